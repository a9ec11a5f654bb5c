"""Tools of MCP servers: programs that speak over their standard input and output, and addresses over HTTP.

What a server says of a call is for the policy, its errors too. A server that is away, closes the connection or falls
silent is nobody's fault here: EnvironmentUnavailable. One that cannot be used as it is set is the environment's fault.

A client of the package `mcp` must be left by the task that entered it, and conversations open and close in tasks of
their own: so a connection is held by a task of its own.
"""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import TypeVar

from pydantic import JsonValue

from env_service.builtin.toolboxes import McpTool, ToolFault
from env_service.environments.interface import EnvironmentUnavailable, Tool, ToolCall

try:
    from mcp import Client, MCPError, StdioServerParameters
    from mcp.types import (
        CONNECTION_CLOSED,
        REQUEST_TIMEOUT,
        CallToolResult,
        ContentBlock,
        EmbeddedResource,
        ListToolsResult,
        ResourceLink,
        TextContent,
        TextResourceContents,
    )
    from mcp.types import Tool as ServerTool
except ImportError as error:
    raise ImportError("mcp 2 is not installed: pip install 'headway[mcp]'") from error

logger = logging.getLogger(__name__)

AnswerT = TypeVar("AnswerT")

_SIGN_OF_LIFE_S = 5.0
_MOST_PAGES = 1000
_UNUSABLE = (FileNotFoundError, PermissionError, NotADirectoryError)
"""Raised for a program that cannot be started, which does not pass."""


class McpFailure(RuntimeError):
    """A server cannot be used as it is set, or answers with what is no answer."""


