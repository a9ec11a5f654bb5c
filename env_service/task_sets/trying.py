"""Trying tasks before they are trained on: the published solution has to be rewarded, and doing nothing must not be.

What was found is kept in a file beside the tasks, by a hash of each task. Tasks that failed are left out from then on,
until they are changed.
"""

import asyncio
import hashlib
import json
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from env_service.environments.interface import Task
from env_service.environments.task_files import TaskFileError, TaskLists
from env_service.runtimes.interface import RuntimeEnded, RuntimeRefused, RuntimeSnapshot
from env_service.task_sets.judging import WorkVerdict, has_passed, judged, lay, run_script, said_of
from env_service.task_sets.preparing import opened, with_image_path
from env_service.task_sets.records import JudgedTask, NamedTests, TaskUnfit
from protocol.trajectories import Purpose

logger = logging.getLogger(__name__)

_AT_ONCE = 4
_NAMED = 8


@dataclass(frozen=True, kw_only=True)
class SetTask:
    """A task of a set as it is listed: where it is written, and the hash by which it is known again."""

    purpose: Purpose
    where: str
    key: str
    task: Task


class TaskSet(TaskLists):
    """The tasks of a set that are fit, for training and for evaluation. `refused` says why others are not.

    Raises TaskFileError if none is left for training.
    """

    def __init__(self, every: Sequence[SetTask], *, refused: Sequence[str], tried: Mapping[Purpose, Path]) -> None:
        found = {purpose: read_tried(path) for purpose, path in tried.items()}
        self.every = tuple(every)
        self.refused = tuple(refused)
        self._files = dict(tried)
        fit: dict[Purpose, list[Task]] = {"train": [], "evaluate": []}
        faults = list(refused)
        for each in every:
            fault = found.get(each.purpose, {}).get(each.key, "")
            if fault:
                faults.append(f"{each.where}: {fault.splitlines()[0]}")
            else:
                fit[each.purpose].append(each.task)
        for fault in faults:
            logger.warning("left out: %s", fault)
        if not fit["train"]:
            raise TaskFileError("no task is fit: " + ("; ".join(faults[:3]) or "there are none"))
        super().__init__(fit["train"], fit["evaluate"])

    async def try_all(self, fault: Callable[[Task], Awaitable[str]]) -> list[tuple[SetTask, str]]:
        """Try every task, those that had been left out too, and keep what was found."""
        places = asyncio.Semaphore(_AT_ONCE)

        async def one(each: SetTask) -> str:
            async with places:
                return await fault(each.task)

        faults = await asyncio.gather(*map(one, self.every))
        ended = list(zip(self.every, faults, strict=True))
        for purpose, path in self._files.items():
            write_tried(path, {each.key: said for each, said in ended if each.purpose == purpose})
        return ended


def read_tried(path: Path) -> Mapping[str, str]:
    """Faults by hash, empty ones of tasks that are fit. Raises TaskFileError for a file that is not such a one."""
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        return {str(key): str(fault) for key, fault in told["faults"].items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise TaskFileError(f"{path} cannot be read: {error}; remove it, and try the tasks again") from error


def write_tried(path: Path, faults: Mapping[str, str]) -> None:
    """Write such a file."""
    new = path.with_name(f".{path.name}.new")
    new.write_text(json.dumps({"faults": faults}, indent=1) + "\n", encoding="utf-8")
    new.replace(path)


def hash_of(*parts: str | bytes) -> str:
    """A hash of texts and bytes in order."""
    whole = hashlib.sha256()
    for part in parts:
        content = part.encode("utf-8", "surrogateescape") if isinstance(part, str) else part
        whole.update(f"{len(content)}\0".encode() + content)
    return whole.hexdigest()[:32]


async def fault_of(task: JudgedTask) -> str:
    """Says what is wrong with a task; empty if nothing is. Raises RuntimeLost, RuntimesBusy and ImageFault."""
    if task.solution is None:
        return "it has no solution, so that nobody knows whether it can be done"
    try:
        task = await with_image_path(task)
        runtime, before = await opened(task.setup)
        try:
            idle = await judged(task, before, await runtime.snapshot(), instead_of=runtime)
        finally:
            await runtime.stop()
        if idle.reward > 0.0:
            return f"its tests give {idle.reward:g} before anything is done"
        after, said = await _solved(task)
        verdict = await judged(task, before, after)
    except (TaskUnfit, RuntimeRefused, RuntimeEnded) as error:
        return str(error)
    return "" if verdict.reward >= 1.0 else _complaint(task, verdict, said)


async def _solved(task: JudgedTask) -> tuple[RuntimeSnapshot, str]:
    """The files after the solution, and what that said."""
    assert task.solution is not None
    runtime, _ = await opened(task.setup)
    said = ""
    try:
        await lay(runtime, task.solution.files)
        if task.solution.script:
            environment = {**task.setup.environment, **task.solution.environment}
            end = await run_script(
                runtime,
                task.solution.script,
                place="/solution/solve.sh",
                cwd=task.setup.cwd,
                environment=environment,
                programs=task.solution.programs,
            )
            said = said_of(end)
        return await runtime.snapshot(), said
    finally:
        await runtime.stop()


def _complaint(task: JudgedTask, verdict: WorkVerdict, said: str) -> str:
    parts = [f"its tests give {verdict.reward:g} after its solution"]
    altered = isinstance(task.tests, NamedTests) and task.tests.altered
    if verdict.tampered:
        parts = [
            "tests that have to fail do not fail among its tests after its solution, so that these prove nothing"
            + (": if tests with other values expected pass by right, set controls = 'added'" if altered else "")
        ]
    if isinstance(task.tests, NamedTests) and not verdict.tampered:
        lacking = [name for name in task.tests.all if not has_passed(name, verdict.outcomes)]
        told = [f"{name} ({verdict.outcomes.get(name, 'not run')})" for name in lacking[:_NAMED]]
        parts.append(f"{len(lacking)} of {len(task.tests.all)} do not pass: {', '.join(told)}")
    if verdict.work.kept_out:
        parts.append(f"not carried over (allow): {', '.join(verdict.work.kept_out[:_NAMED])}")
    laid = ("/solution", *(task.solution.files if task.solution else ()))
    outside = [path for path in verdict.work.outside if not path.startswith(laid)]
    if outside:
        parts.append(f"changed outside of {', '.join(task.carried)} (carry): {', '.join(outside[:_NAMED])}")
    shown = [text for text in (said, verdict.said) if text]
    return "; ".join(parts) + "".join(f"\n{text}" for text in shown)
