"""An MCP server that lists its tools in pages, and answers with what its tools are named after."""

import asyncio

from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server
from mcp.types import (
    BlobResourceContents,
    CallToolRequestParams,
    CallToolResult,
    ContentBlock,
    EmbeddedResource,
    ImageContent,
    ListToolsResult,
    PaginatedRequestParams,
    ResourceLink,
    TextContent,
    TextResourceContents,
    Tool,
)

ANSWERS: dict[str, list[ContentBlock]] = {
    "text": [TextContent(type="text", text="a"), TextContent(type="text", text="b")],
    "file": [EmbeddedResource(type="resource", resource=TextResourceContents(uri="file:///a.txt", text="in the file"))],
    "bytes": [EmbeddedResource(type="resource", resource=BlobResourceContents(uri="file:///a.png", blob="AA=="))],
    "link": [ResourceLink(type="resource_link", uri="file:///b.txt", name="b")],
    "image": [ImageContent(type="image", data="AA==", mime_type="image/png")],
    "structured": [],
}


async def list_tools(context: object, params: PaginatedRequestParams | None) -> ListToolsResult:
    """Two tools a page."""
    at = int(params.cursor) if params is not None and params.cursor else 0
    names = list(ANSWERS)[at : at + 2]
    following = str(at + 2) if at + 2 < len(ANSWERS) else None
    schema = {"type": "object", "properties": {}}
    return ListToolsResult(tools=[Tool(name=name, input_schema=schema) for name in names], next_cursor=following)


async def call_tool(context: object, params: CallToolRequestParams) -> CallToolResult:
    """The answer of that name."""
    structured = {"degrees": 21} if params.name == "structured" else None
    return CallToolResult(content=ANSWERS[params.name], structured_content=structured)


async def main() -> None:
    """Serve over stdin and stdout."""
    server: Server = Server("pages", on_list_tools=list_tools, on_call_tool=call_tool)
    async with stdio_server() as (read, write):
        await server.run(read, write, server.create_initialization_options())


if __name__ == "__main__":
    asyncio.run(main())
