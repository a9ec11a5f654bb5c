"""The benchmark of drawn tasks beside levels: its run files are ones that both services take, and what it says."""

import tomllib
from collections import Counter
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from benchmarks.level_draws import SIDES, TASKS, LevelledRun, options_of, table, write_run
from benchmarks.mixed_tasks import MixedEnvironment, MixedOptions
from env_service.environments.catalog import build
from env_service.environments.imported import NumberedTasks
from env_service.environments.task_configs import Tasks
from learner.config import LearnerConfig
from services.config.models import load_config

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", TASKS)
def test_both_services_take_the_run_file(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(tmp_path)
    file = write_run(name, tmp_path)
    for by in SIDES:
        options = options_of(TASKS[name], by=by, seed=1, steps=None)
        words = [word for key, value in options.items() for word in (f"--{key}", str(value))]
        config = load_config(LearnerConfig, process="learner", argv=["--config", str(file), *words], environ={})
        assert config.rollouts.tasks.by == ("signal" if by == "signal" else "order")
    entries = tomllib.loads(file.read_text(encoding="utf-8"))["env-service"]["environments"]
    adapter: TypeAdapter[Tasks] = TypeAdapter(Tasks)
    offered = build([adapter.validate_python(entry) for entry in entries])
    assert set(offered) == {"mixed", "level-0", "level-1", "level-2", "levels"}
    assert offered["mixed"].tasks.train_tasks == TASKS[name].tasks


async def test_tasks_are_of_every_difficulty_each_always_of_the_same() -> None:
    parts = ({"operands": 2, "form": "text"}, {"operands": 3, "form": "text"}, {"operands": 4, "form": "text"})
    environment = MixedEnvironment(MixedOptions(kind="arithmetic", parts=parts))
    assert environment.rules.max_turns == 8
    source = NumberedTasks(seed=0, train_tasks=90, evaluation_tasks=1)
    tasks = [source.task("train", index) for index in range(90)]
    openings = [str((await environment.reset(task, 0)).prompt) for task in tasks]
    assert openings == [str((await environment.reset(task, 0)).prompt) for task in tasks]
    counts = Counter(sum(text.count(operator) for operator in "+-*") for text in openings)
    assert min(counts[number] for number in (1, 2, 3)) > 15


def test_sides_are_compared_by_their_tokens() -> None:
    text = table([_run(by, seed, at=at) for by, at in (("order", 20), ("signal", 10)) for seed in range(2)])
    assert "| order | 0 | 0.50 | 0.100 | **0.450** | 2,000 | 2,000 | 9 |" in text
    assert "- signal: 0.450 at the end in the mean, 0.450 to 0.450; tokens, medians: 1,000 to 30%, 1,000 to 40%" in text
    assert "- levels: not run" in text
    assert "arithmetic" not in text


def _run(by: str, seed: int, *, at: int) -> LevelledRun:
    accuracies = {step: 0.45 if step >= at else 0.1 for step in (0, 10, 20)}
    sampled = {step: 100 * step for step in accuracies}
    return LevelledRun("maze", by, seed, "2 cores (x), load 1.0 at the end; commit a", accuracies, sampled, 0.5, 9.0)
