"""Arithmetic by steps: the value of an expression, with a calculator that takes two numbers at a time."""

import re
from collections.abc import Mapping
from random import Random
from typing import Literal

from pydantic import Field

from env_service.builtin.games import drawn_for
from env_service.builtin.toolboxes import CalculatorToolbox, ToolFault, calculate
from env_service.environments.interface import Action, Aggregation, ChatMessage, Opening, Role, Step, Task, ToolCall
from env_service.environments.rules import Rules
from env_service.environments.tool_formats import no_such_tool
from services.config.models import ConfigModel

_TWO_NUMBERS = re.compile(r"\s*-?\d+\s*[-+*/]\s*-?\d+\s*", re.ASCII)
_ANSWER = re.compile(r"-?\d+", re.ASCII)

Parts = tuple[str, ...]
"""Numbers and operators in turn."""


class ArithmeticOptions(ConfigModel):
    """Length of expressions, and the form in which the calculator is called."""

    operands: int = Field(3, ge=2, le=6, description="numbers in an expression")
    largest: int = Field(99, ge=1, le=10**6, description="largest of the numbers")
    operators: str = Field("+-*", pattern=r"^[-+*]{1,3}$", description="which of + - * occur")
    form: Literal["tools", "text"] = Field(
        "tools", description="tools: the calculator is a tool; text: an action that ends in = is a calculation"
    )
    system_prompt: str = Field("", description="text of the system message; empty for none")


class ArithmeticEnvironment:
    """The value of an expression such as (12+7)*3; the last number of an answer without a calculation counts."""

    metrics: Mapping[str, Aggregation] = {"success": "last", "tool_calls": "sum", "tool_errors": "sum"}

    def __init__(self, options: ArithmeticOptions) -> None:
        self._options = options
        self._calculator = CalculatorToolbox()
        self._parts: Parts = ()
        self._reached = 0
        tools = options.form == "tools"
        self.roles: tuple[Role, ...] = ("tool",) if tools else ("user",)
        self.rules = Rules(max_turns=2 * options.operands, action="tools" if tools else "text", replayable=True)

    async def reset(self, task: Task, seed: int) -> Opening:
        """Raises ValueError if there are too few expressions to keep some for evaluation."""
        chance = Random(task.seed)
        self._parts = drawn_for(task.purpose, lambda: self._drawn(chance), shown=written)
        self._reached = 0
        text = written(self._parts)
        system = (ChatMessage("system", self._options.system_prompt),) if self._options.system_prompt else ()
        tools = await self._calculator.offered() if self._options.form == "tools" else ()
        return Opening((*system, ChatMessage("user", text)), tools=tuple(tools), state=text)

    async def step(self, action: Action) -> Step:
        """A calculation, or the answer."""
        calls = self._calls(action)
        if not calls or action.last:
            numbers = _ANSWER.findall(action.text)
            right = bool(numbers) and not calls and numbers[-1] == self._value(len(self._parts) // 2)
            return Step(stop="right" if right else "wrong", reward=float(right), metrics={"success": float(right)})
        results = [await self._result(call) for call in calls]
        messages = tuple(
            ChatMessage(self.roles[0], text, name=call.name) for call, text in zip(calls, results, strict=True)
        )
        faults = sum(text.startswith("error") for text in results)
        metrics = {"success": 0.0, "tool_calls": float(len(calls)), "tool_errors": float(faults)}
        state = f"{written(self._parts)} {results[-1]}"
        return Step(messages, state=state, invalid=faults == len(calls), metrics=metrics)

    def scripted(self, chance: Random, *, noise: float = 0.0) -> str:
        """The next calculation or the answer in the form `text`; with probability `noise`, one that has a mistake."""
        text = self._next()
        if chance.random() >= noise:
            return text
        digits = [place for place, letter in enumerate(text) if letter.isdigit()]
        place = chance.choice(digits)
        return text[:place] + str(chance.randrange(10)) + text[place + 1 :]

    def _next(self) -> str:
        value = self._value(self._reached)
        if self._reached == len(self._parts) // 2:
            return value
        operator, number = self._parts[2 * self._reached + 1 : 2 * self._reached + 3]
        return f"{value}{operator}{number}="

    def _drawn(self, chance: Random) -> Parts:
        parts = [str(chance.randint(0, self._options.largest))]
        for _ in range(self._options.operands - 1):
            parts += [chance.choice(self._options.operators), str(chance.randint(0, self._options.largest))]
        return tuple(parts)

    def _calls(self, action: Action) -> tuple[ToolCall, ...]:
        if self._options.form == "tools":
            return action.calls
        text = action.text.strip()
        return (ToolCall("calculate", {"expression": text[:-1]}),) if text.endswith("=") else ()

    async def _result(self, call: ToolCall) -> str:
        expression = call.arguments.get("expression")
        try:
            if call.name != "calculate":
                raise ToolFault(no_such_tool(call.name, ("calculate",)))
            if isinstance(expression, str) and not _TWO_NUMBERS.fullmatch(expression):
                raise ToolFault("expected two numbers with one of + - * / between them")
            result = await self._calculator.call(call)
        except ToolFault as fault:
            return "error" if self._options.form == "text" else f"error: {fault}"
        if self._reached < len(self._parts) // 2 and result == self._value(self._reached + 1):
            self._reached += 1
        return result

    def _value(self, operations: int) -> str:
        """The value after the first so many operations, from the left."""
        return calculate(written(self._parts[: 2 * operations + 1]))


def written(parts: Parts) -> str:
    """An expression, from the left: the parentheses say so."""
    text = parts[0]
    for operator, number in zip(parts[1::2], parts[2::2], strict=True):
        text = f"({text}){operator}{number}" if not text.isdigit() else f"{text}{operator}{number}"
    return text
