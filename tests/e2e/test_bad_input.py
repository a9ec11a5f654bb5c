"""Bad input is refused clearly and counted, and training goes on beside it."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgpack
import pytest
import zmq

from protocol.codec import Frame, decode, encode, sealed
from protocol.messages import Heartbeat, Message, PeerRefusal
from protocol.model import PROTOCOL_VERSION
from services.model_folder import fingerprint_directory
from tests.e2e.long_lived_system import LongLivedSystem, generate
from tests.e2e.processes import until
from tests.e2e.run_files import RunFolder

pytestmark = pytest.mark.e2e

SERVICES = ("learner", "generator", "reward", "env")


@pytest.fixture(scope="module")
def training(system: LongLivedSystem) -> Iterator[RunFolder]:
    """A run without end."""
    until(lambda: _waits(system, "env", whom="learner"), what="the env_service to wait for a learner")
    with system.learner("endless", "--steps", "1000000") as (learner, run):
        processes = [learner, *system.services.values()]
        until(lambda: len(run.steps()) >= 2, what="two steps", during=processes)
        yield run


def _waits(system: LongLivedSystem, service: str, *, whom: str) -> bool:
    """True if it listens, is not ready, and says that it waits for `whom` first."""
    try:
        answer = system.call(service, "/readyz")
    except httpx.ConnectError:  # the system was started a moment ago
        return False
    return answer.status_code == httpx.codes.SERVICE_UNAVAILABLE and whom in answer.json()["waiting_for"][0]


@pytest.mark.parametrize("service", SERVICES)
def test_each_service_tells_its_health_its_readiness_and_its_numbers(
    system: LongLivedSystem, training: RunFolder, service: str
) -> None:
    url = system.run_file.url(service)
    assert httpx.get(f"{url}/healthz").status_code == 200
    assert httpx.get(f"{url}/readyz").json() == {"ready": True, "waiting_for": [], "waiting_s": 0.0}
    assert "headway_" in httpx.get(f"{url}/metrics").text


BAD_REQUESTS: dict[str, tuple[dict[str, Any], int, str, str]] = {
    "no JSON": ({"content": b'{"request_id": '}, 400, "malformed_json", "not JSON"),
    "an unknown field": ({"json": generate(colour="red")}, 422, "unknown_field", "colour"),
    "a token that is not there": ({"json": generate(prompt_token_ids=[3, 999])}, 422, "token_out_of_range", "999"),
    "a negative token": ({"json": generate(prompt_token_ids=[-1])}, 422, "invalid_field", "prompt_token_ids"),
    "too long a prompt": ({"json": generate(prompt_token_ids=[3] * 200)}, 422, "too_long", "64 tokens"),
    "top-p in training": ({"json": generate(sampling={"top_p": 0.9})}, 422, "forbidden_in_training", "top_p"),
    "greedy training": ({"json": generate(sampling={"temperature": 0.0})}, 422, "forbidden_in_training", "temperature"),
    "a stop token that is not there": (
        {"json": generate(sampling={"stop_token_ids": [500]})}, 422, "token_out_of_range", "stop_token_ids",
    ),
    "another token": ({"json": generate(), "headers": {"Authorization": "Bearer x"}}, 401, "unauthorized", "Bearer"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_REQUESTS)
def test_the_generator_refuses_and_counts(system: LongLivedSystem, training: RunFolder, name: str) -> None:
    request, status, kind, named = BAD_REQUESTS[name]
    before = system.refusals("generator").get(kind, 0)
    answer = system.call("generator", "/v1/generate", **request)
    assert answer.status_code == status
    assert answer.json()["error"]["kind"] == kind
    assert named in answer.json()["error"]["message"]
    assert system.refusals("generator")[kind] == before + 1
    assert_it_trains_on(system, training)


@pytest.mark.parametrize(
    ("service", "path"), [("learner", "/v1/generators"), ("reward", "/v1/score"), ("env", "/v1/anything")]
)
def test_the_others_refuse_a_wrong_token_and_what_is_no_json(
    system: LongLivedSystem, training: RunFolder, service: str, path: str
) -> None:
    wrong = system.call(
        service, path, content=b"{", headers={"Authorization": "Bearer x", "Content-Type": "application/json"}
    )
    assert (wrong.status_code, wrong.json()["error"]["kind"]) == (401, "unauthorized")
    broken = system.call(service, path, content=b"{", headers={"Content-Type": "application/json"})
    expected = (404, "unknown_route") if service == "env" else (400, "malformed_json")
    assert (broken.status_code, broken.json()["error"]["kind"]) == expected
    assert system.refusals(service).keys() >= {"unauthorized", expected[1]}


def test_evaluation_may_shape_the_distribution(system: LongLivedSystem, training: RunFolder) -> None:
    shaped = {
        "top_p": 0.9, "top_k": 5, "min_p": 0.01, "repetition_penalty": 1.1, "presence_penalty": 0.5,
        "frequency_penalty": -0.5, "min_tokens": 3, "seed": 7,
    }  # fmt: skip
    answer = system.call("generator", "/v1/generate", json=generate(n=2, purpose="evaluate", sampling=shaped))
    parts = [json.loads(line) for line in answer.text.splitlines()]
    tokens = [token for part in parts for token in part["token_ids"]]
    assert answer.status_code == 200
    assert {part["index"] for part in parts} == {0, 1}
    assert len(tokens) >= 6
    assert all("error" not in part for part in parts)


def test_a_generator_with_another_tokenizer_is_refused_with_both_fingerprints(
    system: LongLivedSystem, training: RunFolder, model: Path
) -> None:
    ours = fingerprint_directory(model)
    stranger = {
        "generator_id": "stranger", "url": "http://127.0.0.1:9", "protocol_version": PROTOCOL_VERSION,
        "fingerprints": {**ours.model_dump(), "tokenizer": "beef" * 8}, "world_size": 1, "backend": "gloo",
        "max_model_len": 64, "serving_version": None,
    }  # fmt: skip
    answer = system.call("learner", "/v1/generators", json=stranger)
    assert answer.status_code == 409
    error = answer.json()["error"]
    assert error["kind"] == "join_refused"
    assert "tokenizer" in error["message"]
    assert ours.tokenizer in error["message"]
    assert "beef" * 8 in error["message"]
    assert system.refusals("learner")["join_refused"] == 1
    assert_it_trains_on(system, training)


GARBAGE: dict[str, tuple[list[Frame], str]] = {
    "garbage": ([b"\x00\xffgarbage"], "malformed"),
    "no header": ([msgpack.packb({"a": 1})], "malformed"),
    "another version": ([msgpack.packb([PROTOCOL_VERSION + 1, "hello", {}])], "protocol_version"),
    "an unknown kind": (sealed([msgpack.packb([PROTOCOL_VERSION, "howdy", {}])]), "malformed"),
    "a wrong field": (sealed([msgpack.packb([PROTOCOL_VERSION, "heartbeat", {"running": 3}])]), "malformed"),
    "damaged on the way": ([*encode(Heartbeat(running=()))[:-1], b"8 bytes."], "checksum"),
    "a heartbeat before a hello": (encode(Heartbeat(running=())), "unknown_peer"),
}


@pytest.mark.parametrize("name", GARBAGE)
def test_the_learner_refuses_and_counts_messages(system: LongLivedSystem, training: RunFolder, name: str) -> None:
    frames, reason = GARBAGE[name]
    before = system.refusals("learner").get(reason, 0)
    answer = ask(f"tcp://127.0.0.1:{system.run_file.leases}", frames)
    assert isinstance(answer, PeerRefusal)
    assert answer.reason == reason
    assert system.refusals("learner")[reason] == before + 1
    assert_it_trains_on(system, training)


def test_the_openai_routes_answer_and_want_the_token(system: LongLivedSystem, training: RunFolder) -> None:
    body = {"model": "policy", "prompt": "12+30=", "max_tokens": 5}
    answer = system.call("generator", "/openai/v1/completions", json=body)
    assert answer.status_code == 200
    assert answer.json()["usage"]["prompt_tokens"] == 6
    stranger = httpx.post(f"{system.run_file.url('generator')}/openai/v1/completions", json=body)
    assert stranger.status_code == 401


def assert_it_trains_on(system: LongLivedSystem, training: RunFolder) -> None:
    before = len(training.steps())
    until(lambda: len(training.steps()) > before, what="another step", during=[*system.services.values()])


def ask(address: str, frames: list[Frame]) -> Message:
    """Sends frames as they are, and returns the answer."""
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    try:
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(address)
        socket.send_multipart(frames)
        assert socket.poll(5000), "no answer"
        return decode(socket.recv_multipart())
    finally:
        socket.close()
        context.term()
