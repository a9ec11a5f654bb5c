"""Toolboxes: what the policy can call; a calculator, and a Python interpreter in the reward service's sandbox.

What one can set about all tools stands here; search and MCP servers, which need packages of their own, have files of
their own. The calculator is exact, and reads nothing but numbers, + - * / // % ** and parentheses.
"""

import ast
import asyncio
import operator
import secrets
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Literal, Protocol, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, JsonValue, SecretStr, ValidationError, model_validator

from env_service.environments.interface import EnvironmentUnavailable, Tool, ToolCall
from protocol.codec import describe
from protocol.rewards import ExecuteAnswer, ExecuteRequest, ExecutionLimits, SessionEnded
from services.config.models import ConfigModel
from services.http.client import (
    HttpClient,
    ServiceFailed,
    ServiceMistrusted,
    ServiceRefused,
    ServiceTimeout,
    ServiceUnreachable,
)
from services.python_syntax import expression_of

_MAX_EXPRESSION = 300
_MAX_BITS = 2000
_TOO_MANY = 429
_OPERATIONS: Mapping[type[ast.operator], Callable[[Fraction, Fraction], Fraction | int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


class CalculatorTool(ConfigModel):
    """`calculate(expression)`: exact arithmetic."""

    kind: Literal["calculator"]


class SearchTool(ConfigModel):
    """`search(query)`: the best passages of a corpus by BM25."""

    kind: Literal["search"]
    corpus: Path = Field(
        description="a .jsonl file of objects with `text` and, if wished, `title`; or a text file, in which empty "
        "lines part the passages"
    )
    results: int = Field(3, ge=1, le=50, description="passages in an answer")
    characters: int = Field(1000, ge=20, le=100_000, description="longest passage in an answer; longer ones are cut")


class SandboxConfig(ConfigModel):
    """A reward service that runs programs."""

    url: str = Field(
        "http://127.0.0.1:7320", pattern=r"^https?://[^\s]+[^/\s]$", description="address of the reward service"
    )
    token: SecretStr | None = Field(None, description="its bearer token")
    wall_s: float = Field(10.0, gt=0, le=600, description="longest time of one call")
    memory_mib: int = Field(512, ge=16, le=1 << 16, description="memory of the program")
    patience_s: float = Field(60.0, gt=0, le=3600, description="how long a call waits for a sandbox that is free")


class PythonTool(SandboxConfig):
    """`python(code)`: an interpreter for each conversation, which keeps its variables between calls."""

    kind: Literal["python"]


class McpTool(ConfigModel):
    """The tools of an MCP server: either a program, or an address."""

    kind: Literal["mcp"]
    command: tuple[str, ...] = Field((), description="program with its arguments, which speaks over stdin and stdout")
    environment: dict[str, str] = Field(
        default_factory=dict, description="environment variables of the program, beside the few that a shell needs"
    )
    url: str = Field("", description="address of a server over HTTP, such as http://127.0.0.1:8941/mcp")
    tools: tuple[str, ...] = Field((), description="names of the tools that are offered; all of the server's if empty")
    shared: bool = Field(
        True,
        description="one connection for all conversations, for servers that keep nothing between calls; otherwise each "
        "has its own, and so its own program",
    )
    connect_timeout_s: float = Field(30.0, gt=0, description="longest time until a server is ready")
    timeout_s: float = Field(30.0, gt=0, description="longest time of a call")

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if bool(self.command) == bool(self.url):
            raise ValueError("expected either command or url of an MCP server, got both or neither")
        return self


ToolConfig = Annotated[CalculatorTool | SearchTool | PythonTool | McpTool, Field(discriminator="kind")]


ArgumentsT = TypeVar("ArgumentsT", bound=BaseModel)


class ToolFault(Exception):
    """A call came to nothing by the policy's own doing; the text is for the policy."""


class Toolbox(Protocol):
    """Some tools, for one conversation."""

    async def offered(self) -> Sequence[Tool]:
        """The tools as the chat template tells them to the policy."""
        ...

    async def call(self, call: ToolCall) -> str:
        """The result as text. Raises ToolFault; EnvironmentUnavailable if whoever runs it is away, or went away with
        what it held; anything else is the environment's doing.
        """
        ...

    async def close(self) -> None: ...


class ToolArguments(BaseModel):
    """The base of what a tool takes."""

    model_config = ConfigDict(extra="forbid")


def described(name: str, description: str, arguments: type[ToolArguments]) -> Tool:
    """A tool as chat templates take it."""
    schema = arguments.model_json_schema()
    properties = {key: {k: v for k, v in each.items() if k != "title"} for key, each in schema["properties"].items()}
    parameters = {"type": "object", "properties": properties, "required": schema.get("required", [])}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def name_of(tool: Tool) -> str:
    """The name under which it is called."""
    function = tool["function"]
    assert isinstance(function, dict)
    return str(function["name"])


def read_arguments(model: type[ArgumentsT], given: Mapping[str, JsonValue]) -> ArgumentsT:
    """Raises ToolFault for arguments that do not fit."""
    try:
        return model.model_validate(given)
    except ValidationError as error:
        raise ToolFault(f"wrong arguments: {describe(error)}") from error


class _Expression(ToolArguments):
    expression: str = Field(description="such as (3 + 4) * 5")


class CalculatorToolbox:
    """The calculator."""

    async def offered(self) -> Sequence[Tool]:
        return (described("calculate", "Evaluates an arithmetic expression exactly.", _Expression),)

    async def call(self, call: ToolCall) -> str:
        return calculate(read_arguments(_Expression, call.arguments).expression)

    async def close(self) -> None:
        """Nothing to do."""


def calculate(expression: str) -> str:
    """The value: a whole number, or a decimal of twelve digits. Raises ToolFault."""
    if len(expression) > _MAX_EXPRESSION:
        raise ToolFault(f"the expression has {len(expression)} characters, expected at most {_MAX_EXPRESSION}")
    try:
        value = _value(expression_of(expression.strip()))
        return str(value.numerator) if value.denominator == 1 else f"{float(value):.12g}"
    except ZeroDivisionError:
        raise ToolFault("division by zero") from None
    except (SyntaxError, ValueError, OverflowError, RecursionError, MemoryError):
        raise ToolFault(f"cannot calculate {expression!r}") from None


def _value(node: ast.expr) -> Fraction:
    """Raises ValueError for what is no arithmetic, or too large."""
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return Fraction(str(number))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _power(_value(left), _value(right))
        case ast.BinOp(left=left, op=operation, right=right) if type(operation) in _OPERATIONS:
            return _bounded(Fraction(_OPERATIONS[type(operation)](_value(left), _value(right))))
    raise ValueError("no arithmetic")


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if exponent.denominator != 1 or bits * abs(exponent) > _MAX_BITS:
        raise ValueError("too large, or no whole exponent")
    return Fraction(base ** int(exponent))


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > _MAX_BITS:
        raise ValueError("too large")
    return value


class SandboxClient:
    """Runs Python in a reward service. Its connections are opened by the first call."""

    def __init__(self, config: SandboxConfig) -> None:
        self._config = config
        self._client: HttpClient | None = None

    async def run(self, code: str, *, session: str | None = None) -> ExecuteAnswer:
        """Raises EnvironmentUnavailable for a service that is away, fails, or has no place in all of `patience_s`, and
        ServiceError for one that refuses to run anything: that is set wrongly, and does not pass.
        """
        try:
            async with asyncio.timeout(self._config.patience_s + self._config.wall_s):
                return await self._run(code, session=session)
        except TimeoutError:
            none_free = f"had no sandbox free in {self._config.patience_s:g} s"
            raise EnvironmentUnavailable(f"the reward service at {self._config.url} {none_free}") from None
        except ServiceMistrusted:
            raise
        except (ServiceUnreachable, ServiceTimeout, ServiceFailed) as error:
            raise EnvironmentUnavailable(f"the reward service that runs programs: {error}") from error

    async def _run(self, code: str, *, session: str | None) -> ExecuteAnswer:
        limits = ExecutionLimits(wall_s=self._config.wall_s, memory_mib=self._config.memory_mib)
        request = ExecuteRequest(code=code, session=session, limits=limits)
        client = await self._open()
        while True:
            try:
                return await client.post(
                    f"{self._config.url}/v1/execute",
                    request,
                    ExecuteAnswer,
                    deadline_s=self._config.patience_s + self._config.wall_s,
                    retries=2,
                )
            except ServiceRefused as refusal:
                if refusal.status != _TOO_MANY:
                    raise
                await asyncio.sleep(refusal.retry_after_s or 0.2)

    async def end(self, session: str) -> None:
        """Ends a session, if there is one."""
        client = await self._open()
        await client.delete(f"{self._config.url}/v1/sessions/{session}", SessionEnded, deadline_s=5.0)

    async def close(self) -> None:
        """Closes the connections."""
        client, self._client = self._client, None
        if client is not None:
            await client.__aexit__(None, None, None)

    async def _open(self) -> HttpClient:
        if self._client is None:
            self._client = await HttpClient(token=self._config.token).__aenter__()
        return self._client


class _Code(ToolArguments):
    code: str = Field(max_length=1 << 20, description="Python code; print what you want to see")


class SessionLost(EnvironmentUnavailable):
    """The interpreter of a conversation is gone with its variables, through no doing of the policy or the task."""


class PythonToolbox:
    """An interpreter in the sandbox, which begins with the first call."""

    def __init__(self, config: PythonTool) -> None:
        self._sandbox = SandboxClient(config)
        self._session = f"conversation-{secrets.token_hex(12)}"
        self._lives = False

    async def offered(self) -> Sequence[Tool]:
        told = "Runs Python code and returns what it prints. Variables stay for the next call."
        return (described("python", told, _Code),)

    async def call(self, call: ToolCall) -> str:
        """The output of the code with any traceback. Raises SessionLost, and as `SandboxClient.run`."""
        code = read_arguments(_Code, call.arguments).code
        answer = await self._sandbox.run(code, session=self._session)
        if answer.session_started and self._lives:
            raise SessionLost(f"session {self._session} began anew in the middle of its conversation")
        self._lives = not answer.session_ended
        return told(answer)

    async def close(self) -> None:
        """Ends the interpreter."""
        try:
            if self._lives:
                await self._sandbox.end(self._session)
        finally:
            await self._sandbox.close()


def told(answer: ExecuteAnswer) -> str:
    """Output and end of a program, as the policy reads them."""
    lines = [answer.stdout.rstrip(), answer.stderr.rstrip()]
    if answer.timed_out:
        lines.append(f"stopped after {answer.wall_s:.0f} s")
    elif answer.signal is not None:
        lines.append(f"killed by signal {answer.signal}")
    if answer.session_ended:
        lines.append("the interpreter has ended, and its variables are gone")
    return "\n".join(filter(None, lines)) or "no output"


def cut(text: str, most: int) -> str:
    """A text's beginning and end, if it is longer than `most` characters."""
    if len(text) <= most:
        return text
    left = f"\n… {len(text) - most} characters left out …\n"
    return text[: most // 2] + left + text[len(text) - most // 2 :]
