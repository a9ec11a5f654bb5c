"""Tasks that are done on a computer: repairs in a repository, work in a shell.

    prompt, files ─▶ a runtime ─▶ calls of tools ─▶ … ─▶ submit ─▶ what is in /work ─▶ a fresh runtime ─▶ checks

A check is a command and what it has to print. It runs in a runtime that the policy never had, over the files that it
left in /work, bytecode of Python apart, with files of its own that it never saw; and what has to be printed is in no
runtime at all: outputs are compared here. So nothing is to be found, and nothing that is changed (a program, a test,
Python itself) judges.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from env_service.builtin.called_tools import TOOL_METRICS, CalledTools
from env_service.builtin.computer_tools import WORK, ComputerToolbox, TaskComputer, ToolName, acted
from env_service.environments.interface import Action, Aggregation, ChatMessage, Opening, Role, Step, Task
from env_service.environments.rules import Rules
from env_service.environments.task_files import TaskLists, tasks_of_files
from env_service.runtimes.interface import (
    Runtime,
    RuntimeCommand,
    RuntimeEnded,
    RuntimeFile,
    RuntimeRefused,
    RuntimeSnapshot,
)
from env_service.runtimes.pool import runtimes
from env_service.task_sets.carrying import is_bytecode
from env_service.task_sets.judging import lay
from protocol.trajectories import Purpose
from services.config.models import ConfigModel

# What one check runs would be found by the next, over other files of the same second and size.
_NO_BYTECODE = {"PYTHONDONTWRITEBYTECODE": "1"}


_ENDED = Step(stop="computer_ended", metrics={"passed_checks": 0.0})


class ComputerOptions(ConfigModel):
    """Tasks from files, and what they are done with."""

    train_file: Path = Field(description="JSONL file: `prompt`, `files`, `checks` and `solution`")
    evaluation_file: Path | None = Field(None, description="the same for evaluation, if there is any")
    image: str = Field("host", min_length=1, description="image of tasks that name none; host: this machine")
    tools: tuple[ToolName, ...] = Field(
        ("shell", "files", "python", "submit"), min_length=1, description="what the policy can call"
    )
    reward: Literal["all", "fraction"] = Field(
        "all", description="all: 1 if every check passes, else 0; fraction: the share of those that pass"
    )
    system_prompt: str = Field(
        "You work on a computer, in the folder /work. When the task is done, submit.",
        description="system message; empty for none",
    )
    result_role: Literal["tool", "user"] = Field(
        "tool", description="role of the messages with results; user for chat templates that know no tools"
    )
    result_characters: int = Field(
        4000, ge=20, le=1 << 20, description="longest result; of longer ones the middle is left out"
    )


class OutputCheck(BaseModel):
    """A command line and what it has to print, spaces around that apart; `files` that are there for it, by path."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    run: str = Field(min_length=1)
    prints: str
    files: dict[str, str] = {}


