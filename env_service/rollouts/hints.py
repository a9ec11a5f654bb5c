"""The prompt of a teacher that is shown more than the policy: the opening with the hint of the rules in it."""

from dataclasses import replace

from env_service.environments.interface import Prompt, Task
from env_service.environments.rules import PRIVILEGED
from env_service.rollouts.outcomes import DataFailure


def hinted(prompt: Prompt, hint: str, task: Task, *, environment: str) -> Prompt:
    """The prompt with the hint: before plain text, which is continued, and at the end of the last message. Raises
    DataFailure for a task that has no text for it.
    """
    answer = task.verification.arguments.get("answer")
    privileged = task.privileged or (str(answer) if isinstance(answer, str | int | float) else "")
    if not privileged:
        raise DataFailure(
            f"environment {environment} has a teacher_hint, and the task no text for it; expected `privileged` of the "
            "task, or an `answer` of its verifier that is text or a number"
        )
    text = hint.replace(PRIVILEGED, privileged)
    if isinstance(prompt, str):
        return text + prompt
    if not prompt:
        raise DataFailure(f"environment {environment} has a teacher_hint, and the task an opening without a message")
    *before, last = prompt
    return (*before, replace(last, content=f"{last.content}\n\n{text}"))
