"""Handles of functions, classes, iterators, and of values whose class is the solution's."""

import contextlib
from collections.abc import Generator, Iterator

from reward_service.code.harness.handles import JUDGING, Handle, Peer, is_reserved
from reward_service.code.harness.plain import NotPlain


class CallableHandle(Handle):
    """A function or another callable object of the solution."""

    def __call__(self, *args: object, **keywords: object) -> object:
        return self._hw_peer.do("call", self, *args, **keywords)


class Patches:
    """What the tests have set in a module or class. To delete it brings back what was there before.

    Whoever patches an attribute finds it in no `__dict__` here, takes it for inherited, and deletes it in the end.
    """

    def __init__(self, peer: Peer) -> None:
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
        """What the tests have set in it."""
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

    _hw_peer: Peer
    _hw_number: int

    def __getattr__(self, name: str) -> object:
        if is_reserved(name) or name in JUDGING:
            raise AttributeError(name)
        return self._hw_peer.do("get", self, name)


def value_handle(*, content: object, name: str, peer: Peer, number: int) -> object:
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
