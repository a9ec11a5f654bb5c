"""The real service with a reward model: a killed model process, the end of the service, a wrong directory."""

import os
import signal
import subprocess
from pathlib import Path

import httpx
import pytest

from tests.process_ends import all_end, children_of
from tests.reward_service.models.tiny_reward_model import PLAIN, write_reward_model
from tests.reward_service.real_service import COMMAND, real_service

pytestmark = pytest.mark.e2e


def config_with(model: Path) -> str:
    return (
        "[reward-service]\nsandbox = 'off'\nhttp = { port = 0 }\n\n"
        f'[[reward-service.reward_models]]\nname = "helpful"\npath = "{model}"\nbatch_size = 4\nwait_s = 0.01\n'
    )


def rewards(client: httpx.Client) -> list[float]:
    items = [
        {"id": str(index), "verifier": "helpful", "prompt": "hi", "completion": text}
        for index, text in enumerate(("a", "no way", "is it so?", "b" * 500))
    ]
    results = client.post("/v1/score", json={"items": items, "deadline_s": 120}).json()["results"]
    assert results[3]["reward"] is None
    assert results[3]["error"]["kind"] == "data"
    assert all(result["verifier_version"].startswith("2+") for result in results)
    return [float(result["reward"]) for result in results[:3]]


def test_rewards_are_the_same_before_and_after_the_model_process_is_killed(tmp_path: Path) -> None:
    model = write_reward_model(tmp_path / "model", given=PLAIN)
    with real_service(tmp_path, config_with(model)) as (process, client):
        before = rewards(client)  # waits until the model is loaded
        assert client.get("/readyz").status_code == 200
        os.kill(children_of(process.pid)[0], signal.SIGKILL)
        assert rewards(client) == pytest.approx(before, abs=1e-5)
        last = children_of(process.pid)[0]
        process.terminate()
        assert process.wait(timeout=30) == 0
        assert all_end([last])


@pytest.mark.parametrize("causal", [False, True])
def test_a_wrong_directory_ends_the_service_with_its_name(tmp_path: Path, causal: bool) -> None:
    model = write_reward_model(tmp_path / "model", causal=True) if causal else tmp_path / "absent"
    config = tmp_path / "run.toml"
    config.write_text(config_with(model))
    ended = subprocess.run([*COMMAND, "--config", config], capture_output=True, text=True, timeout=240, check=False)
    assert ended.returncode == 78
    assert str(model) in ended.stderr
    assert "stopped by an error: " in ended.stderr
