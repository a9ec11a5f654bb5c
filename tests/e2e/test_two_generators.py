"""Two real generators behind one server of the Tinker API: adapters reach both, and one that dies comes back."""

import json
import re
import signal
import subprocess
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from learner.tenants.keys import first_key_path
from tests.e2e.processes import Launched, Launcher, until
from tests.e2e.run_files import free_ports
from tests.e2e.tinker_serving import NAME, client, is_ready
from tests.learner.tenants.tiny import make_tiny_model
from tests.protocol.tinker.sdk import sdk_python

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200)]

UP_S = 600


def sampled_by(port: int) -> int:
    """Tokens that the generator there has sampled since its start; 0 if it does not answer."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
            found = re.findall(
                r"^headway_generator_generated_tokens_total(?:\{.*\})? (\S+)$", answer.read().decode(), re.MULTILINE
            )
    except OSError:
        return 0
    return int(sum(map(float, found)))


def round_of(running: "subprocess.Popen[str]", server: Launched) -> Any:
    assert running.stdin is not None
    assert running.stdout is not None
    running.stdin.write("\n")
    running.stdin.flush()
    line = running.stdout.readline()
    assert line, f"{running.communicate(timeout=60)[1][-2000:]}\n{server.text()[-2000:]}"
    return json.loads(line)


def test_adapters_reach_both_generators_and_one_that_dies_comes_back(launcher: Launcher, tmp_path: Path) -> None:
    sdk_python()
    make_tiny_model(tmp_path / NAME)
    token = tmp_path / "token"
    token.write_text("of-the-generators")
    token.chmod(0o600)
    port, *others = free_ports(3)
    own = ("--model", str(tmp_path / NAME), "--run.directory", str(tmp_path / "runs"), "--run.name", "r")

    def generator(number: int) -> Launched:
        return launcher(
            "generator", *own, "--http.port", str(others[number]), "--http.token-file", str(token),
            "--join.learner", "none", "--engine.dtype", "float32", "--engine.max-model-len", "256",
            "--adapters.slots", "2", "--adapters.source", f"http://127.0.0.1:{port}",
            "--adapters.token-file", str(token),
        )  # fmt: skip

    first, second = generator(0), generator(1)
    addresses = [word for each in others for word in ("--tinker.generators", f"http://127.0.0.1:{each}")]
    learner = launcher(
        "learner", *own, "--http.port", str(port), "--http.token-file", str(token), "--weights.generator-token-file",
        str(token), "--tinker.enabled", "true", "--tinker.base-model", NAME, "--tinker.context-tokens", "256",
        *addresses,
    )  # fmt: skip
    told = {"TINKER_BASE_URL": f"http://127.0.0.1:{port}"}
    until(lambda: is_ready(told), what="the learner", timeout_s=UP_S, during=(learner,))
    told["TINKER_API_KEY"] = first_key_path(tmp_path / "runs" / "r" / "tinker-keys.json").read_text().strip()
    for each, place in ((first, others[0]), (second, others[1])):
        url = {"TINKER_BASE_URL": f"http://127.0.0.1:{place}"}
        until(lambda url=url: is_ready(url), what=each.name, timeout_s=UP_S, during=(each,))  # type: ignore[misc]

    with client("fleet.py", told, NAME) as running:
        report = round_of(running, learner)
        assert (report["samples"], report["gap"] < 1e-3) == (16, True), report
        assert all(sampled_by(each) for each in others), "one of them has sampled nothing"

        first.send(signal.SIGKILL)
        first.wait()
        report = round_of(running, learner)
        assert (report["samples"], report["gap"] < 1e-3) == (16, True), report

        first = generator(0)
        url = {"TINKER_BASE_URL": f"http://127.0.0.1:{others[0]}"}
        until(lambda: is_ready(url), what="the generator that comes back", timeout_s=UP_S, during=(first,))

        def sampled_again() -> bool:
            found = round_of(running, learner)
            assert (found["samples"], found["gap"] < 1e-3) == (16, True), found
            return sampled_by(others[0]) > 0

        until(sampled_again, what="samples of the one that came back", during=(first, second, learner))
