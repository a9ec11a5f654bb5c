"""The real service with a reward model: a killed model process, the end of the service, a wrong directory."""

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

from tests.reward_service.reward_models.tiny_reward_model import PLAIN, write_reward_model

pytestmark = pytest.mark.e2e

COMMAND = (sys.executable, "-c", "from reward_service.command import main; main()")


def write_config(folder: Path, model: Path) -> Path:
    config = folder / "run.toml"
    config.write_text(
        "[reward-service]\nsandbox = 'off'\nhttp = { port = 0 }\n\n"
        f'[[reward-service.reward_models]]\nname = "helpful"\npath = "{model}"\nbatch_size = 4\nwait_s = 0.01\n'
    )
    return config


@contextmanager
def service(config: Path) -> Iterator[tuple[subprocess.Popen[str], httpx.Client]]:
    """The real process on a port that the system chooses, and a client of it; not ready yet."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [*COMMAND, "--config", str(config)]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            lines = iter(process.stderr.readline, "")
            url = next(found.group() for line in lines if (found := re.search(r"http://\S+", line)))
            with httpx.Client(base_url=url, timeout=240, transport=httpx.HTTPTransport(retries=5)) as client:
                yield process, client
        finally:
            process.kill()


def rewards(client: httpx.Client) -> list[float]:
    items = [
        {"id": str(index), "verifier": "helpful", "prompt": "hi", "completion": text}
        for index, text in enumerate(("a", "no way", "is it so?", "b" * 500))
    ]
    results = client.post("/v1/score", json={"items": items, "deadline_s": 120}).json()["results"]
    assert results[3]["reward"] is None
    assert results[3]["error"]["kind"] == "data"
    assert all(result["verifier_version"].startswith("1+") for result in results)
    return [float(result["reward"]) for result in results[:3]]


def child_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


def gone_within(pid: int, *, timeout_s: float) -> bool:
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], timeout_s)[0])
    finally:
        os.close(handle)


def test_rewards_are_the_same_before_and_after_the_model_process_is_killed(tmp_path: Path) -> None:
    model = write_reward_model(tmp_path / "model", given=PLAIN)
    with service(write_config(tmp_path, model)) as (process, client):
        before = rewards(client)  # waits until the model is loaded
        assert client.get("/readyz").status_code == 200
        os.kill(child_of(process.pid), signal.SIGKILL)
        assert rewards(client) == pytest.approx(before, abs=1e-5)
        last = child_of(process.pid)
        process.terminate()
        assert process.wait(timeout=30) == 0
        assert gone_within(last, timeout_s=10)


@pytest.mark.parametrize("causal", [False, True])
def test_a_wrong_directory_ends_the_service_with_its_name(tmp_path: Path, causal: bool) -> None:
    model = write_reward_model(tmp_path / "model", causal=True) if causal else tmp_path / "absent"
    config = write_config(tmp_path, model)
    ended = subprocess.run([*COMMAND, "--config", config], capture_output=True, text=True, timeout=240, check=False)
    assert ended.returncode == 1
    assert str(model) in ended.stderr
    assert "stopped by an error: UserError" in ended.stderr
