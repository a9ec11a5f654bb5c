"""The tests' side of the exchange with the solution's process."""

import builtins
import importlib
import sys
import types
from collections.abc import Callable, Iterable, Mapping

from reward_service.code.inside import handles
from reward_service.code.inside.channel import CallChannel, Channel, ChannelClosed, Message
from reward_service.code.inside.faults import Rebuilder, RemoteException, describe
from reward_service.code.inside.handles import Handle, is_reserved
from reward_service.code.inside.lending import OPERATIONS, LentObjects, lent_result
from reward_service.code.inside.plain import Json, NotPlain, PlainDecoder, PlainEncoder, content_of

_TO_SOLUTION = b"S "
# A request that reads a name of the solution's module runs none of its code.
_READ_NAME = b"G "
_HANDLES: Mapping[str, type[Handle]] = {
    "instance": Handle,
    "callable": handles.CallableHandle,
    "module": Handle,
    "class": handles.ClassHandle,
    "iterator": handles.IteratorHandle,
    "generator": handles.GeneratorHandle,
}
# Modules of which the solution's import is as good as the tests' own.
_MODULES = frozenset(
    {
        *("math", "cmath", "itertools", "functools", "operator", "collections", "heapq", "bisect", "re", "string"),
        *("random", "copy", "json", "datetime", "decimal", "fractions", "statistics", "typing"),
    }
)


_TEST_PACKAGES = frozenset({"pytest", "numpy", "np", "pandas", "pd", "hypothesis"})


class SolutionFault(BaseException):
    """The solution's process broke the exchange; no test may take that for an exception of the solution."""


