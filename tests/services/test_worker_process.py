"""A worker process: how it begins, how it ends, and that what its code prints does not break the exchange."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from services.worker_process import WorkerDied, WorkerProcess, WorkerUnavailable, worker_environment
from tests.env_service.peers import eventually

CHILD = """
import os, signal, sys
from services.worker_process import serve_lines

def load():
    print("loading")
    if sys.argv[1] == "broken":
        raise ValueError("no such thing\\nat all")
    return {}

def answer(loaded, line):
    word = line.decode().strip()
    print("heard", word)
    if word == "leave":
        os._exit(3)
    if word.startswith("leave a child "):
        import subprocess
        sleeper = subprocess.Popen(["sleep", "100"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        open(word.removeprefix("leave a child "), "w").write(str(sleeper.pid))
        os._exit(4)
    if word == "abort":
        os.kill(os.getpid(), signal.SIGKILL)
    if word == "closes":
        raise KeyError(word)
    return word.upper().encode()

serve_lines(parent=int(sys.argv[2]), load=load, answer=answer)
"""


def worker(folder: Path, how: str = "well") -> WorkerProcess:
    (folder / "child_of_a_test.py").write_text(CHILD)
    environment = worker_environment(inherit=False)
    environment["PYTHONPATH"] += f":{folder}"
    return WorkerProcess(command=("child_of_a_test", how), environment=environment, start_timeout_s=60)


@pytest.fixture
async def ready(tmp_path: Path) -> AsyncIterator[WorkerProcess]:
    made = worker(tmp_path)
    await made.ready()
    yield made
    await made.stop()


async def test_what_it_prints_is_no_answer(ready: WorkerProcess) -> None:
    async with asyncio.timeout(60):
        assert await ready.exchange(b"one") == b"ONE\n"
        assert await ready.exchange(b"two") == b"TWO\n"


@pytest.mark.parametrize(
    ("word", "ending"),
    [
        (b"leave", "it ended with exit code 3"),
        (b"abort", "it was ended by SIGKILL"),
        (b"closes", "it ended with exit code 1"),
    ],
)
async def test_its_death_is_told_with_how_it_ended(ready: WorkerProcess, word: bytes, ending: str) -> None:
    async with asyncio.timeout(60):
        with pytest.raises(WorkerDied, match=ending):
            await ready.exchange(word)
        await ready.stop()
        await ready.ready()
        assert await ready.exchange(b"again") == b"AGAIN\n"


def runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


async def test_what_it_has_started_ends_with_it_though_it_died_first(ready: WorkerProcess, tmp_path: Path) -> None:
    async with asyncio.timeout(60):
        note = tmp_path / "child"
        with pytest.raises(WorkerDied, match="exit code 4"):
            await ready.exchange(f"leave a child {note}".encode())
        child = int(note.read_text())
        assert runs(child)
        await ready.stop()
        await eventually(lambda: not runs(child))


async def test_what_it_cannot_load_is_told_in_one_line(tmp_path: Path) -> None:
    async with asyncio.timeout(60):
        with pytest.raises(WorkerUnavailable, match="could not load what it needs: ValueError: no such thing at all"):
            await worker(tmp_path, "broken").ready()
