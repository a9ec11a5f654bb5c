"""Errors of gloo's and NCCL's collectives as one line for a person."""

import re

_PLACE = re.compile(r"\[/\S+:\d+\] ?| in: /\S+:\d+$")
"""A line of their sources, where nobody who reads a log of ours can look."""
_PLACE_BETWEEN = re.compile(r" in: /\S+:\d+,")
_ADVICE = re.compile(r"\s*This is typically caused by .*", re.DOTALL)


def in_plain_words(error: BaseException | str) -> str:
    """The error without places in foreign sources and without gloo's guess at the cause."""
    text = _PLACE.sub("", _PLACE_BETWEEN.sub(":", str(error)))
    return " ".join(_ADVICE.sub("", text).split())
