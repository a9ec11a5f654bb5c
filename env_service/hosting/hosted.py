"""Environments that run in child processes, as the rollout loop sees them: like any other.

entry ─▶ described by a process of its own ─▶ OfferedEnvironment ─ start ─▶ HostedEnvironment ─ Seat ─▶ a child

Nothing of an isolated environment's code is loaded in this process.
"""

import logging
import os
import secrets
import subprocess
import sys
import tempfile
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from pydantic import ValidationError

from env_service.environments.imported import EnvironmentFault, NumberedTasks
from env_service.environments.interface import (
    Action,
    EnvironmentFailed,
    EnvironmentUnavailable,
    OfferedEnvironment,
    Opening,
    Step,
    Task,
    TaskSource,
)
from env_service.environments.task_configs import ClassTasks
from env_service.hosting.messages import Description, HostCall, HostReply, MakeTask, Reset, raise_fault, reply_of
from env_service.hosting.pool import HostPoolSettings, Pool
from env_service.hosting.processes import Seat, command_of, environment_of_a_child
from protocol.trajectories import Purpose
from services.worker_process import Loading

logger = logging.getLogger(__name__)

T = TypeVar("T")

_START_S = 120.0
_CLOSE_S = 10.0
_SOONER = 0.97
"""A call's time here, as part of what the rollout loop gives it: so that it is known where the code was."""


@dataclass(frozen=True, kw_only=True)
class CallLimits:
    """Longest times of a call, in seconds."""

    step_s: float
    opening_s: float


class HostedEnvironment:
    """A conversation with an environment in a child process. It leaves the process as soon as it is over."""

    def __init__(self, name: str, pool: Pool, limits: CallLimits) -> None:
        self._name = name
        self._pool = pool
        self._limits = limits
        self._about = secrets.token_hex(8)
        self._seat: Seat | None = None

    async def reset(self, task: Task, seed: int) -> Opening:
        """Raises EnvironmentFailed and EnvironmentUnavailable, as `step` does."""
        self._seat = await self._pool.take()
        reply = await self._ask(self._call("reset", reset=Reset(task=task, seed=seed)), self._limits.opening_s)
        return expected(reply.opening, "reset")

    async def step(self, action: Action) -> Step:
        reply = await self._ask(self._call("step", action=action), self._limits.step_s)
        step = expected(reply.step, "step")
        if step.ends or action.last:
            await self._close_quietly()
        return step

    async def close(self) -> None:
        """Have the environment closed, and leave the process. Once is enough."""
        seat, self._seat = self._seat, None
        if seat is None:
            return
        try:
            if seat.is_there:
                await seat.ask(self._call("close"), limit_s=_CLOSE_S)
        finally:
            await self._pool.give_back(seat)

    async def _ask(self, call: HostCall, limit_s: float) -> HostReply:
        if self._seat is None:
            raise EnvironmentFailed("nonsense", f"the environment was asked to {call.kind} after its end")
        try:
            return await self._seat.ask(call, limit_s=limit_s)
        except BaseException:
            await self._close_quietly()
            raise

    async def _close_quietly(self) -> None:
        try:
            await self.close()
        except (EnvironmentFailed, EnvironmentUnavailable) as error:
            logger.warning("environment %s could not be closed: %s", self._name, error)

    def _call(self, kind: str, *, reset: Reset | None = None, action: Action | None = None) -> HostCall:
        given = {"kind": kind, "name": self._name, "about": self._about, "reset": reset, "action": action}
        return HostCall.model_validate(given)


class HostedTasks:
    """The tasks of a class that has its own, made in a child process."""

    def __init__(self, name: str, pool: Pool, description: Description, *, limit_s: float) -> None:
        self._name = name
        self._pool = pool
        self._limit_s = limit_s
        self.train_tasks = description.train_tasks
        self.evaluation_tasks = description.evaluation_tasks

    async def task(self, purpose: Purpose, index: int) -> Task:
        """Raises EnvironmentFailed and EnvironmentUnavailable."""
        call = HostCall(kind="task", name=self._name, task=MakeTask(purpose=purpose, index=index))
        reply = await self._pool.ask_for_tasks(call, limit_s=self._limit_s)
        return expected(reply.task, "task")


