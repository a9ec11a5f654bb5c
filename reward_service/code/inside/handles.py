"""The solution's objects as the tests see them: each use of one is a request to the solution's process.

A handle is never equal to a plain value, and is ordered with none: `f(1) == 2` is decided here, by plain values alone.
What the tests tell the solution it may use against them, so an operator with a plain operand (`f(1) - 2`) must give an
object again, and such an object gives no number or truth value away; `2 in f(1)` is decided here, by going through the
elements. Only an object made by calling a class by name, such as `Basket()`, is asked `2 in basket` itself.
"""

import contextlib
from collections.abc import Callable, Generator, Iterator
from typing import Protocol

from reward_service.code.inside.lending import BINARY, IN_PLACE
from reward_service.code.inside.plain import NotPlain

_READABLE = frozenset({"__name__", "__qualname__", "__doc__", "__annotations__"})
_CONTAINERS = frozenset({"count", "index", "copy", "find"})
# Methods with which a test would ask a plain value about another one: an object that only resembles a string or a set
# must not be asked.
JUDGING = frozenset(
    name for kind in (str, bytes, frozenset, int, float) for name in dir(kind) if not name.startswith("_")
).difference(_CONTAINERS)


# What mocks and test runners look for in any object.
_LOOKED_FOR = ("__", "_mock_", "_pytest", "pytest", "_is_coroutine")


def is_reserved(name: str) -> bool:
    """True if an attribute is never asked of the solution."""
    return name.startswith(_LOOKED_FOR) and name not in _READABLE


class SolutionProcess(Protocol):
    """The solution's process."""

    def do(self, name: str, *args: object, **keywords: object) -> object:
        """The result of an operation there."""
        ...


class Handle:
    """An object of the solution."""

    def __init__(self, *, peer: SolutionProcess, number: int) -> None:
        state = vars(self)
        state["_hw_peer"], state["_hw_number"] = peer, number
        # A class that the tests read by its name, or made by one / made by an operator with a plain operand.
        state["_hw_declared"], state["_hw_derived"] = False, False

    _hw_peer: SolutionProcess
    _hw_number: int
    _hw_declared: bool
    _hw_derived: bool

    def __getattr__(self, name: str) -> object:
        if is_reserved(name):
            raise AttributeError(f"{name} of an object of the solution cannot be read")
        if name in JUDGING and not (self._hw_declared or self._hw_number == 0):
            raise AttributeError(f"{name} is a method of plain values, and the solution gave an object")
        return self._hw_peer.do("get", self, name)

    def __setattr__(self, name: str, value: object) -> None:
        if name == "__class__":
            raise AttributeError(name)
        self._hw_peer.do("set", self, name, value)

    def __delattr__(self, name: str) -> None:
        self._hw_peer.do("delete", self, name)

    def __getitem__(self, key: object) -> object:
        return self._hw_peer.do("getitem", self, key)

    def __setitem__(self, key: object, value: object) -> None:
        self._hw_peer.do("setitem", self, key, value)

    def __delitem__(self, key: object) -> None:
        self._hw_peer.do("delitem", self, key)

    def __iter__(self) -> Iterator[object]:
        iterator = self._hw_peer.do("iter", self)
        if isinstance(iterator, Iterator):
            return iterator
        raise TypeError("iter() of the solution's object gave no iterator")

    def __reversed__(self) -> object:
        return self._hw_peer.do("reversed", self)

    def __contains__(self, item: object) -> bool:
        if self._hw_declared or isinstance(item, Handle):
            return self._truth("contains", item)
        return any(item is part or item == part for part in self)

    def __len__(self) -> int:
        return int(self._number_from("len"))

    def __bool__(self) -> bool:
        return self._truth("bool")

    def __int__(self) -> int:
        return int(self._number_from("int"))

    def __index__(self) -> int:
        return int(self._number_from("index"))

    def __float__(self) -> float:
        return float(self._number_from("float"))

    def __round__(self, *digits: int) -> object:
        self._refuse_derived()
        return self._hw_peer.do("round", self, *digits)

    def __str__(self) -> str:
        return self._text("str")

    def __repr__(self) -> str:
        return self._text("repr")

    def __format__(self, specification: str) -> str:
        return self._text("format", specification)

    def __hash__(self) -> int:
        value = self._hw_peer.do("hash", self)
        return value if isinstance(value, int) else 0

    def __dir__(self) -> list[str]:
        names = self._hw_peer.do("dir", self)
        return [str(name) for name in names] if isinstance(names, list) else []

    def __copy__(self) -> object:
        return self._hw_peer.do("copy", self)

    def __deepcopy__(self, memo: object) -> object:
        return self._hw_peer.do("deepcopy", self)

    def __enter__(self) -> object:
        return self._hw_peer.do("enter", self)

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> object:
        return self._hw_peer.do("exit", self, error if isinstance(error, Exception) else None)

    def _truth(self, operation: str, *args: object) -> bool:
        self._refuse_derived()
        return self._hw_peer.do(operation, self, *args) is True

    def _number_from(self, operation: str) -> int | float:
        self._refuse_derived()
        value = self._hw_peer.do(operation, self)
        if type(value) in (int, float, bool):
            assert isinstance(value, int | float)
            return value
        raise TypeError(f"{operation}() of the solution's object gave no number")

    def _text(self, operation: str, *args: str) -> str:
        if self._hw_derived:
            return "<an object of the solution>"
        value = self._hw_peer.do(operation, self, *args)
        if type(value) is str:
            return value
        raise TypeError(f"{operation}() of the solution's object gave no text")

    def _refuse_derived(self) -> None:
        if self._hw_derived:
            raise TypeError("the solution's object was combined with a plain value, and then asked for a plain value")


