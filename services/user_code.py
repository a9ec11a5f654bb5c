"""Errors in code of the user's: the lines of theirs that they went through, and none of ours.

Verifiers, environments, agents and algorithms of one's own are called from deep inside of a process. A traceback of all
that says little to whoever wrote the ten lines at its end. Here it is a sentence, for a message, or lines, for a log.

    ZeroDivisionError: division by zero (reward.py, line 12, in share: return 1 / n; called in digits, line 7)

    File "/home/me/reward.py", line 7, in digits
        return share(len(submission.completion))
    File "/home/me/reward.py", line 12, in share
        return 1 / n
    ZeroDivisionError: division by zero
"""

import asyncio
import linecache
import math
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from itertools import pairwise
from numbers import Real
from pathlib import Path
from types import FrameType, ModuleType

_ROOT = Path(__file__).resolve().parents[1]
_PACKAGES = ("protocol", "services", "learner", "generator", "reward_service", "env_service", "headway")
_NOT_THEIRS = (
    *(f"{_ROOT / package}/" for package in _PACKAGES),
    *(f"{Path(sysconfig.get_paths()[name]).resolve()}/" for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    "<frozen",
)
_LONGEST = 1000
_MAX_CALLERS = 3


def number_of(value: object) -> float | None:
    """The number that user code gave: Python's, numpy's, or a tensor or array without dimensions; None if it is none.

    One too large for a float is infinite.
    """
    if not isinstance(value, Real) and getattr(value, "shape", None) == ():
        item = getattr(value, "item", None)
        value = item() if callable(item) else value
    if not isinstance(value, Real):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf if value == abs(value) else -math.inf


def checked_number(value: object) -> float:
    """`number_of` what is known to be a number."""
    number = number_of(value)
    assert number is not None, "it was looked at before"
    return number


def is_being_cancelled() -> bool:
    """Tells whether somebody cancels the task that asks, so that a CancelledError is for it and not the user code's."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def let_out(error: BaseException) -> str:
    """Says of code that ends more than itself, by a SystemExit or a CancelledError of its own, what it did and where.

    It follows the name of that code in a sentence.
    """
    frames = user_frames(error) or traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}:{frames[-1].lineno}, in {frames[-1].name})" if frames else ""
    said = ": ".join(filter(None, (type(error).__name__, str(error))))
    hint = ", such as that of a task which it cancelled" if isinstance(error, asyncio.CancelledError) else ""
    return f"let out {said}{place}{hint}; expected a result or an Exception: catch it there"


class LetOut(Exception):
    """Stands for an `error` by which code of a user's wanted to end more than itself; the text says so."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(let_out(error))
        self.error = error


def user_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """The frames of the error, and of what it came from, that are in no file of ours, of Python's or of a package's.

    The innermost comes last. Of a file that is no Python, the one place that the complaint names.
    """
    for one in _chain(error):
        if isinstance(one, SyntaxError) and one.filename and one.lineno and _is_theirs(one.filename):
            line = (one.text or linecache.getline(one.filename, one.lineno)).strip()
            return [traceback.FrameSummary(one.filename, one.lineno, "<module>", line=line)]
        frames = [frame for frame in traceback.extract_tb(one.__traceback__) if _is_theirs(frame.filename)]
        if frames:
            return frames
    return []


def place_of(frame: FrameType) -> str:
    """Says where code of the user's is that runs now, in brackets; empty if none of theirs is among what was called."""
    frames = [one for one in traceback.extract_stack(frame) if _is_theirs(one.filename)]
    return f" ({_shown(frames[-1].filename)}, line {frames[-1].lineno}, in {frames[-1].name})" if frames else ""


def in_a_sentence(error: BaseException) -> str:
    """The error, where in the user's code it was raised, and through which lines of theirs it was reached."""
    said = _said(error)
    frames = user_frames(error)
    if not frames:
        return said
    last = frames[-1]
    within = "" if last.name == "<module>" else f", in {last.name}"
    code = f": {last.line}" if last.line else ""
    return f"{said} ({_shown(last.filename)}, line {last.lineno}{within}{code}{_callers(frames)})"[:_LONGEST]


def exit_at_import(error: SystemExit) -> str:
    """Says of a module that ends the process when it is imported how and where it does, and what to do.

    It follows the module's name in a sentence.
    """
    return f'calls sys.exit when imported: {in_a_sentence(error)}; call it below `if __name__ == "__main__":` alone'


def _callers(frames: list[traceback.FrameSummary]) -> str:
    """From the inside; a comprehension, which has a frame of its own, is in a line that is named already."""
    places = [(_shown(each.filename), each.lineno, each.name) for each in reversed(frames)]
    called = [
        f"; called in {name}, {'' if file == inner[0] else f'{file}, '}line {line}"
        for inner, (file, line, name) in pairwise(places)
        if not name.startswith("<")
    ]
    return "".join(called[:_MAX_CALLERS])


def in_lines(error: BaseException) -> str:
    """The user's part of the traceback, and the error; empty if no line of theirs is in it."""
    frames = user_frames(error)
    if not frames:
        return ""
    lines = [f'File "{one.filename}", line {one.lineno}, in {one.name}\n    {one.line}' for one in frames]
    return "\n".join([*lines, _said(next(one for one in _chain(error) if _goes_through(one)))])


def hidden_by(module: ModuleType) -> str:
    """Explains a module that lacks what was meant to be in it, if it hides another file of its name: one of
    Python's, of a package or of ours comes before those beside a run.toml. Empty if it hides none.
    """
    own = getattr(module, "__file__", None)
    for folder in sys.path:
        file = Path(folder, *module.__name__.split(".")).with_suffix(".py")
        if file.is_file() and (own is None or file.resolve() != Path(own).resolve()):
            return f"it is {own or 'a part of Python'}, which hides {_shown(str(file))}: give yours another name"
    return ""


def _goes_through(error: BaseException) -> bool:
    if isinstance(error, SyntaxError):
        return True
    return any(_is_theirs(frame.filename) for frame in traceback.extract_tb(error.__traceback__))


def _said(error: BaseException) -> str:
    text = " ".join(str(error.msg if isinstance(error, SyntaxError) else error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The innermost cause first: an error of ours that was made of one of theirs says less."""
    seen: list[BaseException] = []
    waiting = [error]
    while waiting:
        one = waiting.pop(0)
        if one in seen:
            continue
        seen.append(one)
        waiting += [inner for inner in (one.__cause__, one.__context__) if inner is not None]
        waiting += one.exceptions if isinstance(one, BaseExceptionGroup) else ()
    yield from reversed(seen)


def _is_theirs(file: str) -> bool:
    if not file.endswith(".py") or file.startswith("<"):
        return False
    return not str(Path(file).resolve()).startswith(_NOT_THEIRS)


def _shown(file: str) -> str:
    """From where the process was started, if it is below."""
    path = Path(file)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else file