class Hosting:
    """The child processes of an env_service; an async context manager. What is `offered` before it is entered can be
    used inside of it. `environment_timeout_s` is the rollout loop's.
    """

    def __init__(self, *, workers: int, environment_timeout_s: float) -> None:
        self._environment_timeout_s = environment_timeout_s
        self._sharing: list[ClassTasks] = []
        self._workers = Pool(self._sharing, HostPoolSettings(most=workers, shared=True))
        self._pools: dict[str, Pool] = {}
        self._stack = AsyncExitStack()

    def offered(self, entry: ClassTasks) -> OfferedEnvironment:
        """The environment of an entry that is isolated. Raises EnvironmentFault."""
        described = description_of_entry(entry)
        if described.rules.branch_after:
            raise EnvironmentFault(
                f"environment {entry.name} ({entry.path}): rules: branch_after is {list(described.rules.branch_after)} "
                f'and isolation "{entry.isolation}": an environment in another process cannot be forked; set isolation '
                'to "none", or leave branch_after out'
            )
        if described.makes_room:
            raise EnvironmentFault(
                f"environment {entry.name} ({entry.path}): the class has a method on_full, and isolation is "
                f'"{entry.isolation}": one in another process cannot be asked; set isolation to "none", or leave it out'
            )
        pool = self._pool_of(entry)
        timeout_s = self._environment_timeout_s
        limits = CallLimits(
            step_s=_SOONER * (described.rules.step_timeout_s or timeout_s), opening_s=_SOONER * timeout_s
        )
        numbered = NumberedTasks(
            seed=entry.seed, train_tasks=entry.train_tasks, evaluation_tasks=entry.evaluation_tasks
        )
        own = HostedTasks(entry.name, pool, described, limit_s=limits.opening_s)
        tasks: TaskSource = own if described.own_tasks else numbered
        return OfferedEnvironment(
            name=entry.name,
            tasks=tasks,
            start=partial(HostedEnvironment, entry.name, pool, limits),
            rules=described.rules,
            roles=described.roles,
            metrics=described.metrics,
            template_arguments=entry.chat_template_kwargs,
        )

    @property
    def process_ids(self) -> tuple[int, ...]:
        """Of all children that run."""
        return tuple(one for pool in (self._workers, *self._pools.values()) for one in pool.process_ids)

    async def __aenter__(self) -> Self:
        for pool in (*([self._workers] if self._sharing else []), *self._pools.values()):
            await self._stack.enter_async_context(pool)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    def _pool_of(self, entry: ClassTasks) -> Pool:
        alone = _alone(entry)
        if entry.isolation == "workers":
            self._sharing.append(alone)
            return self._workers
        settings = HostPoolSettings(most=entry.processes, shared=False, spares=entry.spares, fresh=entry.fresh)
        self._pools[entry.name] = Pool((alone,), settings)
        return self._pools[entry.name]


def expected(given: T | None, what: str) -> T:
    """The content of a reply. Raises EnvironmentFailed if it holds something else."""
    if given is None:
        raise EnvironmentFailed("nonsense", f"the environment's process does not answer what was asked: {what}")
    return given


def description_of_entry(entry: ClassTasks) -> Description:
    """The description of an entry's environment, in a process that ends with it. Raises EnvironmentFault."""
    alone = _alone(entry)
    with tempfile.TemporaryDirectory() as folder:
        command = (sys.executable, "-P", "-m", *command_of((alone,), Path(folder) / "stacks.txt"), str(os.getpid()))
        line = HostCall(kind="describe", name=entry.name).model_dump_json().encode() + b"\n"
        try:
            done = subprocess.run(
                command, input=line, stdout=subprocess.PIPE, env=environment_of_a_child(), timeout=_START_S, check=False
            )
        except subprocess.TimeoutExpired:
            raise EnvironmentFault(f"environment {entry.name}: its process did not start in {_START_S:g} s") from None
    return _described(entry, done)


def _described(entry: ClassTasks, done: "subprocess.CompletedProcess[bytes]") -> Description:
    lines = done.stdout.splitlines()
    try:
        problem = Loading.model_validate_json(lines[0]).problem
        if problem:
            raise EnvironmentFault(problem)
        reply = reply_of(lines[1])
        raise_fault(reply)
        return expected(reply.description, "describe")
    except (ValidationError, IndexError, EnvironmentFailed) as error:
        raise EnvironmentFault(
            f"environment {entry.name} ({entry.path}): its process ended with {done.returncode} before it could be "
            f"described: {error}; what it wrote is above"
        ) from error


def _alone(entry: ClassTasks) -> ClassTasks:
    """As the child sees it."""
    return entry.model_copy(update={"isolation": "none"})
