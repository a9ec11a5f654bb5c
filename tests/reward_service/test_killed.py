"""SIGKILL of a worker, or of the service, in the middle of a batch: never a wrong reward."""

import os
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from pydantic import JsonValue

from tests.reward_service.real_service import real_service

pytestmark = pytest.mark.e2e

CONFIG = """
[reward-service]
sandbox = "off"
http = { port = 0 }
workers = { count = 2, max_attempts = 2, compute_timeout_s = 300.0 }

[[reward-service.verifiers]]
name = "read_pipe"
function = "sample_verifiers:read_pipe"

[[reward-service.verifiers]]
name = "length_slowly"
function = "sample_verifiers:length_slowly"
"""
ITEMS = 60

Result = Mapping[str, object]


def batch() -> list[dict[str, JsonValue]]:
    """Items whose right reward is the number in their id."""
    return [{"id": str(number), "verifier": "length_slowly", "completion": "x" * number} for number in range(ITEMS)]


def held_up(pipe: Path) -> dict[str, JsonValue]:
    """An item whose reward, 77, is what somebody writes into the pipe: until then its batch is not done."""
    os.mkfifo(pipe)
    return {"id": "77", "verifier": "read_pipe", "completion": "", "arguments": {"file": str(pipe)}}


def check_all_right_or_failed(results: Sequence[Result]) -> tuple[int, int]:
    """Checks each result for its right reward, or an error that may pass; returns the number of each."""
    for result in results:
        assert (result["reward"] is None) != (result["error"] is None)
        if result["reward"] is not None:
            assert result["reward"] == float(str(result["id"]))
        else:
            error = result["error"]
            assert isinstance(error, dict)
            assert error["kind"] == "infrastructure", error
    rewarded = sum(result["reward"] is not None for result in results)
    return rewarded, len(results) - rewarded


def kill_workers(parent: int, *, times: int, running: Future[httpx.Response]) -> int:
    """Kill children of the process one after the other while the request runs, and return how many were killed."""
    killed = 0
    while killed < times and not running.done():
        for worker in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
            try:
                os.kill(int(worker), signal.SIGKILL)
            except ProcessLookupError:
                continue
            killed += 1
    return killed


def test_items_whose_workers_are_killed_have_their_right_reward_or_an_error(tmp_path: Path) -> None:
    with real_service(tmp_path, CONFIG) as (process, client), ThreadPoolExecutor(1) as thread:
        running = thread.submit(client.post, "/v1/score", json={"items": batch(), "deadline_s": 100})
        assert kill_workers(process.pid, times=6, running=running) >= 1
        answer = running.result(timeout=200)
        assert answer.status_code == 200
        results = answer.json()["results"]
        assert [result["id"] for result in results] == [str(number) for number in range(ITEMS)]
        rewarded, _ = check_all_right_or_failed(results)
        assert rewarded > 0
        again = client.post("/v1/score", json={"items": batch(), "deadline_s": 100}).json()["results"]
        assert check_all_right_or_failed(again) == (ITEMS, 0)


def test_a_killed_service_breaks_the_connection_and_what_it_had_sent_is_right(tmp_path: Path) -> None:
    results: list[Result] = []
    items = [*batch(), held_up(tmp_path / "pipe")]
    first = threading.Event()

    def read(client: httpx.Client) -> None:
        headers = {"Accept": "application/x-ndjson"}
        with client.stream("POST", "/v1/score", json={"items": items}, headers=headers) as answer:
            for line in answer.iter_lines():
                results.append(httpx.Response(200, content=line).json())
                first.set()

    with real_service(tmp_path, CONFIG) as (process, client), ThreadPoolExecutor(1) as thread:
        running = thread.submit(read, client)
        assert first.wait(timeout=200)
        process.send_signal(signal.SIGKILL)
        with pytest.raises(httpx.TransportError):
            running.result(timeout=60)
    assert 0 < len(results) < len(items)
    check_all_right_or_failed(results)


