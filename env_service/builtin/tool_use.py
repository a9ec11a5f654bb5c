"""Tasks that the policy solves by calling tools before it answers.

question ─▶ calls ─▶ results ─▶ calls ─▶ results ─▶ … ─▶ an answer without a call ─▶ the task's verifier
"""

from pathlib import Path
from typing import Literal, assert_never

from pydantic import Field

from env_service.builtin.called_tools import TOOL_METRICS, CalledTools
from env_service.builtin.toolboxes import (
    CalculatorTool,
    CalculatorToolbox,
    McpTool,
    PythonTool,
    PythonToolbox,
    SearchTool,
    Toolbox,
    ToolConfig,
)
from env_service.environments.interface import Action, Opening, Role, Step, Task, TaskSource
from env_service.environments.jsonl import JsonlTaskSource
from env_service.environments.rules import Rules
from env_service.environments.task_configs import JsonlTasks
from services.config.models import ConfigModel


class ToolUseOptions(ConfigModel):
    """Tasks from files, as those of source `jsonl`, and what may be called."""

    tools: tuple[ToolConfig, ...] = Field(min_length=1, max_length=32, description="what the policy can call")
    train_file: Path = Field(description="JSONL file of training tasks")
    evaluation_file: Path | None = Field(None, description="JSONL file of evaluation tasks, if there are any")
    verifier: str | None = Field(None, description="verifier of the lines that name none; gets {answer}")
    system_prompt: str = Field("", description="system message before tasks that have none; empty for none")
    result_role: Literal["tool", "user"] = Field(
        "tool", description="role of the messages with results; user for chat templates that know no tools"
    )
    result_characters: int = Field(
        4000, ge=20, le=1 << 20, description="longest result; of longer ones the middle is left out"
    )


class ToolUseEnvironment:
    """The first answer without a call is the last one, and is judged by the task's verifier."""

    rules = Rules(max_turns=8, action="tools")
    metrics = TOOL_METRICS

    def __init__(self, options: ToolUseOptions) -> None:
        """Raises ValueError for tools that cannot be made."""
        boxes = [_toolbox(config) for config in options.tools]
        self._tools = CalledTools(boxes, role=options.result_role, characters=options.result_characters)
        self._task = Task()
        self.roles: tuple[Role, ...] = (options.result_role,)

    @staticmethod
    def tasks(options: ToolUseOptions) -> TaskSource:
        """The tasks of the files."""
        given = options.model_dump(include={"train_file", "evaluation_file", "verifier", "system_prompt"})
        return JsonlTaskSource(JsonlTasks(source="jsonl", name="tools", **given))

    async def reset(self, task: Task, seed: int) -> Opening:
        """Raises ValueError for two tools of a name."""
        self._task = task
        return Opening(task.prompt, tools=await self._tools.offered())

    async def step(self, action: Action) -> Step:
        """Calls of one turn run side by side. One that cannot be read is told to the policy, as a tool's error."""
        if action.last or not (action.calls or action.fault):
            return Step(verification=self._task.verification)
        return await self._tools.answered(action)

    async def close(self) -> None:
        """Ends what the tools hold."""
        await self._tools.close()


def _toolbox(config: ToolConfig) -> Toolbox:
    match config:
        case CalculatorTool():
            return CalculatorToolbox()
        case PythonTool():
            return PythonToolbox(config)
        case SearchTool():
            # Deferred, as the next: the packages of extras, which few runs need.
            from env_service.builtin.search import SearchToolbox

            return SearchToolbox(config)
        case McpTool():
            from env_service.builtin.mcp_servers import McpToolbox

            return McpToolbox(config)
    assert_never(config)
