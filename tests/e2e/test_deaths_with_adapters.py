"""Generator and learner of a LoRA run are killed, whose versions travel as adapters: each token is of its stamp."""

import re
import signal
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, PreTrainedModel

from learner.config import LearnerConfig
from learner.export import export
from learner.journal.checkpoints import checkpoints_of
from protocol.model import PolicyVersion
from protocol.trajectories import Trajectory, VersionSpan
from services.config.models import load_config
from tests.e2e.processes import Launcher
from tests.e2e.run_files import RunFolder, write_run_file
from tests.e2e.test_deaths_under_headway_up import ENDLESS, RunUnderHeadwayUp

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

LORA = ("--learner.training.lora.rank", "8", "--learner.training.lora.alpha", "16")
CLOSE = 1e-4


def test_each_token_is_of_its_stamped_version_after_deaths(launcher: Launcher, model: Path, tmp_path: Path) -> None:
    run_file = write_run_file(tmp_path, model=model)
    every = ("--learner.checkpoint.every-steps", "1", "--learner.checkpoint.keep", "1000")
    up = launcher(
        "headway", "up", str(run_file.path), *LORA, *every, "--generator.engine.lora-rank", "8",
        "--learner.steps", str(ENDLESS), "--learner.evaluation.tasks", "0", "--learner.evaluation.final-tasks", "0",
    )  # fmt: skip
    system = RunUnderHeadwayUp(launch=launcher, run_file=run_file, up=up)
    system.wait_for_steps(4)
    for victim in ("generator", "learner"):
        system.send(victim, signal.SIGKILL)
        system.wait_for_steps(4)
    up.send(signal.SIGINT)
    assert up.wait() == 0, up.text()

    run = run_file.run()
    sent = [line["sent_bytes"] for line in run.metrics("publish")]
    assert min(sent) < max(sent) / 8, "none was sent alone"
    assert {PolicyVersion.parse(version).incarnation for version in _stamps(run)} == {1, 2}
    policies = _policies(run, [*LORA, "--config", str(run_file.path)], folder=tmp_path / "policies")
    first = {number: spans for number, spans in _first_spans(run).items() if number in policies}
    gaps = [_gaps(spans, version, policies) for version, spans in first.items()]
    right, before = (np.concatenate([found[side] for found in gaps]) for side in (0, 1))
    assert len(right) > 500
    assert right.max() < CLOSE
    assert before.mean() > 30 * right.mean(), "the version before is told apart"


def _trained(run: RunFolder) -> list[Trajectory]:
    return [one for _, batch in run.batches() for group in batch for one in group.trajectories]


def _stamps(run: RunFolder) -> set[str]:
    return {span.version for one in _trained(run) for span in one.version_spans}


def _policies(run: RunFolder, words: list[str], *, folder: Path) -> dict[int, PreTrainedModel]:
    """The policy of each version whose checkpoint is there, adapters merged."""
    config = load_config(LearnerConfig, process="learner", argv=[re.sub("^--learner.", "--", each) for each in words],
                         environ={})  # fmt: skip
    found = {}
    for checkpoint in checkpoints_of(run.path):
        export(config, checkpoint.path, folder / str(checkpoint.version), merged=True)
        found[checkpoint.version] = AutoModelForCausalLM.from_pretrained(folder / str(checkpoint.version)).eval()
    return found


def _first_spans(run: RunFolder) -> dict[int, list[tuple[Trajectory, VersionSpan]]]:
    """The trajectories whose first tokens rest on keys of their own version alone, by its number.

    What follows an update rests on keys of both versions, and is left out, which may be all that a version has: its
    prompts were in the prefix cache before it came.
    """
    found = defaultdict(list)
    for one in _trained(run):
        span = one.version_spans[0]
        if span.cache is None:
            found[PolicyVersion.parse(span.version).number].append((one, span))
    return found


def _gaps(
    chosen: list[tuple[Trajectory, VersionSpan]], version: int, policies: dict[int, PreTrainedModel]
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Of a version's tokens: from its policy's logprobs, and from those of the version before."""
    rows = [torch.tensor(one.token_ids.tolist()) for one, _ in chosen]
    token_ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    found = []
    for policy in (policies[version], policies.get(version - 1, policies[version])):
        with torch.no_grad():
            logprobs = policy(token_ids[:, :-1]).logits.log_softmax(-1)
        own = logprobs.gather(2, token_ids[:, 1:, None])[:, :, 0].numpy()
        gaps = [
            np.abs(own[row, span.start - 1 : span.end - 1] - one.behavior_logprobs[span.start : span.end])
            for row, (one, span) in enumerate(chosen)
        ]
        found.append(np.concatenate(gaps))
    return found[0], found[1]
