"""The smallest environment: one prompt, one completion, one verifier."""

from env_service.environments.interface import Action, Prompt, Step, Task


class SingleTurn:
    """Opens with the task's prompt and ends with the first completion, which the task's verifier judges."""

    def __init__(self) -> None:
        self._task: Task | None = None

    def reset(self, task: Task, seed: int) -> Prompt:
        """The task's prompt; the seed changes nothing."""
        self._task = task
        return task.prompt

    def step(self, action: Action) -> Step:
        """The end, whatever the action was."""
        assert self._task is not None, "step before reset"
        return Step(verification=self._task.verification)