def test_a_repetition_after_the_service_was_killed_is_judged_by_its_successor(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    asked = {"items": [*batch(), held_up(pipe)], "deadline_s": 100}
    headers = {"Idempotency-Key": "once"}
    with real_service(tmp_path, CONFIG) as (process, client), ThreadPoolExecutor(1) as thread:
        running = thread.submit(client.post, "/v1/score", json=asked, headers=headers)
        assert kill_workers(process.pid, times=1, running=running) >= 1, "all that are there at a look"
        process.send_signal(signal.SIGKILL)
        with pytest.raises(httpx.TransportError):
            running.result(timeout=60)
    with real_service(tmp_path, CONFIG) as (_, client), ThreadPoolExecutor(1) as thread:
        running = thread.submit(client.post, "/v1/score", json=asked, headers=headers)
        pipe.write_text("77")  # returns when the verifier has read it
        results = running.result(timeout=200).json()["results"]
    assert check_all_right_or_failed(results) == (ITEMS + 1, 0)


MIXED_CONFIG = CONFIG.replace('sandbox = "off"', 'execution = { cgroup = "off", concurrency = 3, spare = 1 }')
ADD = "```python\ndef add(a, b):\n    return a + b\n```"
COUNTS = "```python\nimport sys\nprint(len(sys.stdin.read()))\n```"


def mixed_batch() -> list[dict[str, JsonValue]]:
    """Right answers, judged in worker processes, in the service, and by programs in the sandbox."""
    call: JsonValue = {"kind": "call", "entry_point": "add", "cases": [{"arguments": [1, 2], "expected": 3}]}
    check: JsonValue = {"kind": "assert", "cases": [{"code": "assert add(1, 2) == 3"}]}
    stdio: JsonValue = {"kind": "stdio", "cases": [{"stdin": "x" * 9, "stdout": "9"}]}
    one_of_each: list[dict[str, JsonValue]] = [
        {"verifier": "math", "completion": "The answer is 4.", "arguments": {"answer": "4"}},
        {"verifier": "length_slowly", "completion": "x"},
        {"verifier": "exact_match", "completion": "a", "arguments": {"answer": "a"}},
        {"verifier": "code", "completion": ADD, "arguments": {"tests": call, "timeout_s": 30.0}},
        {"verifier": "code", "completion": ADD, "arguments": {"tests": check, "timeout_s": 30.0}},
        {"verifier": "code", "completion": COUNTS, "arguments": {"tests": stdio, "timeout_s": 30.0}},
    ]
    return [{"id": str(number), **item} for number, item in enumerate(one_of_each * 4)]


def kill_at_the_first_line(process: subprocess.Popen[str], client: httpx.Client, asked: dict[str, object]) -> None:
    """Kill the service as soon as it has judged one item; what it still sends is right."""
    with client.stream("POST", "/v1/score", json=asked, headers={"Accept": "application/x-ndjson"}) as answer:
        for line in answer.iter_lines():
            assert httpx.Response(200, content=line).json()["reward"] == 1.0
            process.send_signal(signal.SIGKILL)


def test_right_programs_and_answers_score_one_however_often_service_and_workers_are_killed(tmp_path: Path) -> None:
    asked: dict[str, object] = {"items": mixed_batch(), "deadline_s": 200}
    for _ in range(2):
        with real_service(tmp_path, MIXED_CONFIG) as (process, client), pytest.raises(httpx.TransportError):
            kill_at_the_first_line(process, client, asked)
    with real_service(tmp_path, MIXED_CONFIG) as (process, client), ThreadPoolExecutor(1) as thread:
        running = thread.submit(client.post, "/v1/score", json=asked)
        kill_workers(process.pid, times=3, running=running)  # keepers of sandboxes among them
        results = running.result(timeout=240).json()["results"]
        errors = [result["error"]["kind"] for result in results if result["error"]]
        assert set(errors) <= {"infrastructure"}
        assert {result["reward"] for result in results if not result["error"]} <= {1.0}
        again = client.post("/v1/score", json=asked).json()["results"]
        assert [result["reward"] for result in again] == [1.0] * len(again), again
