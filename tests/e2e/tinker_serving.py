"""`headway serve` on a tiny model, and programs of the Tinker SDK as its clients."""

import json
import os
import re
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.chaos.faults import tree
from tests.e2e.processes import Launched, Launcher, marked, until
from tests.e2e.run_files import free_ports
from tests.learner.tenants.server_process import PROGRAMS
from tests.protocol.tinker.sdk import sdk_python

NAME = "tiny/qwen"
"""Of the model: its folder below the launcher's, too."""


def started(launcher: Launcher, folder: Path, *more: str) -> tuple[Launched, dict[str, str]]:
    """The command, with more of its words, and what it tells a client to set."""
    (port,) = free_ports(1)
    options = ("--port", str(port), "--name", NAME, "--run.directory", str(folder / "runs"))
    serve = launcher("headway", "serve", str(folder / NAME), *options, *more)
    said = until(
        lambda: re.findall(r"^export (TINKER_\w+)=(\S+)$", serve.text(), re.MULTILINE),
        what="the lines for a client", timeout_s=600, during=(serve,),
    )  # fmt: skip
    until(lambda: f"base model: {NAME}\n" in serve.text(), what="the last of them", during=(serve,))
    return serve, dict(said)


@contextmanager
def client(program: str, told: dict[str, str], *arguments: str) -> Iterator["subprocess.Popen[str]"]:
    command = [str(sdk_python()), "-W", "ignore", str(PROGRAMS / program), *arguments]
    with subprocess.Popen(
        command,
        env={**os.environ, **told},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as running:
        try:
            yield running
        finally:
            running.kill()


def answers(program: str, told: dict[str, str], *arguments: str) -> Any:
    with client(program, told, *arguments) as running:
        return answer_of(running)


def answer_of(running: "subprocess.Popen[str]", *, timeout_s: float = 600) -> Any:
    said, complaints = running.communicate(timeout=timeout_s)
    assert running.returncode == 0, complaints[-3000:]
    return json.loads(said)


def kill(launcher: Launcher, name: str) -> None:
    """SIGKILL to the learner or the generator."""
    (found,) = pids(launcher, name)
    os.kill(found, signal.SIGKILL)


def pids(launcher: Launcher, name: str) -> list[int]:
    """The process that is the learner or the generator, if it lives; forks of it have its words, too."""
    found = {pid for pid, words in marked(launcher.mark).items() if f"/{name} --model" in words}
    forked = {child for pid in found for child in tree(pid)[1:]}
    return sorted(found - forked)


def is_ready(told: dict[str, str]) -> bool:
    """The learner serves."""
    try:
        urllib.request.urlopen(f"{told['TINKER_BASE_URL']}/readyz", timeout=2).close()
    except OSError:
        return False
    return True
