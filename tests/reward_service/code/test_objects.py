"""Objects that cross between the tests and a solution in another process."""

from collections.abc import Awaitable, Callable

import pytest

from reward_service.verifier.submission import Score

Judged = Callable[..., Awaitable[Score]]

pytestmark = pytest.mark.asyncio(loop_scope="module")

SOLUTION = '''
import asyncio
import collections
import contextlib
import enum
from dataclasses import dataclass, field

class Overdrawn(ValueError):
    def __init__(self, missing):
        super().__init__(f"missing {missing}")
        self.missing = missing

class Refused(Exception):
    def __init__(self, code):
        self.code = code

    def __str__(self):
        return f"refused with {self.code}"

class Account:
    """A bank account."""
    rate = 0.5

    def __init__(self, owner, balance=0):
        self.owner, self._balance = owner, balance

    @property
    def balance(self):
        return self._balance

    def deposit(self, amount):
        self._balance += amount
        return self

    def withdraw(self, amount):
        if amount > self._balance:
            raise Overdrawn(amount - self._balance)
        self._balance -= amount

    @classmethod
    def empty(cls, owner):
        return cls(owner)

    def __len__(self):
        return self._balance

    def __repr__(self):
        return f"Account({self.owner!r}, {self._balance})"

    def __contains__(self, part):
        return part in self.owner

@dataclass(frozen=True)
class Vector:
    x: float
    y: float

    def __add__(self, other):
        return Vector(self.x + other.x, self.y + other.y)

    def __mul__(self, scale):
        return Vector(self.x * scale, self.y * scale)

    __rmul__ = __mul__

    def __matmul__(self, other):
        return self.x * other.x + self.y * other.y

    def __lt__(self, other):
        return self.x < other.x

    def __iter__(self):
        yield self.x
        yield self.y

    def __getitem__(self, index):
        return (self.x, self.y)[index]

Point = collections.namedtuple("Point", "x y")

class Color(enum.Enum):
    RED = 1
    GREEN = 2

class Level(enum.IntEnum):
    LOW = 1

class Node:
    def __init__(self, value, next=None):
        self.value, self.next = value, next

def build(values):
    head = None
    for value in reversed(values):
        head = Node(value, head)
    return head

def reverse(head):
    previous = None
    while head:
        head.next, previous, head = previous, head, head.next
    return previous

def fibonacci():
    a, b = 0, 1
    while True:
        yield a
        a, b = b, a + b

def echo():
    got = None
    while True:
        got = yield got

def sort_in_place(items):
    items.sort()

def fill(grid, table):
    grid[0][1] = 5
    grid.append([7])
    table["new"] = 1

def counter():
    n = 0
    def count(by=1):
        nonlocal n
        n += by
        return n
    return count

def apply(function, values):
    return [function(value) for value in values]

def guarded(function):
    try:
        return function()
    except KeyError as error:
        return f"no {error.args[0]}"

def greet(name):
    print(f"Hello, {name}!")

def ask():
    return input("name? ").upper()

def fail(kind):
    raise {"value": ValueError("bad value", 3), "key": KeyError("k"), "own": Overdrawn(5), "text": Refused(7)}[kind]

async def later(x):
    await asyncio.sleep(0)
    return x + 1

@contextlib.contextmanager
def managed(log):
    log("in")
    yield "inside"
    log("out")

def rows(file):
    return [line.strip().split(",") for line in file]

def total_of(shapes):
    return sum(shape.area() for shape in shapes)

def rename(thing):
    thing.name = thing.name.title()

CONSTANT = {"a": [1, 2], "b": (3,)}
def same(x): return x
'''

