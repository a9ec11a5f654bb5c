"""Lines on their way from a child's pipe to an output of this process."""

import os
import time
from collections.abc import Iterator
from typing import IO

import pytest

from headway.child_output import Sink, Source, turn


class PipeEnds:
    """Both ends of a pipe."""

    def __init__(self) -> None:
        reader, writer = os.pipe()
        self.reader: IO[bytes] = os.fdopen(reader, "rb", buffering=0)
        self.writer: IO[bytes] = os.fdopen(writer, "wb", buffering=0)

    def close(self) -> None:
        self.reader.close()
        self.writer.close()


@pytest.fixture
def child() -> Iterator[PipeEnds]:
    pipe = PipeEnds()
    yield pipe
    pipe.close()


@pytest.fixture
def screen() -> Iterator[PipeEnds]:
    pipe = PipeEnds()
    yield pipe
    pipe.close()


def shown(sink: Sink, screen: PipeEnds) -> bytes:
    if not sink.has_queue:
        return b""
    sink.flush(deadline=time.monotonic() + 5)
    return screen.reader.read(1 << 16)


def test_a_line_waits_for_its_end_and_a_last_one_gets_it(child: PipeEnds, screen: PipeEnds) -> None:
    sink = Sink(screen.writer.fileno())
    source = Source(child.reader, sink)
    child.writer.write(b"one\ntw")
    source.drain()
    assert shown(sink, screen) == b"one\n"
    child.writer.write(b"o\nthree")
    source.close()
    assert shown(sink, screen) == b"two\nthree\n"


def test_held_lines_are_shown_or_dropped_at_the_end(child: PipeEnds, screen: PipeEnds) -> None:
    sink = Sink(screen.writer.fileno())
    source = Source(child.reader, sink, held=True)
    child.writer.write(b"result\n")
    source.drain()
    assert shown(sink, screen) == b""
    source.close()
    assert shown(sink, screen) == b"result\n"
    other = PipeEnds()
    source = Source(other.reader, sink)
    other.writer.write(b"before\n")
    source.drain()
    source.hold()
    other.writer.write(b"noise\n")
    source.close(discard=True)
    other.close()
    assert shown(sink, screen) == b"before\n"


def test_too_much_to_be_held_is_shown(child: PipeEnds, screen: PipeEnds) -> None:
    sink = Sink(screen.writer.fileno())
    source = Source(child.reader, sink, held=True)
    for _ in range(5):
        child.writer.write(b"x" * 60_000 + b"\n")
        source.drain()
    assert sink.has_queue
    source.close(discard=True)


def test_an_output_that_nobody_reads_stops_no_child_and_says_later_what_is_missing(
    child: PipeEnds, screen: PipeEnds, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headway.child_output.PATIENCE_S", 0.01)
    sink, wake = Sink(screen.writer.fileno()), PipeEnds()
    source = Source(child.reader, sink)
    for _ in range(100):
        child.writer.write((b"x" * 99 + b"\n") * 100)  # a pipe holds 64 KiB: this waits for ever unless it is read
        for _ in range(3):
            turn([source], [sink], wake=wake.reader.fileno(), timeout_s=0.004)
    wake.close()
    seen = b""
    while b"missing" not in seen:
        seen += os.read(screen.reader.fileno(), 1 << 16)
        sink.flush(deadline=time.monotonic() + 0.05)
    lines = seen.splitlines()
    assert set(lines[:-1]) == {b"x" * 99}
    assert lines[-1] == b"[%d lines are missing here: nobody read them]" % (10_000 - len(lines) + 1)


def test_an_output_whose_reader_has_left_swallows_all(screen: PipeEnds) -> None:
    sink = Sink(screen.writer.fileno())
    screen.reader.close()
    sink.add(b"x\n" * 100_000)
    sink.flush(deadline=time.monotonic() + 5)
    assert not sink.has_queue


def test_the_last_lines_of_a_child_bring_no_controls_to_a_terminal_and_are_no_flood(child: PipeEnds) -> None:
    source = Source(child.reader, Sink(child.writer.fileno()))
    os.write(child.writer.fileno(), b"\x1b[2Jit failed\n" + b"x" * 9000 + b"\n")
    source.read()

    assert source.last_lines[0] == "?[2Jit failed"
    assert len(source.last_lines[1]) < 3000
