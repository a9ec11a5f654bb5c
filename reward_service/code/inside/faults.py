"""Exceptions as data: a builtin one crosses by its name, others by their class's name and its nearest builtin base."""

import builtins
import sys
from collections.abc import Callable

from reward_service.code.inside.channel import Message
from reward_service.code.inside.plain import Json, NotPlain

_MAX_TEXT = 2000
_RUNNERS = frozenset({"unittest", "doctest", "bdb"})


class RemoteException(BaseException):
    """Carries what the other side raised and must not be caught as an exception: SystemExit, say. It fails the test."""


def describe(error: BaseException, encode: Callable[[object], Json]) -> Message:
    """`fatal`: the name of what is no Exception. Or else `class`, and its arguments and attributes where they cross."""
    if not isinstance(error, Exception):
        return {"fatal": type(error).__name__}
    return {
        "class": describe_class(type(error)),
        "args": [_if_plain(part, encode) for part in error.args],
        "text": _text(error),
        "attributes": _attributes(error, encode),
    }


def describe_class(kind: type) -> Json:
    """The names of its classes, the most special first, down to a builtin one."""
    names: list[Json] = []
    for base in kind.__mro__:
        if _is_builtin(base):
            return [*names, base.__name__]
        names.append(_name(base))
    return [*names, "Exception"]


class Rebuilder:
    """Exceptions of the other side as exceptions of this one, with one class here for each class there."""

    def __init__(self, decode: Callable[[Json], object]) -> None:
        self._decode = decode
        self._classes: dict[str, type[Exception]] = {}

    def remember(self, kind: type) -> None:
        """A class here that the other side may raise."""
        if issubclass(kind, Exception):
            self._classes[_name(kind)] = kind

    def error(self, message: Json) -> BaseException:
        """The exception that is described. Raises NotPlain for what is no description."""
        if not isinstance(message, dict):
            raise NotPlain("no description of an exception")
        if "fatal" in message:
            return RemoteException(f"{str(message['fatal'])[:_MAX_TEXT]} was raised")
        kind = self.kind(message.get("class"))
        args, attributes = message.get("args"), message.get("attributes")
        try:
            error = kind.__new__(kind)
        except TypeError:  # a group of exceptions, say, cannot be made without its parts
            error = Exception()
        error.args = tuple(map(self._decode, args)) if isinstance(args, list) else ()
        error.__dict__["_hw_text"] = message.get("text")
        for name, value in attributes.items() if isinstance(attributes, dict) else ():
            if not name.startswith("_"):
                error.__dict__[name] = self._decode(value)
        return error

    def kind(self, names: Json) -> type[Exception]:
        """The class here. Raises NotPlain for what describes no class of exceptions."""
        if not isinstance(names, list) or not names or len(names) > 50:
            raise NotPlain("no description of a class of exceptions")
        *own, base = names
        kind = getattr(builtins, str(base), None)
        if not (isinstance(kind, type) and issubclass(kind, Exception)):
            raise NotPlain("no builtin exception")
        for name in reversed(own):
            kind = self._own(str(name), kind)
        return kind

    def _own(self, name: str, base: type[Exception]) -> type[Exception]:
        found = self._classes.get(name) or _of_library(name)
        if found is None:
            module, _, qualified = name.partition(":")
            # With its own names, so that it is known again where it came from.
            known = {"__module__": module, "__qualname__": qualified, "__str__": _told_text}
            found = self._classes[name] = type(qualified.rpartition(".")[2], (base,), known)
        return found


def is_of_the_tests(error: BaseException) -> bool:
    """True if the tests lack a name or a module: not the solution, whose exceptions arrive with their text."""
    return isinstance(error, NameError | ImportError) and "_hw_text" not in vars(error)


def _text(error: Exception) -> str:
    try:
        return str(error)[:_MAX_TEXT]
    except Exception:  # noqa: BLE001  its own __str__ may raise anything
        return ""


def _told_text(error: Exception) -> str:
    """The text of an exception of the other side, whose class may have a `__str__` of its own."""
    text = vars(error).get("_hw_text")
    return text if type(text) is str else Exception.__str__(error)


def _attributes(error: Exception, encode: Callable[[object], Json]) -> Message:
    found: Message = {}
    for name, value in vars(error).items():
        if isinstance(name, str) and not name.startswith("_"):
            found[name] = _if_plain(value, encode)
    return found


def _if_plain(value: object, encode: Callable[[object], Json]) -> Json:
    try:
        return encode(value)
    except NotPlain:
        return f"<{type(value).__name__}>"


def _of_library(name: str) -> type[Exception] | None:
    """The same class of the standard library, if it is loaded here and is no order to a test runner."""
    module, _, qualified = name.partition(":")
    package = module.partition(".")[0]
    if package not in sys.stdlib_module_names or package in _RUNNERS:
        return None
    found = getattr(sys.modules.get(module), qualified, None)
    return found if isinstance(found, type) and issubclass(found, Exception) else None


def _name(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _is_builtin(kind: type) -> bool:
    return getattr(builtins, kind.__name__, None) is kind
