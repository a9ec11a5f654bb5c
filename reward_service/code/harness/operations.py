"""What one side can ask the other to do with an object, by name."""

import importlib
import operator
from collections.abc import Callable, Mapping

BINARY = (
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "lshift", "rshift", "and_", "or_", "xor"),
    *("lt", "le", "gt", "ge", "eq", "ne"),
)
IN_PLACE = (
    *("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "imatmul"),
    *("ilshift", "irshift", "iand", "ior", "ixor"),
)


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
