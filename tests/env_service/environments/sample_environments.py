"""Environments of one's own, as a user writes them."""

import random
from pathlib import Path

from pydantic import BaseModel

from env_service.environments.interface import Action, ChatMessage, Opening, Step, Task, TaskSource
from env_service.environments.rules import Rules
from protocol.trajectories import Purpose


class GuessOptions(BaseModel):
    highest: int = 31


class GuessNumber:
    """Guess a number; it says low or high."""

    rules = Rules(max_turns=5, turn_tokens=8)
    metrics = {"tries": "last"}  # noqa: RUF012

    def __init__(self, options: GuessOptions) -> None:
        self._highest = options.highest
        self._number = 0
        self._tries = 0

    def reset(self, task: Task, seed: int) -> Opening:
        self._number = random.Random(task.seed).randint(0, self._highest)
        return Opening((ChatMessage("user", f"0 to {self._highest}?"),), state="start")

    def step(self, action: Action) -> Step:
        self._tries += 1
        tries = {"tries": float(self._tries)}
        if not action.text.strip().isdecimal():
            return Step((ChatMessage("user", "a number"),), invalid=True, metrics=tries)
        guess = int(action.text)
        if guess == self._number:
            return Step(reward=1.0, stop="solved", metrics=tries)
        said = "low" if guess < self._number else "high"
        return Step((ChatMessage("user", said),), state=f"{guess} {said}", metrics=tries)


class ReaderOptions(BaseModel):
    words: Path
    more: tuple[Path, ...] = ()


class FileReader:
    """Says what is in files."""

    roles = ()

    def __init__(self, options: ReaderOptions) -> None:
        self._text = " ".join(file.read_text() for file in (options.words, *options.more))

    def reset(self, task: Task, seed: int) -> str:
        return self._text

    def step(self, action: Action) -> Step:
        return Step(stop="said")


class TwoWords:
    """Two words, as its own tasks."""

    roles = ()

    @staticmethod
    def tasks() -> TaskSource:
        return _Pair()

    def reset(self, task: Task, seed: int) -> str:
        return str(task.data["word"])

    def step(self, action: Action) -> Step:
        return Step(stop="said")


class _Pair:
    train_tasks = 2
    evaluation_tasks = 0

    def task(self, purpose: Purpose, index: int) -> Task:
        return Task(data={"word": ("to", "fro")[index]})


class Stepless:
    def reset(self, task: Task, seed: int) -> str:
        return ""


class TwoParameters(GuessNumber):
    def __init__(self, options: GuessOptions, extra: int) -> None:
        super().__init__(options)


class WrongRole(GuessNumber):
    roles = ("narrator",)


class Bounded(GuessNumber):
    """An instance says what depends on its options; the constructor refuses some."""

    def __init__(self, options: GuessOptions) -> None:
        super().__init__(options)
        if options.highest < 2:
            raise ValueError("two numbers at least")
        self.rules = Rules(max_turns=options.highest)


class Looking(GuessNumber):
    roles = ("tool",)
