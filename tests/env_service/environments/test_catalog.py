"""Several environments in one run: in shares, or as lines of one file."""

import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from env_service.config import EnvServiceConfig
from env_service.environments import catalog
from env_service.environments.catalog import Ladder, Mix, Share, parts_of
from env_service.environments.interface import Task, Verification
from env_service.environments.task_configs import AdditionTasks, JsonlTasks, MixTasks
from protocol.messages import TaskPart
from protocol.trajectories import Purpose


class Numbered:
    """Tasks that say where they are from."""

    def __init__(self, name: str, train: int, evaluation: int = 0) -> None:
        self._name = name
        self.train_tasks = train
        self.evaluation_tasks = evaluation

    def task(self, purpose: Purpose, index: int) -> Task:
        assert index < (self.train_tasks if purpose == "train" else self.evaluation_tasks)
        return Task(prompt=f"{self._name}{index}", verification=Verification(self._name))


def prompts(mix: Mix, purpose: Purpose) -> list[str]:
    count = mix.train_tasks if purpose == "train" else mix.evaluation_tasks
    tasks = [mix.task(purpose, index) for index in range(count)]
    return [str(task.prompt) for task in tasks if isinstance(task, Task)]


def test_training_tasks_come_in_shares_and_all_of_them_occur() -> None:
    mix = Mix([Share(Numbered("a", 3), 2.0), Share(Numbered("b", 6), 1.0)])

    found = prompts(mix, "train")

    assert Counter(prompt[0] for prompt in found) == {"a": 12, "b": 6}
    assert Counter(found) == {**{f"a{index}": 4 for index in range(3)}, **{f"b{index}": 1 for index in range(6)}}
    assert parts_of(mix) == (TaskPart(places=12, tasks=3), TaskPart(places=6, tasks=6))


def test_the_parts_of_levels_are_the_levels_and_the_parts_of_a_mix_among_them() -> None:
    """The mix has 6 places, 4 for its 2 tasks of a and 2 of b, and the other level 8: so it begins once more."""
    mix = Mix([Share(Numbered("a", 2), 2.0), Share(Numbered("b", 2), 1.0)])
    assert parts_of(Ladder([mix, Numbered("c", 8)])) == (
        TaskPart(places=4, tasks=2),
        TaskPart(places=2, tasks=2),
        TaskPart(places=2, tasks=2),
        TaskPart(places=8, tasks=8),
    )
    assert parts_of(Ladder([Numbered("c", 3), Numbered("d", 8)])) == (
        TaskPart(places=8, tasks=3),
        TaskPart(places=8, tasks=8),
    )
    assert parts_of(Ladder([Numbered("c", 8), Numbered("d", 8)])) == (), (
        "nothing that the number of levels does not say"
    )
    assert parts_of(Numbered("c", 8)) == ()


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(1, 20), st.floats(0.2, 5)), min_size=1, max_size=5))
def test_every_task_occurs_and_shares_are_kept_whatever_the_weights(parts: list[tuple[int, float]]) -> None:
    mix = Mix([Share(Numbered(f"{number}:", size), weight) for number, (size, weight) in enumerate(parts)])

    found = Counter(prompt.split(":")[0] for prompt in prompts(mix, "train"))

    assert len(set(prompts(mix, "train"))) == sum(size for size, _ in parts)
    whole = sum(weight for _, weight in parts)
    for number, (_, weight) in enumerate(parts):
        assert found[f"{number}"] == pytest.approx(mix.train_tasks * weight / whole, abs=len(parts) + 1)


def test_the_parts_take_turns_in_evaluation() -> None:
    mix = Mix([Share(Numbered("a", 1, 4), 5.0), Share(Numbered("b", 1, 2), 1.0), Share(Numbered("c", 1), 1.0)])

    assert prompts(mix, "evaluate") == ["a0", "b0", "a1", "b1", "a2", "a3"]


def test_there_is_no_task_beyond_the_last() -> None:
    mix = Mix([Share(Numbered("a", 2, 1), 1.0)])

    with pytest.raises(IndexError):
        mix.task("train", 2)
    with pytest.raises(IndexError):
        mix.task("evaluate", 1)


def test_weights_that_make_an_endless_epoch_are_refused() -> None:
    with pytest.raises(ValueError, match="make its weights less unequal"):
        Mix([Share(Numbered("a", 1_000_000), 1e-3), Share(Numbered("b", 1), 1e6)])


def test_a_mix_without_training_tasks_is_refused() -> None:
    with pytest.raises(ValueError, match="no training tasks"):
        Mix([Share(Numbered("a", 0), 1.0)])


def test_a_mix_is_offered_beside_its_parts(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps({"prompt": "1+1?", "verifier": "math", "arguments": {"answer": "2"}}))
    environments = catalog.build(
        [
            MixTasks.model_validate(
                {"source": "mix", "name": "all", "parts": [{"environment": "sums"}, {"environment": "file"}]}
            ),
            AdditionTasks(name="sums"),
            JsonlTasks(source="jsonl", name="file", train_file=path),
        ]
    )

    assert set(environments) == {"all", "sums", "file"}
    mixed = environments["all"].tasks
    verifiers = Counter(
        task.verification.verifier
        for index in range(mixed.train_tasks)
        if isinstance(task := mixed.task("train", index), Task)
    )
    assert verifiers == {"exact_match": 8_000, "math": 8_000}


def test_the_lines_of_one_file_may_have_different_verifiers(tmp_path: Path) -> None:
    lines = [
        {"prompt": "1+1?", "answer": "2"},
        {"prompt": "Sort.", "verifier": "code", "arguments": {"cases": [{"stdin": "2 1", "stdout": "1 2"}]}},
        {"messages": [{"role": "user", "content": "Be kind."}], "verifier": "judge", "arguments": {"rubric": "kind?"}},
    ]
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))

    (environment,) = catalog.build(
        [JsonlTasks(source="jsonl", name="mixed", train_file=path, verifier="math")]
    ).values()

    tasks = [environment.tasks.task("train", index) for index in range(3)]
    assert [task.verification.verifier for task in tasks if isinstance(task, Task)] == ["math", "code", "judge"]
    assert [task.verification.arguments for task in tasks if isinstance(task, Task)] == [
        {"answer": "2"},
        {"cases": [{"stdin": "2 1", "stdout": "1 2"}]},
        {"rubric": "kind?"},
    ]


@pytest.mark.parametrize(
    "parts", [[{"environment": "nobody"}], [{"environment": "mixed"}], [{"environment": "addition"}] * 2]
)
def test_a_mix_of_what_is_not_there_is_an_error_that_names_what_is(parts: list[dict[str, str]]) -> None:
    with pytest.raises(ValueError, match="expected, once each, environments of this file that are no mix: addition"):
        EnvServiceConfig.model_validate(
            {
                "model": "m",
                "environments": [{"source": "addition"}, {"source": "mix", "name": "mixed", "parts": parts}],
            }
        )
