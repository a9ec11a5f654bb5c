"""`headway serve` with the real engine, and the unmodified SDK of the Tinker API as its client."""

import json
import os
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.e2e.processes import Launched, Launcher, marked, until
from tests.e2e.run_files import free_ports
from tests.learner.tenants.server_process import PROGRAMS
from tests.learner.tenants.tiny import make_tiny_model
from tests.protocol.tinker.sdk import sdk_python

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

NAME = "tiny/qwen"
LEFT_OUT = {"sample: alternative tokens"}


def started(launcher: Launcher, folder: Path) -> tuple[Launched, dict[str, str]]:
    """The command, and what it tells a client to set."""
    (port,) = free_ports(1)
    options = ("--port", str(port), "--name", NAME, "--run.directory", str(folder / "runs"))
    serve = launcher("headway", "serve", str(folder / NAME), *options)
    said = until(
        lambda: re.findall(r"^export (TINKER_\w+)=(\S+)$", serve.text(), re.MULTILINE),
        what="the lines for a client", timeout_s=600, during=(serve,),
    )  # fmt: skip
    until(lambda: f"base model: {NAME}\n" in serve.text(), what="the last of them", timeout_s=10, during=(serve,))
    return serve, dict(said)


def answers(program: str, told: dict[str, str], *arguments: str) -> Any:
    command = [str(sdk_python()), "-W", "ignore", str(PROGRAMS / program), *arguments]
    done = subprocess.run(command, env={**os.environ, **told}, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_a_client_trains_and_samples_and_both_sides_say_the_same(launcher: Launcher, tmp_path: Path) -> None:
    sdk_python()
    (tmp_path / NAME).parent.mkdir()
    make_tiny_model(tmp_path / NAME)
    serve, told = started(launcher, tmp_path)

    report = answers("served.py", told, NAME)
    assert report["models"] == [NAME]
    assert report["losses"][-1] < report["losses"][0]
    for sampled in ("snapshot", "inflight", "replaced", "prompt"):
        theirs, ours = report[sampled]
        np.testing.assert_allclose(theirs, ours, rtol=0, atol=1e-3, err_msg=sampled)
    assert np.ptp(report["snapshot"][0]) > 0.1

    found = answers("features.py", told, told["TINKER_BASE_URL"], NAME)
    assert {name for name, answer in found.items() if answer != "yes"} == LEFT_OUT, found

    serve.send(signal.SIGINT)
    assert serve.wait(timeout_s=60) == 0, serve.text()
    assert marked(launcher.mark) == {}

    # What was there is there again, under the same key.
    serve, told_again = started(launcher, tmp_path)
    assert told_again["TINKER_API_KEY"] == told["TINKER_API_KEY"]
    again = answers("served.py", told_again, NAME, report["path"])
    assert again["first"] == pytest.approx(report["last"], abs=1e-3)
    serve.send(signal.SIGINT)
    assert serve.wait(timeout_s=60) == 0, serve.text()
