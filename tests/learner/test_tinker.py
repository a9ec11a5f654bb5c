"""The learner as a server of the Tinker API, in the test's own process: folder, keys, routes, and what it refuses."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from pydantic import SecretStr

from headway.doctor_command import _tenants_of
from learner.config import LearnerConfig
from learner.tenants.keys import first_key_path
from learner.tinker import serve_tinker
from protocol.adapters import ADAPTER_FILES
from protocol.tinker.messages import MESSAGES
from services.config.models import load_config
from services.config.sources import ConfigError
from services.diagnosis.asked import Target
from services.diagnosis.asking import ask
from services.diagnosis.culprits import diagnose
from services.diagnosis.verdict import verdict_on
from services.process import Stop, WrongSettings
from services.run_lock import FolderTaken
from tests.e2e.run_files import free_ports
from tests.learner.tenants.scripted_generator import SAMPLED, ScriptedAdapterGenerator
from tests.learner.tenants.service_client import forward_backward
from tests.learner.tenants.tiny import make_tiny_model

TOKEN = "of the generators"
NAME = "tiny/model"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("models") / "tiny"
    make_tiny_model(folder)
    return folder


def settings(model: Path, folder: Path, *generators: str, more: Sequence[str] = ()) -> LearnerConfig:
    words = ["--model", str(model), "--run.directory", str(folder), "--run.name", "r"]
    words += ["--http.port", str(free_ports(1)[0])]
    words += ["--tinker.enabled", "true", "--tinker.base-model", NAME]
    words += [word for url in generators for word in ("--tinker.generators", url)]
    return load_config(
        LearnerConfig, process="learner", argv=[*words, *more], environ={"HEADWAY_LEARNER__HTTP__TOKEN": TOKEN}
    )


@asynccontextmanager
async def serving(
    config: LearnerConfig, caplog: pytest.LogCaptureFixture, *, stop: Stop | None = None
) -> AsyncIterator[httpx.AsyncClient]:
    """A client with the first key."""
    caplog.set_level("INFO")
    caplog.clear()
    server = asyncio.create_task(serve_tinker(config, stop or Stop()))
    try:
        async with asyncio.timeout(120):
            while "with the Tinker API" not in caplog.text and not server.done():  # noqa: ASYNC110  a log has no event
                await asyncio.sleep(0.02)
        if server.done():
            await server
        key = first_key_path(config.tinker.keys_path(config.run.folder)).read_text().strip()
        url = f"http://127.0.0.1:{config.http.port}"
        async with httpx.AsyncClient(base_url=url, headers={"X-API-Key": key}, timeout=60) as client:
            yield client
    finally:
        server.cancel()
        await asyncio.gather(server, return_exceptions=True)


async def posted(client: httpx.AsyncClient, route: str, **body: Any) -> Any:
    answer = await client.post(f"/api/v1/{route}", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def result(client: httpx.AsyncClient, accepted: Any) -> httpx.Response:
    return await client.post("/api/v1/retrieve_future", json={"request_id": accepted["request_id"]})


async def trained(client: httpx.AsyncClient) -> str:
    """A model with an inflight sampling session, by the session's name."""
    session = (await posted(client, "create_session", tags=[], sdk_version="0.38"))["session_id"]
    made = await posted(
        client, "create_model", session_id=session, model_seq_id=0, base_model=NAME, lora_config={"rank": 4, "seed": 1}
    )
    model_id = (await result(client, made)).json()["model_id"]
    body = forward_backward(model_id, 1, (1, 2, 3, 4))
    headers = {"Content-Type": "application/x-protobuf"}
    await result(client, (await client.post("/api/v1/forward_backward", content=body, headers=headers)).json())
    await result(client, await posted(client, "optim_step", model_id=model_id, seq_id=2, adam_params={}))
    saved = await posted(
        client, "save_weights_for_sampler", model_id=model_id, seq_id=3, sampling_session_seq_id=1, kind="inflight"
    )
    return str((await result(client, saved)).json()["sampling_session_id"])


