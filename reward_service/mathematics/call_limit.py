"""Bounds how much Python code runs, by counting calls: unlike a clock, it says the same on a slow machine."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class TooManyCalls(BaseException):
    """The limit was reached. Not an Exception: the code that is stopped must not take it for a failure of its own."""


@contextmanager
def at_most_calls(limit: int) -> Iterator[None]:
    """Raises TooManyCalls out of the code within it, at its next call after `limit` calls of Python functions.

    One C function that takes for ever is not stopped. No debugger or measurement of coverage can run at the same time.
    """
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        # A trace function hears of calls of Python functions alone, unlike a profile function: that is cheaper.
        nonlocal calls
        calls += 1
        if calls > limit:
            raise TooManyCalls(f"more than {limit} calls")

    before = sys.gettrace()
    sys.settrace(count)
    try:
        yield
    finally:
        sys.settrace(before)
