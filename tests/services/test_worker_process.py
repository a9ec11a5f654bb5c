"""A worker process: how it begins, how it ends, and that what its code prints does not break the exchange."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from services.worker_process import WorkerDied, WorkerProcess, WorkerUnavailable, worker_environment

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


async def test_what_it_cannot_load_is_told_in_one_line(tmp_path: Path) -> None:
    async with asyncio.timeout(60):
        with pytest.raises(WorkerUnavailable, match="could not load what it needs: ValueError: no such thing at all"):
            await worker(tmp_path, "broken").ready()