def _binary(operation: str) -> Callable[[Handle, object], object]:
    def forward(self: Handle, other: object) -> object:
        return _combined(self, operation, (self, other), other)

    return forward


def _reflected(operation: str) -> Callable[[Handle, object], object]:
    def forward(self: Handle, other: object) -> object:
        return _combined(self, operation, (other, self), other)

    return forward


def _compared(operation: str) -> Callable[[Handle, object], object]:
    def forward(self: Handle, other: object) -> object:
        if not isinstance(other, Handle):
            return NotImplemented
        return self._hw_peer.do(operation, self, other)

    return forward


def _unary(operation: str) -> Callable[[Handle], object]:
    def forward(self: Handle) -> object:
        self._refuse_derived()
        return self._hw_peer.do(operation, self)

    return forward


def _combined(handle: Handle, operation: str, operands: tuple[object, object], other: object) -> object:
    result = handle._hw_peer.do(operation, *operands)
    if isinstance(other, Handle) and not (handle._hw_derived or other._hw_derived):
        return result
    if not isinstance(result, Handle):
        raise TypeError("an operator with a plain value and an object of the solution gave a plain value")
    if not (result is handle and operation in IN_PLACE):
        vars(result)["_hw_derived"] = True
    return result


def _add_operators() -> None:
    for operation in BINARY:
        if operation in ("lt", "le", "gt", "ge", "eq", "ne"):
            setattr(Handle, f"__{operation}__", _compared(operation))
            continue
        name = operation.rstrip("_")
        setattr(Handle, f"__{name}__", _binary(operation))
        setattr(Handle, f"__r{name}__", _reflected(operation))
    for operation in IN_PLACE:
        setattr(Handle, f"__{operation}__", _binary(operation))
    for operation in ("abs", "neg", "pos", "invert"):
        setattr(Handle, f"__{operation}__", _unary(operation))


_add_operators()


class CallableHandle(Handle):
    """A function or another callable object of the solution."""

    def __call__(self, *args: object, **keywords: object) -> object:
        return self._hw_peer.do("call", self, *args, **keywords)


