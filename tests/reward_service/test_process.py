import os
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.process_ends import all_end
from tests.reward_service.real_service import COMMAND, real_service

pytestmark = pytest.mark.e2e

EXACT = {"id": "a", "verifier": "exact_match", "completion": "7", "arguments": {"answer": "7"}}
CONFIG = """
[reward-service]
sandbox = "off"
http = { port = 0 }
id = "rewards-7"
drain_s = 30.0
workers = { count = 1 }

[[reward-service.verifiers]]
name = "process_id"
function = "sample_verifiers:process_id"

[[reward-service.verifiers]]
name = "read_pipe"
function = "sample_verifiers:read_pipe"

[[reward-service.verifiers]]
name = "hang"
function = "sample_verifiers:hang_on_request"
"""


def score(client: httpx.Client, verifier: str, completion: str = "", **arguments: str) -> dict[str, float]:
    item = {"id": "a", "verifier": verifier, "completion": completion, "arguments": arguments}
    result = client.post("/v1/score", json={"items": [item]}).json()["results"][0]
    assert isinstance(result, dict)
    return result


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 0), (signal.SIGKILL, -9)])
def test_however_the_service_ends_it_leaves_no_worker_behind(tmp_path: Path, number: signal.Signals, code: int) -> None:
    with real_service(tmp_path, CONFIG) as (process, client):
        worker = int(score(client, "process_id")["reward"])
        process.send_signal(number)
        assert process.wait(timeout=10) == code
        assert all_end([worker], timeout_s=5)


def test_a_service_that_is_told_to_stop_finishes_what_runs_and_sends_others_away(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with real_service(tmp_path, CONFIG) as (process, client), ThreadPoolExecutor(1) as thread:
        running = thread.submit(score, client, "read_pipe", file=str(pipe))
        with pipe.open("w") as writer:  # returns when the verifier has opened it
            process.terminate()
            while (refused := client.post("/v1/score", json={"items": [EXACT]})).status_code == 200:
                continue
            assert (refused.status_code, refused.json()["error"]["kind"]) == (503, "draining")
            writer.write("0.75")
        assert running.result(timeout=60)["reward"] == 0.75
        assert process.wait(timeout=30) == 0


def test_scores_carry_the_name_of_the_service(tmp_path: Path) -> None:
    with real_service(tmp_path, CONFIG) as (_, client):
        assert client.post("/v1/score", json={"items": [EXACT]}).json()["service_id"] == "rewards-7"


def test_a_worker_that_is_killed_between_items_is_replaced(tmp_path: Path) -> None:
    with real_service(tmp_path, CONFIG) as (_, client):
        first = int(score(client, "process_id")["reward"])
        os.kill(first, signal.SIGKILL)
        assert all_end([first], timeout_s=5)
        assert int(score(client, "process_id")["reward"]) != first


def test_a_verifier_that_cannot_be_loaded_stops_the_start_with_a_reason(tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    config.write_text(CONFIG.replace("sample_verifiers:process_id", "no_such_module:f"))
    ended = subprocess.run([*COMMAND, "--config", config], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 78
    assert "cannot import 'no_such_module'" in ended.stderr
