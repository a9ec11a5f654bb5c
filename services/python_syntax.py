"""Parsing of Python text in processes that have threads and garbage."""

import ast
import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_ALONE = threading.Lock()


def module_of(text: str) -> ast.Module:
    """Syntax tree of a file's text. Raises SyntaxError, ValueError, RecursionError, MemoryError."""
    with _undisturbed():
        return ast.parse(text)


def expression_of(text: str) -> ast.expr:
    """Syntax tree of an expression. Raises as `module_of` does."""
    with _undisturbed():
        return ast.parse(text, mode="eval").body


def literal_of(text: str) -> object:
    """Value of a Python literal, as `ast.literal_eval` gives it. Raises as `module_of` does, and TypeError."""
    return ast.literal_eval(expression_of(text.lstrip(" \t")))


@contextmanager
def _undisturbed() -> Iterator[None]:
    """The garbage collector has a pause.

    CPython 3.11 counts the depth of a tree that is being made in one place for all callers (its issue 106905). What
    runs in the middle of it, a finalizer by way of the collector and other threads by way of the finalizer, makes it
    raise SystemError for a sound text.
    """
    with _ALONE:
        collects = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if collects:
                gc.enable()