HOLDS = {
    "attributes": "a = Account('Ann', 3)\nassert a.owner == 'Ann' and a.balance == 3 and a._balance == 3",
    "methods": "a = Account('Ann')\nassert a.deposit(5).deposit(2).balance == 7\na.withdraw(7)\nassert a.balance == 0",
    "class methods": "assert Account.empty('Bo').owner == 'Bo' and Account.rate == 0.5",
    "setting attributes": "a = Account('Ann')\na.owner = 'Bo'\nassert a.owner == 'Bo'",
    "instances": "a = Account('Ann')\nassert isinstance(a, Account) and not isinstance(a, Vector)\n"
    "assert not isinstance(3, Account) and not isinstance(a, int)",
    "names of types": "assert type(Account('Ann')).__name__ == 'Account' and Account.__name__ == 'Account'",
    "length": "assert len(Account('Ann', 4)) == 4",
    "texts": "assert repr(Account('Ann', 4)) == \"Account('Ann', 4)\" and str(Account('B')) == \"Account('B', 0)\"",
    "formats": "assert f\"{Account('Ann', 4)}\" == \"Account('Ann', 4)\"",
    "membership": "a = Account('Ann')\nassert 'nn' in a and 'x' not in a",
    "equal objects": "assert Vector(1, 2) == Vector(1, 2) and Vector(1, 2) != Vector(2, 1)",
    "hashes": "assert len({Vector(1, 2), Vector(1, 2), Vector(2, 2)}) == 2",
    "operators": "v = Vector(1, 2) + Vector(3, 4)\nassert (v.x, v.y) == (4, 6) and Vector(1, 2) @ Vector(3, 4) == 11",
    "scaling": "assert Vector(1, 2) * 3 == Vector(3, 6) and (2 * Vector(1, 2)).y == 4",
    "order": "assert Vector(1, 2) < Vector(2, 0)\nassert [v.x for v in sorted([Vector(2, 0), Vector(1, 0)])] == [1, 2]",
    "iteration": "assert list(Vector(1, 2)) == [1, 2]\nx, y = Vector(3, 4)\nassert x + y == 7",
    "items": "assert Vector(1, 2)[1] == 2 and Vector(1, 2)[0:2] == (1, 2)",
    "plain tuples and lists": "assert same((1, [2])) == (1, [2]) != [1, [2]]\nassert type(same((1,))) is tuple",
    "named tuples": "p = Point(1, 2)\nassert p == (1, 2) and p.x == 1 and isinstance(p, tuple) and p[1] == 2",
    "copies": "import copy\na = Account('Ann', 1)\nb = copy.deepcopy(a)\nb.deposit(1)\n"
    "assert (a.balance, b.balance, copy.copy(b).balance) == (1, 2, 2)",
    "enums": "assert Color.RED == Color.RED and Color.RED is not Color.GREEN and Color.RED.name == 'RED'\n"
    "assert Color(2) == Color.GREEN and Color['RED'] == Color.RED and Level.LOW == 1",
    "linked lists": "head, found = reverse(build([1, 2, 3])), []\nwhile head:\n    found.append(head.value)\n"
    "    head = head.next\nassert found == [3, 2, 1]",
    "trees of the tests' making": "n = Node(1, Node(2))\nassert n.next.value == 2 and reverse(n).value == 2",
    "generators": "import itertools, types\nassert list(itertools.islice(fibonacci(), 6)) == [0, 1, 1, 2, 3, 5]\n"
    "g = fibonacci()\nassert next(g) == 0 and next(g) == 1 and isinstance(g, types.GeneratorType)",
    "generators that are sent values": "g = echo()\nnext(g)\nassert g.send(3) == 3\ng.close()",
    "arguments changed in place": "a = [3, 1, 2]\nassert sort_in_place(a) is None and a == [1, 2, 3]",
    "nested arguments changed in place": "row = [1, 2]\ng, t = [row], {}\nfill(g, t)\n"
    "assert g == [[1, 5], [7]] and g[0] is row and row == [1, 5] and t == {'new': 1}",
    "closures": "c = counter()\nassert (c(), c(2), c(by=3)) == (1, 3, 6)",
    "callbacks": "seen = []\nassert apply(lambda x: seen.append(x) or x * 2, [1, 2]) == [2, 4] and seen == [1, 2]",
    "callbacks that raise": "def lookup(): return {}['z']\nassert guarded(lookup) == 'no z'",
    "callbacks with errors of the tests": "class Boom(Exception): pass\ndef boom(): raise Boom('b')\n"
    "try:\n    guarded(boom)\n    assert False\nexcept Boom as error:\n    assert error.args == ('b',)",
    "builtins as arguments": "assert apply(len, ['a', 'bc']) == [1, 2] and apply(str, [1]) == ['1']",
    "the solution's own functions as arguments": "assert apply(same, [1, 2]) == [1, 2]",
    "iterators as arguments": "assert apply(str, iter([1, 2])) == ['1', '2']",
    "mocks": "from unittest.mock import Mock\nm = Mock(return_value=7)\nassert apply(m, [1]) == [7]\n"
    "m.assert_called_once_with(1)",
    "builtin errors": "try:\n    fail('value')\n    assert False\nexcept ValueError as error:\n"
    "    assert error.args == ('bad value', 3)",
    "own errors": "try:\n    fail('own')\n    assert False\nexcept Overdrawn as error:\n"
    "    assert error.missing == 5 and str(error) == 'missing 5' and isinstance(error, ValueError)",
    "errors with a text of their own": "try:\n    fail('text')\n    assert False\n"
    "except Refused as error:\n    assert str(error) == 'refused with 7' and error.code == 7",
    "errors by their base": "try:\n    Account('a').withdraw(1)\n    assert False\nexcept ValueError:\n    pass",
    "missing attributes": "try:\n    Account('a').nothing\n    assert False\nexcept AttributeError:\n    pass\n"
    "assert not hasattr(Account('a'), 'nothing')",
    "wrong arguments": "try:\n    Account()\n    assert False\nexcept TypeError:\n    pass",
    "what is printed": "import contextlib, io\nout = io.StringIO()\nwith contextlib.redirect_stdout(out):\n"
    "    greet('Ann')\nassert out.getvalue() == 'Hello, Ann!\\n'",
    "what is read": "import builtins\nbuiltins.input = lambda prompt: 'ann'\nassert ask() == 'ANN'",
    "coroutines": "import asyncio\nassert asyncio.run(later(1)) == 2",
    "context managers": "log = []\nwith managed(log.append) as inside:\n    log.append(inside)\n"
    "assert log == ['in', 'inside', 'out']",
    "files in memory": "import io\nassert rows(io.StringIO('a,b\\nc,d\\n')) == [['a', 'b'], ['c', 'd']]",
    "objects of the tests": "class Square:\n    def __init__(self, side): self.side = side\n"
    "    def area(self): return self.side ** 2\nassert total_of([Square(2), Square(3)]) == 13",
    "objects of the tests that are changed": "class Thing:\n    name = 'ann lee'\nt = Thing()\nrename(t)\n"
    "assert t.name == 'Ann Lee'",
    "constants": "assert CONSTANT == {'a': [1, 2], 'b': (3,)}",
    "numbers": "assert same(2 ** 100) == 2 ** 100 and same(1.5) == 1.5 and same(1j) == 1j\n"
    "assert same(float('nan')) != same(float('nan')) and type(same(True)) is bool and type(same(1)) is int",
    "decimals and dates": "import datetime, decimal, fractions\nfor v in (decimal.Decimal('1.50'),\n"
    "    fractions.Fraction(1, 3), datetime.date(2024, 2, 29), datetime.timedelta(1, 2, 3)):\n"
    "    assert same(v) == v and type(same(v)) is type(v)",
    "unicode": "assert same('żółw 🐢 \\ud800') == 'żółw 🐢 \\ud800' and same(b'\\x00\\xff') == b'\\x00\\xff'",
    "sets and dicts": "assert same({1, (2, 3)}) == {1, (2, 3)} and same({(1,): {2: frozenset([3])}})[(1,)] == {2: {3}}",
    "types": "assert same(int) is int and same([str, None]) == [str, None]",
}
FAILS = {
    "an object is no plain value": "assert build([1]) == 1",
    "an attribute that is wrong": "assert Account('Ann').owner == 'Bo'",
    "an error that does not come": "try:\n    same(1)\nexcept ValueError:\n    pass\nelse:\n    assert False",
    "an object made of a plain value": "assert abs(Vector(1, 2) * 3) < 10",
}


