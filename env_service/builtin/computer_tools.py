"""Tools on a computer of the policy's own: a shell, files, Python, and the word that it is done.

They act on a runtime, in which whatever they find and change is the policy's own business.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from pydantic import Field

from env_service.builtin.called_tools import CalledTools
from env_service.builtin.toolboxes import ToolArguments, ToolFault, described, read_arguments
from env_service.environments.interface import Action, Step, Tool, ToolCall
from env_service.runtimes.interface import CommandEnd, Runtime, RuntimeCommand, RuntimeFile, RuntimeRefused
from services.lines import lines_of

ToolName = Literal["shell", "files", "python", "submit"]
SUBMIT = "submit"
WORK = "/work"
_LINES = 200
_FOUND = 200


class _Line(ToolArguments):
    command: str = Field(min_length=1, max_length=1 << 16, description="a command line for sh")


class _Program(ToolArguments):
    code: str = Field(min_length=1, max_length=1 << 20, description="Python code; print what you want to see")


class _View(ToolArguments):
    path: str = Field(min_length=1, description="a file, as seen from /work")
    first_line: int = Field(1, ge=1, description="first line that is shown")
    lines: int = Field(_LINES, ge=1, le=2000, description="how many lines are shown")


class _Edit(ToolArguments):
    path: str = Field(min_length=1, description="a file, as seen from /work")
    old: str = Field(description="text that is in it exactly once; empty to make a new file")
    new: str = Field(description="text in its place")


class _Search(ToolArguments):
    text: str = Field(min_length=1, description="text that is looked for, exactly as it is")
    path: str = Field(".", min_length=1, description="a file or folder, as seen from /work")


class _Submit(ToolArguments):
    pass


@dataclass(frozen=True, kw_only=True)
class TaskComputer:
    """A runtime in which a task is done, the folder where that is, and variables that its commands see."""

    runtime: Runtime
    folder: str = WORK
    environment: Mapping[str, str] = field(default_factory=dict)


class ComputerToolbox:
    """Tools on one runtime, of the kinds that are named, which work in `folder`. It does not end the runtime."""

    def __init__(
        self,
        runtime: Runtime,
        names: Sequence[ToolName],
        *,
        folder: str = WORK,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._runtime = runtime
        self._names = names
        self._folder = folder
        self._environment = dict(environment or {})

    async def offered(self) -> Sequence[Tool]:
        tools = {
            "shell": (described("shell", "Runs a command line in /work and returns what it prints.", _Line),),
            "files": (
                described("view", "Shows lines of a file with their numbers.", _View),
                described("edit", "Replaces a text in a file by another one, or makes a file.", _Edit),
                described("search", "Finds lines with a text in files.", _Search),
            ),
            "python": (described("python", "Runs a Python program in /work and returns what it prints.", _Program),),
            "submit": (described(SUBMIT, "Says that the task is done. Nothing can be changed afterwards.", _Submit),),
        }
        offered: Sequence[Tool] = [tool for name in self._names for tool in tools[name]]
        # Descriptions of arguments name the usual folder.
        return offered if self._folder == WORK else json.loads(json.dumps(offered).replace(WORK, self._folder))

    async def call(self, call: ToolCall) -> str:
        """The result. Raises ToolFault, and as the runtime."""
        try:
            match call.name:
                case "shell":
                    return await self._shell(read_arguments(_Line, call.arguments))
                case "python":
                    return await self._python(read_arguments(_Program, call.arguments))
                case "view":
                    return await self._view(read_arguments(_View, call.arguments))
                case "edit":
                    return await self._edit(read_arguments(_Edit, call.arguments))
                case "search":
                    return await self._search(read_arguments(_Search, call.arguments))
        except RuntimeRefused as refusal:
            raise ToolFault(str(refusal)) from refusal
        read_arguments(_Submit, call.arguments)
        return "submitted"

    async def close(self) -> None:
        """Nothing to do."""

    async def _shell(self, given: _Line) -> str:
        return told(await self._run(("/bin/sh", "-c", given.command)))

    async def _python(self, given: _Program) -> str:
        return told(await self._run(("python3", "-"), stdin=given.code.encode()))

    async def _view(self, given: _View) -> str:
        lines = lines_of(await self._text(given.path))
        shown = lines[given.first_line - 1 : given.first_line - 1 + given.lines]
        if not shown:
            raise ToolFault(f"{given.path} has {len(lines)} lines")
        numbered = [f"{number:>5}  {line}" for number, line in enumerate(shown, start=given.first_line)]
        left = len(lines) - (given.first_line - 1 + len(shown))
        return "\n".join([*numbered, *([f"… {left} more lines"] if left > 0 else [])])

    async def _edit(self, given: _Edit) -> str:
        path = self._placed(given.path)
        if not given.old:
            if await self._exists(path):
                raise ToolFault(f"{given.path} is there: say which text in it is to be replaced")
            await self._runtime.copy_in({path: given.new.encode()})
            return "made"
        text, mode = await self._text(given.path), (await self._file(path)).mode
        count = text.count(given.old)
        if count != 1:
            raise ToolFault(f"the old text is {count} times in {given.path}, expected once")
        await self._runtime.copy_in({path: RuntimeFile(text.replace(given.old, given.new).encode(), mode)})
        return "replaced"

    async def _search(self, given: _Search) -> str:
        end = await self._run(("grep", "-rnIF", "--", given.text, given.path))
        lines = lines_of(end.stdout.decode(errors="replace"))
        if not lines:
            return end.stderr.decode(errors="replace").strip() or "found nothing"
        left = [f"… {len(lines) - _FOUND} more"] if len(lines) > _FOUND else []
        return "\n".join([*lines[:_FOUND], *left])

    async def _run(self, argv: tuple[str, ...], *, stdin: bytes = b"") -> CommandEnd:
        return await self._runtime.exec(
            RuntimeCommand(argv=argv, cwd=self._folder, stdin=stdin, environment=self._environment)
        )

    async def _exists(self, path: str) -> bool:
        try:
            await self._runtime.copy_out(path)
        except RuntimeRefused:
            return False
        return True

    async def _file(self, path: str) -> RuntimeFile:
        found = await self._runtime.copy_out(path, most_bytes=1 << 20)
        if "" not in found:
            raise ToolFault("it is a folder")
        return found[""]

    async def _text(self, path: str) -> str:
        content = (await self._file(self._placed(path))).content
        try:
            return content.decode()
        except UnicodeDecodeError:
            raise ToolFault(f"{path} is no text") from None

    def _placed(self, path: str) -> str:
        return path if path.startswith("/") else f"{self._folder.rstrip('/')}/{path}"


async def acted(tools: CalledTools, action: Action) -> tuple[Step, bool]:
    """The results of an action's calls, and True if the work is over: it is submitted, nothing was called, or no turn
    is left. Raises RuntimeEnded and RuntimeLost.
    """
    if not (action.calls or action.fault):
        return Step(stop="answered"), True
    return await tools.answered(action), action.last or any(call.name == SUBMIT for call in action.calls)


def told(end: CommandEnd) -> str:
    """Output and end of a command, as the policy reads them."""
    lines = [end.stdout.decode(errors="replace").rstrip(), end.stderr.decode(errors="replace").rstrip()]
    if end.timed_out:
        lines.append(f"stopped after {end.wall_s:.0f} s")
    elif end.signal is not None:
        lines.append("killed: out of memory" if end.starved else f"killed by signal {end.signal}")
    elif end.exit_code:
        lines.append(f"exit code {end.exit_code}")
    return "\n".join(filter(None, lines)) or "no output"
