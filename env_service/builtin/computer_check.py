"""Checking tasks of the environment `computer`: each is solved by its own solution, and not by doing nothing.

env-service runtime check TASKS.jsonl [--image NAME] [--images FOLDER] [--kind engine] [--socket PATH] [--user 0:0]
"""

import argparse
import asyncio
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TextIO

from pydantic import ValidationError

from env_service.builtin.computer import ComputerEnvironment, ComputerOptions, ComputerTask, opened, passed_checks
from env_service.builtin.computer_tools import WORK, told
from env_service.environments.interface import EnvironmentUnavailable
from env_service.environments.task_files import TaskFileError
from env_service.runtimes.config import ContainerEngineConfig, RuntimesConfig
from env_service.runtimes.images import HOST, ImageFault
from env_service.runtimes.interface import CommandEnd, RuntimeCommand, RuntimeEnded, RuntimeFile, RuntimeRefused
from env_service.runtimes.pool import RuntimePool, use_runtimes
from protocol.codec import describe
from services.isolation.faults import CannotIsolate

_AT_ONCE = 4


def main(words: Sequence[str], *, out: TextIO = sys.stdout) -> int:
    """Run the command; the exit code is 0, 1 if a task does not do, or 2 for what cannot be checked."""
    parser = argparse.ArgumentParser(
        prog="env-service",
        description=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("group", choices=("runtime",))
    parser.add_argument("command", choices=("check",))
    parser.add_argument("file", type=Path)
    parser.add_argument("--image", default=HOST)
    usual = RuntimesConfig()
    parser.add_argument("--images", type=Path, default=usual.folder)
    parser.add_argument("--kind", choices=("bubblewrap", "engine"), default=usual.kind)
    parser.add_argument("--socket", type=Path, default=usual.engine.socket, help="the container engine's")
    parser.add_argument("--user", default=usual.engine.user, help="user and group ids of commands in containers")
    given = parser.parse_args(words)
    try:
        given.engine = ContainerEngineConfig(socket=given.socket, user=given.user)
    except ValidationError as error:
        parser.error(describe(error))
    try:
        return asyncio.run(_checked(given, out))
    except (ImageFault, TaskFileError, CannotIsolate, EnvironmentUnavailable) as error:
        sys.stderr.write(f"env-service: {error}\n")
        return 2


async def _checked(given: argparse.Namespace, out: TextIO) -> int:
    pool = use_runtimes(RuntimePool(RuntimesConfig(kind=given.kind, folder=given.images, engine=given.engine)))
    pool.need(given.image)
    source = ComputerEnvironment.tasks(ComputerOptions(train_file=given.file))
    tasks = [ComputerTask.model_validate(source.task("train", at).data) for at in range(source.train_tasks)]
    places = asyncio.Semaphore(_AT_ONCE)

    async def one(task: ComputerTask) -> str:
        async with places:
            return await fault_of(task, image=given.image)

    try:
        faults = await asyncio.gather(*map(one, tasks))
    finally:
        await pool.close()
    for number, (task, fault) in enumerate(zip(tasks, faults, strict=True), start=1):
        if fault:
            out.write(f"{given.file}:{number}: {task.name or 'a task'}: {fault}\n")
    out.write(f"{faults.count('')} of {len(tasks)} tasks are solved by their solution, and not without\n")
    return 0 if not any(faults) else 1


async def fault_of(task: ComputerTask, *, image: str) -> str:
    """Says what is wrong with a task; empty if nothing is. Raises RuntimeLost and ImageFault."""
    try:
        _, untouched = await _worked(task, ":", image=image)
        if await passed_checks(task, untouched, image=image) == 1.0:
            return "its checks pass before anything is done"
        end, left = await _worked(task, task.solution or ":", image=image)
        passed = await passed_checks(task, left, image=image)
    except (RuntimeRefused, RuntimeEnded) as error:
        return str(error)
    if passed < 1.0:
        return f"{passed:.0%} of its checks pass after its solution, which said: {told(end)}"
    return ""


async def _worked(task: ComputerTask, lines: str, *, image: str) -> tuple[CommandEnd, Mapping[str, RuntimeFile]]:
    """The end of lines of shell, and what is in /work then. Nothing is held any more: the checks need a runtime, too,
    for which tasks beside this one may have left no other room.
    """
    runtime = await opened(task, image=image)
    try:
        end = await runtime.exec(RuntimeCommand(argv=("/bin/sh", "-ec", lines)))
        return end, await runtime.copy_out(WORK)
    finally:
        await runtime.stop()
