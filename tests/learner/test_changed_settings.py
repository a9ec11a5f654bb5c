"""The settings that a what-if can change, and how they are spelled and refused."""

import logging
from pathlib import Path
from typing import Any

import pytest

from learner.changed_settings import changed_config, differences_of
from learner.command import to_replay
from learner.config import LearnerConfig
from learner.run_settings import settings_of_run
from services.config import made_with
from services.process import WrongSettings

RUN = {"model": "model", "algo.type": "grpo", "algo.kl_coefficient": 0.1, "algo.kl_form": "k2"}


def refused(*changes: str) -> str:
    with pytest.raises(WrongSettings) as caught:
        changed_config(RUN, changes)
    return str(caught.value)


def test_a_change_is_spelled_as_on_the_command_line_or_as_in_the_file() -> None:
    assert changed_config(RUN, ["algo.clip-high=0.3"]) == changed_config(RUN, ["algo.clip_high=0.3"])
    assert changed_config(RUN, ["--learner.algo.clip-high=0.3"]).algo.model_dump()["clip_high"] == 0.3
    both = changed_config(RUN, ["algo.token_window=[0.5, 5]", "training.optimizer.schedule=inverse_sqrt"])
    assert both.algo.model_dump()["token_window"] == (0.5, 5.0)
    assert both.training.optimizer.schedule == "inverse_sqrt"
    assert both.algo.model_dump()["kl_form"] == "k2"  # of the run


@pytest.mark.parametrize(
    ("change", "key", "reason"),
    [
        ("rollouts.group_size=4", "rollouts.group_size", "decides what was sampled"),
        ("max_lag=1", "max_lag", "decides what was sampled"),
        ("training.temperature=0.5", "training.temperature", "drawn at the run's temperature"),
        ("model=other", "model", "which model is trained"),
        ("training.lora.rank=8", "training.lora.rank", "which model is trained"),
        ("training.critic.kind=head", "training.critic.kind", "which model is trained"),
        ("ranks=2", "ranks", "how and where numbers are computed"),
        ("training.microbatch_tokens=64", "training.microbatch_tokens", "how and where numbers are computed"),
        ("steps=3", "steps", "batches of the journal"),
        ("data.path=x.jsonl", "data.path", "batches of the journal"),
        ("run.name=other", "run.name", "names the run"),
        ("checkpoint.keep=3", "checkpoint.keep", "no part in training"),
    ],
)
def test_what_a_replay_cannot_change_is_refused_by_name(change: str, key: str, reason: str) -> None:
    said = refused(change)
    assert said.startswith(f"--set {key}: a replay cannot change it: ")
    assert reason in said
    assert "It can change algo, training.optimizer, training.updates_per_step" in said


def test_mistakes_are_said_as_elsewhere() -> None:
    assert refused("algo.clip_hihg=0.3").endswith("unknown flag --algo.clip-hihg; did you mean --algo.clip-high?")
    assert refused("algo.clip_high") == "--set algo.clip_high: expected KEY=VALUE, such as --set algo.clip_high=0.3"
    assert refused("=0.3") == "--set =0.3: expected KEY=VALUE, such as --set algo.clip_high=0.3"
    assert refused("algo.clip_high=wide").startswith("--set algo.clip_high: got 'wide': expected a number")
    assert refused("algo=grop").startswith("--set algo.type: got 'grop': did you mean grpo?")
    assert "algo.truncated_penalty" in refused("algo.truncated_penalty=1")  # of no use as the others stand
    assert refused("algo=sft") == "--set algo.type: sft learns from files, and a journal holds samples"


def test_settings_of_the_run_that_the_change_makes_useless_are_left_out_and_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        assert "kl_form" not in changed_config(RUN, ["algo.kl_coefficient=0"]).algo.model_dump()
        assert "has no effect now: algo.kl_form" in caplog.text
        other = changed_config(RUN, ["algo=gspo"])
    assert (other.algo.type, other.algo.model_dump()["kl_coefficient"]) == ("gspo", 0.0)
    assert "left out is what the run set: algo.kl_coefficient, algo.kl_form" in caplog.text


def test_the_differences_are_those_of_all_settings_and_none_is_refused() -> None:
    run = LearnerConfig.model_validate(made_with.tables_of(RUN))
    (only,) = differences_of(run, changed_config(RUN, ["algo.clip_high=0.3"]), asked=())
    assert str(only) == "algo.clip_high: 0.2 → 0.3"
    with pytest.raises(WrongSettings, match=r"--set algo.clip_high=0.2: the run has these settings already"):
        differences_of(run, changed_config(RUN, ["algo.clip_high=0.2"]), asked=["algo.clip_high=0.2"])


def run_in(folder: Path, **more: Any) -> Path:
    config = {"model": "model", "run": {"directory": folder, "name": "one"}, **more}
    (folder / "one").mkdir()
    made_with.write(folder / "one", LearnerConfig.model_validate(config).made_with())
    return folder / "one"


def test_the_command_has_a_what_if_only_with_set(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_in(tmp_path, steps=7)
    plain = to_replay(["replay", str(run), "--from", "3"])
    assert plain is not None
    assert (plain.config, plain.version, plain.what_if, plain.in_turn) == (settings_of_run(run), 3, None, ())
    order = to_replay(["replay", str(run), "--set", "algo.clip_high=0.3", "--set", "training.optimizer.beta1=0.8"])
    assert order is not None
    assert order.what_if is not None
    assert [str(each) for each in order.what_if.differences] == [
        "algo.clip_high: 0.2 → 0.3", "training.optimizer.beta1: 0.9 → 0.8"
    ]  # fmt: skip
    assert order.in_turn == (plain.config, order.what_if.changed)
    alone = to_replay(["replay", str(run), "--set", "algo.clip_high=0.3", "--groups", "0"])
    assert alone is not None
    assert alone.in_turn == (order.in_turn[0].model_copy(update={"algo": order.what_if.changed.algo}),)
    assert to_replay(["--algo", "grpo"]) is None

    for words, said in (
        (["--to", "x"], "--to and --groups are for a what-if: add --set KEY=VALUE"),
        (["--set", "algo.clip_high=0.3", "--groups", "-1"], "--groups is -1: expected 0 or more"),
        (["--set", "max_lag=1"], "learner replay: --set max_lag: a replay cannot change it"),
    ):
        with pytest.raises(SystemExit) as caught:
            to_replay(["replay", str(run), *words])
        assert caught.value.code == (78 if words[0] == "--set" and len(words) == 2 else 2)
        assert said in capsys.readouterr().err
