"""What a completion answers, for votes among samples. Answers are compared as text: 1/2 and 0.5 are two answers."""

import re
from collections.abc import Mapping

_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_BOX = "\\boxed{"
_FOUND = ("extracted", "parsed")
"""Reward components by which a verifier says whether it found an answer at all."""


def answer_of(completion: str, *, components: Mapping[str, float]) -> str | None:
    r"""The answer in a completion, None if there is none or the verifier, by its `components`, found none.

    The thought before the last `</think>` does not count. The answer is the last `<answer>..</answer>`, else the whole
    text; within it the last `\boxed{..}`, if there is one; with each white space made one space.
    """
    if any(components.get(name) == 0 for name in _FOUND):
        return None
    text = completion.rpartition("</think>")[2]
    tagged = _TAG.findall(text)
    given = str(tagged[-1]) if tagged else text
    return " ".join((_last_boxed(given) or given).split()) or None


def _last_boxed(text: str) -> str | None:
    """The content of the last box, None if it never closes."""
    start = text.rfind(_BOX)
    if start < 0:
        return None
    start += len(_BOX)
    depth = 1
    for place in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[start:place]
    return None
