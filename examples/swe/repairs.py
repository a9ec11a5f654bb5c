"""Repairs in small Python modules, drawn from seeds: an issue, a module with one mistake, a test, and hidden calls.

Each module has four functions of two parameters, a line each. In one of them either the operation is another one, or
one name stands twice. The issue says what a call gives and what was expected; that call is what the test tries as well.
The checks make other calls, of all its functions, in a runtime that the agent never had.
"""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random

OPERATIONS: Mapping[str, Callable[[int, int], int]] = {
    "+": lambda one, other: one + other,
    "-": lambda one, other: one - other,
    "*": lambda one, other: one * other,
    "%": lambda one, other: one % other,
}
MODULES = ("shop", "bank", "farm", "trip")
FUNCTIONS = (
    "price", "rest", "share", "area", "total", "gain", "load", "score", "speed", "height", "costs", "debt", "weight",
    "change", "profit", "volume",
)  # fmt: skip
NAMES = (
    "count", "size", "width", "days", "rate", "paid", "left", "items", "hours", "miles", "seats", "boxes", "weeks",
    "level", "points", "coins",
)  # fmt: skip
COUNT = 4
"""Functions of a module."""
CALLS = 2
"""Hidden calls of each function."""
HELD_OUT = 0.1


@dataclass(frozen=True)
class ModuleFunction:
    """A function of two parameters, as it is written: `return LEFT SIGN RIGHT`."""

    name: str
    parameters: tuple[str, str]
    sign: str
    right: str
    """The name behind the sign: the second parameter, where there is no mistake."""

    @property
    def text(self) -> str:
        """Its line."""
        one, other = self.parameters
        return f"def {self.name}({one}, {other}): return {one} {self.sign} {self.right}"

    def gives(self, one: int, other: int) -> int:
        """The value of a call."""
        return OPERATIONS[self.sign](one, other if self.right == self.parameters[1] else one)


@dataclass(frozen=True)
class Repair:
    """A module, the number of the function with the mistake, and that function as it has to be."""

    module: str
    functions: tuple[ModuleFunction, ...]
    broken: int
    repaired: ModuleFunction
    numbers: tuple[int, int]

    @property
    def file(self) -> str:
        """The name of the module's file."""
        return f"{self.module}.py"

    @property
    def line(self) -> int:
        """The number of the line with the mistake."""
        return line_of(self.broken)

    @property
    def call(self) -> str:
        """The call of the issue."""
        return f"{self.repaired.name}({self.numbers[0]}, {self.numbers[1]})"

    @property
    def expected(self) -> int:
        """The value that it has to give."""
        return self.repaired.gives(*self.numbers)

    @property
    def issue(self) -> str:
        """The text of the task."""
        found = self.functions[self.broken].gives(*self.numbers)
        return f"{self.call} gives {found}, not {self.expected}. See {self.file}."

    @property
    def edit(self) -> tuple[str, str]:
        """The part of the line that is wrong, and what has to stand there."""
        wrong = self.functions[self.broken]
        if wrong.sign != self.repaired.sign:
            return wrong.sign, self.repaired.sign
        return f"{wrong.sign} {wrong.right}", f"{wrong.sign} {self.repaired.right}"

    @property
    def held_out(self) -> bool:
        """True of a repair that neither the warm start nor the training sees: by its module's text, without the
        numbers of the issue.
        """
        text = repr((module_text(self.functions), self.repaired))
        return hashlib.sha256(text.encode()).digest()[0] < 256 * HELD_OUT


def line_of(place: int) -> int:
    """The number of the line of a function: an empty one is between two."""
    return 2 * place + 1


def module_text(functions: tuple[ModuleFunction, ...]) -> str:
    """A module's text."""
    return "\n\n".join(each.text for each in functions) + "\n"


def test_text(repair: Repair) -> str:
    """The test that the agent has: it makes the issue's call. Files of the same size that change within a second would
    have Python take the module from its cache.
    """
    return (
        "import sys\n\n"
        "sys.dont_write_bytecode = True\n"
        f"from {repair.module} import {repair.repaired.name}\n\n"
        f"found = {repair.call}\n"
        f'print("ok" if found == {repair.expected} else f"{repair.call} gives {{found}}, not {repair.expected}")\n'
    )


def drawn_repair(chance: Random) -> Repair:
    """A repair of which the issue's call has another value under each of the operations."""
    names = chance.sample(FUNCTIONS, COUNT)
    functions = []
    for name in names:
        parameters = tuple(chance.sample(NAMES, 2))
        functions.append(
            ModuleFunction(name, (parameters[0], parameters[1]), chance.choice(list(OPERATIONS)), parameters[1])
        )
    broken = chance.randrange(COUNT)
    repaired = functions[broken]
    if chance.random() < 0.75:
        sign = chance.choice([each for each in OPERATIONS if each != repaired.sign])
        wrong = ModuleFunction(repaired.name, repaired.parameters, sign, repaired.right)
    else:
        wrong = ModuleFunction(repaired.name, repaired.parameters, repaired.sign, repaired.parameters[0])
    functions[broken] = wrong
    while True:
        numbers = chance.randrange(2, 10), chance.randrange(2, 10)
        values = [each(*numbers) for each in OPERATIONS.values()]
        if len({*values, wrong.gives(*numbers)}) >= len(values) and wrong.gives(*numbers) != repaired.gives(*numbers):
            return Repair(chance.choice(MODULES), tuple(functions), broken, repaired, numbers)


def repair_of(index: int, *, held_out: bool, seed: int = 0) -> Repair:
    """The repair of an index among those that are held out, or among the others."""
    chance = Random(f"{seed} {held_out} {index}")
    while True:
        repair = drawn_repair(chance)
        if repair.held_out == held_out:
            return repair


def task_of(repair: Repair) -> dict[str, object]:
    """The repair as a line of a task file of the environment `computer`."""
    chance = Random(repair.issue)
    whole = [*repair.functions]
    whole[repair.broken] = repair.repaired
    calls = [(each, chance.randrange(10, 100), chance.randrange(2, 100)) for each in whole for _ in range(CALLS)]
    made = ", ".join(f"{repair.module}.{each.name}({one}, {other})" for each, one, other in calls)
    old, new = repair.edit
    return {
        "name": f"{repair.module}.{repair.repaired.name}",
        "prompt": repair.issue,
        "files": {repair.file: module_text(repair.functions), "test.py": test_text(repair)},
        "checks": [
            {
                "run": f"rm -rf __pycache__; python3 -SB -c 'import {repair.module}; print({made})'",
                "prints": " ".join(str(each.gives(one, other)) for each, one, other in calls),
            }
        ],
        "solution": f"sed -i '{repair.line}s/{old}/{new}/' {repair.file}",
    }
