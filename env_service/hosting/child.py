"""A process that runs environments: `python -m env_service.hosting.child STACKS_FILE ENTRIES_AS_JSON PARENT_PID`.

It answers calls from its standard input on its standard output, one at a time (messages.py). On SIGUSR1, and when the
interpreter itself dies, it writes to STACKS_FILE where its code was.
"""

import asyncio
import faulthandler
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from env_service.environments.imported import EnvironmentFault, class_at, offered
from env_service.environments.interface import Environment, OfferedEnvironment
from env_service.environments.task_configs import ClassTasks
from env_service.hosting.messages import (
    HostCall,
    HostReply,
    description_of,
    fault_of,
    line_of,
    opening_reply,
    resolved,
    step_reply,
)
from env_service.runtimes.config import RuntimesConfig
from env_service.runtimes.pool import RuntimePool, use_runtimes
from services.process import describe_error
from services.worker_process import MAX_LINE_BYTES, serve_lines

ENTRIES = TypeAdapter(tuple[ClassTasks, ...])
_NO_RUNTIMES = 'it is isolated; set isolation = "none", since whatever is run there is isolated by the runtime'


class HostedEnvironments:
    """The environments of some entries, and the conversations with them."""

    def __init__(self, entries: Sequence[ClassTasks]) -> None:
        self._offered = {entry.name: offered(entry) for entry in entries}
        self._own_tasks = {entry.name: hasattr(class_at(entry), "tasks") for entry in entries}
        for entry in entries:
            made = self._offered[entry.name]
            if made.agent is not None or made.players:
                what = "a game of several players" if made.players else "an agent"
                raise EnvironmentFault(
                    f"environment {entry.name} ({entry.path}) is {what}: "
                    '`isolation` is for classes with reset and step and one conversation; set isolation = "none"'
                )
        self._conversations: dict[str, Environment] = {}
        self._runner = asyncio.Runner()

    def answer(self, line: bytes) -> bytes:
        """The reply to a call, both as a line. Raises nothing that an environment raises."""
        try:
            reply = self._runner.run(self._reply(HostCall.model_validate_json(line)))
        except (Exception, SystemExit, asyncio.CancelledError) as error:  # noqa: BLE001 - code of others, here and below
            reply = HostReply(fault=fault_of(error))
        return line_of(reply, most_bytes=MAX_LINE_BYTES)

    async def _reply(self, call: HostCall) -> HostReply:
        environment = self._offered[call.name]
        match call.kind:
            case "describe":
                return HostReply(description=description_of(environment, own_tasks=self._own_tasks[call.name]))
            case "task":
                assert call.task is not None, "a call for a task says which"
                return HostReply(task=await resolved(environment.tasks.task(call.task.purpose, call.task.index)))
            case "reset":
                return await self._reset(environment, call)
            case "step":
                return await self._step(call)
            case "close":
                await self._close(call.about)
                return HostReply()

    async def _reset(self, environment: OfferedEnvironment, call: HostCall) -> HostReply:
        assert call.reset is not None, "a call to reset says with what"
        made = self._conversations[call.about] = environment.start()
        return opening_reply(await resolved(made.reset(call.reset.task, call.reset.seed)))

    async def _step(self, call: HostCall) -> HostReply:
        assert call.action is not None, "a call to step says what was done"
        return step_reply(await resolved(self._conversations[call.about].step(call.action)))

    async def _close(self, about: str) -> None:
        made = self._conversations.pop(about, None)
        close = getattr(made, "close", None)
        if callable(close):
            await resolved(close())


def main() -> None:
    """Load the environments, say whether that went well, then answer calls until the input ends."""
    stacks, entries, parent = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    # Open for as long as the process lives: the handlers below write to it.
    file = stacks.open("w")
    faulthandler.enable(file)
    faulthandler.register(signal.SIGUSR1, file, all_threads=False)
    try:
        given = ENTRIES.validate_json(entries)
    except ValidationError as error:
        raise SystemExit(f"the entries of environments cannot be read: {error}") from error
    use_runtimes(RuntimePool(RuntimesConfig(kind="off"), without=_NO_RUNTIMES))
    serve_lines(
        parent=parent,
        load=lambda: HostedEnvironments(given),
        answer=lambda stage, line: stage.answer(line),
        describe=_problem,
    )


def _problem(error: Exception) -> str:
    return str(error) if isinstance(error, EnvironmentFault) else describe_error(error)


if __name__ == "__main__":
    main()
