"""Settings that are allowed and hardly meant are named, with what they lead to."""

from pathlib import Path

import pytest

from env_service.config import EnvServiceConfig
from env_service.environments.catalog import build
from headway.doubts import doubts, few_tasks
from learner.config import LearnerConfig


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


def test_the_message_that_leads_to_groups_of_one_says_whom_they_are_for() -> None:
    with pytest.raises(
        ValueError, match="groups of one, by lowering the first, are for algorithms that do not compare"
    ):
        _learner(rollouts={"environment": "sums", "group_size": 1})
