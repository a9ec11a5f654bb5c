"""Commands whose standard output nobody reads, cannot be written, or lacks letters."""

import importlib
import os
import subprocess
import sys
from importlib.metadata import entry_points

import pytest

PRELUDE = """
import sys
from services.standard_output import show, standard_output
@standard_output()
def main():
"""


def run(body: str, *, stdout: int, unbuffered: bool = False) -> tuple[int, str]:
    """Exit code and standard error of a command that does `body`."""
    environ = {**os.environ, "PYTHONUNBUFFERED": "1" if unbuffered else "", "PYTHONIOENCODING": "ascii"}
    ended = subprocess.run(
        [sys.executable, "-c", f"{PRELUDE}    {body}\nmain()\n"],
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        env=environ,
        timeout=100,
    )
    return ended.returncode, ended.stderr


@pytest.fixture
def unread() -> int:
    """A pipe that nobody reads any more."""
    reader, writer = os.pipe()
    os.close(reader)
    return writer


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("print('x' * 100_000)", 141),
        ("print('a line')", 141),
        ("print('a line'); sys.exit(0)", 141),
        ("print('a line'); sys.exit(2)", 2),
        ("show('what came of it'); sys.exit(0)", 0),
    ],
)
def test_a_reader_that_has_left_ends_a_command_without_a_word(body: str, code: int, unread: int) -> None:
    try:
        assert run(body, stdout=unread, unbuffered=body.startswith("show")) == (code, "")
    finally:
        os.close(unread)


def test_a_full_disk_is_said_in_a_sentence() -> None:
    with open("/dev/full", "wb") as full:
        code, said = run("print('a line')", stdout=full.fileno())

    assert code == 1
    assert said == "cannot write to standard output: No space left on device; what was printed is not whole\n"


def test_letters_that_a_terminal_lacks_are_written_as_escapes() -> None:
    reader, writer = os.pipe()
    assert run("print('für')", stdout=writer) == (0, "")
    os.close(writer)
    with open(reader, "rb") as shown:
        assert shown.read() == b"f\\xfcr\n"


def test_another_broken_pipe_is_none_of_the_readers() -> None:
    reader, writer = os.pipe()
    code, said = run("raise BrokenPipeError('that of somebody else')", stdout=writer)
    os.close(writer)
    os.close(reader)

    assert code == 1
    assert "that of somebody else" in said


@pytest.mark.parametrize("name", ["headway", "learner", "generator", "reward-service", "env-service"])
def test_every_command_bears_a_reader_that_leaves(name: str) -> None:
    (entry,) = entry_points(group="console_scripts", name=name)
    assert hasattr(getattr(importlib.import_module(entry.module), entry.attr), "__wrapped__")
