"""`POST /v1/sessions/{id}/commands`: an agent runs commands on the computer of its task, with its session's key.

The computer is a runtime, which reaches nobody; the agent stands beside it and needs no more than HTTP. Agents of which
the class has a method `command` offer it.
"""

from typing import Protocol, runtime_checkable

from pydantic import Field

from protocol.model import WireModel

_SHELL = 'exec 2>&1; if command -v bash >/dev/null; then exec bash -c "$1"; fi; exec sh -c "$1"'


class CommandAsked(WireModel):
    """Lines for the shell of a task's computer; its bash where it has one."""

    command: str = Field(min_length=1, max_length=1 << 16, description="lines of shell")
    folder: str | None = Field(None, max_length=4096, description="where it runs; the task's folder if not given")
    environment: dict[str, str] = Field(default_factory=dict, max_length=256, description="variables that it sees, too")
    timeout_s: float | None = Field(
        None, gt=0, description="longest time in seconds, at most what the settings of runtimes say"
    )

    @property
    def argv(self) -> tuple[str, ...]:
        """The command, whose errors go where its output goes."""
        return ("/bin/sh", "-c", _SHELL, "sh", self.command)


class CommandAnswered(WireModel):
    """End of a command, as a shell tells it: `exit_code` is 128 and the signal's number where one ended it."""

    output: str = Field(description="what it printed, errors included")
    exit_code: int
    cut: bool = Field(False, description="it printed more than is kept")
    timed_out: bool = Field(False, description="it was stopped, since its time was over")
    starved: bool = Field(False, description="something was killed since there was no memory left")


@runtime_checkable
class ComputerUser(Protocol):
    """An agent whose task has a computer."""

    async def command(self, asked: CommandAsked) -> CommandAnswered:
        """Run a command there. Raises CallRefused for one that cannot be run."""
        ...
