"""The real process with a sandbox: however it ends, nothing that it ran is left."""

import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

pytestmark = pytest.mark.e2e

CONFIG = """
[reward-service]
http = { port = 0 }
drain_s = 0.0
execution = { cgroup = "off", packages = [], concurrency = 2 }
"""

# It leaves a daemon behind in its session, which still runs when the call has been answered.
DAEMON = """
import os, time
if os.fork() == 0:
    os.setsid()
    while True: time.sleep(1)
"""


@contextmanager
def service(folder: Path) -> Iterator[tuple[subprocess.Popen[str], httpx.Client]]:
    config = folder / "run.toml"
    config.write_text(CONFIG)
    command = [sys.executable, "-c", "from reward_service.command import main; main()", "--config", str(config)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "API_KEY": "s3cr3t"}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            lines = iter(process.stderr.readline, "")
            url = next(found.group() for line in lines if (found := re.search(r"http://\S+", line)))
            with httpx.Client(base_url=url, timeout=120, transport=httpx.HTTPTransport(retries=5)) as client:
                yield process, client
        finally:
            process.kill()


def descendants(pid: int) -> set[int]:
    found = set()
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, path.read_text().split()):
            found |= {child} | descendants(child)
    return found


def end(pids: set[int], *, timeout_s: float) -> bool:
    """Whether all of them are gone within that time."""
    handles = []
    for pid in pids:
        try:
            handles.append(os.pidfd_open(pid))
        except ProcessLookupError:
            continue
    try:
        return all(select.select([handle], [], [], timeout_s)[0] for handle in handles)
    finally:
        for handle in handles:
            os.close(handle)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGKILL, -9)])
def test_however_the_service_ends_it_leaves_nothing_running(tmp_path: Path, number: signal.Signals, code: int) -> None:
    with service(tmp_path) as (process, client):
        answer = client.post("/v1/execute", json={"code": DAEMON, "session": "a"}).json()
        assert answer["exit_code"] == 0, answer
        running = descendants(process.pid)
        # Three keepers, and with each bubblewrap, the first process of its namespace and the program.
        assert len(running) >= 10
        process.send_signal(number)
        assert process.wait(timeout=60) == code
        assert end(running, timeout_s=60)


def test_programs_see_nothing_of_the_services_environment(tmp_path: Path) -> None:
    with service(tmp_path) as (_, client):
        code = "import os; print(sorted(os.environ), open('/proc/1/environ').read())"
        seen = client.post("/v1/execute", json={"code": code}).json()["stdout"]
    assert set(re.findall(r"\w+(?=')", seen)) <= {"HOME", "LANG", "LC_CTYPE", "LD_LIBRARY_PATH", "PATH"}