async def test_a_client_trains_and_samples_and_a_generator_fetches_what_it_samples_from(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    generator = ScriptedAdapterGenerator()
    async with generator.running() as url, serving(settings(model, tmp_path, url), caplog) as client:
        session = await trained(client)
        prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]}
        targets = {"data": [2, 3], "dtype": "int64", "shape": [2, 1]}
        accepted = await posted(
            client, "asample", sampling_session_id=session, seq_id=1, prompt=prompt,
            sampling_params={"max_tokens": 3}, target_prompt_logprobs=targets,
        )  # fmt: skip
        answer = await result(client, accepted)
        (sequence,) = MESSAGES["SampleResponse"].FromString(answer.content).sequences
        assert np.frombuffer(sequence.tokens, "<i4").tolist() == [*SAMPLED]
        assert np.frombuffer(sequence.versions, "<i8").tolist() == [1] * len(SAMPLED), "of one step"

        adapter = generator.asked[0].adapter
        assert adapter is not None
        assert (adapter.rank, adapter.is_replaced) == (4, True)
        paths = [f"/v1/adapters/{adapter.name}/{file}" for file in ADAPTER_FILES]
        assert [(await client.get(path)).status_code for path in paths] == [401, 401]
        shown = {"Authorization": f"Bearer {TOKEN}"}
        assert [(await client.get(path, headers=shown)).status_code for path in paths] == [200, 200]
        status = (await client.get("/v1/status", headers=shown)).json()
        assert [peer["url"] for peer in status["peers"]] == [url]
        tenants = status["tenants"]
        assert (tenants["base_model"], tenants["clients"], tenants["run_count"], tenants["resident"]) == (NAME, 1, 1, 1)
        (run,) = tenants["runs"]
        assert (run["tenant"], run["rank"], run["steps"], run["place"]) == ("first", 4, 1, "memory")
        assert run["waits_for"] == "its client"
        assert run["loss"] > 0
        assert not any(
            secret in json.dumps(status) for secret in (session.partition(":")[0], client.headers["X-API-Key"])
        )
        asked = await ask(Target("learner", str(client.base_url).rstrip("/"), SecretStr(TOKEN)))
        assert verdict_on([asked], diagnose([asked])).sentence.startswith("Healthy: 1 ")
        assert run["name"] in "\n".join(_tenants_of([asked])), "headway doctor shows the run"
        assert "Training runs" in (await client.get("/")).text
        told = (await client.get("/page/data/tenants")).json()
        assert (told["viewer"], told["runs"][0]["name"]) == ("first", run["name"])
        (drawn,) = (await client.get("/page/data/tenant_curves", params={"run": run["name"]})).json()["runs"]
        assert drawn["columns"]["loss"] == [pytest.approx(run["loss"], rel=1e-5)]
        metrics = (await client.get("/metrics")).text
        assert 'headway_learner_tenant_queued_operations{tenant="first"} 0.0' in metrics
        assert "headway_learner_tenant_passes_total 1.0" in metrics
        assert (await client.get("/readyz")).json()["ready"]


async def test_a_second_server_on_the_folder_is_refused_by_name_and_a_later_one_has_what_was_there(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = settings(model, tmp_path)
    async with serving(config, caplog) as client:
        await trained(client)
        with pytest.raises(FolderTaken, match=r"the run in .*/r is that of process .* give this run another name"):
            await serve_tinker(config, Stop())
        key = client.headers["X-API-Key"]
    async with serving(config, caplog) as client:
        assert client.headers["X-API-Key"] == key
        (run,) = (await client.get("/api/v1/training_runs")).json()["training_runs"]
        assert run["base_model"] == NAME
        assert (await client.get("/api/v1/training_runs", headers={"X-API-Key": "tml-x"})).status_code == 401


async def test_what_clients_wait_for_ends_with_the_server_and_nothing_is_cut_off(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stop = Stop()
    async with serving(settings(model, tmp_path), caplog, stop=stop) as client:
        session = await trained(client)
        target = {"sampling_session_id": session, "cloned_sampler_id": 0}
        body = {"target": target, "prev_cursor": 0, "timeout": 30}
        poll = asyncio.create_task(client.post("/api/v1/retrieve_futures", json=body))
        await asyncio.sleep(0.2)
        assert not poll.done()
        stop.request("the test")
        async with asyncio.timeout(60):
            answer = await poll
        assert answer.status_code == 503
        assert (await client.get("/healthz")).status_code == 200
    assert not [each for each in caplog.records if each.levelname == "ERROR"]


async def test_the_state_of_one_base_model_is_not_served_on_another(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(settings(model, tmp_path), caplog):
        pass
    other = tmp_path / "other"
    make_tiny_model(other, hidden=64)
    with pytest.raises(WrongSettings, match=r"the adapters in .* are of the model that was in .*tiny, and .*other is"):
        await serve_tinker(settings(other, tmp_path), Stop())


async def test_more_weights_than_generators_fetch_are_a_wrong_setting(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("learner.tenant_ranks.MAX_ADAPTER_BYTES", 1000)
    with pytest.raises(
        WrongSettings, match=r"tinker\.all_weights: all weights of .* bytes in float32, .* at most 1,000"
    ):
        await serve_tinker(settings(model, tmp_path, more=["--tinker.all-weights", "true"]), Stop())


async def test_what_cannot_be_served_is_a_wrong_setting(model: Path, tmp_path: Path) -> None:
    with pytest.raises(WrongSettings, match=r"tinker\.base_model: clients cut a/b/c"):
        await serve_tinker(settings(model, tmp_path, more=["--tinker.base-model", "a/b/c"]), Stop())
    (tmp_path / "keys.json").write_text(json.dumps({"keys": []}))
    (tmp_path / "keys.json").chmod(0o644)
    with pytest.raises(WrongSettings, match=r"keys\.json holds a secret, and its mode 0644 lets others use it"):
        await serve_tinker(settings(model, tmp_path, more=["--tinker.keys-file", str(tmp_path / "keys.json")]), Stop())


def test_settings_of_a_run_have_no_effect_and_a_token_is_needed(model: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"--training.optimizer.learning-rate is set but has no effect: tinker.enabled"
    ):
        load_config(
            LearnerConfig,
            process="learner",
            argv=["--model", str(model), "--tinker.enabled", "true", "--training.optimizer.learning-rate", "1e-3"],
            environ={"HEADWAY_LEARNER__HTTP__TOKEN": TOKEN},
        )
    with pytest.raises(ConfigError, match=r"--tinker.max-resident is set but has no effect: tinker.enabled is false"):
        load_config(
            LearnerConfig, process="learner", argv=["--model", str(model), "--tinker.max-resident", "3"], environ={}
        )
    with pytest.raises(ConfigError, match=r"tinker.enabled is true and http.token is not set"):
        load_config(
            LearnerConfig, process="learner", argv=["--model", str(model), "--tinker.enabled", "true"], environ={}
        )
