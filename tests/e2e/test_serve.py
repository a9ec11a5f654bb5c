"""`headway serve` with the real engine, and the unmodified SDK of the Tinker API as its client."""

import os
import re
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from headway.certificates import Authority
from tests.e2e.processes import ROOT, Launcher, marked, until
from tests.e2e.run_files import free_ports
from tests.e2e.tinker_serving import NAME, answer_of, answers, client, is_ready, kill, started
from tests.learner.tenants.tiny import make_tiny_model
from tests.protocol.tinker.sdk import sdk_python

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

TWICE = """
from env_service.environments.interface import Opening, Step, Verification
from env_service.environments.rules import Rules


class Twice:
    rules, roles = Rules(max_turns=2, turn_tokens=5), ()

    def reset(self, task, seed):
        self._turns = 0
        return Opening(f"{task.seed}: ")

    def step(self, action):
        self._turns += 1
        if self._turns == 1:
            return Step(" again: ", reward=float(len(action.text) % 2))
        return Step(verification=Verification("exact_match", {"answer": action.text}))
"""


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
    assert {name: answer for name, answer in found.items() if answer != "yes"} == {}
    assert len(found) == 29

    trains_asynchronously(launcher, told, tmp_path)

    serve.send(signal.SIGINT)
    assert serve.wait() == 0, serve.text()
    until(lambda: not marked(launcher.mark), what="all processes to be gone")

    # What was there is there again, under the same key; now over HTTPS.
    serve, told_again = started(launcher, tmp_path, *with_certificate(tmp_path))
    assert told_again["TINKER_API_KEY"] == told["TINKER_API_KEY"]
    assert told_again["TINKER_BASE_URL"].startswith("https://")
    again = answers("served.py", {**told_again, "SSL_CERT_FILE": str(tmp_path / "ca.pem")}, NAME, report["path"])
    assert again["first"] == pytest.approx(report["last"], abs=1e-3)
    sampled, ours = again["sampled"]
    np.testing.assert_allclose(sampled, ours, rtol=0, atol=1e-3)
    serve.send(signal.SIGINT)
    assert serve.wait() == 0, serve.text()


def with_certificate(folder: Path) -> list[str]:
    """Options of `headway serve` by which it serves HTTPS, with a certificate in the folder."""
    authority = Authority.new()
    authority.write(folder)
    authority.issue(folder, "learner", hosts=[])
    files = {"cert": "learner.pem", "key": "learner.key", "ca": "ca.pem"}
    return [word for name, file in files.items() for word in (f"--learner.http.tls-{name}-file", str(folder / file))]


def test_a_client_does_not_notice_that_learner_and_generator_are_killed(launcher: Launcher, tmp_path: Path) -> None:
    sdk_python()
    (tmp_path / NAME).parent.mkdir()
    make_tiny_model(tmp_path / NAME)
    serve, told = started(launcher, tmp_path)
    arguments = (told["TINKER_BASE_URL"], NAME, "30")
    expected = answers("history.py", told, *arguments)
    with client("history.py", told, *arguments) as running:
        for victim in ("learner", "generator", "learner"):
            time.sleep(1.5)
            assert running.poll() is None, "nobody was killed while it ran"
            kill(launcher, victim)
            until(lambda: is_ready(told), what="the learner's next life", during=(serve,))
        history = answer_of(running)

    for name in ("counts", "sampled", "paths", "greedy"):
        assert history[name] == expected[name], name
    # A replay may pack other rows together: the sums are then rounded in another way.
    np.testing.assert_allclose(history["losses"], expected["losses"], rtol=1e-6, atol=1e-5)
    assert serve.text().count("SIGKILL") == 3, serve.text()
    serve.send(signal.SIGINT)
    assert serve.wait() == 0, serve.text()


def trains_asynchronously(launcher: Launcher, told: dict[str, str], folder: Path) -> None:
    """The asynchronous example, with fewer samples, two turns, rewards of the environment and of a verifier."""
    (folder / "twice.py").write_text(TWICE, encoding="utf-8")
    example = (ROOT / "examples/tinker/async_rl.py").read_text(encoding="utf-8")
    sizes = "LAG, GROUPS, SAMPLES = 2, 16, 8\n"
    assert sizes in example
    (folder / "async_rl.py").write_text(example.replace(sizes, "LAG, GROUPS, SAMPLES = 1, 2, 4\n"), encoding="utf-8")
    environments, rewards = free_ports(2)
    beside = replace(launcher, environment={"PYTHONPATH": str(folder)})
    host = beside("env-service", "host", "twice:Twice", "--port", str(environments))
    service = beside("reward-service", "--http.port", str(rewards))
    until(lambda: all("listening at" in each.text() for each in (host, service)), what="both", during=(host, service))
    urls = {"ENVIRONMENT_URL": f"http://127.0.0.1:{environments}", "REWARDS_URL": f"http://127.0.0.1:{rewards}"}
    command = [str(sdk_python()), "-W", "ignore", str(folder / "async_rl.py"), "4", NAME]
    ran = subprocess.run(
        command,
        env={**os.environ, **told, **urls},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    for process in (host, service):
        process.send(signal.SIGTERM)
        assert process.wait() == 0, process.text()
    assert ran.returncode == 0, ran.stderr[-3000:]
    said = re.findall(r"step +(\d+)  reward (\d\.\d+)", ran.stdout)
    assert [int(step) for step, _ in said] == [1, 2, 3, 4]
    # One from the verifier for each conversation, and of its first turn what differs between them.
    assert all(1.0 <= float(reward) <= 2.0 for _, reward in said)
    assert any(float(reward) not in (1.0, 2.0) for _, reward in said), "groups whose rewards differ are trained"
