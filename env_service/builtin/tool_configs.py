"""What a user can set about tools. Light: what a tool needs is loaded with the tool."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, SecretStr, model_validator

from services.config.models import ConfigModel


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
