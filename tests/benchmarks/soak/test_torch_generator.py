"""The soak's generator: the real one on a torch engine. It loads what a learner has, and its logprobs say so."""

import asyncio
import json
import sys
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from fastapi import FastAPI, Response

from benchmarks.soak.torch_policy import TorchPolicy
from protocol.fleet import PULLED_EPOCH, AnnouncementAnswer, Commit, Pull
from services.http.bodies import json_answer
from tests.e2e.processes import Launched
from tests.e2e.run_files import free_ports
from tests.generator.conftest import Policy, pack
from tests.generator.scripted_learner import ScriptedDownloads

TOLERANCE = 1e-5
TEXT = (3, 4, 13, 5, 6, 14, 7)
START_S = 120.0


class TakingLearner(ScriptedDownloads):
    """Takes every generator in, and offers it weights."""

    def _app(self) -> FastAPI:
        app = super()._app()

        @app.post("/v1/generators")
        async def announced() -> Response:
            return json_answer(AnnouncementAnswer(incarnation=1, announce_every_s=1.0))

        return app


@pytest.fixture
def policy(tmp_path: Path) -> Policy:
    """A Llama of transformers in the learner's place. Its tokenizer is not asked for, but has to be there."""
    folder = tmp_path / "model"
    folder.mkdir()
    policy = Policy(folder=folder, tied=True)
    (folder / "tokenizer.json").write_text("{}", encoding="utf-8")
    return policy


def test_the_policy_in_torch_has_the_logprobs_of_the_model_of_transformers(policy: Policy) -> None:
    ours = TorchPolicy.read(policy.folder, positions=64)

    rows = ours(torch.tensor([TEXT]))[0, :-1].log_softmax(-1)

    found = rows.gather(1, torch.tensor(TEXT[1:])[:, None])[:, 0].tolist()
    assert found == pytest.approx(policy.logprobs(TEXT), abs=TOLERANCE)


async def test_the_generator_proves_the_weights_that_it_has_loaded_and_samples_with_their_logprobs(
    policy: Policy, tmp_path: Path
) -> None:
    policy.change(seed=1)
    learner = TakingLearner(buckets=pack(policy.tensors()), version="1.1")
    async with learner.running(), _generator(policy.folder, learner=learner.url, folder=tmp_path) as client:
        assert (await client.post("/v1/generate", json=_request())).status_code == 503

        pulled = await _post(client, "/v1/weights/pull", Pull(version="1.1", deadline_s=60.0).model_dump(mode="json"))
        commit = Commit(version="1.1", epoch=PULLED_EPOCH, probe=(TEXT,))
        committed = await _post(client, "/v1/weights/commit", commit.model_dump(mode="json"))
        answer = await client.post("/v1/generate", json=_request())

    assert pulled["version"] == "1.1"
    assert committed["probe_logprobs"] == pytest.approx(policy.logprobs(TEXT), abs=TOLERANCE)
    _are_of(policy, answer.text)


def _request() -> dict[str, Any]:
    sampling = {"max_tokens": 5, "seed": 3}
    return {"request_id": "r", "prompt_token_ids": list(TEXT), "n": 3, "purpose": "train", "sampling": sampling}


def _are_of(policy: Policy, answer: str) -> None:
    """Three whole completions, each token stamped, with the policy's logprobs."""
    parts = [json.loads(line) for line in answer.splitlines()]
    assert sorted(part["index"] for part in parts) == [0, 1, 2]
    for part in parts:
        assert [(span["version"], span["start"], span["end"]) for span in part["version_spans"]] == [("1.1", 0, 5)]
        expected = policy.logprobs((*TEXT, *part["token_ids"]))[len(TEXT) - 1 :]
        assert part["behavior_logprobs"] == pytest.approx(expected, abs=TOLERANCE)
    assert len({tuple(part["token_ids"]) for part in parts}) > 1


async def _post(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = await client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


@asynccontextmanager
async def _generator(model: Path, *, learner: str, folder: Path) -> AsyncIterator[httpx.AsyncClient]:
    """The process, ready for weights."""
    (port,) = free_ports(1)
    words = ["--model", str(model), "--http.port", str(port), "--openai", "false", "--join.learner", learner]
    words += ["--engine.max-model-len", "64", "--run.directory", str(folder)]
    launched = Launched(
        "generator", [sys.executable, "-m", "benchmarks.soak.generator", *words], folder=folder, mark=uuid.uuid4().hex
    )
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=START_S) as client:
            async with asyncio.timeout(START_S):
                while not await _is_up(client):
                    assert launched.alive, launched.text()
                    await asyncio.sleep(0.1)
            yield client
    finally:
        launched.end()


async def _is_up(client: httpx.AsyncClient) -> bool:
    try:
        return (await client.get("/v1/state")).status_code == 200
    except httpx.TransportError:
        return False