class SolutionPeer:
    """Sends operations to the solution's process, and serves what it asks meanwhile.

    `touched`: the solution's code was run since this was last set to False.
    """

    def __init__(self, channel: Channel) -> None:
        self._conversation = CallChannel(channel=channel, prefix=_TO_SOLUTION, serve=self._serve)
        self._lent = LentObjects()
        self._handles: dict[int, object] = {}
        self._pending: BaseException | None = None
        self._decode = PlainDecoder(self._decode_other).decode
        self._rebuilder = Rebuilder(self._decode)
        self.touched = False
        self.module = Handle(peer=self, number=0)

    def do(self, name: str, *args: object, **keywords: object) -> object:
        """The result of an operation. Raises what the solution raises, and SolutionFault."""
        reads_name = name == "get" and args[0] is self.module
        self.touched = self.touched or not reads_name
        message: Message = {"do": name, "args": self._encode(list(args))}
        if keywords:
            message["keywords"] = self._encode(keywords)
        try:
            answer = self._conversation.request(message, prefix=_READ_NAME if reads_name else None)
            if isinstance(printed := answer.get("printed"), str):
                sys.stdout.write(printed)
            self._raise_pending()
            if "raised" in answer:
                raise self._rebuilder.error(answer["raised"])
            self._restore(args, answer.get("changed"))
            value = self._decode(answer.get("value"))
        except NotPlain as error:
            raise SolutionFault(str(error)) from error
        if name == "get" and isinstance(value, handles.ClassHandle):
            value.hw_read_as(str(args[1]))
        return value

    def _raise_pending(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            raise pending

    def _restore(self, args: tuple[object, ...], changed: Json) -> None:
        for item in changed if isinstance(changed, list) else ():
            if not (isinstance(item, list) and len(item) == 2 and type(item[0]) is int and 0 <= item[0] < len(args)):
                raise NotPlain("no changed argument")
            restore(args[item[0]], self._decode(item[1]))

    def _serve(self, asked: Message) -> Message:
        """Serves the solution's use of an object of the tests. A failing test that it calls into fails in the end."""
        try:
            return {"value": self._encode(self._served(asked))}
        except ChannelClosed:
            raise
        except Exception as error:  # noqa: BLE001  it crosses to the solution, which called into the tests
            self._rebuilder.remember(type(error))
            return {"raised": describe(error, self._encode)}
        except BaseException as error:  # noqa: BLE001  an end of the test that the solution must not swallow
            self._pending = error
            return {"raised": {"fatal": type(error).__name__}}

    def _served(self, asked: Message) -> object:
        operation = str(asked.get("do"))
        if operation == "input":
            return builtins.input(str(asked.get("prompt")))
        value = self._lent.get(asked.get("of"))
        args, keywords = self._decode(asked.get("args", [])), self._decode(asked.get("keywords", {"d": []}))
        if not (isinstance(args, list) and isinstance(keywords, dict)):
            raise NotPlain("no arguments")
        self._lent.checked(operation, value, args)
        return lent_result(OPERATIONS[operation](value, *args, **keywords))

    def _encode(self, value: object) -> Json:
        return PlainEncoder(self._encode_other).encode(value)

    def _encode_other(self, value: object) -> Json:
        if isinstance(value, Handle | handles.ValueHandle):
            return {"h": vars(value)["_hw_number"]}
        if isinstance(value, Exception):
            self._rebuilder.remember(type(value))
            return {"x": describe(value, self._encode)}
        content = content_of(value, (int, float, str, bytes))  # of a class of the tests' own, such as an IntEnum
        if content is not None:
            return self._encode(content)
        return {"k": self._lent.number(value)}

    def _decode_other(self, tag: str, body: Json) -> object:
        if tag == "k":
            return self._lent.get(body)
        if tag == "h" and isinstance(body, list) and len(body) == 4 and isinstance(number := body[0], int):
            _, kind, name, detail = body
            found = self._handles.get(number)
            if found is None:
                found = self._made(number, str(kind), str(name), detail)
                if kind != "coroutine":
                    self._handles[number] = found
            return found
        raise NotPlain(f"unknown tag {tag}")

    def _made(self, number: int, kind: str, name: str, detail: Json) -> object:
        if kind == "value":
            return handles.value_handle(content=self._decode(detail), name=name, peer=self, number=number)
        if kind == "exception":
            return self._rebuilder.kind(detail)
        if kind == "module" and detail in _MODULES:
            return importlib.import_module(str(detail))
        if kind not in _HANDLES and kind != "coroutine":
            raise NotPlain(f"unknown kind {kind}")
        made = _subclass(_HANDLES.get(kind, Handle), name)(peer=self, number=number)
        return _awaited(made) if kind == "coroutine" else made


class SolutionModule(types.ModuleType):
    """The module that the tests import. A name that the solution lacks fails where it is used, or, with `strict`, read.

    So a test file that imports several names is collected even if one of them is missing.
    """

    def __init__(self, *, name: str, peer: SolutionPeer, names: Iterable[str]) -> None:
        super().__init__(name)
        public = tuple(found for found in names if not found.startswith("_") and not is_claimed(found))
        vars(self).update(_hw_peer=peer, _hw_strict=False, _hw_patches=handles.Patches(peer), _hw_public=public)

    _hw_peer: SolutionPeer
    _hw_strict: bool
    _hw_patches: handles.Patches
    _hw_public: tuple[str, ...]

    @property
    def __all__(self) -> list[str]:
        """The names of `from solution import *`: no name that the importing file has already."""
        bound = sys._getframe(1).f_globals
        return [name for name in self._hw_public if name not in bound]

    def __getattr__(self, name: str) -> object:
        if is_reserved(name):
            raise AttributeError(name)
        try:
            return self._hw_peer.do("get", self._hw_peer.module, name)
        except AttributeError:
            if self._hw_strict:
                raise
            self._hw_peer.touched = True  # what the tests cannot do now is the solution's fault
            return Missing(name, module=self)

    def __setattr__(self, name: str, value: object) -> None:
        if name.startswith("__"):
            super().__setattr__(name, value)
        else:
            self._hw_patches.set(self._hw_peer.module, name, value)

    def __delattr__(self, name: str) -> None:
        self._hw_patches.delete(self._hw_peer.module, name)


def is_claimed(name: str) -> bool:
    """True if tests that do not say where a name comes from never mean the solution's: `abs`, or `math`."""
    return hasattr(builtins, name) or name in sys.stdlib_module_names or name in _TEST_PACKAGES


class Missing:
    """A name that the solution does not define."""

    def __init__(self, name: str, *, module: SolutionModule) -> None:
        self._hw_name = name
        self._hw_module = module

    def __call__(self, *args: object, **keywords: object) -> object:
        raise RemoteException(f"the solution defines no {self._hw_name}")

    def __getattr__(self, name: str) -> object:
        # Whoever collects tests looks at all names, to see if they are tests.
        if name.startswith("_") or not self._hw_module._hw_strict:
            raise AttributeError(name)
        raise RemoteException(f"the solution defines no {self._hw_name}")


def restore(old: object, new: object) -> None:
    """Bring a mutable argument to what the call has made of it, in place, and its parts as far as they correspond."""
    if type(old) is not type(new):
        return
    if isinstance(old, list) and isinstance(new, list):
        old[:] = [_restored(*pair) for pair in zip(old, new, strict=False)] + new[len(old) :]
    elif isinstance(old, dict) and isinstance(new, dict):
        merged = {key: _restored(old[key], value) if key in old else value for key, value in new.items()}
        old.clear()
        old.update(merged)
    elif isinstance(old, set) and isinstance(new, set):
        old.clear()
        old.update(new)
    elif isinstance(old, bytearray) and isinstance(new, bytearray):
        old[:] = new
    elif hasattr(old, "extend") and isinstance(old, Iterable) and isinstance(new, Iterable):  # a deque
        _refill(old, list(new))


def _refill(old: object, content: list[object]) -> None:
    clear: Callable[[], None] = getattr(old, "clear")  # noqa: B009  the type is known only when its module is loaded
    extend: Callable[[list[object]], None] = getattr(old, "extend")  # noqa: B009
    clear()
    extend(content)


def _restored(old: object, new: object) -> object:
    if type(old) is type(new) and isinstance(old, list | dict | set | bytearray):
        restore(old, new)
        return old
    return new


def _subclass(kind: type[Handle], name: str) -> type[Handle]:
    """A class named like the solution's, for `type(x).__name__`."""
    return type(name if name.isidentifier() else kind.__name__, (kind,), {})


async def _awaited(handle: Handle) -> object:
    return handle._hw_peer.do("await", handle)
