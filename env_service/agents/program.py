"""`source = "agent"`: the user's own agent, a function, a program, or one that comes from outside.

    options = { run = "my_agent:run" }               async def run(task, client) -> float
    options = { command = ["python", "agent.py"] }   a process for each trajectory
    options = {}                                     agents ask for tasks by POST /v1/sessions

A function runs on the users' event loop, in a thread beside the process's: it does not stop the process. A
program is a process group of its own: whatever it started ends with its trajectory.
"""

import asyncio
import importlib
import inspect
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, JsonValue, model_validator

from env_service.agents.processes import Confinement, ProgramRun
from env_service.environments.imported import NumberedTasks
from env_service.environments.interface import (
    AgentClient,
    AgentResult,
    EnvironmentFailed,
    EnvironmentUnavailable,
    Task,
    TaskSource,
    Verification,
    text_of,
)
from env_service.environments.task_files import OBJECT, tasks_of_files
from protocol.trajectories import Purpose
from services.config.models import ConfigModel
from services.user_code import exit_at_import
from services.user_loop import TookTooLong, user_loop

_AFTER_REWARD_S = 10.0
"""In which a program ends once its reward is posted; less than what its session waits for."""

Function = Callable[[Task, AgentClient], Awaitable[AgentResult | float | None]]


class AgentOptions(ConfigModel):
    """An agent's code, its tasks, and its bounds."""

    run: str | None = Field(
        None,
        pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$",
        description="package.module:function, an `async def run(task, client) -> float`",
    )
    command: tuple[Annotated[str, Field(min_length=1)], ...] | None = Field(
        None, min_length=1, description="program and its arguments, started for each trajectory"
    )
    environ: dict[str, str] = Field(default_factory=dict, description="what a program finds in its environment, too")
    confinement: Confinement = Confinement()
    timeout_s: float | None = Field(
        None, gt=0, description="longest time of the function or program; a trajectory that takes longer is spoilt"
    )
    claim_s: float = Field(600.0, gt=0, description="how long a task waits for an agent from outside, in seconds")
    train_file: Path | None = Field(None, description="tasks: a JSON object a line, which is the task's `data`")
    evaluation_file: Path | None = Field(None, description="tasks of evaluation, in the same form")
    train_tasks: int = Field(10_000, ge=1, le=100_000_000, description="number of tasks, if there is no file")
    evaluation_tasks: int = Field(200, ge=0, le=1_000_000, description="the same for evaluation")
    verifier: str | None = Field(
        None,
        min_length=1,
        max_length=256,
        description="who judges the policy's last answer, with `arguments` or `answer` of the task's line; what the "
        "agent says itself is added",
    )

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if self.run is not None and self.command is not None:
            raise ValueError("run and command are both set; an agent is a function or a program")
        if self.evaluation_file is not None and self.train_file is None:
            raise ValueError("evaluation_file is set, and train_file is not")
        return self


