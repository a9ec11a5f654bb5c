"""Checks that a generator serves the learner's weights: its logprobs against those of the model on disk.

At the end that is the run's exported model; midway it is a checkpoint, of a version that the generator served.
"""

import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from protocol.generation import GeneratePart

if TYPE_CHECKING:
    from tests.chaos.system import ChaosSystem

_TOLERANCE = 1e-3
_PROMPTS = ((3, 4, 13, 5, 6, 14), (7, 8, 13, 9, 3, 14))
_EXPORT_S = 120.0
_MADE_WITH = "made_with.json"
"""The file beside a checkpoint that an export reads."""


@dataclass(frozen=True)
class Answer:
    """Tokens that a generator sampled after a prompt, their logprobs, and the versions it says that they are of."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: frozenset[str]


@dataclass(frozen=True)
class Sampled:
    """Answers of a generator under one version, and the checkpoint of it."""

    generator: str
    version: str
    answers: Sequence[Answer]
    checkpoint: Path


def serves_exported_weights(system: "ChaosSystem", generator: str) -> list[str]:
    """Complaints about a generator that should serve the run's last version."""
    state = system.state(generator)
    version = str(state.get("policy_version"))
    if not state.get("serving") or not version.endswith(f".{system.size.steps}"):
        return [f"{generator} does not serve version {system.size.steps}: {state}"]
    return differences(generator, _answers(system, generator), model=system.run.path / "model")


def sample_at_checkpoint(system: "ChaosSystem", generator: str, *, patience_s: float) -> Sampled:
    """Asks a generator while it serves a version that becomes a checkpoint, and keeps that. It must serve."""
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        version = str(system.state(generator).get("policy_version"))
        number = int(version.rpartition(".")[2]) if version.rpartition(".")[2].isdecimal() else 0
        if not number or number % system.size.checkpoint_every:
            time.sleep(0.02)
            continue
        answers = _answers(system, generator)
        kept = _keep(system, system.run.path / f"checkpoint-{number:08d}")
        if kept is not None and all(answer.versions == {version} for answer in answers):
            return Sampled(generator, version, answers, kept)
    raise AssertionError(f"waited {patience_s:g} s in vain for {generator} to serve a version that is a checkpoint")


def serves_checkpoint(system: "ChaosSystem", sampled: Sampled) -> list[str]:
    """Complaints about answers that are not those of the checkpoint."""
    model = sampled.checkpoint.with_name(f"{sampled.checkpoint.name}-model")
    exported = system.launch("headway", "export", str(sampled.checkpoint), "--to", str(model))
    code = exported.wait(timeout_s=_EXPORT_S)
    if code:
        return [f"{sampled.checkpoint.name} could not be exported: {exported.text()[-300:]}"]
    who = f"{sampled.generator}, at version {sampled.version},"
    return differences(who, sampled.answers, model=model)


def differences(who: str, answers: Sequence[Answer], *, model: Path) -> list[str]:
    """A complaint of each answer whose logprobs are not those of the model in a folder."""
    found = []
    for answer in answers:
        ours = _logprobs(model, answer)
        gap = max(abs(one - other) for one, other in zip(answer.logprobs, ours, strict=True))
        if not gap < _TOLERANCE:
            found.append(f"{who} gives logprobs that differ by {gap:.3g} nats from those of the learner's model")
    return found


def _answers(system: "ChaosSystem", generator: str) -> list[Answer]:
    return [_answer(system, generator, prompt) for prompt in _PROMPTS]


def _answer(system: "ChaosSystem", generator: str, prompt: tuple[int, ...]) -> Answer:
    body = {"request_id": "chaos", "prompt_token_ids": list(prompt), "purpose": "train", "sampling": {"max_tokens": 4}}
    answer = system.ask(generator, "/v1/generate", json=body)
    parts = [GeneratePart.model_validate_json(line) for line in answer.text.splitlines()]
    return Answer(
        prompt=prompt,
        tokens=tuple(token for part in parts for token in part.token_ids),
        logprobs=tuple(logprob for part in parts for logprob in part.behavior_logprobs),
        versions=frozenset(span.version for part in parts for span in part.version_spans),
    )


def _keep(system: "ChaosSystem", checkpoint: Path) -> Path | None:
    """A copy of a checkpoint that is there or comes soon, since a run removes all but its newest; else None."""
    kept = system.folder / "kept" / checkpoint.name
    kept.parent.mkdir(exist_ok=True)
    deadline = time.monotonic() + 10
    while not checkpoint.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    try:
        shutil.copytree(checkpoint, kept, copy_function=os.link, dirs_exist_ok=True)
        shutil.copy(checkpoint.with_name(_MADE_WITH), kept.with_name(_MADE_WITH))
    except OSError:
        shutil.rmtree(kept, ignore_errors=True)
        return None
    return kept


def _logprobs(model: Path, answer: Answer) -> list[float]:
    import torch
    from transformers import AutoModelForCausalLM

    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        rows = policy(torch.tensor([[*answer.prompt, *answer.tokens]])).logits[0].log_softmax(-1)
    return [float(rows[len(answer.prompt) - 1 + index, token]) for index, token in enumerate(answer.tokens)]