class ComputerTask(BaseModel):
    """A line of a task file. `files` are in /work at the beginning; `solution` are lines of shell that solve it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = ""
    prompt: str = Field(min_length=1)
    image: str = ""
    files: dict[str, str] = {}
    checks: tuple[OutputCheck, ...] = Field(min_length=1, max_length=1000)
    solution: str = ""


class ComputerEnvironment:
    """Work on a computer of one's own, judged by what is left of it in a fresh one."""

    rules = Rules(max_turns=16, action="tools")
    metrics: Mapping[str, Aggregation] = {**TOOL_METRICS, "passed_checks": "last"}

    def __init__(self, options: ComputerOptions) -> None:
        """Raises ImageFault for an image that there is not."""
        runtimes().need(options.image)
        self._options = options
        self._runtime: Runtime | None = None
        self._tools: CalledTools | None = None
        self._task: ComputerTask | None = None
        self.roles: tuple[Role, ...] = (options.result_role,)

    @staticmethod
    def tasks(options: ComputerOptions) -> TaskLists:
        """The tasks of the files. Raises TaskFileError for a line that is none."""

        def make(_number: int, text: str, purpose: Purpose) -> Task:
            task = ComputerTask.model_validate_json(text)
            return Task(prompt=task.prompt, data=task.model_dump(mode="json"), purpose=purpose)

        return tasks_of_files(options.train_file, options.evaluation_file, make)

    async def reset(self, task: Task, seed: int) -> Opening:
        """Raises RuntimeLost and RuntimesBusy."""
        self._task = ComputerTask.model_validate(task.data)
        self._runtime = await opened(self._task, image=self._options.image)
        self._tools = self._called_tools(self._runtime)
        system = (ChatMessage("system", self._options.system_prompt),) if self._options.system_prompt else ()
        return Opening((*system, ChatMessage("user", self._task.prompt)), tools=await self._tools.offered())

    async def step(self, action: Action) -> Step:
        """Results of the calls; or the end: submitted, no call, or the last turn. Raises RuntimeLost."""
        assert self._tools is not None
        try:
            step, over = await acted(self._tools, action)
        except RuntimeEnded:
            return _ENDED
        return await self.judged(step) if over else step

    @property
    def computer(self) -> TaskComputer:
        """The computer of a task that was reset."""
        assert self._runtime is not None
        return TaskComputer(runtime=self._runtime)

    async def judged(self, step: Step) -> Step:
        """The end: what is left is judged, behind a last step. Raises RuntimeLost."""
        try:
            return await self._judged(step)
        except RuntimeEnded:
            return _ENDED

    async def fork(self) -> "ComputerEnvironment":
        """Another one, whose computer has the files of this one's, and none of its processes. Raises RuntimeLost,
        RuntimesBusy, and RuntimeEnded of a computer that was ended from inside.
        """
        assert self._runtime is not None
        snapshot = await self._runtime.snapshot()
        forked = ComputerEnvironment(self._options)
        forked._task = self._task
        forked._runtime = await runtimes().start(snapshot.image, snapshot=snapshot)
        forked._tools = self._called_tools(forked._runtime)
        await forked._tools.offered()
        return forked

    async def save(self) -> bytes:
        """The files of its computer. Raises as `fork`."""
        assert self._runtime is not None
        return (await self._runtime.snapshot()).packed()

    async def restore(self, saved: bytes) -> None:
        """Has these files on a computer in the place of its own. Raises RuntimeLost and RuntimesBusy."""
        assert self._runtime is not None
        snapshot = RuntimeSnapshot.unpacked(saved)
        self._runtime = await runtimes().exchange(self._runtime, snapshot.image, snapshot=snapshot)
        self._tools = self._called_tools(self._runtime)
        await self._tools.offered()

    def _called_tools(self, runtime: Runtime) -> CalledTools:
        toolbox = ComputerToolbox(runtime, self._options.tools)
        return CalledTools(
            [toolbox], role=self._options.result_role, characters=self._options.result_characters, in_turn=True
        )

    async def close(self) -> None:
        """Ends the runtime."""
        if self._runtime is not None:
            await self._runtime.stop()

    async def _judged(self, step: Step) -> Step:
        assert self._runtime is not None
        assert self._task is not None
        try:
            left = await self._runtime.copy_out(WORK)
        except RuntimeRefused:  # far more than any task makes, or no folder any more
            metrics = {**step.metrics, "passed_checks": 0.0}
            await self._runtime.stop()
            return Step(stop="unreadable", invalid=step.invalid, metrics=metrics)
        except BaseException:
            await self._runtime.stop()
            raise
        passed = await passed_checks(self._task, left, image=self._options.image, instead_of=self._runtime)
        worth = passed if self._options.reward == "fraction" else float(passed == 1.0)
        stop = "solved" if passed == 1.0 else "failed"
        metrics = {**step.metrics, "passed_checks": passed}
        return Step(stop=stop, reward=worth, invalid=step.invalid, metrics=metrics)


async def opened(task: ComputerTask, *, image: str) -> Runtime:
    """A runtime with the task's files. Raises as `runtimes().start`."""
    runtime = await runtimes().start(task.image or image)
    try:
        await runtime.copy_in({f"{WORK}/{path}": text.encode() for path, text in task.files.items()})
    except BaseException:
        await runtime.stop()
        raise
    return runtime


async def passed_checks(
    task: ComputerTask, left: Mapping[str, RuntimeFile], *, image: str, instead_of: Runtime | None = None
) -> float:
    """The share of checks that pass over the files that were left in /work, in a runtime that takes the place of the
    one that they were left in, if that is given: work that is done is judged before other work begins. Raises
    RuntimeLost.
    """
    name = task.image or image
    fresh = await (runtimes().start(name) if instead_of is None else runtimes().exchange(instead_of, name))
    try:
        await fresh.copy_in({f"{WORK}/{path}": file for path, file in _judged_files(task, left).items()})
        return sum([await _passes(fresh, check) for check in task.checks]) / len(task.checks)
    except (RuntimeEnded, RuntimeRefused):  # by the code that is judged
        return 0.0
    finally:
        await fresh.stop()


def _judged_files(task: ComputerTask, left: Mapping[str, RuntimeFile]) -> Mapping[str, RuntimeFile]:
    """The files that were left, without bytecode that was made: it may say something else than its source."""
    given = {path: text.encode() for path, text in task.files.items()}
    return {path: file for path, file in left.items() if not is_bytecode(path, left) or file.content == given.get(path)}


async def _passes(fresh: Runtime, check: OutputCheck) -> bool:
    await lay(fresh, {path: RuntimeFile(text.encode()) for path, text in check.files.items()})
    end = await fresh.exec(RuntimeCommand(argv=("/bin/sh", "-c", check.run), environment=_NO_BYTECODE))
    return not end.timed_out and end.stdout.decode(errors="replace").strip() == check.prints.strip()
