"""Processes of this machine, and what one of them takes with all that it began."""

import errno
import os
import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from services.local_processes import listener_of, machine_cpu_s, proportional_memory_of, usage_of

_TICKS, _PAGE = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")
FAMILY = {10: (1, 100), 11: (10, 20), 12: (10, 3), 13: (12, 4), 20: (1, 1000)}
"""A machine's processes: the parent of each, and both the ticks and the pages that it takes. 20 is a stranger."""

_HELD = 64 << 20
_FORKS = f"""
import os, sys
held = b"x" * {_HELD}
reads, writes = os.pipe()
if os.fork() == 0:
    os.close(writes)
    print(len(held), flush=True)
    os.read(reads, 1)
    os._exit(0)
sys.stdin.readline()
os.close(writes)
os.wait()
"""
"""A process that shares so many bytes with a fork of itself, until it is told to end."""


def made(proc: Path, *, listed: bool) -> Path:
    """The folder, as the kernel would fill it: the children of 10 were begun by two threads."""
    for pid, (parent, amount) in FAMILY.items():
        (proc / f"{pid}/task/{pid}").mkdir(parents=True)
        stat = f"{pid} (a name) of) S {parent} {'0 ' * 9}{amount} 0 {'0 ' * 8}{amount} 0\n"
        (proc / f"{pid}/stat").write_text(stat)
    for thread, children in {"10/task/10": "11 ", "10/task/15": "12 ", "12/task/12": "13 "}.items():
        (proc / thread).mkdir(parents=True, exist_ok=True)
        if listed:
            (proc / thread / "children").write_text(children)
    if listed:
        (proc / f"self/task/{os.getpid()}").mkdir(parents=True)
        (proc / f"self/task/{os.getpid()}/children").write_text("")
    return proc


@pytest.mark.parametrize("listed", [True, False])
def test_the_use_of_a_process_is_that_of_all_its_descendants(tmp_path: Path, listed: bool) -> None:
    proc = made(tmp_path, listed=listed)

    assert usage_of(10, proc=proc) == (127 / _TICKS, 127 * _PAGE)
    assert usage_of(12, proc=proc) == (7 / _TICKS, 7 * _PAGE)
    assert usage_of(99, proc=proc) == (0.0, 0)


@pytest.mark.parametrize("listed", [True, False])
def test_processes_that_end_while_they_are_listed_hide_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listed: bool
) -> None:
    proc, stat = made(tmp_path, listed=listed), os.stat

    def gone(path: Path | str, **named: Any) -> os.stat_result:
        if "/10/task/10/" in str(path) or "/20/" in str(path):
            raise ProcessLookupError(errno.ESRCH, "No such process", str(path))
        return stat(path, **named)

    monkeypatch.setattr(os, "stat", gone)
    assert usage_of(10, proc=proc) == (127 / _TICKS, 127 * _PAGE)


def test_shared_pages_count_once_where_the_kernel_says_who_shares_them(tmp_path: Path) -> None:
    proc = made(tmp_path, listed=True)
    (proc / "10/smaps_rollup").write_text("5-7 ---p 0 0 [rollup]\nRss:  400 kB\nPss:   90 kB\nPss_Dirty:   80 kB\n")
    (proc / "13/smaps_rollup").write_text("5-7 ---p 0 0 [rollup]\nRss:   16 kB\n")

    assert proportional_memory_of(10, proc=proc) == 90 * 1024 + (20 + 3 + 4) * _PAGE
    assert proportional_memory_of(99, proc=proc) == 0


def test_what_a_fork_shares_with_its_parent_counts_once() -> None:
    words = [sys.executable, "-c", _FORKS]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        parent.stdout.readline()
        _, resident = usage_of(parent.pid)
        proportional = proportional_memory_of(parent.pid)
        parent.communicate("\n")

    assert resident > 2 * _HELD
    assert _HELD < proportional < resident - _HELD // 2


def test_the_use_of_the_machine_is_all_but_its_idle_time(tmp_path: Path) -> None:
    assert machine_cpu_s(proc=tmp_path) is None
    (tmp_path / "stat").write_text("cpu  100 20 30 9000 800 4 5 6 70 0\ncpu0 1 1 1 1 1 1 1 1 0 0\n")
    assert machine_cpu_s(proc=tmp_path) == pytest.approx(165 / _TICKS), "guests are in the time of users"
    (tmp_path / "stat").write_text("cpu  100\n")
    assert machine_cpu_s(proc=tmp_path) is None


def test_other_processes_are_not_looked_at_where_the_kernel_lists_children(tmp_path: Path) -> None:
    proc = made(tmp_path, listed=True)
    (proc / "20/stat").write_text("nobody reads this")

    assert usage_of(10, proc=proc) == (127 / _TICKS, 127 * _PAGE)


def test_a_process_that_has_ended_takes_nothing(tmp_path: Path) -> None:
    proc = made(tmp_path, listed=True)
    shutil.rmtree(proc / "12")

    assert usage_of(10, proc=proc) == (120 / _TICKS, 120 * _PAGE)


def test_a_thread_that_ends_meanwhile_hides_neither_its_process_nor_its_children(tmp_path: Path) -> None:
    proc = made(tmp_path, listed=True)
    (proc / "10/task/14/children").mkdir(parents=True)  # it cannot be read

    assert usage_of(10, proc=proc) == (127 / _TICKS, 127 * _PAGE)


def test_what_another_thread_began_counts() -> None:
    words = [sys.executable, "-c", "x = bytearray(200 << 20); print(len(x), flush=True); input()"]
    began, ends = threading.Event(), threading.Event()

    def hold() -> None:
        with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            child.stdout.readline()
            began.set()
            ends.wait()
            child.communicate("\n")

    _, alone = usage_of(os.getpid())
    thread = threading.Thread(target=hold)
    thread.start()
    began.wait()
    _, together = usage_of(os.getpid())
    ends.set()
    thread.join()

    assert together > alone + (150 << 20)


def test_a_listener_is_found_though_one_of_its_files_is_closed_while_they_are_looked_through() -> None:
    """The listing's own file, which is gone afterwards, has the lowest number that is free: below the socket's."""
    pipe = os.pipe()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        for end in pipe:
            os.close(end)
        found = listener_of(listener.getsockname()[1])
    assert found is not None
    assert found.pid == os.getpid()
