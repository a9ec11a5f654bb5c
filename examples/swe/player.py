"""A scripted agent that repairs, and errs often on purpose: its conversations are what the model is warmed up on.

It knows the form: look for the function, change a line, run the test, submit. It takes the wrong line or the wrong text
in most of its changes, and often submits without a test, or after one that failed: what is left to learn is to go on
until the test passes. What the terminal says is computed here, and is what a runtime says to these commands.
"""

import json
from dataclasses import dataclass, replace
from random import Random

from examples.swe.repairs import COUNT, OPERATIONS, ModuleFunction, Repair, line_of

TEST = "python3 -S test.py"
SUBMIT = '<tool_call>{"name": "submit", "arguments": {}}</tool_call>'
TURNS = 10


@dataclass(frozen=True)
class Habits:
    """Shares of turns in which the agent does right: looks first, takes the right line, puts in the right text, runs
    the test, and tries again where that failed.
    """

    looks: float = 0.9
    line: float = 0.75
    text: float = 0.35
    tests: float = 0.6
    again: float = 0.6


@dataclass
class _Module:
    """The module as the agent has left it."""

    functions: list[ModuleFunction]

    def change(self, place: int, old: str, new: str) -> None:
        """Do what `sed` does to the line of a function, where that has the old text."""
        there = self.functions[place]
        if old == there.sign and new in OPERATIONS:
            self.functions[place] = replace(there, sign=new)
        elif old == f"{there.sign} {there.right}":
            sign, _, right = new.partition(" ")
            self.functions[place] = replace(there, sign=sign, right=right)


def shell(command: str) -> str:
    """A call of the shell as the policy writes it."""
    return f"<tool_call>{json.dumps({'name': 'shell', 'arguments': {'command': command}})}</tool_call>"


def conversation_of(repair: Repair, chance: Random, habits: Habits = Habits()) -> tuple[list[dict[str, str]], bool]:
    """A conversation up to the agent's last words, and True if it repaired the module."""
    module = _Module(list(repair.functions))
    told: list[dict[str, str]] = [{"role": "user", "content": repair.issue}]

    def does(command: str, output: str) -> None:
        told.append({"role": "assistant", "content": shell(command)})
        told.append({"role": "tool", "content": output})

    looked = chance.random() < habits.looks
    if looked:
        there = module.functions[repair.broken]
        does(f"grep -n {there.name} {repair.file}", f"{repair.line}:{there.text}")
    while len(told) < 2 * TURNS - 1:
        place, old, new = _change(repair, module, chance, habits) if looked else _guess(chance)
        module.change(place, old, new)
        does(f"sed -i '{line_of(place)}s/{old}/{new}/' {repair.file}", "no output")
        if chance.random() >= habits.tests or len(told) >= 2 * TURNS - 1:
            break
        found = module.functions[repair.broken].gives(*repair.numbers)
        does(TEST, "ok" if found == repair.expected else f"{repair.call} gives {found}, not {repair.expected}")
        if found == repair.expected or chance.random() >= habits.again:
            break
    told.append({"role": "assistant", "content": SUBMIT})
    right = [*repair.functions]
    right[repair.broken] = repair.repaired
    return told, module.functions == right


def _change(repair: Repair, module: _Module, chance: Random, habits: Habits) -> tuple[int, str, str]:
    """A function's number, a text of its line, and another one."""
    place = repair.broken
    if chance.random() >= habits.line:
        place = chance.choice([each for each in range(COUNT) if each != repair.broken])
    there = module.functions[place]
    if place == repair.broken and chance.random() < habits.text:
        if there.sign != repair.repaired.sign:
            return place, there.sign, repair.repaired.sign
        return place, f"{there.sign} {there.right}", f"{there.sign} {repair.repaired.right}"
    if chance.random() < 0.7:
        return place, there.sign, chance.choice([each for each in OPERATIONS if each != there.sign])
    other = there.parameters[0] if there.right == there.parameters[1] else there.parameters[1]
    return place, f"{there.sign} {there.right}", f"{there.sign} {other}"


def _guess(chance: Random) -> tuple[int, str, str]:
    """A change by somebody who has not seen the module."""
    old, new = chance.sample(list(OPERATIONS), 2)
    return chance.randrange(COUNT), old, new
