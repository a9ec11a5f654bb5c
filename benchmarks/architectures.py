"""Architectures of transformers: does vLLM sample with the probabilities that the learner trains with?

    python -m benchmarks.architectures [NAME ...]

Each model of tests/learner/training/tiny_models.py is made small and random, in float32, with heads of a size that
vLLM's attention on a CPU has. A generator's engine samples completions with it, longer than its window; their logprobs
are compared with the learner's, of all sequences in one row, and with plain transformers' of each sequence alone. Then
the weights are changed, published into the running engine under the names that the learner publishes, and all is
compared again. Each architecture has a process and an engine of its own. Results go to
benchmarks/results/architectures.md, a row after each; rows of models that are not run stay.
"""

import argparse
import asyncio
import dataclasses
import json
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from benchmarks.machine import described_machine
from generator.engine.fitting import engine_faults
from generator.engine.options import EngineOptions, prepare_environment
from generator.weights.plan import WeightSyncError
from learner.export import SavedModel
from learner.training.batch import TrainSequence, flatten
from learner.training.logprobs import Chunking
from learner.training.packing import pack, shared_prefixes
from learner.training.policy import LogprobSettings, PolicyModel, host_copy, load_causal_lm
from protocol.fleet import Prepare
from protocol.generation import Sampling
from services.process import parent_death_signal
from tests.learner.training.tiny_model import VOCABULARY
from tests.learner.training.tiny_models import ARCHITECTURES, served_sizes, write_tiny_model

if TYPE_CHECKING:
    from generator.engine.engine import Engine

RESULT = Path(__file__).with_name("results") / "architectures.md"
BOUND = 1e-3
"""Of a gap in float32: what the tests of the engine allow for their Llama, whose gaps are near 1e-5."""
CHANGED = 0.01
"""New weights move some logprob by more, or nothing was compared."""
PROMPTS = ((5, 9, 33, 7, 12, 21, 30, 2, 17), (5, 9, 33, 7, 12), (22, 3))
COMPLETIONS = 3
LONG = {"llama4": 120}
"""So many tokens come before each prompt: vLLM's chunks of attention are of at least 128."""
MAX_TOKENS = 24
SHORT, LONGEST = 64, 256
BUCKET_BYTES = 1 << 16
TIMEOUT_S = 300
SETTINGS = LogprobSettings(temperature=1.0, chunking=Chunking(tokens=16, vocabulary=13), with_entropy=False)


@dataclass(frozen=True)
class Gaps:
    """Largest gaps of a sampled token's logprob: the engine's against the learner's and against transformers'. `stale`
    is that of an engine which lacks the new weights.
    """

    ours: float
    transformers: float
    stale: float
    updated_ours: float
    updated_transformers: float

    @property
    def verdict(self) -> str:
        """In a word."""
        found = (self.ours, self.transformers, self.updated_ours, self.updated_transformers)
        return "right" if max(found) < BOUND < CHANGED < self.stale else "WRONG"


class NotServed(Exception):
    """An engine cannot serve a model; why, in its own words."""


