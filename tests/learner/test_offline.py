"""Training on files that is ended in the middle and taken up: as if nothing had happened."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray

from learner import offline
from learner.config import LearnerConfig
from learner.journal.run_folder import NothingToResume, changed_settings
from learner.offline_examples import Unit, in_step
from learner.training.batch import TrainSequence
from learner.training.ranks import CommandChannel, Ranks
from learner.training.trainer import Trainer
from services.config import made_with
from services.process import Stop

STEPS, EVERY, BATCH, EXAMPLES = 7, 2, 6, 20
"""An epoch ends in the middle of a batch, and of what lies between two checkpoints."""

Train = Callable[[LearnerConfig], None]


class ProcessGone(Exception):
    """The process is no more."""


def records(kind: str) -> list[dict[str, str]]:
    numbers = np.random.default_rng(0).integers(10, 100, (EXAMPLES, 3))
    if kind in ("rm", "dpo"):
        return [{"prompt": f"{a}+{b}=", "chosen": f"{a + b}", "rejected": f"{c}"} for a, b, c in numbers]
    return [{"prompt": f"{a}+{b}=", "completion": f"{a + b}"} for a, b, _ in numbers]


def config_of(folder: Path, model: Path, kind: str, name: str, *, resume: bool = False) -> LearnerConfig:
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps(record) + "\n" for record in records(kind)))
    teachers = [{"name": "itself", "path": str(model)}] if kind == "distill" else []
    return LearnerConfig.model_validate(
        {
            "model": model, "run": {"directory": folder, "name": name}, "algo": {"type": kind}, "steps": STEPS,
            "data": {"path": data, "batch_size": BATCH, "held_out_share": 0.1}, "teachers": teachers, "resume": resume,
            "checkpoint": {"every_steps": EVERY}, "training": {"optimizer": {"learning_rate": 1e-3}},
        }
    )  # fmt: skip


@pytest.fixture
def train(commands: CommandChannel) -> Train:
    def run(config: LearnerConfig) -> None:
        trainer = Trainer(
            config.model,
            algorithm=config.algo,
            config=config.training,
            ranks=Ranks(),
            commands=commands,
            teachers=[teacher.path for teacher in config.teachers if teacher.path is not None],
        )
        config.run.folder.mkdir(exist_ok=True)
        offline._train(config, trainer)

    return run


def ending_at(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process ends when it asks for the examples of this step."""
    taken = 0
    really = in_step

    def count(units: Sequence[Unit]) -> list[TrainSequence]:
        nonlocal taken
        taken += 1
        if taken == step:
            raise ProcessGone
        return really(units)

    monkeypatch.setattr(offline, "in_step", count)


def left_behind(config: LearnerConfig) -> tuple[list[dict[str, object]], object, dict[str, bytes]]:
    """Metrics without times, the summary, and the model's weights."""
    lines = (config.run.folder / "metrics.jsonl").read_text().splitlines()
    told = [json.loads(line) for line in lines]
    entries = [{name: line[name] for name in line if name[-2:] != "_s" and name != "pass_costs"} for line in told]
    weights = {path.name: path.read_bytes() for path in (config.run.folder / "model").glob("*.safetensors")}
    assert weights
    return entries, json.loads((config.run.folder / "summary.json").read_text()), weights


