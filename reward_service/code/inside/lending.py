"""Lends the tests' objects to the solution, which may call functions, draw from iterators and read public attributes.

It reaches nothing that leads to the tests' code: no underscored name, no module, no attribute of a function.
"""

import importlib
import io
import operator
import sys
import types
from collections.abc import Callable, Mapping

from reward_service.code.inside.plain import NotPlain

_OPERATIONS = frozenset({"call", "get", "set", "iter", "next", "len", "getitem", "bool", "str", "repr"})
_LIBRARY = ("unittest.mock",)
_OPAQUE = (
    *(types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.GeneratorType),
    *(types.CoroutineType, types.AsyncGeneratorType, types.FrameType, types.CodeType, types.TracebackType, type),
)
BINARY = (
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "lshift", "rshift", "and_", "or_", "xor"),
    *("lt", "le", "gt", "ge", "eq", "ne"),
)
IN_PLACE = (
    *("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "imatmul"),
    *("ilshift", "irshift", "iand", "ior", "ixor"),
)


class LentObjects:
    """Objects by number, kept for as long as the process lives."""

    def __init__(self) -> None:
        self._objects: list[object] = []
        self._numbers: dict[int, int] = {}

    def number(self, value: object) -> int:
        """The number under which the solution knows the object. Raises NotPlain for what is not lent."""
        if isinstance(value, types.ModuleType | types.FrameType | types.CodeType | types.TracebackType):
            raise NotPlain(f"a {type(value).__name__} is not given to the solution")
        number = self._numbers.get(id(value))
        if number is None:
            number = self._numbers[id(value)] = len(self._objects)
            self._objects.append(value)
        return number

    def get(self, number: object) -> object:
        """The object of that number. Raises NotPlain."""
        if type(number) is int and 0 <= number < len(self._objects):
            return self._objects[number]
        raise NotPlain("no object of that number")

    def checked(self, operation: str, value: object, args: list[object]) -> None:
        """Raises NotPlain unless the solution may do this with the object."""
        if operation not in _OPERATIONS:
            raise NotPlain(f"{operation} is not done with an object of the tests")
        if operation not in ("get", "set"):
            return
        name = args[0] if args else None
        if type(name) is not str or name.startswith("_") or not _is_open(value):
            raise NotPlain("this attribute is not given to the solution")


def lent_result(value: object) -> object:
    """The result of an operation on a lent object, if the solution may have it. Raises NotPlain."""
    if isinstance(value, types.ModuleType | types.FrameType | types.CodeType):
        raise NotPlain("a module or a frame is not given to the solution")
    return value


def _is_open(value: object) -> bool:
    """True if public attributes may be read: of instances of the tests' classes, of mocks, of files in memory."""
    if isinstance(value, _OPAQUE):
        return False
    if isinstance(value, io.StringIO | io.BytesIO):
        return True
    module = type(value).__module__
    return module in _LIBRARY or not _is_installed(module)


def _is_installed(module: str) -> bool:
    loaded: Mapping[str, object] = sys.modules
    file = str(getattr(loaded.get(module), "__file__", None) or "")
    return module.partition(".")[0] in sys.stdlib_module_names or "site-packages" in file


def _call(function: Callable[..., object], *args: object, **keywords: object) -> object:
    return function(*args, **keywords)


def _await(awaitable: object) -> object:
    async def awaited() -> object:
        return await awaitable  # type: ignore[misc]

    # Few solutions have coroutines, and the import takes longer than the start of the process.
    run: Callable[..., object] = importlib.import_module("asyncio").run
    return run(awaited())


def _copied(name: str) -> Callable[[object], object]:
    def copied(value: object) -> object:
        copy: Callable[[object], object] = getattr(importlib.import_module("copy"), name)
        return copy(value)

    return copied


def _enter(manager: object) -> object:
    return type(manager).__enter__(manager)  # type: ignore[attr-defined]


def _exit(manager: object, error: BaseException | None) -> object:
    kind = None if error is None else type(error)
    return type(manager).__exit__(manager, kind, error, None)  # type: ignore[attr-defined]


OPERATIONS: Mapping[str, Callable[..., object]] = {
    "call": _call,
    "get": getattr,
    "set": setattr,
    "delete": delattr,
    "getitem": operator.getitem,
    "setitem": operator.setitem,
    "delitem": operator.delitem,
    "contains": operator.contains,
    "iter": iter,
    "next": next,
    "reversed": reversed,
    "len": len,
    "bool": bool,
    "int": int,
    "float": float,
    "complex": complex,
    "index": operator.index,
    "str": str,
    "repr": repr,
    "format": format,
    "hash": hash,
    "abs": abs,
    "neg": operator.neg,
    "pos": operator.pos,
    "invert": operator.invert,
    "round": round,
    "divmod": divmod,
    "dir": dir,
    "copy": _copied("copy"),
    "deepcopy": _copied("deepcopy"),
    "instance": lambda kind, value: isinstance(value, kind),
    "subclass": lambda kind, value: issubclass(value, kind),
    "await": _await,
    "enter": _enter,
    "exit": _exit,
    **{name: getattr(operator, name) for name in (*BINARY, *IN_PLACE)},
}
