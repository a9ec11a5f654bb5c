"""Processes that simulate seeds for another one, and end with it."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from services.process import parent_death_signal


def started_worker(
    seeds: Sequence[int],
    *,
    tenants: bool,
    env: Mapping[str, str],
    core: int | None = None,
    root: Path | None = None,
    quiet: bool = False,
) -> "subprocess.Popen[bytes]":
    """A process that simulates seeds one after the other, and writes a line of JSON for each to its output.

    It is held on `core` where one is given, and runs the code of the tree `root`, else of this one. `quiet`: its errors
    are not shown. The seeds go to its input: tens of thousands are more than a command line may have.
    """

    def ready() -> None:
        parent_death_signal(signal.SIGKILL)
        if core is not None:
            os.sched_setaffinity(0, [core])

    worker = subprocess.Popen(
        [sys.executable, "-m", "simulation", "--worker", "--seeds", "-", *(["--tenants"] if tenants else [])],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL if quiet else None,
        cwd=root,
        env=env,
        preexec_fn=ready,
    )
    assert worker.stdin is not None
    with contextlib.suppress(BrokenPipeError), worker.stdin:  # one that has ended says so by its code
        worker.stdin.write(json.dumps(list(seeds)).encode())
    return worker
