"""A run on files that is taken up by other ranks, as commands: it ends as one that was never interrupted."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from learner.journal.checkpoints import checkpoints_of
from tests.e2e.processes import ROOT, script
from tests.learner.test_offline import records

TOLERANCE = 1e-5
"""Of losses and weights over other ranks; AdamW's epsilon is large enough not to blow rounding up."""


def learn(folder: Path, model: Path, name: str, *words: str) -> Path:
    """The folder of a run of the command, which has ended well."""
    argv = [
        script("learner"), "--algo", "sft", "--model", str(model), "--run.directory", str(folder), "--run.name", name,
        "--data.path", str(folder / "data.jsonl"), "--data.batch-size", "6", "--checkpoint.every-steps", "2",
        "--training.optimizer.learning-rate", "1e-3", "--training.optimizer.epsilon", "1e-4",
        "--training.lora.rank", "4", *words,
    ]  # fmt: skip
    ended = subprocess.run(argv, env=os.environ, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return folder / name


def losses(run: Path) -> list[float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [line["loss"] for line in lines if line["kind"] == "step"]


@pytest.mark.timeout(900)
def test_a_run_goes_on_with_two_ranks_and_another_zero_stage(tmp_path: Path, untrained_model: Path) -> None:
    # Three learners, one of them of two ranks: the command itself finds the checkpoint, and starts the second rank.
    text = "".join(json.dumps(record) + "\n" for record in records("sft"))
    (tmp_path / "data.jsonl").write_text(text, encoding="utf-8")
    straight = learn(tmp_path, untrained_model, "straight", "--steps", "4")
    learn(tmp_path, untrained_model, "moved", "--steps", "2")
    moved = learn(
        tmp_path, untrained_model, "moved", "--steps", "4", "--ranks", "2", "--training.zero-stage", "3",
        "--resume", "true",
    )  # fmt: skip
    before, newest = checkpoints_of(moved)
    assert [(each.version, each.fault()) for each in (before, newest)] == [(2, None), (4, None)]
    assert len(list(newest.trainer.glob("random_state_*"))) == 2
    assert losses(moved) == pytest.approx(losses(straight), abs=TOLERANCE)
    expected = load_file(straight / "model" / "model.safetensors")
    for name, value in load_file(moved / "model" / "model.safetensors").items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=TOLERANCE)
