"""The real process with a sandbox: however it ends, nothing that it ran is left."""

import re
import signal
from pathlib import Path

import pytest

from tests.process_ends import all_end
from tests.reward_service.real_service import real_service

pytestmark = pytest.mark.e2e

CONFIG = """
[reward-service]
http = { port = 0 }
drain_s = 0.0
execution = { cgroup = "off", packages = [], concurrency = 2, spare = 0 }
"""

# It leaves a daemon behind in its session, which still runs when the call has been answered.
DAEMON = """
import os, time
if os.fork() == 0:
    os.setsid()
    while True: time.sleep(1)
"""


def descendants(pid: int) -> set[int]:
    found = set()
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, path.read_text().split()):
            found |= {child} | descendants(child)
    return found


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGKILL, -9)])
def test_however_the_service_ends_it_leaves_nothing_running(tmp_path: Path, number: signal.Signals, code: int) -> None:
    with real_service(tmp_path, CONFIG, environment={"API_KEY": "s3cr3t"}) as (process, client):
        answer = client.post("/v1/execute", json={"code": DAEMON, "session": "a"}).json()
        assert answer["exit_code"] == 0, answer
        running = descendants(process.pid)
        # Three keepers, and with each bubblewrap, the first process of its namespace and the program.
        assert len(running) >= 10
        process.send_signal(number)
        assert process.wait(timeout=60) == code
        assert all_end(running)


def test_programs_see_nothing_of_the_services_environment(tmp_path: Path) -> None:
    with real_service(tmp_path, CONFIG, environment={"API_KEY": "s3cr3t"}) as (_, client):
        code = "import os; print(sorted(os.environ), open('/proc/1/environ').read())"
        seen = client.post("/v1/execute", json={"code": code}).json()["stdout"]
    assert set(re.findall(r"\w+(?=')", seen)) <= {"HOME", "LANG", "LC_CTYPE", "LD_LIBRARY_PATH", "PATH"}
