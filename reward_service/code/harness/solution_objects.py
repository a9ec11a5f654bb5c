"""The solution's objects that the tests hold, and the tests' objects that the solution holds."""

import functools
import types
from collections.abc import Callable, Iterator

from reward_service.code.harness.exchange import Message
from reward_service.code.harness.faults import Rebuilder, describe_class
from reward_service.code.harness.plain import Decoder, Encoder, Json, NotPlain, content_of

_MODULE = 0
_VALUES = (int, float, str, bytes, tuple)


class Objects:
    """Encodes what is not plain as a number under which the object is kept, for as long as the process lives."""

    def __init__(self, ask: Callable[[Message], object]) -> None:
        self._ask = ask
        self.module = types.ModuleType("solution")
        self._borrowed: dict[int, Borrowed] = {}
        self._kept: dict[int, object] = {}
        self._numbers: dict[int, int] = {}
        self.rebuilder = Rebuilder(Decoder(self.decode).decode)

    def encode(self, value: object) -> Json:
        """`k`: an object of the tests. `h`: an object here: number, kind, name, and what else belongs to the kind."""
        if isinstance(value, Borrowed):
            return {"k": value._body}
        number = self._number(value)
        name = value.__name__ if isinstance(value, type | types.FunctionType) else type(value).__name__
        return {"h": [number, _kind(value), str(name), self._detail(value)]}

    def decode(self, tag: str, body: Json) -> object:
        """An object from here that the tests send back, an object of theirs, or an exception."""
        if tag == "h" and isinstance(body, int):
            return self.module if body == _MODULE else self._kept[body]
        if tag == "k" and isinstance(body, int):
            return self._borrowed.setdefault(body, Borrowed(body, functools.partial(self._do, body)))
        if tag == "x":
            return self.rebuilder.error(body)
        raise NotPlain(f"unknown tag {tag}")

    def _do(self, number: int, name: str, *args: object, **keywords: object) -> object:
        encode = Encoder(self.encode).encode
        return self._ask({"do": name, "of": number, "args": encode(list(args)), "keywords": encode(keywords)})

    def _number(self, value: object) -> int:
        number = self._numbers.get(id(value))
        if number is None:
            number = self._numbers[id(value)] = len(self._numbers) + 1
            self._kept[number] = value
        return number

    def _detail(self, value: object) -> Json:
        if isinstance(value, type) and issubclass(value, Exception):
            return describe_class(value)
        if isinstance(value, types.ModuleType):
            return value.__name__
        content = content_of(value, _VALUES)
        return None if content is None else Encoder(self.encode).encode(content)


def _kind(value: object) -> str:
    if isinstance(value, type):
        return "exception" if issubclass(value, Exception) else "class"
    if isinstance(value, _VALUES):
        return "value"
    if isinstance(value, types.CoroutineType):
        return "coroutine"
    if isinstance(value, types.GeneratorType):
        return "generator"
    if isinstance(value, types.ModuleType):
        return "module"
    if callable(value):
        return "callable"
    return "iterator" if isinstance(value, Iterator) else "instance"


class Borrowed:
    """An object of the tests: it can be called and read, and its parts come over one by one."""

    def __init__(self, body: Json, do: Callable[..., object]) -> None:
        object.__setattr__(self, "_body", body)
        object.__setattr__(self, "_do", do)

    _body: Json
    _do: Callable[..., object]

    def __call__(self, *args: object, **keywords: object) -> object:
        return self._do("call", *args, **keywords)

    def __getattr__(self, name: str) -> object:
        return self._do("get", name)

    def __setattr__(self, name: str, value: object) -> None:
        self._do("set", name, value)

    def __iter__(self) -> Iterator[object]:
        iterator = self._do("iter")
        assert isinstance(iterator, Borrowed)
        return iterator

    def __next__(self) -> object:
        return self._do("next")

    def __len__(self) -> int:
        length = self._do("len")
        assert isinstance(length, int)
        return length

    def __getitem__(self, key: object) -> object:
        return self._do("getitem", key)

    def __bool__(self) -> bool:
        return bool(self._do("bool"))

    def __str__(self) -> str:
        return str(self._do("str"))

    def __repr__(self) -> str:
        return str(self._do("repr"))
