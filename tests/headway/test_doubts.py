"""Settings that are allowed and hardly meant are named, with what they lead to."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from pydantic import JsonValue

from env_service.config import EnvServiceConfig
from env_service.environments.catalog import build
from headway.checking import examine
from headway.doubts import doubts, few_tasks, wrong_success
from learner.config import LearnerConfig
from reward_service.config import RewardServiceConfig
from tests.env_service.chat_models import model_with


def _learner(**settings: object) -> LearnerConfig:
    return LearnerConfig.model_validate(
        {"model": "model", "run": {"name": "r"}, "rollouts": {"environment": "sums", "max_tokens": 5}} | settings
    )


def _said(config: LearnerConfig) -> str:
    return "\n".join(doubts({"learner": config, "generator": config}))


def test_usual_settings_are_not_doubted() -> None:
    assert _said(_learner()) == ""


def test_a_learning_rate_that_destroys_a_model_is_doubted() -> None:
    assert "learning_rate is 10" in _said(_learner(training={"optimizer": {"learning_rate": 10.0}}))


@pytest.mark.parametrize("algo", ["grpo", "dr_grpo", "rloo"])
def test_groups_of_one_are_doubted_where_the_algorithm_compares(algo: str) -> None:
    alone = {"environment": "sums", "max_tokens": 5, "group_size": 1, "min_group_size": 1, "drop_uniform_groups": False}

    assert f"group_size is 1, and {algo} compares" in _said(_learner(rollouts=alone, algo={"type": algo}))


@pytest.mark.parametrize(
    "algo",
    [
        {"type": "sapo"},
        {"type": "rloo", "policy_loss": "sequence_clip"},
        *(
            {"type": name}
            for name in ("reinforce", "rloo", "cispo", "opo", "rae", "remax", "kl_cov", "gvpo", "online_dpo")
        ),
    ],
)
def test_tokens_that_are_too_old_for_the_loss_are_doubted(algo: JsonValue) -> None:
    assert f"{algo['type']} " in _said(_learner(algo=algo, max_lag=8, training={"updates_per_step": 4}))  # type: ignore[index,call-overload]
    assert "16 with 1 update a step" in _said(_learner(algo=algo, max_lag=16))
    assert _said(_learner(algo=algo, max_lag=4)) == ""
    assert _said(_learner(algo={"type": "grpo"}, max_lag=8, training={"updates_per_step": 4})) == ""


def test_groups_of_one_are_no_doubt_where_a_critic_is_the_baseline() -> None:
    alone = {"environment": "sums", "max_tokens": 5, "group_size": 1, "min_group_size": 1, "drop_uniform_groups": False}

    assert _said(_learner(rollouts=alone, algo={"type": "ppo"})) == ""


def test_a_file_without_a_generator_is_doubted() -> None:
    assert "no [generator] table" in "\n".join(doubts({"learner": _learner()}))


def test_an_evaluation_on_the_training_tasks_is_doubted(tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "1+1=", "verifier": "exact", "arguments": {"answer": "2"}}\n')
    entry = {"name": "sums", "source": "jsonl", "chat": False, "train_file": str(tmp_path / "tasks.jsonl")}

    def of(held_out: str) -> str:
        environments = [entry | {"evaluation_file": str(tmp_path / held_out)}]
        config = EnvServiceConfig.model_validate({"model": "model", "environments": environments})
        return "\n".join(doubts({"env-service": config}))

    assert "evaluation_file is the train_file" in of("tasks.jsonl")
    assert of("held_out.jsonl") == ""


def test_fewer_tasks_than_a_step_takes_are_doubted(tmp_path: Path) -> None:
    lines = [f'{{"prompt": "{n}+1=", "verifier": "exact", "arguments": {{"answer": "2"}}}}\n' for n in range(3)]
    (tmp_path / "tasks.jsonl").write_text("".join(lines))
    entry = {"name": "sums", "source": "jsonl", "chat": False, "train_file": str(tmp_path / "tasks.jsonl")}
    environments = build(EnvServiceConfig.model_validate({"model": "model", "environments": [entry]}).environments)

    (said,) = few_tasks(_learner(groups_per_step=4), environments)

    assert "environment sums has 3 training tasks, and a step takes 4 groups" in said
    assert list(few_tasks(_learner(groups_per_step=3), environments)) == []
    assert list(few_tasks(_learner(groups_per_step=4, max_lag=4, reuse={"share": 0.25}), environments)) == []


def test_the_message_that_leads_to_groups_of_one_says_whom_they_are_for() -> None:
    with pytest.raises(
        ValueError, match="groups of one, by lowering the first, are for algorithms that do not compare"
    ):
        _learner(rollouts={"environment": "sums", "group_size": 1})


OWN = {"verifier": "mine", "arguments": {}}
RIGHT = {"verifier": "exact_match", "arguments": {"answer": "2"}}
SHORT = {"verifier": "overlong", "arguments": {"maximum": 9, "buffer": 3}}


def _composite(*weights: float, of: Mapping[str, object] = RIGHT, **more: object) -> dict[str, JsonValue]:
    parts = [{**of, "weight": weight, "name": str(place)} for place, weight in enumerate(weights)]
    return {"verifier": "composite", "arguments": {"parts": parts, **more}}  # type: ignore[dict-item]


def _held_out(folder: Path, tasks: Sequence[Mapping[str, object]]) -> EnvServiceConfig:
    (folder / "train.jsonl").write_text(json.dumps({"prompt": "1+1=", **OWN}) + "\n")
    (folder / "held_out.jsonl").write_text("".join(json.dumps({"prompt": "1+1=", **task}) + "\n" for task in tasks))
    files = {"train_file": str(folder / "train.jsonl"), "evaluation_file": str(folder / "held_out.jsonl")}
    entry = {"name": "sums", "source": "jsonl", "chat": False, **files}
    return EnvServiceConfig.model_validate({"model": "model", "environments": [entry]})


@pytest.mark.parametrize(
    ("tasks", "success", "said"),
    [
        ([RIGHT], 1.0, ""),
        ([RIGHT], 1.5, "give 1.0 at most: accuracy would be 0"),
        ([RIGHT], 0.0, "give 0.0 at least: accuracy would be 1"),
        ([SHORT], 1.0, "give 0.0 at most"),
        ([SHORT, RIGHT], 1.0, ""),
        ([_composite(0.5, 0.3)], 1.0, "give 0.8 at most"),
        ([_composite(0.5, 0.3)], 0.8, ""),
        ([_composite(0.7, 0.2, 0.1)], 1.0, "give 0.9999999999999999 at most"),
        ([_composite(0.7, 0.2, 0.1, combine="mean")], 1.0, ""),
        ([_composite(2.0, of=OWN)], 5.0, ""),
        ([RIGHT, OWN], 5.0, ""),
        ([{"verifier": "helpful", "arguments": {}}], 5.0, "give 1.0 at most"),
        ([{"verifier": "length", "arguments": {"in_range": 0.5}}], 1.0, "give 0.5 at most"),
    ],
)
def test_an_evaluation_in_which_nothing_or_everything_is_right_is_doubted(
    tmp_path: Path, tasks: Sequence[Mapping[str, object]], success: float, said: str
) -> None:
    environments = build(_held_out(tmp_path, tasks).environments)
    learner = _learner(evaluation={"success_reward": success})

    found = "".join(wrong_success(learner, environments, shares=["helpful"]))

    assert said in found
    assert bool(found) is bool(said)


def test_an_evaluation_that_is_off_is_not_doubted(tmp_path: Path) -> None:
    environments = build(_held_out(tmp_path, [RIGHT]).environments)
    off = _learner(evaluation={"success_reward": 2.0, "tasks": 0, "final_tasks": 0})

    assert list(wrong_success(off, environments, shares=[])) == []


@pytest.mark.parametrize("elsewhere", [False, True])
def test_the_check_doubts_an_evaluation_if_all_verifiers_are_its_own_services(tmp_path: Path, elsewhere: bool) -> None:
    (tmp_path / "model").mkdir()
    model = model_with("chatml", tmp_path / "model")
    given = _held_out(tmp_path, [RIGHT]).model_copy(update={"model": model})
    if elsewhere:
        sets = [{"url": "http://127.0.0.1:1", "verifiers": ["exact_match"]}]
        given = EnvServiceConfig.model_validate({**given.model_dump(), "rewards": sets})
    learner = _learner(model=str(model), evaluation={"success_reward": 2.0})

    notes = examine({"learner": learner, "env-service": given, "reward-service": RewardServiceConfig()}).notes

    assert any("success_reward is 2.0" in note for note in notes) is not elsewhere