@pytest.mark.parametrize("name", HOLDS)
async def test_a_solution_in_another_process_is_used_as_if_it_were_here(judge: Judged, name: str) -> None:
    tests = {"kind": "assert", "cases": [{"code": HOLDS[name]}]}
    score = await judge(SOLUTION, tests)
    assert score.reward == 1.0, score


@pytest.mark.parametrize("name", FAILS)
async def test_what_does_not_hold_fails(judge: Judged, name: str) -> None:
    score = await judge(SOLUTION, {"kind": "assert", "cases": [{"code": FAILS[name]}]})
    assert score.reward == 0.0, score


CURIOUS = {
    "a function's globals": "return f.__globals__",
    "a function's code": "return f.__code__",
    "a generator's frame": "return f.gi_frame",
    "an underscored name": "return f._secret",
    "a module": "return f.os",
}


@pytest.mark.parametrize("name", CURIOUS)
async def test_a_solution_does_not_reach_through_what_it_is_given(judge: Judged, name: str) -> None:
    setup = (
        "import os as _os\nclass Given:\n    _secret = 1\n    os = _os\n    def __call__(self): pass\n"
        "def function(): pass\ndef generator(): yield\nexpected = 42"
    )
    code = (
        f"def look(f):\n    try:\n        {CURIOUS[name]}\n    except BaseException as error:\n        return 'nothing'"
    )
    case = "assert [look(g) for g in (function, generator(), Given(), Given)] == ['nothing'] * 4"
    assert (await judge(code, {"kind": "assert", "setup": setup, "cases": [{"code": case}]})).reward == 1.0
