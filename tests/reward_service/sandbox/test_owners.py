"""Processes of sandboxes that outlived their service are killed by the next one; those of the living are not."""

import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from reward_service.sandbox.pool import open_sandboxes
from reward_service.sandbox.python_inside import FIRST_MODULE
from reward_service.verifier.program import ExecutionConfig
from services.isolation.owners import Owner, end_orphans
from services.local_processes import each_process
from tests.process_ends import all_end

# As a sandbox's first process that waits for ever: its launcher died before it had asked to die with it.
WAITS = f"import signal  # {FIRST_MODULE}\nsignal.pause()"
# A service that is killed while its sandbox stands.
SERVICE = """
import subprocess, sys
from services.isolation.owners import Owner
child = subprocess.Popen([sys.executable, "-c", sys.argv[1], "/tmp/work", Owner.this().mark])
print(child.pid, flush=True)
sys.stdin.read()
"""


@contextmanager
def sandbox_of(mark: str, *, sign: str) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", f"import signal  # {sign}\nsignal.pause()", mark]) as process:
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def service_with_a_sandbox() -> Iterator[tuple[subprocess.Popen[str], int]]:
    command, root = [sys.executable, "-c", SERVICE, WAITS], Path(__file__).parents[3]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root) as service:
        assert service.stdout is not None
        yield service, int(service.stdout.readline())


async def test_a_killed_services_sandbox_is_killed_by_the_next_service() -> None:
    with service_with_a_sandbox() as (service, left):
        async with open_sandboxes(kind="unsafe", config=ExecutionConfig(concurrency=1, spare=0, cgroup="off")):
            assert not all_end([left], timeout_s=0), "its service lives"
        service.send_signal(signal.SIGKILL)
        service.wait()
        async with open_sandboxes(kind="unsafe", config=ExecutionConfig(concurrency=1, spare=0, cgroup="off")):
            assert all_end([left])


@pytest.mark.parametrize("kind", ["unsafe", "required"])
async def test_the_processes_of_a_sandbox_have_the_mark(kind: str) -> None:
    config = ExecutionConfig(concurrency=1, spare=0, cgroup="off", packages=())
    async with open_sandboxes(kind=kind, config=config) as sandboxes:  # type: ignore[arg-type]
        assert sandboxes is not None
        async with sandboxes.programs._turn():
            place = await sandboxes.programs._idle.get()
            await place.offered(disk_mib=32, fresh=False)
            marked = _marked()
            # With bubblewrap: itself, the first process of the namespace, and the one that waits for a program.
            assert len(marked) == (3 if kind == "required" else 1)
            assert end_orphans(FIRST_MODULE) == 0


def _marked() -> list[int]:
    return [pid for pid, words in each_process("cmdline") if words.endswith(Owner.this().mark.encode() + b"\0")]


def test_what_belongs_to_the_living_or_to_another_namespace_or_to_nobody_stays() -> None:
    # A sign of its own: services of other tests start meanwhile, and clear away what has theirs.
    own, sign = Owner.this(), f"test-{secrets.token_hex(8)}"
    gone = replace(own, pid=2**22 + 1)
    elsewhere = replace(gone, namespace=1)
    with (
        sandbox_of(own.mark, sign=sign) as living,
        sandbox_of(elsewhere.mark, sign=sign) as far,
        sandbox_of(f"{gone.mark} and more", sign=sign) as other,
        sandbox_of(replace(own, started=own.started + 1).mark, sign=sign) as reused,
        sandbox_of(gone.mark, sign=sign) as left,
    ):
        assert end_orphans(sign) == 2
        assert (left.wait(), reused.wait()) == (-9, -9)
        assert [process.poll() for process in (living, far, other)] == [None] * 3
