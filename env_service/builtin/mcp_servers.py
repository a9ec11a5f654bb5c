"""Tools of MCP servers: programs that speak over their standard input and output, and addresses over HTTP.

A client of the package `mcp` must be left by the task that entered it, and conversations open and close in tasks of
their own: so a connection is held by a task of its own.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import lru_cache
from typing import TypeVar

from pydantic import JsonValue

from env_service.builtin.toolboxes import McpTool, ToolFault
from env_service.environments.interface import Tool, ToolCall

try:
    from mcp import Client, MCPError, StdioServerParameters
    from mcp.types import CallToolResult, TextContent
    from mcp.types import Tool as ServerTool
except ImportError as error:
    raise ImportError("mcp 2 is not installed: pip install 'headway[mcp]'") from error

logger = logging.getLogger(__name__)

AnswerT = TypeVar("AnswerT")

_TIMED_OUT = -32001


class McpFailure(RuntimeError):
    """A server cannot be reached, or went away."""


class McpConnection:
    """A client that is opened when it is first wanted, and again after the server went away."""

    def __init__(self, config: McpTool) -> None:
        self._config = config
        self._holder: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[Client] | None = None
        self._leave = asyncio.Event()

    async def tools(self) -> Sequence[Tool]:
        """What is offered. Raises McpFailure, and ValueError for a name that the server does not have."""
        listed = (await self._ask(lambda client: client.list_tools())).tools
        wanted = self._config.tools or tuple(tool.name for tool in listed)
        found = {tool.name: tool for tool in listed}
        if absent := [name for name in wanted if name not in found]:
            raise ValueError(f"the MCP server has no tool {', '.join(absent)}; it has {', '.join(found)}")
        return [_as_tool(found[name]) for name in wanted]

    async def call(self, name: str, arguments: Mapping[str, JsonValue]) -> str:
        """Raises ToolFault for what the server calls an error, and McpFailure."""
        result = await self._ask(lambda client: client.call_tool(name, dict(arguments)))
        text = _text_of(result)
        if result.is_error:
            raise ToolFault(text)
        return text

    async def close(self) -> None:
        """Ends the connection; the server's program ends with it."""
        holder, self._holder = self._holder, None
        self._leave.set()
        if holder is not None:
            await asyncio.wait([holder], timeout=5.0)
            holder.cancel()

    async def _ask(self, ask: Callable[[Client], Awaitable[AnswerT]]) -> AnswerT:
        client = await self._client()
        try:
            async with asyncio.timeout(self._config.timeout_s + 1):  # where the client does not notice
                return await ask(client)
        except TimeoutError:
            await self.close()
            raise McpFailure(f"{self._named}: does not answer") from None
        except MCPError as error:
            if error.code == _TIMED_OUT:
                raise ToolFault(f"no answer within {self._config.timeout_s:g} s") from error
            await self.close()
            raise McpFailure(f"{self._named}: {error}") from error

    async def _client(self) -> Client:
        """Raises McpFailure if none can be opened."""
        if self._holder is None or self._holder.done():
            self._ready, self._leave = asyncio.get_running_loop().create_future(), asyncio.Event()
            # In no group: it outlives the conversation that happens to be first, and is ended by `close`.
            self._holder = asyncio.create_task(self._hold(self._ready, self._leave), name=self._named)
        assert self._ready is not None
        try:
            async with asyncio.timeout(self._config.connect_timeout_s):
                return await asyncio.shield(self._ready)
        except TimeoutError:
            await self.close()
            raise McpFailure(f"{self._named}: not ready within {self._config.connect_timeout_s:g} s") from None

    async def _hold(self, ready: "asyncio.Future[Client]", leave: asyncio.Event) -> None:
        try:
            async with Client(self._server(), read_timeout_seconds=self._config.timeout_s) as client:
                ready.set_result(client)
                await leave.wait()
        except Exception as error:  # noqa: BLE001 - transports raise what they like, in groups
            if not ready.done():
                ready.set_exception(McpFailure(f"{self._named}: {_innermost(error)}"))
            else:
                logger.warning("%s: the connection ended: %s", self._named, _innermost(error))

    def _server(self) -> StdioServerParameters | str:
        if self._config.url:
            return self._config.url
        command, *arguments = self._config.command
        return StdioServerParameters(command=command, args=arguments, env=self._config.environment or None)

    @property
    def _named(self) -> str:
        return f"MCP server {self._config.url or ' '.join(self._config.command)}"


class McpToolbox:
    """The tools of one server, for one conversation."""

    def __init__(self, config: McpTool) -> None:
        self._connection = _shared(config.model_dump_json()) if config.shared else McpConnection(config)
        self._shared = config.shared

    async def offered(self) -> Sequence[Tool]:
        return await self._connection.tools()

    async def call(self, call: ToolCall) -> str:
        return await self._connection.call(call.name, call.arguments)

    async def close(self) -> None:
        """Ends the connection, if no other conversation has it."""
        if not self._shared:
            await self._connection.close()


@lru_cache(maxsize=64)
def _shared(config: str) -> McpConnection:
    """The connection of all conversations with one configuration, in JSON."""
    return McpConnection(McpTool.model_validate_json(config))


def _as_tool(tool: ServerTool) -> Tool:
    function: dict[str, JsonValue] = {
        "name": tool.name,
        "description": tool.description or "",
        "parameters": tool.input_schema,
    }
    return {"type": "function", "function": function}


def _text_of(result: CallToolResult) -> str:
    parts = [part.text if isinstance(part, TextContent) else f"[{part.type}]" for part in result.content]
    return "\n".join(parts)


def _innermost(error: BaseException) -> BaseException:
    """What a group of exceptions is about."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
