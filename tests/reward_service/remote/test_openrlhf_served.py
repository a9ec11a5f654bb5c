"""The service as a reward server of OpenRLHF's shape, asked as its trainer asks, and by our own client of that."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.reward_service.real_service import real_service

PATH = "/get_reward/numeric"


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    config = '[reward-service]\nsandbox = "off"\nhttp = { port = 0 }\n'
    with real_service(tmp_path_factory.mktemp("service"), config) as (_, client):
        yield client


def test_each_query_has_a_reward_in_its_order(client: httpx.Client) -> None:
    asked = {"query": ["2+2=4", "2+2=5"], "prompts": ["2+2=", "2+2="], "labels": ["4", '{"answer": "4"}']}

    answer = client.post(PATH, json=asked)

    assert answer.status_code == 200, answer.text
    assert answer.json() == {"rewards": [1.0, 0.0], "scores": [1.0, 0.0], "extra_logs": {}}


def test_what_has_no_reward_is_refused_and_no_zero(client: httpx.Client) -> None:
    answer = client.post("/get_reward/nobody", json={"query": ["a"], "labels": ["1"]})

    assert answer.status_code == 404
    assert "unknown verifier 'nobody'" in answer.json()["error"]["message"]


def test_lists_of_other_lengths_are_refused(client: httpx.Client) -> None:
    answer = client.post(PATH, json={"query": ["a"], "labels": ["1", "2"]})

    assert answer.status_code == 422
    assert "labels has 2 entries and query 1" in answer.text


def test_a_headway_service_can_be_that_servers_client(client: httpx.Client, tmp_path: Path) -> None:
    url = str(client.base_url).rstrip("/") + PATH
    config = (
        '[reward-service]\nsandbox = "off"\nhttp = { port = 0 }\n'
        f'[[reward-service.remotes]]\nname = "there"\nkind = "openrlhf"\nurl = "{url}"\n'
    )
    item = {"id": "1", "verifier": "there", "prompt": "2+2=", "completion": "4", "arguments": {"label": "4"}}

    with real_service(tmp_path, config) as (_, other):
        (result,) = other.post("/v1/score", json={"items": [item]}).json()["results"]

    assert result["reward"] == 1.0, result
