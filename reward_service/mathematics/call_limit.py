"""Bounds how much Python code runs, by counting calls: unlike a clock, it says the same on a slow machine."""

import gc
import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

# So many calls more are granted until one comes from no generator.
_MORE = 10_000

_CALLED_BACK = ("weakref", "_weakrefset")


class TooManyCalls(BaseException):
    """The limit was reached. Not an Exception: the code that is stopped must not take it for a failure of its own."""


@contextmanager
def at_most_calls(limit: int) -> Iterator[None]:
    """Raises TooManyCalls out of the code within it, soon after `limit` calls of Python functions.

    At its next call, but for those whose exceptions Python drops: the code would go on, and nobody would count it.
    One C function that takes for ever is not stopped. No debugger or measurement of coverage can run at the same time.
    """
    body = sys._getframe(2)
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        # A trace function hears of calls of Python functions alone, unlike a profile function: that is cheaper.
        nonlocal calls
        calls += 1
        if calls > limit and _is_heard(frame, body, in_generators=calls > limit + _MORE):
            raise TooManyCalls(f"more than {limit} calls")

    before = sys.gettrace()
    sys.settrace(count)
    try:
        yield
    finally:
        sys.settrace(before)


def _is_heard(frame: FrameType, body: FrameType, *, in_generators: bool) -> bool:
    """Whether an exception from the call that begins reaches `body`.

    What the interpreter calls by itself loses it: callbacks of the garbage collector and of weak references,
    finalisers, and generators that are closed since nobody needs them any more. These look like all generators, which
    may be around most of the work: so calls of functions by generators are heard if `in_generators` says so.
    """
    if frame.f_code.co_flags & inspect.CO_GENERATOR:
        return False
    collecting = {getattr(callback, "__code__", None) for callback in gc.callbacks}
    inner: FrameType | None = frame
    while inner is not None and inner is not body:
        code = inner.f_code
        if code in collecting or code.co_name == "__del__" or inner.f_globals.get("__name__") in _CALLED_BACK:
            return False
        if code.co_flags & inspect.CO_GENERATOR and not in_generators:
            return False
        inner = inner.f_back
    return True
