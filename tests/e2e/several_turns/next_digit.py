"""The smallest game with a state: say the digit that follows the one that is shown, three times."""

from env_service.environments.interface import Action, Opening, Step, Task
from env_service.environments.rules import Rules

TURNS = 3


class NextDigit:
    """Shows a digit, such as `7=`; the next one earns a third, and is shown then, whatever was said."""

    rules = Rules(max_turns=TURNS, turn_tokens=1)
    roles = ()

    def reset(self, task: Task, seed: int) -> Opening:
        self._digit = task.seed % 10
        self._turns = 0
        return Opening(f"{self._digit}=", state=str(self._digit))

    def step(self, action: Action) -> Step:
        self._turns += 1
        self._digit = (self._digit + 1) % 10
        reward = 1 / TURNS if action.text == str(self._digit) else 0.0
        if self._turns == TURNS:
            return Step(reward=reward, stop="over")
        return Step(f"{self._digit}=", reward=reward, state=str(self._digit))
