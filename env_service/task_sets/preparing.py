"""Computers of tasks as agents find them: made once by a task's steps, kept as a snapshot, with which each begins."""

import asyncio
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace
from weakref import WeakKeyDictionary

from env_service.runtimes.interface import Runtime, RuntimeCommand, RuntimeRefused, RuntimeSnapshot
from env_service.runtimes.pool import RuntimePool, runtimes
from env_service.task_sets.records import IMAGE_PATH, ComputerSetup, JudgedTask, TaskUnfit

_MOST_BYTES = 512 << 20
_TOLD = 1500


class _PreparedComputers:
    """Snapshots of one pool by what they were made of, the latest used last. Who comes while one is made waits."""

    def __init__(self) -> None:
        self._found: OrderedDict[str, RuntimeSnapshot] = OrderedDict()
        self._making: dict[str, asyncio.Task[RuntimeSnapshot]] = {}
        self._paths: dict[str, str] = {}

    async def path_of(self, image: str) -> str:
        """The PATH of an image, kept from the first time. Raises as `runtimes().start`."""
        if image not in self._paths:
            runtime = await runtimes().start(image)
            try:
                end = await runtime.exec(RuntimeCommand(argv=("/bin/sh", "-c", 'printf %s "$PATH"'), cwd="/"))
            finally:
                await runtime.stop()
            path = end.stdout.decode("utf-8", "surrogateescape")
            if end.exit_code != 0 or not path:
                said = end.stderr.decode(errors="replace").strip()[-_TOLD:]
                raise TaskUnfit(f"the image {image} does not say its PATH by /bin/sh: {said or 'no output'}")
            self._paths[image] = path
        return self._paths[image]

    async def of(self, setup: ComputerSetup) -> RuntimeSnapshot:
        """Raises as `prepared`."""
        key = setup.key
        if key in self._found:
            self._found.move_to_end(key)
            return self._found[key]
        making = self._making.get(key)
        if making is None or making.done() or making.get_loop() is not asyncio.get_running_loop():
            making = self._making[key] = asyncio.create_task(_made(setup))
        try:
            # Others may wait for it when this one is cancelled.
            self._found[key] = await asyncio.shield(making)
        finally:
            if making.done():
                self._making.pop(key, None)
        while len(self._found) > 1 and sum(map(_bytes_of, self._found.values())) > _MOST_BYTES:
            self._found.popitem(last=False)
        return self._found[key]


_SHELVES: WeakKeyDictionary[RuntimePool, _PreparedComputers] = WeakKeyDictionary()


async def with_image_path(task: JudgedTask) -> JudgedTask:
    """The task with the image's own PATH where its Dockerfile names that. Raises as `_PreparedComputers.path_of`."""
    setup = task.setup
    told_of = (setup.environment, *(step.environment for step in setup.steps))
    if not any(IMAGE_PATH in text for told in told_of for text in told.values()):
        return task
    path = await _SHELVES.setdefault(runtimes(), _PreparedComputers()).path_of(setup.image)

    def filled(told: Mapping[str, str]) -> dict[str, str]:
        return {name: text.replace(IMAGE_PATH, path) for name, text in told.items()}

    steps = tuple(replace(step, environment=filled(step.environment)) for step in setup.steps)
    return replace(task, setup=replace(setup, environment=filled(setup.environment), steps=steps))


async def prepared(setup: ComputerSetup) -> RuntimeSnapshot:
    """The files of a computer after its steps. Raises TaskUnfit for a step that fails, and as `runtimes().start`."""
    return await _SHELVES.setdefault(runtimes(), _PreparedComputers()).of(setup)


async def opened(setup: ComputerSetup) -> tuple[Runtime, RuntimeSnapshot]:
    """A runtime that begins so, and the files that it began with. Raises as `prepared`."""
    begun = await prepared(setup)
    return await runtimes().start(setup.image, snapshot=begun), begun


async def _made(setup: ComputerSetup) -> RuntimeSnapshot:
    runtime = await runtimes().start(setup.image)
    try:
        for step in setup.steps:
            try:
                await runtime.copy_in(step.files)
            except RuntimeRefused as refusal:
                raise TaskUnfit(f"its files do not go in: {refusal} (env-service.runtimes.limits)") from refusal
            if step.run:
                command = RuntimeCommand(
                    argv=step.run, cwd=step.cwd, environment=step.environment, wall_s=setup.timeout_s
                )
                end = await runtime.exec(command)
                if end.exit_code != 0:
                    said = (end.stdout + end.stderr).decode(errors="replace").strip()[-_TOLD:]
                    how = "takes too long" if end.timed_out else f"ends with {end.exit_code or end.signal}"
                    raise TaskUnfit(f"{step.said or step.run[-1]}: {how} in image {setup.image}: {said or 'no output'}")
        return await runtime.snapshot()
    finally:
        await runtime.stop()


def _bytes_of(snapshot: RuntimeSnapshot) -> int:
    return sum(len(content) + len(path) for _, path, _, content in snapshot.entries)
