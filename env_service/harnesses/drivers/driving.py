"""The part that all drivers share: the task, its computer, an agent of the user's, and the answer.

It runs in the virtual environment of a harness, and uses the standard library alone.
"""

import ctypes
import importlib.util
import json
import os
import select
import signal
import subprocess
import sys
import time
import urllib.request
from typing import Any

_PR_SET_PDEATHSIG = 1
# The end of a program's output is read, up to 64 KiB.
_MAX_ANSWER = 60_000
# Of a command, where the harness runs in its task's computer.
_MAX_OUTPUT = 64 << 10
_LOOK_S = 0.05
_SHELL = 'if command -v bash >/dev/null; then exec bash -c "$1"; fi; exec sh -c "$1"'
_OWN_VARIABLES = ("OPENAI_", "ANTHROPIC_", "AGENT_")


class GivenTask:
    """A task as it stands on the standard input. `folder` is that of its computer, None if it has none."""

    def __init__(self) -> None:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        given = json.loads(sys.stdin.readline())
        self.prompt: str = given["prompt"]
        self.instructions: str = given["instructions"]
        self.data: dict[str, Any] = given["data"]
        self.folder: str | None = given["folder"]
        self.max_turns: int = given["max_turns"]
        self.settings: dict[str, Any] = given["settings"]
        self.model: str = os.environ["AGENT_MODEL"]
        self._agent_file: str | None = given["agent_file"]
        self._agent_name: str = given["agent_name"]

    def agent(self) -> Any:
        """The agent of the user's file, by its name there; None without a file. Raises SystemExit if it has none."""
        if self._agent_file is None:
            return None
        sys.path.insert(0, os.path.dirname(self._agent_file))
        spec = importlib.util.spec_from_file_location("agent_of_the_user", self._agent_file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        found = getattr(module, self._agent_name, None)
        if found is None:
            sys.exit(f"{self._agent_file} has no {self._agent_name!r}, which agent_name names")
        return found


def command(
    line: str, *, timeout_s: float | None = None, folder: str | None = None, environment: dict[str, str] | None = None
) -> dict[str, Any]:
    """Run a line of shell on the task's computer: `output`, `exit_code`, `timed_out`, `cut`, `starved`."""
    if "AGENT_INSIDE_COMMAND_S" in os.environ:  # which is this one
        given_s = float(os.environ["AGENT_INSIDE_COMMAND_S"])
        return _command_here(line, given_s if timeout_s is None else min(timeout_s, given_s), folder, environment or {})
    asked = {"command": line, "timeout_s": timeout_s, "folder": folder, "environment": environment or {}}
    body = json.dumps(asked).encode()
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
    request = urllib.request.Request(os.environ["AGENT_COMMANDS_URL"], body, headers)
    # No proxy stands between a harness and its session.
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request) as answer:
        told: dict[str, Any] = json.load(answer)
    return told


def _command_here(line: str, timeout_s: float, folder: str | None, environment: dict[str, str]) -> dict[str, Any]:
    # A session's variables are the harness's own business.
    environ = {name: text for name, text in os.environ.items() if not name.startswith(_OWN_VARIABLES)}
    process = subprocess.Popen(
        ["/bin/sh", "-c", _SHELL, "sh", line], cwd=folder, env={**environ, **environment}, start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    deadline = time.monotonic() + timeout_s
    output, cut = _output_of(process, deadline)
    try:
        code, timed_out = process.wait(max(0.0, deadline - time.monotonic())), False
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        code, timed_out = process.wait(), True
    return {
        "output": output.decode(errors="replace"),
        "exit_code": code if code >= 0 else 128 - code,
        "timed_out": timed_out,
        "cut": cut,
        "starved": False,
    }


def _output_of(process: "subprocess.Popen[bytes]", deadline: float) -> tuple[bytes, bool]:
    """The beginning of what it prints, and if there was more. What it leaves behind may go on to print."""
    assert process.stdout is not None
    kept, cut = b"", False
    with process.stdout as stream:
        while time.monotonic() < deadline:
            ended = process.poll() is not None
            if not select.select([stream], [], [], 0.0 if ended else _LOOK_S)[0]:
                if ended:
                    break
                continue
            part = os.read(stream.fileno(), _MAX_OUTPUT)
            if not part:
                break
            cut = cut or len(kept) + len(part) > _MAX_OUTPUT
            kept = (kept + part)[:_MAX_OUTPUT]
    return kept, cut


def shell(line: str) -> str:
    """Output of a line of shell on the task's computer, and how it ends."""
    end = command(line)
    printed = end["output"].rstrip()
    if len(printed) > 10_000:
        printed = f"{printed[:5000]}\n… {len(printed) - 10_000} characters are left out …\n{printed[-5000:]}"
    if end["timed_out"]:
        return f"{printed}\nstopped: its time was over".strip()
    return printed if end["exit_code"] == 0 else f"{printed}\nexit code {end['exit_code']}".strip()


def finish(answer: object, *, stop: str = "finished") -> None:
    """Give the answer, as the last line of the output. The verifier, or whoever judges the computer, says the worth."""
    text = answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False, default=str)
    while len(json.dumps(text)) > _MAX_ANSWER:
        text = text[: len(text) // 2]
    sys.stdout.write("\n" + json.dumps({"reward": 0.0, "answer": text, "stop": stop}) + "\n")
    sys.stdout.flush()
