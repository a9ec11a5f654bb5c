"""HTTP bodies of `POST /v1/execute`: programs that run in the reward service's sandbox."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from protocol.model import WireModel

Text = Annotated[str, Field(max_length=1 << 22)]


class ExecutionLimits(WireModel):
    """What a program may take; what is not given is the service's usual. Above its maxima it is refused.

    `wall_s` is from the program's start to its end; `cpu_s` for each process; `output_bytes` for stdout and stderr
    each, of which more is cut.
    """

    wall_s: float | None = Field(default=None, gt=0)
    cpu_s: float | None = Field(default=None, gt=0)
    memory_mib: int | None = Field(default=None, ge=1)
    processes: int | None = Field(default=None, ge=1)
    output_bytes: int | None = Field(default=None, ge=1)
    disk_mib: int | None = Field(default=None, ge=1)


class ExecuteRequest(WireModel):
    """Either `code` in a `language` (`python`, or another of the service's interpreters), or a command line `argv`.

    `files` are by relative path. With a `session`, a name of the caller's, the code runs where the code of the same
    session ran before, with its variables and files; of the limits, `wall_s` and `output_bytes` are for the call, and
    the others for the whole session, as its first call says.
    """

    code: Text | None = None
    language: str = Field(default="python", min_length=1, max_length=64)
    argv: tuple[str, ...] = Field(default=(), max_length=256)
    files: dict[str, Text] = Field(default_factory=dict, max_length=256)
    stdin: Text = ""
    environment: dict[str, str] = Field(default_factory=dict, max_length=64)
    limits: ExecutionLimits = ExecutionLimits()
    session: str | None = Field(default=None, min_length=1, max_length=256)

    @model_validator(mode="after")
    def _code_or_command(self) -> Self:
        if (self.code is None) == (not self.argv):
            raise ValueError("expected either code or argv, got both or neither")
        if self.session is not None and (self.code is None or self.environment):
            raise ValueError("a session takes code, and neither argv nor environment")
        return self


class ExecuteAnswer(WireModel):
    """How it ended: by `exit_code` or by `signal`. Bytes of the output that are no UTF-8 are replaced.

    `timed_out`: it was killed at its wall-clock limit. `session_started`: there was no session of that name, so that
    no earlier state was there; `session_ended`: there is none any more.
    """

    exit_code: int | None
    signal: int | None
    stdout: str
    stderr: str
    stdout_cut: bool
    stderr_cut: bool
    timed_out: bool
    wall_s: float = Field(ge=0)
    session_started: bool = False
    session_ended: bool = False


class SessionEnded(WireModel):
    """`DELETE /v1/sessions/{name}`: whether there was one."""

    ended: bool
