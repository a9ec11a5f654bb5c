"""The tests' objects that the solution may use: it calls functions, draws from iterators, and reads public attributes.

It reaches nothing that leads to the tests' code: no underscored name, no module, no attribute of a function.
"""

import io
import sys
import types
from collections.abc import Mapping

from reward_service.code.harness.plain import NotPlain

_OPERATIONS = frozenset({"call", "get", "set", "iter", "next", "len", "getitem", "bool", "str", "repr"})
_LIBRARY = ("unittest.mock",)
_OPAQUE = (
    *(types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.GeneratorType),
    *(types.CoroutineType, types.AsyncGeneratorType, types.FrameType, types.CodeType, types.TracebackType, type),
)


class Lent:
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
    """What an operation on a lent object gave, if the solution may have it. Raises NotPlain."""
    if isinstance(value, types.ModuleType | types.FrameType | types.CodeType):
        raise NotPlain("a module or a frame is not given to the solution")
    return value


def _is_open(value: object) -> bool:
    """Whether public attributes may be read: of instances of the tests' classes, of mocks, of files in memory."""
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
