"""A real run with a generator of users beside that of rollouts: released, rated, rolled back, killed and resumed."""

import json
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from headway import command as umbrella
from tests.e2e.processes import Launcher, until
from tests.e2e.run_files import free_ports, write_run_file

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1500)]

RELEASING = ("--release.enabled", "true", "--release.every-steps", "5", "--release.tasks", "40")


def served(port: int) -> str | None:
    try:
        answer = httpx.get(f"http://127.0.0.1:{port}/v1/state", timeout=5)
    except httpx.HTTPError:
        return None
    return str(answer.json().get("policy_version")) if answer.status_code == 200 else None


def rows(folder: Path, event: str) -> Sequence[dict[str, Any]]:
    path = folder / "releases" / "history.jsonl"
    found = [json.loads(line) for line in path.read_text().splitlines() if line] if path.exists() else []
    return [row for row in found if row["event"] == event]


def test_users_get_released_versions_rate_answers_and_get_a_former_version_back(
    launcher: Launcher, model: Path, tmp_path: Path
) -> None:
    run_file = write_run_file(tmp_path, model=model)
    words, folder = ("--config", str(run_file.path)), run_file.run().path
    for name in ("reward-service", "env-service"):
        launcher(name, *words)
    launcher("generator", *words, "--id", "rollouts")
    (port,) = free_ports(1)
    channel = ("--join.channel", "released", "--join.feedback", "true")
    users = launcher("generator", *words, "--id", "users", "--http.port", str(port), *channel)
    # Candidates that learn: where nothing changes, none is better, and the second release is waited for without end.
    gate = ("--release.standard-errors", "0.01", "--training.optimizer.learning-rate", "3e-4")
    long = ("--steps", "5000", "--max-lag", "2", *RELEASING, *gate)
    learner = launcher("learner", *words, *long)

    until(lambda: served(port) == "1.0", what="the first release", timeout_s=600, during=[learner, users])
    asked = {"model": "policy", "prompt": "27+82=", "max_tokens": 4}
    answer = httpx.post(f"http://127.0.0.1:{port}/openai/v1/completions", json=asked, timeout=60)
    rating = {"id": answer.json()["id"], "key": answer.headers["X-Headway-Feedback-Key"], "reward": 1}

    def rate() -> httpx.Response:
        return httpx.post(f"http://127.0.0.1:{port}/v1/feedback", json=rating, timeout=60)

    until(lambda: rate().status_code == 200, what="the answer at the learner", during=[learner, users])
    until(lambda: len(rows(folder, "released")) > 1, what="a second release", timeout_s=600, during=[learner, users])
    second = str(rows(folder, "released")[-1]["version"])
    until(lambda: served(port) not in (None, "1.0"), what="it at the users'", during=[learner, users])

    assert umbrella._run(["rollback", str(run_file.path), "1.0", "--reason", "complaints"]) == 0
    assert served(port) == "1.0"
    learner.send(signal.SIGKILL)
    learner.wait()
    assert served(port) == "1.0", "users' generators need no learner to go on"
    learner = launcher("learner", *words, *long, "--resume", "true")
    until(lambda: rate().status_code == 200, what="the resumed learner", timeout_s=600, during=[learner, users])
    assert rate().json()["outcome"] == "repeated"
    until(lambda: len(rows(folder, "refused")) > 0, what="a candidate", timeout_s=600, during=[learner, users])
    assert served(port) == "1.0", f"promotions are held since {second} was taken back"

    assert umbrella._run(["feedback", str(run_file.path), str(tmp_path / "rated.jsonl")]) == 0
    (row,) = [json.loads(line) for line in (tmp_path / "rated.jsonl").read_text().splitlines()]
    assert (row["prompt"], row["version"], row["label"]) == ("27+82=", "1.0", True)
