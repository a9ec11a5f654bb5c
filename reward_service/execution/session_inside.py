"""Runs a session's code inside its sandbox: reads a call a line and answers each with a line, in JSON.

Python code runs in one namespace. Shell code runs in one shell, which gets each call's code as a file to source. What a
call writes goes to files, and from there into its answer. It stands alone: of this package it is all that is inside.
"""

import contextlib
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from typing import Any

_FOLDER = "/tmp/session"
_WRITE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND

# The code of a call; its exit code, and whether no more code can run.
_Run = Callable[[str], tuple[int, bool]]


def main() -> None:
    """Answer calls until there are none."""
    language, command, most = sys.argv[1], sys.argv[2], int(sys.argv[3])
    os.makedirs(_FOLDER, exist_ok=True)
    calls, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    run = _python() if language == "python" else _shell(command)
    for line in calls:
        answers.write(json.dumps(_answer(json.loads(line), run, most=most)).encode() + b"\n")
        answers.flush()


def _answer(call: dict[str, Any], run: _Run, *, most: int) -> dict[str, object]:
    try:
        _write_files({**call["files"], _path("stdin"): call["stdin"]})
        code, over = run(call["code"])
        written = {name: _read(name, most=most) for name in ("stdout", "stderr")}
        return {"exit_code": code, "over": over, **written}
    except (OSError, ValueError) as error:  # a folder of that name, a full disk: for the caller, whose session goes on
        said = f"a file of the call cannot be written or read: {error}\n".encode(errors="replace")
        return {"exit_code": 1, "over": False, "stdout": "", "stderr": said[: most + 1].decode("latin-1")}


def _write_files(files: dict[str, str]) -> None:
    for name, content in files.items():
        if os.path.dirname(name):
            os.makedirs(os.path.dirname(name), exist_ok=True)
        with open(name, "w") as file:
            file.write(content)


def _path(name: str) -> str:
    return os.path.join(_FOLDER, name)


def _read(name: str, *, most: int) -> str:
    """The output of a call, and a byte more than it may, by which the service sees that there is more."""
    with open(_path(name), "rb") as file:
        return file.read(most + 1).decode("latin-1")


def _python() -> _Run:
    variables: dict[str, object] = {"__name__": "__main__", "__builtins__": __builtins__}
    del sys.argv[1:]
    sys.path[0] = ""

    def run(code: str) -> tuple[int, bool]:
        for number, (name, flags) in enumerate((("stdin", os.O_RDONLY), ("stdout", _WRITE), ("stderr", _WRITE))):
            handle = os.open(_path(name), flags, 0o600)
            os.dup2(handle, number)
            os.close(handle)
        sys.stdin = os.fdopen(0, closefd=False)
        try:
            exec(compile(code, "<session>", "exec"), variables)
        except BaseException as error:  # noqa: BLE001  whatever the code raises ends this call and not the session
            _flush()
            return _exit_code(error), False
        finally:
            _flush()
        return 0, False

    return run


def _flush() -> None:
    """Flush the output. A stream for which that fails, since the code has closed it or filled the disk, is replaced."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        try:
            getattr(sys, name).flush()
        except Exception:  # noqa: BLE001  it may be any object that the code has put there
            setattr(sys, name, os.fdopen(number, "w", errors="backslashreplace", closefd=False))


def _exit_code(error: BaseException) -> int:
    if not isinstance(error, SystemExit):
        trace = error.__traceback__
        with contextlib.suppress(Exception):  # the disk may be full
            traceback.print_exception(type(error), error, trace.tb_next if trace is not None else None)
        return 1
    if isinstance(error.code, str):
        with contextlib.suppress(Exception):
            sys.stderr.write(error.code + "\n")
    return error.code & 255 if isinstance(error.code, int) else int(error.code is not None)


def _shell(command: str) -> _Run:
    reading, writing = os.pipe()
    shell = subprocess.Popen([command], stdin=subprocess.PIPE, stdout=2, stderr=2, pass_fds=[writing])
    os.close(writing)
    statuses = os.fdopen(reading, "rb")

    def run(code: str) -> tuple[int, bool]:
        assert shell.stdin is not None
        _write_files({_path("code"): code, _path("stdout"): "", _path("stderr"): ""})
        redirected = f"<{_path('stdin')} >>{_path('stdout')} 2>>{_path('stderr')}"
        with contextlib.suppress(BrokenPipeError):
            shell.stdin.write(f". {_path('code')} {redirected}; echo $? >&{writing}\n".encode())
            shell.stdin.flush()
        status = statuses.readline().strip()
        if status.isdigit():
            return int(status) & 255, False
        ended = shell.wait()
        return (ended if ended >= 0 else 128 - ended), True

    return run


if __name__ == "__main__":
    main()
