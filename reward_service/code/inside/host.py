"""Serves one solution where it runs: answers requests that the service relays, and keeps the objects of both sides.

Nothing here is trusted: the solution can change all of it. What a request or an answer says is the solution's own word.
"""

import builtins
import collections
import functools
import sys
import types
from collections.abc import Callable, Iterator

from reward_service.code.inside.channel import CallChannel, Channel, ChannelClosed, Message, PrintedText
from reward_service.code.inside.faults import Rebuilder, describe, describe_class
from reward_service.code.inside.lending import OPERATIONS
from reward_service.code.inside.plain import Json, NotPlain, PlainDecoder, PlainEncoder, content_of

_MODULE = 0
_VALUES = (int, float, str, bytes, tuple)
SOURCE = "solution.py"
_MUTABLE = (list, dict, set, bytearray, collections.deque)


class Objects:
    """Encodes what is not plain as a number under which the object is kept, for as long as the process lives."""

    def __init__(self, ask: Callable[[Message], object]) -> None:
        self._ask = ask
        self.module = types.ModuleType("solution")
        self._borrowed: dict[int, BorrowedObject] = {}
        self._kept: dict[int, object] = {}
        self._numbers: dict[int, int] = {}
        self.rebuilder = Rebuilder(PlainDecoder(self.decode).decode)

    def encode(self, value: object) -> Json:
        """`k`: an object of the tests. `h`: an object here: number, kind, name, and what else belongs to the kind."""
        if isinstance(value, BorrowedObject):
            return {"k": value._body}
        number = self._number(value)
        name = value.__name__ if isinstance(value, type | types.FunctionType) else type(value).__name__
        return {"h": [number, _kind(value), str(name), self._detail(value)]}

    def decode(self, tag: str, body: Json) -> object:
        """An object from here that the tests send back, an object of theirs, or an exception."""
        if tag == "h" and isinstance(body, int):
            return self.module if body == _MODULE else self._kept[body]
        if tag == "k" and isinstance(body, int):
            return self._borrowed.setdefault(body, BorrowedObject(body, functools.partial(self._do, body)))
        if tag == "x":
            return self.rebuilder.error(body)
        raise NotPlain(f"unknown tag {tag}")

    def _do(self, number: int, name: str, *args: object, **keywords: object) -> object:
        encode = PlainEncoder(self.encode).encode
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
        return None if content is None else PlainEncoder(self.encode).encode(content)


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


class BorrowedObject:
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
        assert isinstance(iterator, BorrowedObject)
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


class Host:
    """The solution's module and what the other side knows of it."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._conversation = CallChannel(channel=channel, prefix=b"", serve=self._serve)
        self._objects = Objects(self._ask)
        self._printed = PrintedText()

    def run(self) -> None:
        """Load the solution, say how that went, and serve until the end."""
        module = types.ModuleType("solution")
        sys.modules["solution"] = module
        sys.stdout = self._printed  # what a call prints is told with its answer
        builtins.input = self._input
        self._channel.send(b"", self._load(module))
        self._conversation.serve_forever()

    def _load(self, module: types.ModuleType) -> Message:
        try:
            with open(SOURCE, encoding="utf-8") as source:
                code = compile(source.read(), SOURCE, "exec")
            exec(code, vars(module))
        except ChannelClosed:
            raise
        except BaseException as error:  # noqa: BLE001  it may raise whatever it likes
            return {"failed": f"{type(error).__name__}: {error}"[:1000]}
        self._objects.module = module
        names: list[Json] = [name for name in vars(module) if not name.startswith("__")]
        return {"ready": names}

    def _serve(self, asked: Message) -> Message:
        try:
            answer = self._answer(asked)
        except ChannelClosed:
            raise
        except BaseException as error:  # noqa: BLE001  it may raise whatever it likes
            answer = {"raised": describe(error, self._encode)}
        text = self._printed.taken()
        return {**answer, "printed": text} if text else answer

    def _answer(self, asked: Message) -> Message:
        if asked.get("do") == "entry":
            return {"value": self._entry(asked)}
        args, keywords = self._arguments(asked)
        mutable = [place for place, value in enumerate(args) if type(value) in _MUTABLE]
        before = [self._encode(args[place]) for place in mutable]
        answer: Message = {"value": self._encode(OPERATIONS[str(asked["do"])](*args, **keywords))}
        changed: list[Json] = []
        for place, old in zip(mutable, before, strict=True):
            new = self._encode(args[place])
            if new != old:
                changed.append([place, new])
        return {**answer, "changed": changed} if changed else answer

    def _arguments(self, asked: Message) -> tuple[list[object], dict[str, object]]:
        args, keywords = self._decode(asked.get("args", [])), self._decode(asked.get("keywords", {"d": []}))
        assert isinstance(args, list)
        assert isinstance(keywords, dict)
        return args, keywords

    def _entry(self, asked: Message) -> Json:
        """The result of one call of the entry point, where an iterator counts as the list of what it yields."""
        args, keywords = self._arguments(asked)
        result = _found(self._objects.module, str(asked["entry_point"]))(*args, **keywords)
        if isinstance(result, types.CoroutineType):
            result = OPERATIONS["await"](result)
        return PlainEncoder(_listed_iterator).encode(_list_if_iterator(result))

    def _input(self, prompt: object = "") -> str:
        answer = self._ask({"do": "input", "prompt": str(prompt)})
        return str(answer)

    def _ask(self, message: Message) -> object:
        """Ask the tests' side: call a function that it passed in, say."""
        answer = self._conversation.request(message)
        if "raised" in answer:
            raise self._objects.rebuilder.error(answer["raised"])
        return self._decode(answer.get("value"))

    def _encode(self, value: object) -> Json:
        return PlainEncoder(self._objects.encode).encode(value)

    def _decode(self, given: Json) -> object:
        return PlainDecoder(self._objects.decode).decode(given)


def _found(module: types.ModuleType, entry_point: str) -> "types.FunctionType":
    """A function, or the method of a new instance: `name`, `Class.method`, or a method of a class `Solution`."""
    owner, _, name = entry_point.rpartition(".")
    if not owner and not hasattr(module, name) and hasattr(module, "Solution"):
        owner = "Solution"
    found: types.FunctionType = getattr(getattr(module, owner)() if owner else module, name)
    return found


def _list_if_iterator(value: object) -> object:
    if isinstance(value, types.GeneratorType | map | filter | zip | enumerate | reversed):
        return list(value)
    return value


def _listed_iterator(value: object) -> Json:
    listed = _list_if_iterator(value)
    if listed is value:
        listed = _content(value)
    return PlainEncoder(_listed_iterator).encode(listed)


def _content(value: object) -> object:
    """The content of an instance of a subclass of a builtin type. Raises NotPlain for any other object."""
    if isinstance(value, type({}.keys()) | type({}.items()) | type({}.values())):
        return list(value)
    content = content_of(value, (int, float, str, bytes, tuple, list, dict, set, frozenset))
    if content is None:
        raise NotPlain(f"{type(value).__name__} is no plain value")
    return content


def main() -> None:
    """The process of a solution."""
    Host(Channel.take()).run()


if __name__ == "__main__":
    main()