class ModelPair:
    """The same weights in the learner and in transformers."""

    def __init__(self, folder: Path) -> None:
        self._policy = PolicyModel(load_causal_lm(folder, dtype=torch.float32), settings=SETTINGS).eval()
        plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        self._plain: nn.Module = plain.eval()

    def change(self) -> None:
        """All weights, those of both alike."""
        for model in (self._policy.causal_lm, self._plain):
            drawn = torch.Generator().manual_seed(1)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1 + 0.2 * torch.randn(parameter.shape, generator=drawn))

    @torch.no_grad()
    def gaps(self, sequences: Sequence[TrainSequence]) -> tuple[float, float]:
        """The largest of the learner's, all sequences in one row, and of transformers', one at a time."""
        batch = flatten(list(sequences))
        row = pack(batch, np.arange(len(sequences)), prefixes=shared_prefixes(batch))
        sampled = torch.from_numpy(np.concatenate([each.behavior_logprobs[each.loss_mask] for each in sequences]))
        together = self._policy(row)[0]
        alone = torch.cat([self._alone(each) for each in sequences])
        return float((together - sampled).abs().max()), float((alone - sampled).abs().max())

    def _alone(self, sequence: TrainSequence) -> Tensor:
        ids = torch.from_numpy(sequence.token_ids).long()
        places = torch.from_numpy(sequence.loss_mask).nonzero()[:, 0]
        logits: Tensor = self._plain(input_ids=ids[None], use_cache=False).logits[0]
        return logits[places - 1].log_softmax(dim=-1).gather(1, ids[places][:, None])[:, 0]

    async def publish(self, engine: "Engine", folder: Path, *, version: str) -> None:
        """Into the engine, as files that it has downloaded."""
        saved = {name: parameter.detach() for name, parameter in self._policy.named_parameters()}
        whole = SavedModel(self._policy, saved)
        laid_out = host_copy(whole, dtype="float32", keep=True, bucket_bytes=BUCKET_BYTES).buckets
        buckets = [bucket.hashed() for bucket in laid_out]
        paths = [folder / f"bucket_{number}" for number in range(len(buckets))]
        for path, bucket in zip(paths, buckets, strict=True):
            path.write_bytes(bucket.data.numpy().tobytes())
        plan = Prepare(version=version, epoch=1, buckets=tuple(bucket.spec for bucket in buckets))
        await engine.stage_files(plan, paths=[str(path) for path in paths])
        await engine.commit(version=version)


async def sampled(
    engine: "Engine", *, label: str, before: int = 0, prompts: Sequence[Sequence[int]] = PROMPTS
) -> list[TrainSequence]:
    """Some completions of each prompt, with the logprobs that the engine reports. So many tokens come `before` it."""
    sequences = []
    for number, end in enumerate(prompts):
        prompt = (*np.random.default_rng(number).integers(2, VOCABULARY, before).tolist(), *end)
        parts: list[tuple[list[int], list[float]]] = [([], []) for _ in range(COMPLETIONS)]
        asked = engine.generate(
            request_id=f"{label}-{number}", prompt_token_ids=prompt, n=COMPLETIONS,
            sampling=Sampling(max_tokens=MAX_TOKENS, seed=7 * number),
        )  # fmt: skip
        async for some in asked:
            for part in some:
                parts[part.index][0].extend(part.token_ids)
                parts[part.index][1].extend(part.behavior_logprobs)
        sequences += [_sequence(prompt, ids, logprobs) for ids, logprobs in parts]
    return sequences


def _sequence(prompt: Sequence[int], ids: Sequence[int], logprobs: Sequence[float]) -> TrainSequence:
    token_ids = np.array([*prompt, *ids], dtype=np.int32)
    return TrainSequence(
        token_ids=token_ids,
        loss_mask=np.arange(len(token_ids)) >= len(prompt),
        behavior_logprobs=np.array([0.0] * len(prompt) + list(logprobs), dtype=np.float32),
        reward=0.0,
        lags=np.zeros(len(token_ids), dtype=np.int32),
        mixed_versions=False,
    )


async def compared(name: str, folder: Path) -> Gaps:
    """The gaps of one architecture, by an engine of its own, which has ended then; files are put into `folder`.

    Raises ValueError if the learner refuses the model, NotServed, and WeightSyncError if the engine cannot take its
    weights.
    """
    before = LONG.get(name, 0)
    options = EngineOptions(
        model=str(write_tiny_model(name, folder, **served_sizes(name))),
        dtype="float32", max_model_len=LONGEST if before else SHORT, max_num_seqs=8, kv_cache_gb=0.25, tokenizer=False,
    )  # fmt: skip
    prepare_environment(options)
    torch.set_num_threads(1)
    models = ModelPair(folder)
    # vLLM warns at import of things that are not ours to change.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from generator.engine.engine import Engine, EngineGone, EngineNotStarted

    try:
        engine = await Engine.start(options=options)
    except EngineNotStarted as error:
        raise NotServed(str(error)) from error
    try:
        learner, plain = models.gaps(await sampled(engine, label="first", before=before))
        models.change()
        stale, _ = models.gaps(await sampled(engine, label="stale", before=before))
        await models.publish(engine, folder, version="1.1")
        updated_learner, updated_plain = models.gaps(await sampled(engine, label="updated", before=before))
    except EngineGone as error:
        raise NotServed(str(engine.death())) from error
    finally:
        await engine.shutdown()
    return Gaps(learner, plain, stale, updated_learner, updated_plain)


