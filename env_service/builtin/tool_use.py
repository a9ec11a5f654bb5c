"""Tasks that the policy solves by calling tools before it answers.

question ─▶ calls ─▶ results ─▶ calls ─▶ results ─▶ … ─▶ an answer without a call ─▶ the task's verifier
"""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, assert_never

from pydantic import Field

from env_service.builtin.toolboxes import (
    CalculatorTool,
    CalculatorToolbox,
    McpTool,
    PythonTool,
    PythonToolbox,
    SearchTool,
    Toolbox,
    ToolConfig,
    ToolFault,
    cut,
    name_of,
)
from env_service.environments.interface import (
    Action,
    Aggregation,
    ChatMessage,
    Opening,
    Role,
    Step,
    Task,
    TaskSource,
    ToolCall,
)
from env_service.environments.jsonl import JsonlTaskSource
from env_service.environments.rules import Rules
from env_service.environments.task_configs import JsonlTasks
from env_service.environments.tool_formats import no_such_tool
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
    metrics: Mapping[str, Aggregation] = {"tool_calls": "sum", "tool_errors": "sum"}

    def __init__(self, options: ToolUseOptions) -> None:
        """Raises ValueError for tools that cannot be made."""
        self._options = options
        self._boxes: list[Toolbox] = [_toolbox(config) for config in options.tools]
        self._by_name: dict[str, Toolbox] = {}
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
        offered = []
        for box in self._boxes:
            for tool in await box.offered():
                if name_of(tool) in self._by_name:
                    raise ValueError(f"two tools are called {name_of(tool)!r}: offer one of them only")
                self._by_name[name_of(tool)] = box
                offered.append(tool)
        return Opening(task.prompt, tools=tuple(offered))

    async def step(self, action: Action) -> Step:
        """Calls of one turn run side by side. One that cannot be read is told to the policy, as a tool's error."""
        if action.last or not (action.calls or action.fault):
            return Step(verification=self._task.verification)
        if not action.calls:
            told = ChatMessage(self._options.result_role, f"error: {action.fault}", name=next(iter(self._by_name)))
            return Step((told,), invalid=True, metrics={"tool_calls": 1.0, "tool_errors": 1.0})
        results = await asyncio.gather(*map(self._result, action.calls))
        faults = sum(faulty for faulty, _ in results)
        messages = [self._told(call, text) for call, (_, text) in zip(action.calls, results, strict=True)]
        metrics = {"tool_calls": float(len(results)), "tool_errors": float(faults)}
        return Step(tuple(messages), invalid=faults == len(results), metrics=metrics)

    def _told(self, call: ToolCall, text: str) -> ChatMessage:
        shown = cut(text, self._options.result_characters)
        return ChatMessage(self._options.result_role, shown, name=call.name, tool_call_id=call.id)

    async def close(self) -> None:
        """Ends what the tools hold."""
        for box in self._boxes:
            await box.close()

    async def _result(self, call: ToolCall) -> tuple[bool, str]:
        """True if the policy called it wrongly, and what it is told."""
        box = self._by_name.get(call.name)
        try:
            if box is None:
                raise ToolFault(no_such_tool(call.name, self._by_name))
            return False, await box.call(call)
        except ToolFault as fault:
            return True, f"error: {fault}"


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
