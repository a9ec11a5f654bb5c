"""The server of tests in a process of its own, which can be killed and started again on its folder and port."""

import json
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

from tests.protocol.tinker.sdk import sdk_python

ROOT = Path(__file__).parents[3]
PROGRAMS = Path(__file__).parent / "sdk_programs"
_UP_S = 120.0


class ServerProcess:
    """`arguments` are those of serve.py. Its log is in the folder."""

    def __init__(self, folder: Path, *arguments: object) -> None:
        self._folder, self._arguments = folder, [str(argument) for argument in arguments]
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = int(free.getsockname()[1])
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        self._folder.mkdir(exist_ok=True)
        command = [sys.executable, "-m", "tests.learner.tenants.serve", str(self._folder / "state"), "--port"]
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [*command, str(self.port), *self._arguments], cwd=ROOT, stdout=log, stderr=log
            )
        end = time.monotonic() + _UP_S
        while not self._answers():
            assert time.monotonic() < end, self.log()
            assert self._process.poll() is None, self.log()
            time.sleep(0.05)

    def kill(self) -> None:
        """SIGKILL."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def log(self) -> str:
        return (self._folder / "log").read_text()[-3000:]

    def _answers(self) -> bool:
        try:
            urllib.request.urlopen(f"{self.url}/healthz", timeout=1).close()
        except OSError:
            return False
        return True


@contextmanager
def serving(folder: Path, *arguments: object) -> Iterator[ServerProcess]:
    """A server that answers."""
    server = ServerProcess(folder, *arguments)
    try:
        server.start()
        yield server
    finally:
        server.kill()


def run_program(name: str, server: ServerProcess, *arguments: object, timeout_s: float = 240) -> Any:
    """The JSON that a program of the SDK prints."""
    command: Sequence[str | Path] = [sdk_python(), PROGRAMS / name, server.url, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert done.returncode == 0, f"{done.stderr[-3000:]}\n{server.log()}"
    return json.loads(done.stdout)


@contextmanager
def killed_again_and_again(server: ServerProcess, *, kills: int, seed: int) -> Iterator[list[int]]:
    """Kills the server at random moments while the body runs, and starts it again; the list gets an item each time."""
    ended, random, done = threading.Event(), Random(seed), list[int]()

    def disturb() -> None:
        while len(done) < kills and not ended.wait(random.uniform(0.3, 1.5)):
            server.kill()
            server.start()
            done.append(server.port)

    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        yield done
    finally:
        ended.set()
        thread.join()
