"""A what-if trains a run's own batches by other settings, by the real trainer, and says what would differ."""

import dataclasses
import json
import math
import subprocess
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from learner.config import LearnerConfig
from learner.reports.history import RunHistory
from learner.reports.what_if_folder import WhatIfProgress
from learner.run_settings import what_if_of
from learner.training.group_pulls import GroupChange
from learner.training.ranks import CommandChannel
from learner.training.step import StepMetrics
from learner.training.trainer import Trainer
from learner.what_if import OFF_POLICY, _beginning, _ordered
from services.config import made_with
from services.process import WrongSettings
from services.run_lock import RunLock
from tests.learner.training.tiny_model import write_tiny_llama
from tests.learner.what_if_run import STEPS, TrainedRun, sampled, trained_run

NARROW = {"algo": {"type": "grpo", "clip_high": 0.01, "clip_low": 0.01}, "training": {"epochs_per_step": 2}}
MakeRun = Callable[..., TrainedRun]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("llama"), tied=True)


@pytest.fixture
def make_run(tmp_path: Path, model: Path, commands: CommandChannel) -> MakeRun:
    def made(**tables: Any) -> TrainedRun:
        return trained_run(tmp_path / "runs", model, commands, **tables)

    return made


def test_a_wider_clip_shows_both_curves_and_the_groups_that_it_sets_free(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run(**NARROW)
    before = {path: path.read_bytes() for path in run.folder.rglob("*") if path.is_file()}
    shown = run.what_if("algo.clip_high=1e6", "algo.clip_low=1", to=tmp_path / "wide")
    said = str(shown)

    assert {path: path.read_bytes() for path in run.folder.rglob("*") if path.is_file()} == before
    assert "what if algo.clip_low: 0.01 → 1.0; algo.clip_high: 0.01 → 1000000.0" in said
    assert "steps 1 to 4: the first that differs is step 1\n" in said
    assert "the run gives its numbers again, digit for digit" in said
    assert said.endswith(OFF_POLICY)
    held, free = run.lines()[0], shown.now[1]
    assert held["clip_fraction"] > 0.2
    assert free["clip_fraction"] == 0.0
    assert f"{held['loss']:.4g}" in said
    assert f"{free['loss']:.4g}" in said

    written = [json.loads(line) for line in (tmp_path / "wide/groups.jsonl").read_text().splitlines()]
    assert [(each["step"], each["lease_id"]) for each in written] == [(1 + n // 2, n) for n in range(2 * STEPS)]
    first = [each for each in written if each["step"] == 1]
    assert all(each["clipped_share_run"] > 0 and each["clipped_share"] == 0 for each in first)
    assert all(each["pull"] > each["pull_run"] > 0 for each in first)
    equal = [each for each in written if set(each["rewards"]) == {1.0}]
    assert equal
    assert all(each["pull"] == each["pull_run"] == each["pull_change"] == 0 for each in equal)
    most = sorted((each for each in written if each["pull_change"]), key=lambda each: -each["pull_change"])
    assert [each.lease_id for each in shown.groups] == [each["lease_id"] for each in most]


def test_what_the_clip_holds_back_of_groups_adds_up_to_what_it_holds_back_of_the_step(
    make_run: MakeRun, tmp_path: Path
) -> None:
    """Of two epochs of two updates each, a token is in two updates."""
    run = make_run(algo=NARROW["algo"], training={"updates_per_step": 2, "epochs_per_step": 2})
    shown = run.what_if("algo.clip_high=0.02", to=tmp_path / "wider")
    written = [json.loads(line) for line in (tmp_path / "wider/groups.jsonl").read_text().splitlines()]
    for step, numbers in shown.now.items():
        groups = [each for each in written if each["step"] == step]
        leases = [sampled(each["lease_id"], version=0) for each in groups]
        tokens = np.array([sum(sum(one.loss_mask) for one in group.trajectories) for group in leases])
        for name, found in (("clipped_share", numbers), ("clipped_share_run", run.lines()[step - 1])):
            held = float(tokens @ [each[name] for each in groups] / tokens.sum())
            assert held == pytest.approx(found["clip_fraction"], abs=1e-6)
            assert held > 0.05


def test_the_folder_reads_as_that_of_a_run(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run(**NARROW)
    shown = run.what_if("training.optimizer.learning_rate=1e-3", to=tmp_path / "slow")
    history = RunHistory(dict).read(tmp_path / "slow/metrics.jsonl")
    assert history.unread == 0
    assert [(step, each["loss"], each["learning_rate"]) for step, each in history.steps.items()] == [
        (step, shown.now[step]["loss"], 1e-3) for step in range(1, STEPS + 1)
    ]
    assert "reward_mean" not in history.steps[1]
    assert "mismatch_kl" not in history.steps[1]
    made, own = made_with.read(tmp_path / "slow"), made_with.read(run.folder)
    assert made["settings"]["training.optimizer.learning_rate"] == 1e-3
    assert {**made["settings"], "training.optimizer.learning_rate": 1e-2, "training.publish_dtype": "float32"} == (
        own["settings"]
    )
    note = json.loads((tmp_path / "slow/what_if.json").read_text())
    assert note == {
        "run": str(run.folder),
        "from_version": 0,
        "changes": ["training.optimizer.learning_rate: 0.01 → 0.001"],
        "caveat": OFF_POLICY,
    }


def test_a_change_without_effect_is_said_to_have_none(make_run: MakeRun) -> None:
    """With one update a step the ratio that the clip bounds is always 1."""
    shown = make_run().what_if("algo.clip_high=0.9")
    assert "no number of any step differs: these settings change nothing here" in str(shown)
    assert "no group's pull on the policy changed" in str(shown)
    assert shown.groups == ()
    assert "digit for digit" in str(shown)
    assert "digit for digit" not in str(dataclasses.replace(shown, run={})), "of no step was anything compared"


def test_other_numbers_of_the_run_itself_are_named(make_run: MakeRun) -> None:
    run = make_run()
    lines = run.lines()
    lines[2]["grad_norm"] += 1e-9
    (run.folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    shown = run.what_if("training.optimizer.max_grad_norm=0.1")
    assert shown.unlike.startswith("step 3 is the first that differs: its grad_norm was ")
    assert shown.unlike in str(shown)
    assert "digit for digit" not in str(shown)


class _Ended(Exception):
    """The order to end, in the middle of a step."""


def test_one_that_is_ended_has_noted_what_its_own_settings_gave_otherwise_and_keeps_its_pulls_by_itself(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, to = make_run(), tmp_path / "ended"
    lines = run.lines()
    lines[1]["grad_norm"] += 1e-9
    (run.folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    opened: list[Trainer] = []
    kept: list[Path] = []

    def opened_to_end(config: LearnerConfig) -> Trainer:
        trainer = run.open_trainer(config)
        train = trainer.train_step

        def train_step(*given: Any, version: int, **named: Any) -> StepMetrics:
            if trainer is not opened[0] and version == 2:
                kept.extend(path for path in to.rglob("*.npz"))
                raise _Ended
            return train(*given, version=version, **named)

        monkeypatch.setattr(trainer, "train_step", train_step)
        opened.append(trainer)
        return trainer

    with pytest.raises(_Ended):
        TrainedRun(run.folder, opened_to_end).what_if("training.optimizer.max_grad_norm=0.1", to=to)
    noted = WhatIfProgress.read(to)
    assert noted is not None
    assert noted.phase == "what-if"
    assert noted.unlike.startswith("step 2 is the first that differs: its grad_norm was ")
    assert sorted(path.name for path in kept) == [f"{version}.npz" for version in range(STEPS)]
    assert {path.parent.parent for path in kept} == {to}
    assert not any(path.exists() for path in kept)
    for trainer in opened:
        trainer.close()


def test_groups_whose_pull_is_no_number_are_shown_first() -> None:
    one = GroupChange(
        step=1, lease_id=0, environment="sums", task_index=0, rewards=(), pull_change=1.0, pull_run=1.0, pull=1.0,
        clipped_share_run=None, clipped_share=None, advantage_run=1.0, advantage=1.0,
    )  # fmt: skip
    pulls = [1.0, math.nan, 3.0, 0.0, math.nan, 2.0]
    changes = [dataclasses.replace(one, lease_id=lease, pull_change=pull) for lease, pull in enumerate(pulls)]
    assert [each.lease_id for *_, each in sorted(_ordered(changes), reverse=True)] == [1, 4, 2, 5, 0]


async def test_of_a_run_that_goes_on_a_version_that_is_missing_is_told_with_all_that_are_there(
    make_run: MakeRun,
) -> None:
    run = make_run(checkpoint_at=2)
    what_if = what_if_of(run.folder, ["algo.clip_high=0.3"])
    with await RunLock.held(run.folder):
        async with AsyncExitStack() as stack:
            with pytest.raises(WrongSettings, match=r"no version 1: the journal follows these: 0, 2\. It is kept"):
                _beginning(what_if, 1, stack)
            base, steps = _beginning(what_if, 2, stack)
            assert base is not None
            assert (base.version, base.path.parent == run.folder) == (2, False)
            assert [each.version for each in steps] == [2, 3]
            assert _beginning(what_if, None, stack)[0] is None


def test_without_groups_the_run_is_not_trained_again(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run()
    opened: list[LearnerConfig] = []

    def counted_open(config: LearnerConfig) -> Trainer:
        opened.append(config)
        return run.open_trainer(config)

    counted = TrainedRun(run.folder, counted_open)
    shown = counted.what_if("algo.advantage_scale=none", groups=0, to=tmp_path / "none")
    assert [config.algo.model_dump()["advantage_scale"] for config in opened] == ["none"]
    assert "groups" not in str(shown)
    assert "digit for digit" not in str(shown)
    assert not (tmp_path / "none/groups.jsonl").exists()
    assert counted.what_if("algo.advantage_scale=none").now == shown.now
    assert len(opened) == 3


@pytest.mark.parametrize(
    "change", ["training.optimizer.weight_decay=5", "training.optimizer.beta1=0", "training.optimizer.epsilon=1e-3"]
)
def test_what_the_optimizer_keeps_in_a_checkpoint_is_changed_too(make_run: MakeRun, change: str) -> None:
    """The first step behind the checkpoint begins alike, and moves the weights in another way."""
    shown = make_run(checkpoint_at=2).what_if(change, version=2)
    assert sorted(shown.now) == [3, 4]
    assert shown.run[3]["loss"] == shown.now[3]["loss"]
    assert shown.run[4]["loss"] != shown.now[4]["loss"]
    assert "the first that differs is step 4" in str(shown)


def test_another_algorithm_can_train_the_batches(make_run: MakeRun) -> None:
    shown = make_run().what_if("algo=gspo", "algo.clip_high=0.01")
    assert shown.differences == ('algo.type: "grpo" → "gspo"', "algo.clip_high: 0.2 → 0.01")
    assert sorted(shown.now) == [1, 2, 3, 4]


def test_a_checkpoint_without_what_the_settings_need_is_named_with_the_way_out(
    make_run: MakeRun, tmp_path: Path
) -> None:
    run = make_run(checkpoint_at=2)
    changes = ("algo.kl_coefficient=0.1", "training.reference.mode=ema")
    with pytest.raises(WrongSettings, match=r"checkpoint-00000002 does not hold .* no reference policy .*--from 0"):
        run.what_if(*changes, version=2, to=tmp_path / "ema")
    assert not (tmp_path / "ema").exists()
    assert sorted(run.what_if(*changes, version=0).now) == [1, 2, 3, 4]


def test_another_optimizer_cannot_go_on_from_a_checkpoint_and_can_begin(make_run: MakeRun) -> None:
    run, change = make_run(checkpoint_at=2), "training.optimizer.type=muon"
    with pytest.raises(WrongSettings, match=r"checkpoint-00000002 does not hold .* optimizer is adamw.*--from 0"):
        run.what_if(change, version=2)
    assert sorted(run.what_if(change, version=0).now) == [1, 2, 3, 4]


def test_the_command_trains_both_settings_with_all_ranks(make_run: MakeRun, tmp_path: Path) -> None:
    """Each rank follows two trainers in turn. Two ranks round otherwise than the one that trained the run."""
    run = make_run(**NARROW, ranks=2, threads=1)
    words = ("replay", str(run.folder), "--set", "algo.clip-high=1e6", "--set", "algo.clip_low=1")
    ended = subprocess.run(
        [sys.executable, "-m", "learner.command", *words, "--to", str(tmp_path / "wide")],
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert ended.returncode == 0, ended.stderr
    assert "the run's own settings do not give its numbers here" in ended.stdout
    assert "groups whose pull on the policy changed most" in ended.stdout
    alone = run.what_if("algo.clip_high=1e6", "algo.clip_low=1", to=tmp_path / "alone")
    history = RunHistory(dict).read(tmp_path / "wide/metrics.jsonl")
    assert list(history.steps) == [1, 2, 3, 4]
    assert history.steps[1]["grad_norm"] == pytest.approx(alone.now[1]["grad_norm"], rel=1e-4)
    both = [json.loads((tmp_path / name / "groups.jsonl").read_text().splitlines()[0]) for name in ("wide", "alone")]
    for name in ("pull", "pull_run", "pull_change", "clipped_share_run", "advantage"):
        assert both[0][name] == pytest.approx(both[1][name], rel=1e-4)
