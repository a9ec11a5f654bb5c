"""The prompt of a teacher that is shown more than the policy: the opening with the hint of the rules in it."""

import math
import re
from collections.abc import Sequence
from dataclasses import replace

from env_service.environments.interface import Prompt, Task
from env_service.environments.rules import PRIVILEGED, SIBLING
from env_service.rollouts.outcomes import DataFailure


def solved_sibling(rewards: Sequence[float | None], *, reward: float) -> int | None:
    """The place of the best reward, the first of several; None if it is less than `reward`."""
    known = [-math.inf if each is None else each for each in rewards]
    best = max(range(len(known)), key=known.__getitem__, default=None)
    return None if best is None or known[best] < reward else best


def hinted(prompt: Prompt, hint: str, task: Task, *, environment: str, sibling: str = "") -> Prompt:
    """The prompt with the hint: before plain text, which is continued, and at the end of the last message. `sibling` is
    what a trajectory said that has solved the task. Raises DataFailure for a task that has no text for it.
    """
    answer = task.verification.arguments.get("answer")
    privileged = task.privileged or (str(answer) if isinstance(answer, str | int | float) else "")
    if not privileged and PRIVILEGED in hint:
        raise DataFailure(
            f"environment {environment} has a teacher_hint, and the task no text for it; expected `privileged` of the "
            "task, or an `answer` of its verifier that is text or a number"
        )
    places = {PRIVILEGED: privileged, SIBLING: sibling}
    text = re.sub("|".join(map(re.escape, places)), lambda found: places[found.group()], hint)
    if isinstance(prompt, str):
        return text + prompt
    if not prompt:
        raise DataFailure(f"environment {environment} has a teacher_hint, and the task an opening without a message")
    *before, last = prompt
    return (*before, replace(last, content=f"{last.content}\n\n{text}"))