class AgentProgram:
    """An agent of one's own, which asks the policy through an address and a key."""

    def __init__(self, options: AgentOptions) -> None:
        self._options = options
        self._function = None if options.run is None else function_at(options.run)

    @staticmethod
    def tasks(options: AgentOptions) -> TaskSource:
        """Tasks of the files, or numbered ones."""
        if options.train_file is None:
            return NumberedTasks(seed=None, train_tasks=options.train_tasks, evaluation_tasks=options.evaluation_tasks)
        return tasks_of_files(options.train_file, options.evaluation_file, _of_line)

    async def run(self, task: Task, client: AgentClient) -> AgentResult | float | None:
        """Let it run; what it is worth, None if it did not say. Raises EnvironmentFailed for one that takes too long,
        and what it raises itself.
        """
        # A function's time is counted in its loop: not while others hold that.
        limit = asyncio.timeout(None if self._function is not None else self._options.timeout_s)
        try:
            async with limit:
                result = await _ran_or_posted(self._ran(task, client), client)
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise self._not_done() from error
        return self._judged(result, task)

    async def _ran(self, task: Task, client: AgentClient) -> AgentResult | float | None:
        options = self._options
        if self._function is not None:
            return await self._called(partial(self._function, task, client))
        if options.command is not None:
            run = ProgramRun(command=options.command, environ=options.environ, confinement=options.confinement)
            return await run.result(task_json(task), client)
        return await self._from_outside(client)

    async def _called(
        self, function: Callable[[], Awaitable[AgentResult | float | None]]
    ) -> AgentResult | float | None:
        limit_s = self._options.timeout_s
        try:
            return await user_loop().run(function, limit_s=limit_s)
        except TookTooLong as error:
            raise self._not_done() from error

    def _not_done(self) -> EnvironmentFailed:
        return EnvironmentFailed("hung", f"the agent was not done within {self._options.timeout_s:g} s")

    async def _from_outside(self, client: AgentClient) -> AgentResult:
        try:
            async with asyncio.timeout(self._options.claim_s):
                await client.offer()
        except TimeoutError as error:
            raise EnvironmentUnavailable(f"no agent asked for the task in {self._options.claim_s:g} s") from error
        return await client.posted()

    def _judged(self, returned: AgentResult | float | None, task: Task) -> AgentResult | float | None:
        if self._options.verifier is None:
            return returned
        result = returned if isinstance(returned, AgentResult) else AgentResult(0.0 if returned is None else returned)
        if result.verification is not None:
            return result
        arguments = task.data.get("arguments")
        answer = {"answer": task.data["answer"]} if "answer" in task.data else {}
        given = {**answer, **(arguments if isinstance(arguments, Mapping) else {})}
        verification = Verification(self._options.verifier, given)
        return replace(result, verification=verification)


async def _ran_or_posted(
    running: Awaitable[AgentResult | float | None], client: AgentClient
) -> AgentResult | float | None:
    """The result of an agent; the posted one of an agent that does not end after it. Raises what the agent raises."""
    ran, posted = asyncio.ensure_future(running), asyncio.ensure_future(client.posted())
    try:
        await asyncio.wait({ran, posted}, return_when=asyncio.FIRST_COMPLETED)
        if not ran.done():
            await asyncio.wait({ran}, timeout=_AFTER_REWARD_S)
        return await (ran if ran.done() else posted)
    finally:
        ran.cancel()
        posted.cancel()
        await asyncio.gather(ran, posted, return_exceptions=True)


def task_json(task: Task) -> dict[str, JsonValue]:
    """A task as agents outside of the process see it."""
    return {"prompt": text_of(task.prompt), "seed": task.seed, "purpose": task.purpose, "data": dict(task.data)}


def function_at(path: str) -> Function:
    """The function of an import path. Raises ValueError."""
    module_name, _, name = path.partition(":")
    try:
        found: Any = getattr(importlib.import_module(module_name), name, None)
    except ImportError as error:
        raise ValueError(
            f"run: cannot import {module_name!r}: {error}; is it beside run.toml, installed, or its folder on "
            "PYTHONPATH?"
        ) from error
    except SystemExit as error:
        raise ValueError(f"run: {module_name!r} {exit_at_import(error)}") from error
    except Exception as error:  # whatever a module of the user's raises when it is loaded
        raise ValueError(f"run: {module_name!r} raises when imported: {error!r}") from error
    if not inspect.iscoroutinefunction(found):
        raise ValueError(f"run: {path} is no async function; expected `async def {name}(task, client) -> float`")
    if len(inspect.signature(found).parameters) != 2:
        raise ValueError(f"run: {path} takes {inspect.signature(found)}; expected (task, client)")
    function: Function = found
    return function


def _of_line(number: int, text: str, purpose: Purpose) -> Task:
    return Task(seed=number, data=OBJECT.validate_json(text), purpose=purpose)
