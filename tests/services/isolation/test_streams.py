"""Output of programs is kept up to a bound, and what is dropped is read at a bounded pace."""

import asyncio
import os

import pytest

from env_service.agents import processes
from env_service.runtimes.engine_commands import CommandOutput
from services.isolation import streams
from services.isolation.streams import PipeReader

PART = 1 << 16


@pytest.fixture
def endless_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "DROPPED_BYTES_S", 1)


async def passes() -> None:
    """Give the event loop time to read what there is."""
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.mark.usefixtures("endless_pauses")
async def test_who_writes_more_to_a_pipe_than_is_kept_waits_for_its_reader() -> None:
    end, writer = os.pipe()
    os.set_blocking(writer, False)
    reader = PipeReader(end, most=10, drain=True)
    os.write(writer, bytes(PART))
    await passes()
    os.write(writer, bytes(PART))
    await passes()
    with pytest.raises(BlockingIOError):
        os.write(writer, b"x")
    os.close(writer)
    reader.close()


async def test_a_pipe_is_read_to_its_end_though_more_comes_than_is_kept() -> None:
    end, writer = os.pipe()
    reader = PipeReader(end, most=10, drain=True)
    for _ in range(3):
        await asyncio.to_thread(os.write, writer, bytes(PART))
    os.close(writer)
    assert (len(await reader.ended()), reader.cut) == (10, True)


class Endless:
    """Prints without end."""

    taken = 0

    async def frames(self):  # type: ignore[no-untyped-def]
        """Parts on stdout."""
        while True:
            self.taken += 1
            yield 1, bytes(PART)
            await asyncio.sleep(0)

    async def read(self, most: int) -> bytes:
        """A part."""
        self.taken += 1
        await asyncio.sleep(0)
        return bytes(most)


@pytest.mark.usefixtures("endless_pauses")
async def test_the_stream_of_a_command_that_prints_more_than_is_kept_is_held_up() -> None:
    stream, output = Endless(), CommandOutput(most=PART)
    collecting = asyncio.ensure_future(output.collect(stream))
    await passes()
    assert (len(output.stdout), output.cut, stream.taken) == (PART, True, 2)
    collecting.cancel()


@pytest.mark.usefixtures("endless_pauses")
async def test_a_program_that_prints_more_than_is_kept_of_its_end_is_held_up() -> None:
    stream = Endless()
    reading = asyncio.ensure_future(processes._tail(stream))  # type: ignore[arg-type]
    await passes()
    assert stream.taken == 2
    reading.cancel()
