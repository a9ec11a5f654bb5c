"""The learner, watched while a file is there and not watched while it is not; for benchmarks.watch_cost.

    python -m benchmarks.watched_learner SWITCH --config FILE [OPTION ...]

Not watched, it is as if no tracker and no store of trajectories were set: nothing is computed for them, and nothing
gets to them. At its first step it writes the names of its threads, by their ids, to SWITCH.threads.
"""

import json
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

from learner import command
from services.process import run_process


class Switch:
    """On while the file is there."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._off_since: float | None = time.monotonic()
        self._off_s = 0.0
        self._said = False

    def look(self) -> bool:
        """True if it is on, from here on until the next look."""
        now, is_on = time.monotonic(), self._path.exists()
        if is_on and self._off_since is not None:
            self._off_s += now - self._off_since
            self._off_since = None
        elif not is_on and self._off_since is None:
            self._off_since = now
        if not self._said:
            names = {thread.native_id: thread.name for thread in threading.enumerate()}
            self._path.with_suffix(".threads").write_text(json.dumps(names), encoding="utf-8")
            self._said = True
        return is_on

    @property
    def is_on(self) -> bool:
        """As the last look found it."""
        return self._off_since is None

    @property
    def off_s(self) -> float:
        """For how long it has been off; while it is on."""
        return self._off_s


def main() -> None:
    """Runs the learner with what switches it in the place of what is watched."""
    switch = Switch(Path(sys.argv.pop(1)))

    def run(*arguments: Any) -> int:
        with ExitStack() as stack:  # here, since torch is imported by it, and must not be before
            _put_in_place(switch, stack)
            return run_process(*arguments)

    with patch("learner.command.run_process", run):
        command.main()


def _put_in_place(switch: Switch, stack: ExitStack) -> None:
    from learner import event_loop, run_ranks, service
    from learner.page.store import TrajectoryStore
    from learner.page.taken import TakenStep
    from learner.reports.trackers import Trackers
    from learner.training.trainer import Trainer
    from protocol.trajectories import TrajectoryGroup

    class Store(TrajectoryStore):
        """Its share of the time is one of the time that is watched."""

        def put(self, taken: TakenStep) -> None:
            if switch.is_on:
                self._began += switch.off_s - self._off_s
                self._off_s = switch.off_s
                super().put(taken)

        def put_left_out(self, group: TrajectoryGroup, *, step: int, why: str) -> None:
            if switch.is_on:
                super().put_left_out(group, step=step, why=why)

        _off_s = 0.0

    class Followed(Trackers):
        def take(self, entry: Mapping[str, Any]) -> None:
            if switch.is_on:
                super().take(entry)

    class Switched(Trainer):
        def train_step(self, *arguments: Any, **named: Any) -> Any:
            self._step.keeps_tokens = switch.look()
            return super().train_step(*arguments, **named)

    stack.enter_context(patch.object(event_loop, "TrajectoryStore", Store))
    stack.enter_context(patch.object(service, "Trackers", Followed))
    stack.enter_context(patch.object(run_ranks, "Trainer", Switched))


if __name__ == "__main__":
    main()
