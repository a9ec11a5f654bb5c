"""An MCP server: over stdin and stdout, or over HTTP on the port that it is given."""

import asyncio
import os
import sys

from mcp.server import MCPServer

server = MCPServer("samples")


@server.tool()
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


@server.tool()
def process() -> int:
    """The number of this process."""
    return os.getpid()


@server.tool()
def die() -> None:
    """Ends the server."""
    os._exit(3)


@server.tool()
async def wait(seconds: float) -> str:
    """Sleeps."""
    await asyncio.sleep(seconds)
    return "done"


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
    else:
        server.run("stdio")