class McpConnection:
    """A client that is opened when it is first wanted. A shared one is opened again after the server went away; of one
    of its own a conversation has lost what the server held.
    """

    def __init__(self, config: McpTool) -> None:
        self._config = config
        self._holder: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[Client] | None = None
        self._leave = asyncio.Event()
        self._lost = ""

    async def tools(self) -> Sequence[Tool]:
        """The server's tools. Raises EnvironmentUnavailable, McpFailure, and ValueError for a name that the server does
        not have.
        """
        try:
            listed = await self._listed()
        except ToolFault as fault:
            raise McpFailure(f"{self._named} does not list its tools: {fault}") from fault
        wanted = self._config.tools or tuple(tool.name for tool in listed)
        found = {tool.name: tool for tool in listed}
        if absent := [name for name in wanted if name not in found]:
            raise ValueError(f"the MCP server has no tool {', '.join(absent)}; it has {', '.join(found)}")
        return [_as_tool(found[name]) for name in wanted]

    async def _listed(self) -> Sequence[ServerTool]:
        """The tools of all pages of the server's list."""
        found: list[ServerTool] = []
        cursor: str | None = None
        for _ in range(_MOST_PAGES):
            page = await self._ask(partial(_page_of_tools, cursor=cursor))
            found += page.tools
            cursor = page.next_cursor
            if cursor is None:
                return found
        raise McpFailure(f"{self._named} lists its tools in more than {_MOST_PAGES} pages; expected an end")

    async def call(self, name: str, arguments: Mapping[str, JsonValue]) -> str:
        """Raises ToolFault for what the server calls an error, EnvironmentUnavailable and McpFailure."""
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
            if self._ready is not None and not self._ready.done():
                holder.cancel()  # it is not there yet to leave
            await asyncio.wait([holder], timeout=5.0)
            holder.cancel()

    async def _ask(self, ask: Callable[[Client], Awaitable[AnswerT]]) -> AnswerT:
        client = await self._client()
        try:
            async with asyncio.timeout(self._config.timeout_s + 1):  # where the client does not notice
                return await ask(client)
        except TimeoutError:
            raise await self._gone("does not answer", client) from None
        except MCPError as error:
            if error.code == CONNECTION_CLOSED:
                raise await self._gone(str(error), client) from error
            if error.code != REQUEST_TIMEOUT:
                raise ToolFault(str(error)) from error
            if await self._is_silent(client):
                raise await self._gone("does not answer", client) from error
            raise ToolFault(f"no answer within {self._config.timeout_s:g} s") from error

    async def _is_silent(self, client: Client) -> bool:
        """True if it answers nothing at all, and not this call alone."""
        try:
            async with asyncio.timeout(_SIGN_OF_LIFE_S):
                await client.session.list_tools()  # the client itself might remember the answer
        except TimeoutError:
            return True
        except MCPError as error:
            return error.code in (CONNECTION_CLOSED, REQUEST_TIMEOUT)
        return False

    async def _gone(self, why: str, client: Client) -> EnvironmentUnavailable:
        """The error for a server that is lost, once the connection is closed, unless it was opened again since."""
        if not self._config.shared:
            self._lost = why
        ready = self._ready
        if ready is None or not ready.done() or ready.exception() is not None or ready.result() is client:
            await self.close()
        return EnvironmentUnavailable(f"{self._named}: {why}")

    async def _client(self) -> Client:
        """Raises EnvironmentUnavailable if the server is away, and McpFailure."""
        is_open = self._holder is not None and not self._holder.done()
        if self._holder is not None and not is_open and not self._config.shared:
            self._lost = self._lost or "ended in the middle of its conversation"
        if self._lost:
            raise EnvironmentUnavailable(f"{self._named}: {self._lost}")
        if not is_open:
            self._ready, self._leave = asyncio.get_running_loop().create_future(), asyncio.Event()
            # In no group: it outlives the conversation that happens to be first, and is ended by `close`.
            self._holder = asyncio.create_task(self._hold(self._ready, self._leave), name=self._named)
        assert self._ready is not None
        holder, ready = self._holder, self._ready
        try:
            async with asyncio.timeout(self._config.connect_timeout_s):
                return await asyncio.shield(ready)
        except TimeoutError:
            if self._holder is holder:  # not one that was opened since then
                await self.close()
            late = f"not ready within {self._config.connect_timeout_s:g} s"
            raise EnvironmentUnavailable(f"{self._named}: {late}") from None

    async def _hold(self, ready: "asyncio.Future[Client]", leave: asyncio.Event) -> None:
        try:
            async with Client(self._server(), read_timeout_seconds=self._config.timeout_s) as client:
                ready.set_result(client)
                await leave.wait()
        except asyncio.CancelledError:
            if not ready.done():
                ready.set_exception(EnvironmentUnavailable(f"{self._named}: its connection was given up"))
                ready.exception()  # nobody has to be there to hear it
            raise
        except Exception as error:  # noqa: BLE001 - transports raise what they like, in groups
            cause = _innermost(error)
            if not ready.done():
                kind = McpFailure if _does_not_pass(cause) else EnvironmentUnavailable
                ready.set_exception(kind(f"{self._named}: {cause}"))
            else:
                logger.warning("%s: the connection ended: %s", self._named, cause)

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


async def _page_of_tools(client: Client, *, cursor: str | None) -> ListToolsResult:
    return await client.list_tools(cursor=cursor)


def _text_of(result: CallToolResult) -> str:
    """All of a result that is text; the other parts by what they are. Some servers give an object alone."""
    if not result.content and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(map(_shown, result.content))


def _shown(part: ContentBlock) -> str:
    match part:
        case TextContent():
            return part.text
        case EmbeddedResource(resource=TextResourceContents(text=text)):
            return text
        case EmbeddedResource():
            return f"[resource {part.resource.uri}]"
        case ResourceLink():
            return f"[resource_link {part.uri}]"
    return f"[{part.type}]"


def _does_not_pass(error: BaseException) -> bool:
    """True if it is about how a server is set, and not about whether it is there."""
    if isinstance(error, MCPError):
        return error.code not in (CONNECTION_CLOSED, REQUEST_TIMEOUT)
    return isinstance(error, _UNUSABLE)


def _innermost(error: BaseException) -> BaseException:
    """The innermost error of a group of exceptions."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
