"""Seeds that take their time, and seeds that hang: told apart by the work that is done, on any machine."""

import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.mutants.trying import answered

SLOW = "import time; time.sleep(1.5); print('held')"
"""As one that gets none of a busy machine's time."""
ENDLESS = "while True: pass"


@pytest.fixture
def worker(program: str) -> Iterator["subprocess.Popen[bytes]"]:
    started = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    try:
        yield started
    finally:
        started.kill()
        started.wait()
        assert started.stdout is not None
        started.stdout.close()


@pytest.mark.parametrize(("program", "found"), [(SLOW, True), (ENDLESS, False), ("", True)])
def test_one_that_is_kept_waiting_does_not_hang_and_one_that_works_without_end_does(
    worker: "subprocess.Popen[bytes]", found: bool
) -> None:
    assert worker.stdout is not None
    assert answered(worker.stdout, worker.pid, timeout_s=0.5) is found
