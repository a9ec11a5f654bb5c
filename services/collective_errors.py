"""Errors of gloo's and NCCL's collectives as one line for a person."""

import re

_SOURCE_PLACE = re.compile(r"\[/\S+:\d+\] ?| in: /\S+:\d+(?=,|$)")
"""A line of gloo's or torch's sources, which tells nothing to a reader of a log: `[/path/pair.cc:549] ` before gloo's
words, ` in: /path/NCCLUtils.cpp:210` among torch's.
"""
_GLOO_GUESS = re.compile(r"\s*This is typically caused by .*", re.DOTALL)
"""Gloo's guess at the cause, and all that follows it."""


def in_plain_words(error: BaseException) -> str:
    """The error without places in foreign sources and without gloo's guess at the cause."""
    text = _SOURCE_PLACE.sub("", str(error))
    return " ".join(_GLOO_GUESS.sub("", text).split())