@pytest.mark.parametrize(
    ("kind", "ends"),
    [
        ("sft", (2, 4)),  # before the first checkpoint, and then a step after one
        ("rm", (4,)),
        ("dpo", (6,)),
        ("distill", (5,)),
    ],
)
def test_a_run_that_was_ended_comes_to_the_same_weights_and_metrics(
    kind: str,
    ends: tuple[int, ...],
    untrained_model: Path,
    tmp_path: Path,
    train: Train,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = config_of(tmp_path, untrained_model, kind, "whole")
    train(whole)
    for attempt, step in enumerate(ends):
        config = config_of(tmp_path, untrained_model, kind, "cut", resume=attempt > 0)
        with monkeypatch.context() as patch:
            ending_at(step, patch)
            with pytest.raises(ProcessGone):
                train(config)
    resumed = config_of(tmp_path, untrained_model, kind, "cut", resume=True)
    train(resumed)
    assert left_behind(resumed) == left_behind(whole)
    steps = [json.loads(line) for line in (resumed.run.folder / "metrics.jsonl").read_text().splitlines()]
    began = [each["unix_s"] - each["time_s"] for each in steps if each["kind"] == "step"]
    assert began == pytest.approx([began[0]] * len(began), abs=0.01), "the time goes on over resumes"
    assert [entry["step"] for entry in left_behind(whole)[0]] == [0, *range(1, STEPS + 1), STEPS]


class AskedReference:
    """Counts how often the reference is asked, and says -1 of each token."""

    def __init__(self) -> None:
        self.asked = 0

    def reference_logprobs(self, sequences: Sequence[TrainSequence]) -> list[NDArray[np.float32]]:
        self.asked += 1
        return [np.full(int(each.loss_mask.sum()), -1, np.float32) for each in sequences]


def test_a_reference_with_another_precision_of_its_head_is_asked_again(untrained_model: Path, tmp_path: Path) -> None:
    """In float32 its head is the same either way."""
    given = config_of(tmp_path, untrained_model, "dpo", "run")
    sequence = TrainSequence.supervised(token_ids=np.arange(3, dtype=np.int32), loss_mask=np.arange(3) > 0)
    reference, asked = AskedReference(), []
    for dtype in ("bfloat16", "float32"):
        for head in ("model", "float32", "model"):
            training = given.training.model_copy(update={"dtype": dtype, "head_dtype": head})
            config = given.model_copy(update={"training": training})
            offline._reference_logprobs(config, cast(Trainer, reference), [sequence])
            asked.append(reference.asked)
    assert asked == [1, 2, 2, 3, 3, 3]


def test_a_run_is_not_taken_up_with_other_examples_or_without_a_whole_checkpoint(
    untrained_model: Path, tmp_path: Path, train: Train
) -> None:
    config = config_of(tmp_path, untrained_model, "sft", "run", resume=True)
    train(config)
    other = config.model_copy(update={"data": config.data.model_copy(update={"seed": 1})})
    with pytest.raises(NothingToResume, match=r"is of a run on other examples, or in another order .*seed 0"):
        train(other)
    for checkpoint in config.run.folder.glob("checkpoint-*"):
        (checkpoint / "manifest.json").unlink()
    with pytest.raises(NothingToResume, match=r"no checkpoint in .* is whole"):
        train(config)


@pytest.mark.parametrize("reason", ["stop", "time"])
def test_a_run_that_is_ended_early_leaves_model_and_summary_and_can_go_on(
    reason: str,
    untrained_model: Path,
    tmp_path: Path,
    commands: CommandChannel,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr("sys.argv", ["/bin/learner", "--config", "my run.toml"])
    config = config_of(tmp_path, untrained_model, "sft", "ended")
    stop = Stop()
    if reason == "stop":
        stop.request("SIGINT")
    else:
        config = config.model_copy(update={"time_limit_s": 1e-9})
    trainer = Trainer(
        config.model, algorithm=config.algo, config=config.training, ranks=Ranks(), commands=commands, teachers=[]
    )
    config.run.folder.mkdir()
    offline._train(config, trainer, stop)

    assert "to go on: learner --config 'my run.toml' --resume true" in caplog.text
    entries, summary, _ = left_behind(config)
    assert [entry["step"] for entry in entries if entry["kind"] == "step"] == [1]
    assert isinstance(summary, dict)
    assert summary["steps"] == 1
    assert [path.name for path in config.run.folder.glob("checkpoint-*")] == ["checkpoint-00000001"]


def test_epochs_come_to_steps_and_what_is_held_out_is_measured_between_them(
    tmp_path: Path, untrained_model: Path, train: Train
) -> None:
    config = config_of(tmp_path, untrained_model, "sft", "epochs")
    settings = config.model_dump(exclude_unset=True, exclude={"steps"})
    settings["data"] |= {"epochs": 2, "measure_every_steps": 2}
    config = LearnerConfig.model_validate(settings)
    config.run.folder.mkdir()
    made_with.write(config.run.folder, config.made_with())
    train(config)

    noted = made_with.read(config.run.folder)
    assert noted["settings"] == config.made_with() | {"steps": 6}, "or the page would say that it ended early"
    assert changed_settings(config.run.folder, config.made_with(), resume=True, accepted=False) == []
    fewer = config.made_with() | {"data.epochs": None, "steps": 5}
    assert [each.key for each in changed_settings(config.run.folder, fewer, resume=True, accepted=False)] == [
        "steps", "data.epochs"
    ]  # fmt: skip
    lines = [json.loads(line) for line in (tmp_path / "epochs" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "step"] == [1, 2, 3, 4, 5, 6]  # of 18 examples, 6 a step
    assert [line["step"] for line in lines if line["kind"] == "held_out"] == [0, 2, 4, 6]


def test_training_ends_where_what_is_held_out_is_good_enough_and_a_resume_trains_no_further(
    tmp_path: Path, untrained_model: Path, train: Train, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    settings = config_of(tmp_path, untrained_model, "sft", "enough").model_dump(exclude_unset=True)
    settings["data"] |= {"measure_every_steps": 2, "stop_at_nll": 100.0}
    config = LearnerConfig.model_validate(settings)
    train(config)
    assert "training ends after step 2: what is held out is at data.stop_at_nll, 100" in caplog.text
    resumed = LearnerConfig.model_validate(settings | {"resume": True})
    train(resumed)
    entries, summary, _ = left_behind(resumed)
    assert [entry["step"] for entry in entries if entry["kind"] == "step"] == [1, 2]
    assert isinstance(summary, dict)
    assert summary["steps"] == 2
    assert summary["after"]["nll"] < 100.0
    settings["data"] |= {"stop_at_nll": 1e-6}
    train(LearnerConfig.model_validate(settings | {"resume": True}))
    entries, summary, _ = left_behind(config)
    assert [entry["step"] for entry in entries if entry["kind"] == "step"] == [*range(1, STEPS + 1)]


@pytest.mark.parametrize(
    ("algo", "data", "refused"),
    [
        ("sft", {"stop_at_nll": 1.0}, "stop_at_nll is set and measure_every_steps is not"),
        ("dpo", {"stop_at_nll": 1.0, "measure_every_steps": 2}, "algo dpo learns from pairs"),
        ("rm", {"stop_at_nll": 1.0, "measure_every_steps": 2}, "algo rm learns from pairs"),
    ],
)
def test_a_good_enough_that_cannot_be_told_is_refused(
    algo: str, data: dict[str, object], refused: str, tmp_path: Path, untrained_model: Path
) -> None:
    settings = config_of(tmp_path, untrained_model, algo, "untold").model_dump(exclude_unset=True)
    settings["data"] |= data
    with pytest.raises(ValueError, match=refused):
        LearnerConfig.model_validate(settings)


def test_epochs_and_steps_at_once_are_refused(tmp_path: Path, untrained_model: Path) -> None:
    settings = config_of(tmp_path, untrained_model, "sft", "both").model_dump(exclude_unset=True)
    settings["data"] |= {"epochs": 2}
    with pytest.raises(ValueError, match=r"steps is 7 and data\.epochs 2: set one of them"):
        LearnerConfig.model_validate(settings)


def test_a_resume_with_fewer_steps_than_are_trained_ends_at_the_step_that_it_has(
    tmp_path: Path, untrained_model: Path
) -> None:
    config = config_of(tmp_path, untrained_model, "sft", "fewer")
    nothing = cast("Any", None)
    begun = offline._RunState(order="", step=STEPS + 3)
    assert offline._train_steps(config, nothing, nothing, nothing, begun, nothing, iter(()), nothing) == STEPS + 3
