"""An environment that does what it is told: well, or badly in every way that a process can."""

import ctypes
import os
import signal
import sys
import time

from pydantic import BaseModel

from env_service.environments.interface import (
    Action,
    ChatMessage,
    EnvironmentUnavailable,
    Opening,
    Step,
    Task,
    TaskSource,
)
from env_service.environments.rules import Rules
from protocol.trajectories import Purpose

print("a module that prints")

conversations_of_this_process = 0


class NaughtyOptions(BaseModel):
    step_timeout_s: float = 30.0


class Naughty:
    """Does what the policy says."""

    metrics = {"conversations": "last"}  # noqa: RUF012

    def __init__(self, options: NaughtyOptions) -> None:
        self.rules = Rules(max_turns=4, turn_tokens=16, step_timeout_s=options.step_timeout_s)

    def reset(self, task: Task, seed: int) -> Opening:
        global conversations_of_this_process
        conversations_of_this_process += 1
        return Opening((ChatMessage("user", "go"),))

    async def step(self, action: Action) -> Step:
        self._do(action.text)
        if action.text == "odd":
            return "not a step"  # type: ignore[return-value]
        if action.text in ("on", "loud"):
            return Step((ChatMessage("user", "on"),), reward=0.25)
        return Step(
            reward=1.0,
            stop="x" * (5 << 20) if action.text == "huge" else "done",
            metrics={"conversations": float(conversations_of_this_process), "process": float(os.getpid())},
        )

    def _do(self, word: str) -> None:
        match word:
            case "boom":
                raise ValueError("a bug of mine")
            case "quit":
                sys.exit("I quit")
            case "away":
                raise EnvironmentUnavailable("the game server is full")
            case "hang":
                time.sleep(1e6)
            case "slow":
                time.sleep(1.0)
            case "leave":
                os._exit(3)
            case "segfault":
                ctypes.string_at(0)
            case "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            case "loud":
                print("printing", sys.stdin.read())


class OwnTasks(Naughty):
    """The same, with tasks of its own."""

    @staticmethod
    def tasks(options: NaughtyOptions) -> TaskSource:
        return _Few()


class _Few:
    train_tasks = 3
    evaluation_tasks = 1

    def task(self, purpose: Purpose, index: int) -> Task:
        if index == 2:
            raise LookupError("no such row")
        return Task(data={"row": index})


class DiesAtOnce:
    """Ends the process that loads it."""

    os.environ.get("HEADWAY_TEST_NOT_SET")

    def __init__(self) -> None:
        os._exit(7)

    def reset(self, task: Task, seed: int) -> str:
        return ""

    def step(self, action: Action) -> Step:
        return Step(stop="never")