class Patches:
    """Patches that the tests have set in a module or class. To delete it brings back what was there before.

    Whoever patches an attribute finds it in no `__dict__` here, takes it for inherited, and deletes it in the end.
    """

    def __init__(self, peer: SolutionProcess) -> None:
        self._peer = peer
        self._originals: dict[str, object] = {}

    def set(self, owner: Handle, name: str, value: object) -> None:
        """Set an attribute."""
        if name not in self._originals:
            with contextlib.suppress(AttributeError):
                self._originals[name] = self._peer.do("get", owner, name)
        self._peer.do("set", owner, name, value)

    def delete(self, owner: Handle, name: str) -> None:
        """Delete what the solution has set; bring back what it had before the tests set it."""
        if name in self._originals:
            self._peer.do("set", owner, name, self._originals.pop(name))
        else:
            self._peer.do("delete", owner, name)


class ClassHandle(CallableHandle):
    """A class of the solution."""

    def __call__(self, *args: object, **keywords: object) -> object:
        made = self._hw_peer.do("call", self, *args, **keywords)
        if isinstance(made, Handle) and self._hw_declared:
            vars(made)["_hw_declared"] = True
        return made

    def __setattr__(self, name: str, value: object) -> None:
        self.hw_patches().set(self, name, value)

    def __delattr__(self, name: str) -> None:
        self.hw_patches().delete(self, name)

    def hw_patches(self) -> "Patches":
        """The patches that the tests have set in it."""
        found = vars(self).setdefault("_hw_patches", Patches(self._hw_peer))
        assert isinstance(found, Patches)
        return found

    def hw_read_as(self, name: str) -> None:
        """The tests have read it by this name: that of a class, if each time it began with a capital."""
        named = vars(self).get("_hw_named", True) and name.lstrip("_")[:1].isupper()
        vars(self).update(_hw_named=named, _hw_declared=named)

    def __instancecheck__(self, value: object) -> bool:
        return isinstance(value, Handle | ValueHandle) and self._hw_peer.do("instance", self, value) is True

    def __subclasscheck__(self, kind: object) -> bool:
        return isinstance(kind, ClassHandle) and self._hw_peer.do("subclass", self, kind) is True


class IteratorHandle(Handle):
    """An iterator of the solution."""

    def __iter__(self) -> Iterator[object]:
        return self

    def __next__(self) -> object:
        return self._hw_peer.do("next", self)


class GeneratorHandle(IteratorHandle):
    """A generator of the solution; tests may ask for its type."""

    @property
    def __class__(self) -> type:
        return type(_no_elements())

    @__class__.setter
    def __class__(self, kind: type) -> None:
        raise AttributeError("__class__")

    def send(self, value: object) -> object:
        """As a generator's."""
        return self._hw_peer.do("call", self._hw_peer.do("get", self, "send"), value)

    def close(self) -> object:
        """As a generator's."""
        return self._hw_peer.do("call", self._hw_peer.do("get", self, "close"))


class ValueHandle:
    """A value of a subclass of a builtin type (a named tuple, say): plain, by its content, with further attributes."""

    _hw_peer: SolutionProcess
    _hw_number: int

    def __getattr__(self, name: str) -> object:
        if is_reserved(name) or name in JUDGING:
            raise AttributeError(name)
        return self._hw_peer.do("get", self, name)


def value_handle(*, content: object, name: str, peer: SolutionProcess, number: int) -> object:
    """An instance of a class that is made here, of the content's type, that knows the solution's object.

    Raises NotPlain for content of a type that cannot have subclasses.
    """
    try:
        kind = type(name, (ValueHandle, type(content)), {})
        made: object = kind(content)
    except (TypeError, ValueError) as error:
        raise NotPlain("no content of a value") from error
    vars(made)["_hw_peer"], vars(made)["_hw_number"] = peer, number
    return made


def _no_elements() -> Generator[None, None, None]:
    yield from ()
