"""Online trainings made by their constructor, of real settings, with stand-ins for the parts that a test has no use
for: a new field of theirs has its default in every test.
"""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from learner.config import LearnerConfig
from learner.online import OnlineTraining
from learner.training.guard import Guard
from learner.weights.published import Snapshot


class NothingToTrain:
    """Stands for trainer, publisher and the rest in a run whose last step is done."""

    preset: Any = None
    tokens: Any = None
    tokens_s = 0.0

    def __init__(self) -> None:
        self.offered: list[Snapshot] = []

    def probe_logprobs(self, texts: object) -> tuple[float, ...]:
        return (0.0,)

    def host_copy(self, *, bucket_bytes: int, shared: bool, mapped: bool) -> SimpleNamespace:
        return SimpleNamespace(buckets=(), shares=())

    def offer(self, snapshot: Snapshot, *, hold: bool = False) -> None:
        assert not hold, "no release is wanted"
        self.offered.append(snapshot)

    def export(self, folder: Path) -> None:
        pass

    def may_write(self) -> None:
        pass

    def begin_steps(self) -> float:
        return 0.0

    async def wait_until_served(self, version: int) -> None:
        pass

    async def begin(self) -> None:
        pass

    async def end(self) -> None:
        pass


def settings_of(folder: Path | None = None, **settings: Any) -> LearnerConfig:
    """A run's settings: its folder is there only if a test gives it one to write to."""
    run = {"directory": folder or "no-runs", "name": "run"}
    return LearnerConfig.model_validate({"model": "m", "run": run, "evaluation": {"final_tasks": 0}, **settings})


def training_of(settings: LearnerConfig, **given: Any) -> Any:
    """A run from version 7 on, with the arguments `given`. Whatever part is not among them is `parts`, or stands still;
    without a loop of the test's own nobody may be called in it.
    """
    parts = given.pop("parts", None) or NothingToTrain()
    try:
        loop: Any = asyncio.get_running_loop()
    except RuntimeError:
        loop = None
    whole = dict.fromkeys(
        ("trainer", "intake", "publisher", "records", "metrics", "idle", "teachers", "checkpoints"), parts
    )
    guard = Guard(settings.guard, max_lag=settings.max_lag)
    rest = {"guard": guard, "samples": None, "first_probe": (1, 2), "first_version": 7, "replay": (), "loop": loop}
    return OnlineTraining(**{"config": settings, **whole, **rest, **given})
