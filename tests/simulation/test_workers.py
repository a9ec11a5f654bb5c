"""Processes that simulate for another one."""

import contextlib
import os
import signal
import subprocess
import sys

import pytest

from simulation.workers import started_worker
from tests.process_ends import all_end

MANY = 40_000
"""Seeds that are longer, as text, than an argument of a command may be."""


@pytest.mark.timeout(60)
def test_a_worker_ends_with_the_process_that_started_it() -> None:
    program = (
        "import os, time; from simulation.workers import started_worker\n"
        "worker = started_worker(range(1, 1000), tenants=False, env=os.environ)\n"
        "print(worker.pid, flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout is not None
        pid = int(starter.stdout.readline())
        os.kill(pid, signal.SIGSTOP)  # it would end by itself with the next line that nobody reads
        starter.kill()
    try:
        assert all_end([pid])
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.timeout(60)
def test_a_worker_takes_more_seeds_than_a_command_line_does() -> None:
    worker = started_worker(range(1, MANY), tenants=False, env=os.environ, quiet=True)
    try:
        assert worker.poll() is None
    finally:
        worker.kill()
        worker.wait()
        assert worker.stdout is not None
        worker.stdout.close()
