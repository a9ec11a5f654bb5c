import random

from pydantic import BaseModel

from env_service.environments.interface import Action, ChatMessage, Opening, Step, Task
from env_service.environments.rules import Rules


class Options(BaseModel):
    highest: int = 31


class Guess:
    """Guess a number; each guess is too low or too high."""

    rules = Rules(max_turns=6, turn_tokens=8, invalid_penalty=0.1)

    def __init__(self, options: Options) -> None:
        self._highest = options.highest

    def reset(self, task: Task, seed: int) -> Opening:
        self._number = random.Random(task.seed).randint(0, self._highest)
        return Opening((ChatMessage("user", f"Guess my number, 0 to {self._highest}. Say the number alone."),))

    def step(self, action: Action) -> Step:
        if not action.text.strip().isdecimal():
            return Step((ChatMessage("user", "a number, please"),), invalid=True)
        guess = int(action.text)
        if guess == self._number:
            return Step(reward=1.0, stop="solved")
        return Step((ChatMessage("user", "too low" if guess < self._number else "too high"),))