def one(name: str, folder: Path) -> dict[str, object]:
    """The outcome of one architecture: its gaps, or why there are none."""
    write_tiny_model(name, folder, **served_sizes(name))
    if refused := list(engine_faults(folder, on_cpu=True, dtype="float32", extra={})):
        return {"refused": refused[0]}
    try:
        return dataclasses.asdict(asyncio.run(compared(name, folder)))
    except ValueError as error:
        return {"learner": str(error)}
    except WeightSyncError as error:
        return {"update": error.reason}
    except NotServed as error:
        return {"cannot": str(error)}


def in_a_process(name: str) -> dict[str, object]:
    """The same, whatever becomes of the process in which it is found out."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        command = [sys.executable, "-m", "benchmarks.architectures", "--into", str(answer), name]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S,
                preexec_fn=parent_death_signal,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return {"cannot": f"no answer in {TIMEOUT_S} s"}
        if not answer.exists():
            return {"cannot": f"ended with {done.returncode}: {done.stderr.strip()[-500:]}"}
        found = json.loads(answer.read_text(encoding="utf-8").replace(folder, "the model"))
        return dict(found)


def row(name: str, outcome: dict[str, object]) -> str:
    """A line of the table."""
    kind = ARCHITECTURES[name][0]
    for key, said in (
        ("learner", "refused by the learner"),
        ("refused", "refused by the generator and by `check`"),
        ("cannot", "vLLM cannot"),
        ("update", "**WRONG**: no update"),
    ):
        if key in outcome:
            text = " ".join(str(outcome[key]).split()).replace("|", "\\|")
            return f"| {name} | {kind} | {said}: {text} | | | | |"
    gaps = Gaps(**outcome)  # type: ignore[arg-type]
    numbers = (gaps.ours, gaps.transformers, gaps.updated_ours, gaps.updated_transformers)
    verdict = gaps.verdict if gaps.verdict == "right" else f"**{gaps.verdict}**"
    return f"| {name} | {kind} | {verdict} | " + " | ".join(f"{number:.1e}" for number in numbers) + " |"


def written(outcomes: dict[str, dict[str, object]]) -> Iterator[str]:
    """The lines of the result."""
    rights = sum("stale" in each and Gaps(**each).verdict == "right" for each in outcomes.values())  # type: ignore[arg-type]
    yield from (
        "# Architectures in vLLM, in the learner and in transformers",
        "",
        f"`python -m benchmarks.architectures`, {described_machine()}. Tiny random models in float32, vLLM's CPU "
        f"engine: {len(PROMPTS) * COMPLETIONS} completions of up to {MAX_TOKENS} tokens, at temperature 1. Gaps are "
        "the largest of a sampled token's logprob, the engine's against the learner's (all sequences in one row) and "
        "against plain transformers' (each alone): with the weights that the engine was started with, and after an "
        f"update of all weights. Right: all below {BOUND:g}, the bound of the engine's own tests on a Llama, while the "
        f"engine without the update is off by more than {CHANGED:g}.",
        "",
        f"{rights} of {len(outcomes)} right.",
        "",
        "| model | class | verdict | learner | transformers | learner, updated | transformers, updated |",
        "|---|---|---|---|---|---|---|",
    )
    yield from (row(name, outcomes[name]) for name in ARCHITECTURES if name in outcomes)


def main() -> None:
    """Rewrites the table after each architecture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="some of the table's; all")
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.into is not None:
        arguments.into.write_text(json.dumps(one(arguments.names[0], arguments.into.parent)), encoding="utf-8")
        return
    kept = RESULT.with_suffix(".json")
    outcomes: dict[str, dict[str, object]] = {}
    if kept.exists():
        outcomes = json.loads(kept.read_text(encoding="utf-8"))
    for name in arguments.names or ARCHITECTURES:
        outcomes[name] = in_a_process(name)
        print(row(name, outcomes[name]), flush=True)
        kept.write_text(json.dumps(outcomes, indent=1) + "\n", encoding="utf-8")
        RESULT.write_text("\n".join([*written(outcomes), ""]), encoding="utf-8")


if __name__ == "__main__":
    main()
