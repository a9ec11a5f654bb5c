import asyncio
import json
import os
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest

from learner.tenants.operations import LoggedOperation
from learner.tenants.routes import MAX_BODY_BYTES
from learner.training import trainer_thread
from protocol.tinker.messages import MESSAGES
from protocol.tinker.tensors import write_csr
from tests.learner.tenants.scripted import POISON
from tests.learner.tenants.service_client import BASE, Client, forward_backward, served


def refusing(*_: object, **__: object) -> None:
    raise OSError(28, "No space left on device")


async def history(client: Client, model_id: str, first: int, count: int) -> list[float]:
    """Losses of pairs of a pass and a step, beginning with operation `first`."""
    losses = []
    for seq_id in range(first, first + 2 * count, 2):
        losses.append(await client.loss(model_id, seq_id))
        await client.result(await client.step(model_id, seq_id + 1))
    return losses


async def test_operations_wait_for_those_before_them_and_share_no_gradient(tmp_path: Path) -> None:
    async with served(tmp_path) as parts:
        client = parts.client()
        model_id = await client.model()
        step = await client.step(model_id, 3)
        second = await client.train(model_id, 2)
        assert not any(call.startswith("round") for call in parts.trainer.calls)
        first = await client.train(model_id, 1)
        losses = [(await client.result(each))["loss:sum"] for each in (first, second)]
        assert losses[0] == losses[1]
        assert (await client.result(step))["metrics"]["step:max"] == 1
        assert await client.loss(model_id, 4) < losses[0]


async def test_calls_that_meet_share_a_pass(tmp_path: Path) -> None:
    async with served(tmp_path) as parts:
        one, two = parts.client("a"), parts.client("b")
        models = [await one.model(), await one.model(1), await two.model()]
        accepted = await asyncio.gather(
            *(client.train(model, seq) for client, model in zip((one, one, two), models, strict=True) for seq in (2, 1))
        )
        for client, each in zip((one, one, one, one, two, two), accepted, strict=True):
            await client.result(each)
        rounds = [call for call in parts.trainer.calls if call.startswith("round")]
        assert len(rounds) < 6


async def test_a_retry_is_done_once_and_another_message_under_its_number_is_named(tmp_path: Path) -> None:
    async with served(tmp_path) as parts:
        client = parts.client()
        model_id = await client.model()
        first, again = await client.train(model_id, 1), await client.train(model_id, 1)
        assert first == again
        await client.result(first)
        assert (await client.result(again))["loss:sum"] > 0
        assert parts.trainer.calls.count("round of 1") == 1
        refused = await client.train(model_id, 1, tokens=(4, 5), status=422)
        assert "another content" in refused["error"]["message"]
        refused = await client.post("optim_step", 422, model_id=model_id, seq_id=1, adam_params={})
        assert "needs the next seq_id" in refused["error"]["message"]


async def test_a_retry_that_counts_the_sampling_session_up_is_a_retry(tmp_path: Path) -> None:
    async with served(tmp_path) as parts:
        client = parts.client()
        model_id = await client.model()
        names = []
        for number in (5, 6):
            accepted = await client.post(
                "save_weights_for_sampler", model_id=model_id, seq_id=1, sampling_session_seq_id=number
            )
            names.append((await client.result(accepted))["sampling_session_id"])
        assert names == [f"{client.session_id}:sample:5"] * 2


async def test_what_does_not_fit_fails_in_its_turn_and_leaves_no_hole(tmp_path: Path) -> None:
    async with served(tmp_path) as parts:
        client = parts.client()
        model_id = await client.model()
        failed = await client.post("optim_step", model_id=model_id, seq_id=1, adam_params={"beta1": 7})
        answer = await client.result(failed)
        assert answer["category"] == "user"
        assert "adam_params.beta1" in answer["error"]
        dimuon = await client.post("optim_step", model_id=model_id, seq_id=2, optimizer_params={"type": "dimuon"})
        assert "AdamW alone" in (await client.result(dimuon))["error"]
        assert await client.loss(model_id, 3) > 0


async def test_tensors_of_no_shape_fail_in_their_turn_too(tmp_path: Path) -> None:
    async with served(tmp_path) as parts:
        client = parts.client()
        model_id = await client.model()
        request = MESSAGES["ForwardBackwardRequest"].FromString(forward_backward(model_id, 1))
        request.data[0].loss_fn_inputs["weights"].CopyFrom(MESSAGES["Tensor"](dtype=1, dense=bytes(4), shape=[1] * 70))
        accepted = await client.send(request.SerializeToString())
        answer = await client.result(accepted)
        assert answer["category"] == "user"
        assert "weights: a shape of 70 sizes" in answer["error"]
        assert await client.loss(model_id, 2) > 0


async def test_a_request_whose_reading_broke_was_not_accepted_and_may_come_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its retry must not be told that it was: its client would wait for ever."""
    async with served(tmp_path) as parts:
        client = parts.client()
        model_id = await client.model()
        with monkeypatch.context() as broken:
            broken.setattr(parts.service._reader, "_check", lambda _: (_ for _ in ()).throw(MemoryError("no memory")))
            for _ in range(2):
                with pytest.raises(MemoryError):
                    await client.train(model_id, 1)
        assert await client.loss(model_id, 1) > 0


async def test_tensors_that_a_few_bytes_stand_for_count_with_their_size_while_they_wait(tmp_path: Path) -> None:
    async with served(tmp_path, max_queued_bytes=1 << 20) as parts:
        client = parts.client()
        model_id = await client.model()
        request = MESSAGES["ForwardBackwardRequest"].FromString(forward_backward(model_id, 2))
        request.data[0].loss_fn_inputs["weights"].CopyFrom(
            write_csr(np.zeros(0), np.zeros(2, np.int64), np.zeros(0, np.int64), (1, 1 << 19))
        )
        await client.send(request.SerializeToString())
        assert parts.service.models.queue_length("a").size > 1 << 20
        await client.train(model_id, 3, status=429)


async def test_what_a_client_puts_in_as_it_likes_is_bounded_so_that_the_next_life_can_read_it(tmp_path: Path) -> None:
    """A parser of JSON has a bound of depth: notes next to it lie deeper in the catalog, which no start could read."""
    deep = json.loads('{"a":' * 199 + "1" + "}" * 199)
    async with served(tmp_path) as parts:
        client = parts.client()
        for notes in (deep, {"a": "x" * (1 << 20)}):
            answer = await client.post("create_session", 422, user_metadata=notes)
            assert "user_metadata" in answer["error"]["message"]
        session = await client.session()
        finished = await client.http.post(f"/sessions/{session}/finish", json={"status": deep})
        assert finished.status_code == 422
        graph = {"nodes": [], "more": deep["a"]}
        body: dict[str, Any] = {"session_id": session, "custom_loss_seq_id": 0, "inputs": []}
        answer = await client.post("create_custom_loss", 422, **body, graph=graph)
        assert "graph: Value error, too deep: expected at most 64" in answer["error"]["message"]
    async with served(tmp_path) as parts:
        assert await parts.client().get(f"sessions/{session}")


async def test_models_that_are_made_together_find_no_room_twice(tmp_path: Path) -> None:
    async with served(tmp_path, max_models=1) as parts:
        client = parts.client()
        body = {"session_id": await client.session(), "base_model": BASE, "lora_config": {"rank": 2}}
        numbers = (0, 1, 1, 0)
        answers = await asyncio.gather(
            *(client.http.post("/create_model", json={**body, "model_seq_id": number}) for number in numbers)
        )
        assert [answer.status_code for answer in answers] == [200, 422, 422, 200]
        assert len(parts.trainer.adapters) == 1
        await client.post("unload_model", model_id=f"{client.session_id}:train:0")
        await client.model(2)


@pytest.mark.parametrize("lora", [{}, {"lora_config": None}, {"lora_config": {"rank": 0}}], ids=str)
async def test_who_asks_for_all_weights_is_refused_by_name(tmp_path: Path, lora: dict[str, Any]) -> None:
    async with served(tmp_path) as parts:
        client = parts.client()
        body = {"session_id": await client.session(), "model_seq_id": 0, "base_model": BASE, **lora}
        refused = await client.post("create_model", 422, **body)
        assert "lora_config: " in refused["error"]["message"]
        assert "asks for all weights of the model; this server trains adapters alone" in refused["error"]["message"]


async def test_all_weights_are_one_models_at_a_time_where_the_settings_say_so(tmp_path: Path) -> None:
    async with served(tmp_path, all_weights=True) as parts:
        client, other = parts.client(), parts.client("b")
        body: dict[str, Any] = {"base_model": BASE, "lora_config": {"rank": 0}}
        mine = {**body, "session_id": await client.session()}
        theirs = {**body, "session_id": await other.session()}
        adapter = await client.post("create_model", 422, **{**mine, "lora_config": {"rank": 4}}, model_seq_id=0)
        assert "lora_config: of rank 4; this server trains all weights" in adapter["error"]["message"]

        model_id = (await client.result(await client.post("create_model", **mine, model_seq_id=1)))["model_id"]
        assert parts.trainer.adapters[model_id].shape.rank == 0
        info = await client.post("get_info", model_id=model_id)
        assert (info["is_lora"], info["lora_rank"]) == (False, None)
        second = await client.post("create_model", 422, **mine, model_seq_id=2)
        assert f"all weights are trained by your model {model_id}" in second["error"]["message"]
        refused = await other.post("create_model", 422, **theirs, model_seq_id=0)
        assert "all weights are trained by another tenant's model" in refused["error"]["message"]
        assert model_id not in refused["error"]["message"]

        await client.post("unload_model", model_id=model_id)
        await other.result(await other.post("create_model", **theirs, model_seq_id=1))


async def test_another_tenant_finds_nothing_of_mine(tmp_path: Path) -> None:
    async with served(tmp_path) as parts:
        mine, other = parts.client("a"), parts.client("b")
        model_id = await mine.model()
        saved = await mine.post("save_weights", model_id=model_id, seq_id=1, path="one")
        path = (await mine.result(saved))["path"]
        await other.session()
        await other.train(model_id, 2, status=404)
        await other.post("get_info", 404, model_id=model_id)
        await other.post("retrieve_future", 404, request_id=saved["request_id"])
        await other.post("session_heartbeat", 404, session_id=mine.session_id)
        await other.post("weights_info", 404, tinker_path=path)
        await other.get(f"training_runs/{model_id}", 404)
        await other.get(f"sessions/{mine.session_id}", 404)
        body = {"session_id": other.session_id, "model_seq_id": 0, "path": path, "optimizer": True}
        await other.post("load_weights", 404, **body)
        body = {"session_id": other.session_id, "sampling_session_seq_id": 0, "model_path": path}
        await other.post("create_sampling_session", 404, **body)
        await mine.post(f"training_runs/{model_id}/checkpoints/weights/one/publish", 204)
        await other.post("create_sampling_session", **body)


async def test_a_loss_of_ours_gets_the_versions_that_sampled_its_tokens_after_a_death_too(tmp_path: Path) -> None:
    preset = {"headway": "grpo", "proximal": "interpolate"}
    async with served(tmp_path, snapshot_every=9) as parts:
        client = parts.client()
        model_id = await client.model()
        await client.result(await client.step(model_id, 1))
        saved = await client.post(
            "save_weights_for_sampler", model_id=model_id, seq_id=2, sampling_session_seq_id=0, kind="inflight"
        )
        session = (await client.result(saved))["sampling_session_id"]
        prompt = {"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7]}]}
        body = {"sampling_session_id": session, "seq_id": 1, "num_samples": 1, "prompt": prompt}
        sampled = await client.post("asample", **body, sampling_params={"max_tokens": 3, "seed": 1})
        answer = await client.http.post("/retrieve_future", json={"request_id": sampled["request_id"]})
        sequence = MESSAGES["SampleResponse"].FromString(answer.content).sequences[0]
        claim = {"sequence_id": sampled["sample_sequence_ids"][0], "prompt": 3, "preset": preset}
        claim["logprobs"] = np.frombuffer(sequence.logprobs, "<f4")
        whole = [5, 6, 7, *np.frombuffer(sequence.tokens, "<i4").tolist()]
        parts.trainer.released.clear()
        await client.train(model_id, 3, whole, **claim)
        again = await client.train(model_id, 3, whole, **claim)
        parts.trainer.released.set()
        assert "loss:sum" in await client.result(again)
        (operation,) = parts.trainer.rounds[-1]
        assert operation.data[0].inputs["versions"].tolist() == [0, 0, 1, 1, 1]
    async with served(tmp_path, snapshot_every=9) as parts:
        await parts.client().result(again)
        (operation,) = parts.trainer.rounds[-1]
        assert operation.data[0].inputs["versions"].tolist() == [0, 0, 1, 1, 1]


@pytest.mark.parametrize("key", ["", "tml-nobody", "a"])
async def test_a_key_is_wanted(tmp_path: Path, key: str) -> None:
    async with served(tmp_path) as parts:
        client = parts.client()
        client.http.headers["X-API-Key"] = key
        answer = await client.post("create_session", 401)
        assert "X-API-Key" in answer["error"]["message"]


async def test_a_flood_is_told_to_come_again_and_others_do_not_notice(tmp_path: Path) -> None:
    async with served(tmp_path, max_queued_operations=3) as parts:
        client, other = parts.client("a"), parts.client("b")
        model_id, theirs = await client.model(), await other.model()
        for seq_id in (2, 3, 4):
            await client.train(model_id, seq_id)
        refused = await client.train(model_id, 5, status=429)
        assert refused["queue_state"] == "paused_rate_limit"
        assert "3 operations of yours" in refused["queue_state_reason"]
        assert await other.loss(theirs, 1) > 0


async def test_the_operation_that_all_others_wait_for_is_no_flood(tmp_path: Path) -> None:
    async with served(tmp_path, max_queued_operations=3) as parts:
        client = parts.client()
        model_id = await client.model()
        waiting = [await client.train(model_id, seq_id) for seq_id in (2, 3, 4)]
        await client.train(model_id, 5, status=429)
        parts.trainer.released.clear()
        waiting.append(await client.train(model_id, 1))
        await asyncio.to_thread(parts.trainer.entered.wait, 30)
        parts.trainer.released.set()
        assert all([(await client.result(each))["loss:sum"] > 0 for each in waiting])


async def test_results_that_a_tenant_never_fetches_have_a_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with served(tmp_path, max_result_bytes=2000) as parts:
        client, other = parts.client("a"), parts.client("b")
        model_id, theirs = await client.model(), await other.model()

        async def done(seq_id: int) -> Any:
            accepted = await client.train(model_id, seq_id)
            future = parts.service.futures.get(accepted["request_id"], owner="a")
            assert future is not None
            await future.done.wait()
            return accepted

        left = [await done(seq_id) for seq_id in (1, 2, 3)]
        await parts.service.sweep()
        refused = await client.train(model_id, 4, status=429)
        assert "bytes of results of yours wait to be retrieved" in refused["queue_state_reason"]
        assert await client.train(model_id, 3) == left[2], "a retry leaves no more of them"
        assert await other.loss(theirs, 1) > 0
        for each in left:
            await client.result(each)
        await parts.service.sweep()
        left = [await done(seq_id) for seq_id in (4, 5)]
        with monkeypatch.context() as silent:
            silent.setattr("learner.tenants.sessions.DEAD_S", -1.0)
            await parts.service.sweep()
        assert await client.loss(model_id, 6) > 0, "nobody will come for those of a dead session"


async def test_a_step_is_answered_before_the_passes_of_others_that_wait_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with served(tmp_path) as parts:
        one, two = parts.client("a"), parts.client("b")
        mine, theirs = await one.model(), await two.model()
        await two.loss(theirs, 1)
        trainer = parts.trainer
        trainer.released.clear()
        trainer.entered.clear()
        first = await one.train(mine, 1)
        await asyncio.to_thread(trainer.entered.wait, 30)
        stepped, passed = await two.step(theirs, 2), await one.train(mine, 2)
        held = threading.Event()
        run_round = trainer.run_round
        monkeypatch.setattr(trainer, "run_round", lambda asked: held.wait(30) and run_round(asked))
        trainer.released.set()
        await one.result(first)
        try:
            async with asyncio.timeout(10):
                assert (await two.result(stepped))["metrics"]["step:max"] == 1
        finally:
            held.set()
        assert (await one.result(passed))["loss:sum"] > 0


async def test_a_flood_in_order_is_one_too(tmp_path: Path) -> None:
    async with served(tmp_path, max_queued_operations=3) as parts:
        client = parts.client()
        model_id = await client.model()
        parts.trainer.released.clear()
        last = await client.train(model_id, 1)
        await asyncio.to_thread(parts.trainer.entered.wait, 30)
        for seq_id in (2, 3, 4):
            last = await client.train(model_id, seq_id)
        await client.train(model_id, 5, status=429)
        parts.trainer.released.set()
        assert (await client.result(last))["loss:sum"] > 0


async def test_a_model_that_the_disk_refused_leaves_no_adapter_to_the_one_that_is_made_in_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with served(tmp_path) as parts:
        client = parts.client()
        body: dict[str, Any] = {"session_id": await client.session(), "model_seq_id": 0, "base_model": BASE}
        body["lora_config"] = {"rank": 2}
        with monkeypatch.context() as broken:
            broken.setattr(os, "fdatasync", refusing)
            await client.post("create_model", 503, **body)
        assert parts.trainer.adapters == {}
        model_id = (await client.result(await client.post("create_model", **body)))["model_id"]
        assert parts.trainer.adapters[model_id].shape == parts.service.models.by_id[model_id].entry.shape


async def test_an_unloaded_model_keeps_nothing_but_its_checkpoints(tmp_path: Path) -> None:
    async with served(tmp_path, snapshot_every=1) as parts:
        parts.service.log._segment_bytes = 1
        client = parts.client()
        gone, stays = await client.model(), await client.model(1)
        for model_id in (gone, stays):
            await client.loss(model_id, 1)
        await client.train(gone, 3)  # behind a hole
        await client.post("unload_model", model_id=gone)
        await parts.service.sweep()
        assert parts.service.log.files == 1
        copy = shutil.copytree(tmp_path, tmp_path.with_name("copy"))
        assert len(list((tmp_path / "models").iterdir())) == 1
    async with served(copy) as parts:
        await parts.client().train(gone, 4, status=404)
        assert await parts.client().loss(stays, 2) > 0


async def test_a_snapshot_that_a_death_left_of_an_unloaded_model_goes_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with served(tmp_path, snapshot_every=1) as parts:
        client = parts.client()
        model_id = await client.model()
        await client.loss(model_id, 1)
        monkeypatch.setattr("learner.tenants.snapshots.remove_folder", refusing)
        await client.post("unload_model", model_id=model_id)
        assert len(list((tmp_path / "models").iterdir())) == 1
    monkeypatch.undo()
    async with served(tmp_path):
        assert not list((tmp_path / "models").iterdir())


async def test_what_was_given_up_keeps_no_file_of_the_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with served(tmp_path, snapshot_every=1) as parts:
        parts.service.log._segment_bytes = 1
        client = parts.client()
        model_id = await client.model()
        await client.loss(model_id, 1)
        await client.train(model_id, 9)  # behind a hole
        await parts.service.sweep()
        assert parts.service.log.files > 1
        with monkeypatch.context() as silent:
            silent.setattr("learner.tenants.sessions.DEAD_S", -1.0)
            await parts.service.sweep()
        assert parts.service.log.files == 1
        assert await client.loss(model_id, 2) > 0
    async with served(tmp_path) as parts:
        assert await parts.client().loss(model_id, 3) > 0


async def test_clients_that_join_while_others_are_written_down_have_numbers_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with served(tmp_path) as parts:
        client = parts.client()
        body: dict[str, Any] = {"session_id": await client.session(), "sampling_session_seq_id": 0, "base_model": BASE}
        name = (await client.post("create_sampling_session", **body))["sampling_session_id"]
        service, (tenant, _) = parts.service, parts.service.keys.tenants
        first = asyncio.create_task(service.join_sampling_session(tenant, name))
        await asyncio.sleep(0)  # the first is on its way to the disk
        await asyncio.sleep(0)
        second = asyncio.create_task(service.join_sampling_session(tenant, name))
        numbers = [await first, await service.join_sampling_session(tenant, name), await second]
        assert sorted(numbers) == [1, 2, 3]


async def test_a_flood_makes_no_round_longer_than_the_trainer_takes_a_moment_for(tmp_path: Path) -> None:
    """A client that comes during a round waits for its end. The trainer does 20,000 tokens a second by its clock."""
    async with served(tmp_path, round_s=0.05, long_poll_s=60.0, max_queued_operations=1000) as parts:

        def tokens() -> list[int]:
            return [sum(len(datum.token_ids) for each in done for datum in each.data) for done in parts.trainer.rounds]

        parts.service.training._clock = lambda: sum(tokens()) / 20_000
        flooder, other = parts.client("a"), parts.client("b")
        model_id, theirs = await flooder.model(), await other.model()
        parts.trainer.released.clear()
        row = [number % 200 for number in range(201)]
        last = [await flooder.train(model_id, seq_id, row) for seq_id in range(1, 60)][-1]
        parts.trainer.released.set()
        assert await other.loss(theirs, 1) > 0
        await flooder.result(last)
    assert sum(tokens()) == 59 * 200 + 2
    assert max(tokens()[1:]) <= 0.05 * 20_000 + 200, "an operation is never divided"


async def test_a_body_that_unpacks_to_more_than_a_plain_one_may_have_is_refused(tmp_path: Path) -> None:
    async with served(tmp_path) as parts:
        client = parts.client()
        model_id = await client.model()
        bomb = pyarrow.Codec("zstd").compress(bytes(MAX_BODY_BYTES + 1), asbytes=True)
        answer = await client.http.post(
            "/forward_backward",
            content=bomb,
            headers={"Content-Encoding": "zstd", "Content-Type": "application/x-protobuf"},
        )
        assert answer.status_code == 413
        assert f"at most {MAX_BODY_BYTES} are taken" in answer.json()["error"]["message"]
        assert await client.loss(model_id, 1) > 0


async def test_a_poll_says_what_an_operation_waits_for(tmp_path: Path) -> None:
    async with served(tmp_path, long_poll_s=0.01) as parts:
        client = parts.client()
        accepted = await client.train(await client.model(), 2)
        answer = await client.post("retrieve_future", 408, request_id=accepted["request_id"])
        assert answer["queue_state"] == "active"
        assert "operation 1 of the model" in answer["queue_state_reason"]


async def test_a_resume_after_any_operation_goes_on_as_if_nothing_had_been(tmp_path: Path) -> None:
    async with served(tmp_path / "quiet") as parts:
        client = parts.client()
        expected = await history(client, await client.model(), 1, 6)
    found: list[float] = []
    model_id, session = "", ""
    for life in range(6):
        async with served(tmp_path / "killed") as parts:
            client = parts.client()
            client.session_id = session
            model_id = model_id or await client.model()
            session = client.session_id
            found += await history(client, model_id, 1 + 2 * life, 1)
        # A death leaves the folder as it is; nothing of a clean end may be needed.
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-9)


async def test_an_accepted_operation_is_answered_by_the_next_life(tmp_path: Path) -> None:
    async with served(tmp_path / "one") as parts:
        client = parts.client()
        model_id = await client.model()
        step = await client.step(model_id, 2)
        copy = shutil.copytree(tmp_path / "one", tmp_path / "two")  # as a death at this moment leaves it
    async with served(copy) as parts:
        again = parts.client()
        again.session_id = client.session_id
        loss = await again.loss(model_id, 1)
        assert (await again.result(step))["metrics"]["step:max"] == 1
        assert await again.loss(model_id, 3) < loss


async def test_results_that_nobody_retrieved_outlive_a_snapshot_and_a_death(tmp_path: Path) -> None:
    async with served(tmp_path, snapshot_every=1) as parts:
        client = parts.client()
        model_id = await client.model()
        accepted = [await client.train(model_id, 1), await client.step(model_id, 2)]
        other = await client.model(1)
        for seq_id in (1, 2):  # in a later turn, before which the snapshots of the former one are written
            await client.loss(other, seq_id)
        assert parts.service.models.by_id[model_id].snapshot_seq == 2
    async with served(tmp_path) as parts:
        again = parts.client()
        assert (await again.result(accepted[0]))["loss:sum"] > 0
        assert (await again.result(accepted[1]))["metrics"]["step:max"] == 1
        assert await again.train(model_id, 1) == accepted[0]
        assert not any(call.startswith("round") for call in parts.trainer.calls)


async def test_the_result_of_a_load_outlives_a_death_before_and_after_its_client_asked_for_it(tmp_path: Path) -> None:
    async with served(tmp_path / "one", snapshot_every=100) as parts:
        client = parts.client()
        source, model_id = await client.model(), await client.model(1)
        saved = await client.post("save_weights", model_id=source, seq_id=1, path="one")
        path = (await client.result(saved))["path"]
        accepted = await client.post("load_weights", model_id=model_id, seq_id=1, path=path, optimizer=True)
        await client.loss(model_id, 2)  # the load has been done then
        before = shutil.copytree(tmp_path / "one", tmp_path / "two")
        told = await client.result(accepted)
        await client.result(await client.post("load_weights", model_id=model_id, seq_id=3, path=path, optimizer=True))
    assert told == {"path": path, "model_id": model_id, "type": "load_weights"}
    for folder in (before, tmp_path / "one"):
        async with served(folder) as parts:
            assert await parts.client().result(accepted) == told


async def test_a_retrieved_result_that_a_snapshot_keeps_goes_after_a_while_in_the_next_life(tmp_path: Path) -> None:
    async with served(tmp_path, snapshot_every=1) as parts:
        client = parts.client()
        model_id = await client.model()
        await client.loss(model_id, 1)
        await client.result(await client.step(model_id, 2))
        await client.model(1)  # in a later turn
        assert parts.service.models.by_id[model_id].snapshot_seq == 2
    async with served(tmp_path) as parts:
        kept = parts.service.futures.get(f"{model_id}:1", owner="a")
        assert kept is not None
        assert kept.retrieved_at is not None


async def test_a_load_that_the_disk_refuses_to_keep_is_not_said_to_be_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with served(tmp_path, snapshot_every=100) as parts:
        client = parts.client()
        source, model_id = await client.model(), await client.model(1)
        saved = await client.post("save_weights", model_id=source, seq_id=1, path="one")
        body = {"model_id": model_id, "path": (await client.result(saved))["path"], "optimizer": True}
        with monkeypatch.context() as broken:
            broken.setattr(parts.service._snapshots, "write", refusing)
            answer = await client.result(await client.post("load_weights", seq_id=1, **body))
        assert answer == {"error": "the learner's disk: [Errno 28] No space left on device", "category": "server"}
        assert "path" in await client.result(await client.post("load_weights", seq_id=2, **body))


async def test_models_beyond_the_room_are_parked_and_come_back(tmp_path: Path) -> None:
    async with served(tmp_path, max_resident=2) as parts:
        client = parts.client()
        models = [await client.model(number) for number in range(5)]
        first = [await history(client, model, 1, 1) for model in models]
        second = [await history(client, model, 3, 1) for model in models]
        assert len(parts.trainer.adapters) <= 2
        assert any(call.startswith("restore") for call in parts.trainer.calls)
        assert second == [second[0]] * 5
        assert second[0] < first[0]


async def test_the_models_of_a_dead_session_are_parked_not_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with served(tmp_path) as parts:
        client = parts.client()
        model_id = await client.model()
        await client.loss(model_id, 1)
        await client.train(model_id, 9)  # behind a hole
        monkeypatch.setattr("learner.tenants.sessions.DEAD_S", -1.0)
        await parts.service.sweep()
        assert parts.trainer.adapters == {}
        assert parts.service.models.queue_length("a").operations == 0
        assert await client.loss(model_id, 2) > 0


async def test_a_client_that_comes_back_fills_its_hole_and_sends_again_what_was_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with served(tmp_path, snapshot_every=1) as parts:
        client = parts.client()
        model_id = await client.model()
        early = await client.train(model_id, 2)
        with monkeypatch.context() as silent:
            silent.setattr("learner.tenants.sessions.DEAD_S", -1.0)
            await parts.service.sweep()
        told = (await parts.client().result(early))["error"]
        assert "operation 1 of the model has not come" in told
        assert "send that one, and this one again" in told

        first = await client.loss(model_id, 1)
        assert "another content" in (await client.train(model_id, 2, (4, 5), status=422))["error"]["message"]
        assert await client.loss(model_id, 2) == first
        assert (await client.result(await client.step(model_id, 3)))["metrics"]["step:max"] == 1
        after = await client.loss(model_id, 4)
    async with served(tmp_path) as parts:
        again = parts.client()
        again.session_id = client.session_id
        assert await again.loss(model_id, 5) == after


async def test_what_was_given_up_before_a_start_has_the_result_of_what_is_done_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with served(tmp_path, snapshot_every=1) as parts:
        client = parts.client()
        model_id = await client.model()
        early = await client.train(model_id, 2)
        with monkeypatch.context() as silent:
            silent.setattr("learner.tenants.sessions.DEAD_S", -1.0)
            await parts.service.sweep()
        first = await client.loss(model_id, 1)
    async with served(tmp_path) as parts:
        again = parts.client()
        again.session_id = client.session_id
        assert (await again.result(early))["loss:sum"] == first


async def test_a_model_is_not_parked_in_the_middle_of_its_turn(tmp_path: Path) -> None:
    async with served(tmp_path, snapshot_every=1) as parts:
        client = parts.client()
        norms = []
        for number in range(2):
            model_id = await client.model(number)
            model = parts.service.models.by_id[model_id]
            await client.loss(model_id, 1)
            parts.trainer.entered.clear()
            parts.trainer.released.clear()
            accepted = await client.train(model_id, 2)
            await asyncio.to_thread(parts.trainer.entered.wait, 10)
            parking = asyncio.create_task(parts.service.training.park([model] * number))
            await asyncio.sleep(0)  # it is at the trainer's door
            parts.trainer.released.set()
            await parking
            await client.result(accepted)
            norms.append((await client.result(await client.step(model_id, 3)))["metrics"]["grad_norm:mean"])
        assert f"remove {model_id}" in parts.trainer.calls
        assert norms[0] == norms[1]


async def test_a_save_that_is_done_again_after_a_start_changes_nothing(tmp_path: Path) -> None:
    async with served(tmp_path, snapshot_every=100) as parts:
        client = parts.client()
        model_id = await client.model()
        saves = []
        for seq_id, name in ((1, "one"), (2, "two")):
            saves.append(await client.post("save_weights", model_id=model_id, seq_id=seq_id, path=name))
        paths = [(await client.result(each))["path"] for each in saves]
        answer = await client.http.delete(f"/training_runs/{model_id}/checkpoints/weights/two")
        assert answer.status_code == 204
    async with served(tmp_path) as parts:
        again = parts.client()
        assert [(await again.result(each))["path"] for each in saves] == paths
        await again.post("weights_info", tinker_path=paths[0])
        await again.post("weights_info", 404, tinker_path=paths[1])


async def test_a_load_is_not_done_again_after_what_it_loaded_was_overwritten(tmp_path: Path) -> None:
    async with served(tmp_path, snapshot_every=100) as parts:
        client = parts.client()
        source, model_id = await client.model(), await client.model(1)
        save: dict[str, Any] = {"model_id": source, "path": "one", "overwrite": True}
        path = (await client.result(await client.post("save_weights", seq_id=1, **save)))["path"]
        await client.result(await client.post("load_weights", model_id=model_id, seq_id=1, path=path, optimizer=True))
        loss = await client.loss(model_id, 2)
        await history(client, source, 2, 2)
        await client.result(await client.post("save_weights", seq_id=6, **save))
    async with served(tmp_path) as parts:
        assert await parts.client().loss(model_id, 3) == loss


async def test_what_was_refused_by_what_stood_on_the_disk_is_not_done_after_a_start(tmp_path: Path) -> None:
    """A load of what was saved after it, and a save under a name that was deleted after it: a replay finds the disk as
    it is by then.
    """
    async with served(tmp_path, snapshot_every=100) as parts:
        client = parts.client()
        model_id = await client.model()
        one, two = (f"tinker://{model_id}/weights/{name}" for name in ("one", "two"))
        body: dict[str, Any] = {"model_id": model_id}
        losses = await history(client, model_id, 1, 1)
        load = await client.post("load_weights", seq_id=3, path=two, optimizer=True, **body)
        assert "no training checkpoint" in (await client.result(load))["error"]
        losses += await history(client, model_id, 4, 1)
        await client.result(await client.post("save_weights", seq_id=6, path="one", **body))
        save = await client.post("save_weights", seq_id=7, path="one", **body)
        assert "exists" in (await client.result(save))["error"]
        answer = await client.http.delete(f"/training_runs/{model_id}/checkpoints/weights/one")
        assert answer.status_code == 204
        losses += await history(client, model_id, 8, 1)
        await client.result(await client.post("save_weights", seq_id=10, path="two", **body))
    async with served(tmp_path) as parts:
        again = parts.client()
        assert "no training checkpoint" in (await again.result(load))["error"]
        assert "exists" in (await again.result(save))["error"]
        await again.post("weights_info", 404, tinker_path=one)
        later = [await again.result({"request_id": f"{model_id}:{seq_id}"}) for seq_id in (4, 8)]
        assert [each["loss:sum"] for each in later] == losses[1:]


async def test_a_new_model_is_made_of_a_checkpoint_with_and_without_its_optimizer(tmp_path: Path) -> None:
    async with served(tmp_path) as parts:
        client = parts.client()
        model_id = await client.model()
        await history(client, model_id, 1, 2)
        saved = await client.result(await client.post("save_weights", model_id=model_id, seq_id=5, path="one"))
        loss = await client.loss(model_id, 6)
        for number, optimizer in ((1, True), (2, False)):
            made = await client.post(
                "load_weights",
                session_id=client.session_id,
                model_seq_id=number,
                path=saved["path"],
                optimizer=optimizer,
            )
            new = (await client.result(made))["model_id"]
            assert await client.loss(new, 1) == loss
            stepped = await client.result(await client.step(new, 2))
            assert stepped["metrics"]["step:max"] == (3 if optimizer else 1)


async def test_a_checkpoint_is_not_overwritten_unless_asked_to(tmp_path: Path) -> None:
    async with served(tmp_path) as parts:
        client = parts.client()
        body: dict[str, Any] = {"model_id": await client.model(), "path": "one"}
        assert "path" in await client.result(await client.post("save_weights", seq_id=1, **body))
        refused = await client.result(await client.post("save_weights", seq_id=2, **body))
        assert "exists; choose another name" in refused["error"]
        again = await client.post("save_weights", seq_id=3, overwrite=True, **body)
        assert "path" in await client.result(again)


async def test_runs_checkpoints_and_sessions_are_listed(tmp_path: Path) -> None:
    async with served(tmp_path) as parts:
        client = parts.client()
        model_id = await client.model(user_metadata={"x": "y"})
        await client.result(await client.post("save_weights", model_id=model_id, seq_id=1, path="one"))
        await client.result(await client.post("save_weights_for_sampler", model_id=model_id, seq_id=2, path="two"))
        run = await client.get(f"training_runs/{model_id}")
        assert (run["base_model"], run["lora_rank"], run["user_metadata"]) == ("tiny/bigram", 2, {"x": "y"})
        assert run["last_checkpoint"]["checkpoint_id"] == "weights/one"
        listed = (await client.get(f"training_runs/{model_id}/checkpoints"))["checkpoints"]
        assert [each["checkpoint_type"] for each in listed] == ["training", "sampler"]
        assert (await client.get("training_runs"))["cursor"]["total_count"] == 1
        assert len((await client.get("checkpoints?limit=1"))["checkpoints"]) == 1
        assert (await client.get("sessions"))["sessions"] == [client.session_id]
        assert (await client.get(f"sessions/{client.session_id}"))["training_run_ids"] == [model_id]
        assert (await client.post("sessions/search"))["sessions"][0]["checkpoints_count"] == 2
        one = f"training_runs/{model_id}/checkpoints/weights/one"
        assert (await client.http.put(f"/{one}/ttl", json={"ttl_seconds": 3600})).status_code == 204
        assert (await client.get("checkpoints"))["checkpoints"][1]["expires_at"]
        archive = await client.http.get(f"/{one}/archive")
        assert b"adapter_model.safetensors" in archive.content
        urls = (await client.get(f"{one}/external_weights_urls"))["urls"]
        url = urls["adapter_config.json"]
        client.http.headers.pop("X-API-Key")
        assert (await client.http.get(url)).json()["r"] == 2
        for wrong in ("0", "%C3%A4"):
            assert (await client.http.get(url.replace("signature=", f"signature={wrong}"))).status_code == 404
        client.http.headers["X-API-Key"] = "tml-a"
        assert (await client.http.delete(f"/{one}")).status_code == 204
        await client.post("weights_info", 404, tinker_path=f"tinker://{model_id}/weights/one")


async def test_weights_are_copied_into_a_run_of_their_own(tmp_path: Path) -> None:
    async with served(tmp_path) as parts:
        client = parts.client()
        saved = await client.post("save_weights", model_id=await client.model(), seq_id=1, path="one")
        path = (await client.result(saved))["path"]
        body = {"source_path": path, "session_id": client.session_id, "model_seq_id": 7}
        copied = (await client.post("copy_weights", **body))["tinker_path"]
        assert copied == f"tinker://{client.session_id}:train:7/weights/one"
        assert await client.post("copy_weights", **body) == {"tinker_path": copied}
        assert (await client.post("weights_info", tinker_path=copied))["lora_rank"] == 2


async def test_a_page_of_a_listing_goes_through_the_checkpoints_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page has a thousand runs, and a tenant tens of thousands of checkpoints: all others wait for it."""
    async with served(tmp_path) as parts:
        client = parts.client()
        for number in range(3):
            await saved_checkpoint(client, await client.model(number), name=f"of-{number}")
        calls, find = [], parts.service.checkpoints.find

        def counted(path: str, *, reader: str) -> Any:
            calls.append(path)
            return find(path, reader=reader)

        monkeypatch.setattr(parts.service.checkpoints, "find", counted)
        runs = (await client.get("training_runs"))["training_runs"]
        assert [run["last_checkpoint"]["checkpoint_id"] for run in runs] == [f"weights/of-{n}" for n in (2, 1, 0)]
        await client.session()
        sessions = (await client.post("sessions/search"))["sessions"]
        assert [each["checkpoints_count"] for each in sessions] == [0, 3]
        assert len(calls) == 6


@pytest.mark.parametrize(
    ("more", "complaint"),
    [
        ({"optimizer_config": {"type": "dimuon"}}, "optimizer_config.type: 'dimuon'"),
        ({"base_model": "x"}, "base_model"),
    ],
)
async def test_what_a_new_model_of_a_checkpoint_cannot_have_is_refused_by_name(
    tmp_path: Path, more: dict[str, Any], complaint: str
) -> None:
    async with served(tmp_path) as parts:
        client = parts.client()
        model_id = await client.model()
        body: dict[str, Any] = {"path": await saved_checkpoint(client, model_id), "optimizer": False, **more}
        refused = await client.post("load_weights", 422, session_id=client.session_id, model_seq_id=1, **body)
        assert complaint in refused["error"]["message"]
        loaded = await client.result(await client.post("load_weights", model_id=model_id, seq_id=2, **body))
        assert ("error" in loaded) == ("optimizer_config" in more)


async def test_a_turn_of_more_models_than_there_is_room_for_brings_no_more_to_the_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with served(tmp_path, max_resident=2) as parts:
        client, trainer = parts.client(), parts.trainer
        models = [await client.model(number) for number in range(5)]
        there, run_round = list[int](), trainer.run_round

        def counted(operations: Any) -> Any:
            there.append(len(trainer.adapters))
            return run_round(operations)

        monkeypatch.setattr(trainer, "run_round", counted)
        trainer.released.clear()
        accepted = [await client.train(models[0], 1)]
        await asyncio.to_thread(trainer.entered.wait, 30)
        accepted += [await client.train(model_id, seq_id) for model_id in models[1:] for seq_id in (1, 2)]
        trainer.released.set()
        losses = {(await client.result(each))["loss:sum"] for each in accepted}
        assert len(losses) == 1
        assert max(there) == 2


async def test_a_turn_is_shorter_where_models_have_to_make_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tenant with more models than there is room for would else fill turns of many seconds."""
    async with served(tmp_path, max_resident=1, round_s=1.0) as parts:
        client, training = parts.client(), parts.service.training
        models = [await client.model(number) for number in range(2)]
        now, park = 0.0, training._park

        async def slow(model: Any) -> None:
            nonlocal now
            now += 1.0
            await park(model)

        monkeypatch.setattr(training, "_clock", lambda: now)
        monkeypatch.setattr(training, "_park", slow)
        for seq_id in range(1, 12):
            await asyncio.gather(*(client.loss(model_id, seq_id) for model_id in models))
        assert training._budget.tokens() == 512


async def saved_checkpoint(client: Client, model_id: str, name: str = "one", seq_id: int = 1) -> str:
    saved = await client.post("save_weights", model_id=model_id, seq_id=seq_id, path=name)
    return str((await client.result(saved))["path"])


async def test_a_copy_takes_the_place_of_no_model_and_of_no_other_copy(tmp_path: Path) -> None:
    async with served(tmp_path, snapshot_every=1) as parts:
        client = parts.client()
        models = [await client.model(number) for number in range(2)]
        paths = [await saved_checkpoint(client, model_id) for model_id in models]
        body: dict[str, Any] = {"session_id": client.session_id, "source_path": paths[0]}
        for number in (0, 1):
            refused = await client.post("copy_weights", 422, **body, model_seq_id=number)
            assert f"model_seq_id: {number} is taken by {models[number]}" in refused["error"]["message"]
        await client.post("copy_weights", **body, model_seq_id=7)
        await client.post("copy_weights", 422, **{**body, "source_path": paths[1]}, model_seq_id=7)
        await client.post("copy_weights", **{**body, "source_path": paths[1]}, model_seq_id=8)
    async with served(tmp_path, snapshot_every=1) as parts:
        assert await parts.client().loss(models[1], 2) > 0


async def test_a_copy_without_a_session_has_one_of_its_own_and_is_made_once(tmp_path: Path) -> None:
    """As the SDK asks for it: by a key that it sends again at each try."""
    async with served(tmp_path) as parts:
        client, other = parts.client(), parts.client("b")
        model_id = await client.model()
        body: dict[str, Any] = {"source_path": await saved_checkpoint(client, model_id)}
        await client.post(f"training_runs/{model_id}/checkpoints/weights/one/publish", 204)
        copies = []
        for tenant, key in ((client, "k"), (client, "k"), (client, "l"), (other, "k"), (other, "")):
            headers = {"X-Idempotency-Key": key} if key else {}
            copies.append((await tenant.http.post("/copy_weights", json=body, headers=headers)).json()["tinker_path"])
        assert copies[0] == copies[1]
        assert len(set(copies)) == 4
        run = copies[0].removeprefix("tinker://").partition("/")[0]
        assert (await client.get(f"training_runs/{run}"))["lora_rank"] == 2
        await other.get(f"training_runs/{run}", 404)
        await client.post("copy_weights", 422, **body, model_seq_id=1)
        await client.post("copy_weights", 422, **body, destination_project_id="p")


async def test_a_copy_that_the_disk_refused_is_found_by_its_run_once_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with served(tmp_path) as parts:
        client = parts.client()
        path = await saved_checkpoint(client, await client.model())
        body: dict[str, Any] = {"session_id": client.session_id, "source_path": path, "model_seq_id": 7}
        with monkeypatch.context() as broken:
            broken.setattr(os, "fdatasync", refusing)
            await client.post("copy_weights", 503, **body)
        copies = await asyncio.gather(*(client.post("copy_weights", **body) for _ in range(3)))
        assert len({each["tinker_path"] for each in copies}) == 1
        listed = await client.get(f"training_runs/{client.session_id}:train:7/checkpoints")
        assert [each["checkpoint_id"] for each in listed["checkpoints"]] == ["weights/one"]


async def test_an_unloaded_model_is_gone_and_its_checkpoints_stay(tmp_path: Path) -> None:
    async with served(tmp_path) as parts:
        client = parts.client()
        model_id = await client.model()
        saved = await client.post("save_weights", model_id=model_id, seq_id=1, path="one")
        path = (await client.result(saved))["path"]
        await client.post("unload_model", model_id=model_id)
        assert parts.trainer.adapters == {}
        await client.train(model_id, 2, status=404)
        await client.post("weights_info", tinker_path=path)


async def test_what_waits_for_an_unloaded_model_is_answered_and_counts_no_more(tmp_path: Path) -> None:
    async with served(tmp_path, max_queued_operations=4) as parts:
        client = parts.client()
        model_id = await client.model()
        parts.trainer.released.clear()
        under_way = await client.train(model_id, 1)
        await asyncio.to_thread(parts.trainer.entered.wait, 30)
        waiting = [await client.train(model_id, seq_id) for seq_id in (2, 3, 5)]
        unloading = asyncio.create_task(client.post("unload_model", model_id=model_id))
        for accepted in waiting:
            answer = await client.result(accepted)
            assert "was not done: its model was unloaded" in answer["error"]
            assert answer["category"] == "user"
        parts.trainer.released.set()
        await unloading
        assert "loss:sum" in await client.result(under_way)
        other = await client.model(1)
        await asyncio.gather(*(client.train(other, seq_id) for seq_id in (2, 3, 4, 5)))


async def test_a_model_whose_unloading_the_disk_refused_is_still_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with served(tmp_path) as parts:
        client = parts.client()
        model_id = await client.model()
        with monkeypatch.context() as broken:
            broken.setattr(os, "fdatasync", refusing)
            await client.post("unload_model", 503, model_id=model_id)
        loss = await client.loss(model_id, 1)
        await client.post("unload_model", model_id=model_id)
        await client.train(model_id, 2, status=404)
    assert loss > 0


async def test_a_sweep_goes_on_after_what_the_disk_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with served(tmp_path, snapshot_every=1) as parts:
        client = parts.client()
        model_id = await client.model()
        saved = await client.post(
            "save_weights_for_sampler", model_id=model_id, seq_id=1, sampling_session_seq_id=0, kind="inflight"
        )
        await client.result(saved)
        service = parts.service
        monkeypatch.setattr("learner.tenants.sessions.DEAD_S", -1.0)
        monkeypatch.setattr(service, "_settings", replace(service._settings, retain_targets_s=-1.0))
        with monkeypatch.context() as broken:
            broken.setattr(service.checkpoints, "expire", refusing)
            broken.setattr(os, "fdatasync", refusing)
            broken.setattr(service.log, "trim", refusing)
            await service.sweep()
        assert parts.trainer.adapters == {}, "the parts after the one that failed have been done"
        assert len(service.log.catalog.samplings) == 1
        await service.sweep()
        assert not service.log.catalog.samplings
        assert len(service.futures) == 0, "results of whoever was silent for so long go with its targets"
    assert caplog.text.count("a part of a sweep failed") == 2
    assert "a file of the journal cannot be removed" in caplog.text


async def test_a_model_that_is_unloaded_while_its_turn_is_awaited_stops_nobody(tmp_path: Path) -> None:
    async with served(tmp_path) as parts:
        client = parts.client()
        models = [await client.model(number) for number in range(2)]
        released = threading.Event()
        busy = asyncio.create_task(parts.service.training.between_turns(lambda: released.wait(30)))
        await asyncio.sleep(0)
        given_up = await client.train(models[0], 1)
        unloading = asyncio.create_task(client.post("unload_model", model_id=models[0]))
        assert "its model was unloaded" in (await client.result(given_up))["error"]
        released.set()
        await asyncio.gather(busy, unloading)
        assert await client.loss(models[1], 1) > 0


async def test_an_operation_whose_model_is_unloaded_while_it_is_accepted_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with served(tmp_path) as parts:
        client = parts.client()
        model_id = await client.model()
        log, reached, released = parts.service.log, asyncio.Event(), asyncio.Event()
        write = log.operation

        async def write_late(logged: LoggedOperation) -> None:
            reached.set()
            await released.wait()
            await write(logged)

        monkeypatch.setattr(log, "operation", write_late)
        sending = asyncio.create_task(client.train(model_id, 1))
        await reached.wait()
        await client.post("unload_model", model_id=model_id)
        released.set()
        assert "its model was unloaded" in (await client.result(await sending))["error"]
        assert parts.service.models.queue_length("a").operations == 0


async def test_unloading_a_model_makes_room_for_another_one(tmp_path: Path) -> None:
    async with served(tmp_path, max_models=1) as parts:
        client = parts.client()
        model_id = await client.model()
        lora = {"rank": 2, "seed": 1}
        body = {"session_id": client.session_id, "model_seq_id": 1, "base_model": BASE, "lora_config": lora}
        refused = await client.post("create_model", 422, **body)
        assert "unload one first" in str(refused)
        await client.post("unload_model", model_id=model_id)
        await client.model(1)


async def test_operations_that_share_a_pass_get_their_own_results(tmp_path: Path) -> None:
    async with served(tmp_path) as parts:
        client = parts.client()
        models = [await client.model(number) for number in range(3)]
        given = list(zip(models, [(1, 2, 3), (4, 5), (1, 6, 2, 3)], strict=True))
        alone = [await client.result(await client.train(model_id, 1, text)) for model_id, text in given]
        before = parts.service.training.rounds
        async with parts.service.training._turn_lock:
            sent = [await client.train(model_id, 2, text) for model_id, text in given]
        together = [await client.result(each) for each in sent]
        assert parts.service.training.rounds == before + 1
    losses = [each["loss:sum"] for each in alone]
    assert len(set(losses)) == 3
    assert [each["loss:sum"] for each in together] == pytest.approx(losses, abs=1e-6)


async def test_a_damaged_snapshot_fails_its_model_alone(tmp_path: Path) -> None:
    async with served(tmp_path, snapshot_every=1) as parts:
        client = parts.client()
        models = [await client.model(number) for number in range(2)]
        for model_id in models:
            await client.loss(model_id, 1)
        folder = parts.service._snapshots._path(models[0])
    path = folder / "state.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    async with served(tmp_path, snapshot_every=1) as parts:
        again = parts.client()
        await again.result(await again.train(models[0], 2))
        answer = await again.result(await again.train(models[0], 3))
        assert answer["category"] == "server"
        assert "does not match its checksum" in answer["error"]
        assert await again.loss(models[1], 2) > 0


async def test_a_snapshot_without_readable_facts_fails_its_model_alone_until_a_copy_is_there(tmp_path: Path) -> None:
    async with served(tmp_path) as parts:
        client = parts.client()
        damaged, whole = [await client.model(number) for number in range(2)]
        await history(client, damaged, 1, 2)
        loss = await client.train(damaged, 5)  # behind the snapshot, in the journal alone
        expected = await client.result(loss)
        folder = parts.service._snapshots._path(damaged)
    facts = (folder / "facts.json").read_bytes()
    for seq_id, content in enumerate((b"", b'{"checksums": {}, "facts": {"model_id": 1}}', facts[:-40]), start=1):
        (folder / "facts.json").write_bytes(content)
        async with served(tmp_path) as parts:
            again = parts.client()
            answer = await again.result(loss)
            assert answer["category"] == "server"
            assert f"the model cannot be loaded: {folder}: " in answer["error"]
            refused = await again.train(damaged, 6, status=422)
            assert "make a new training client from a checkpoint" in str(refused)
            assert await again.loss(whole, seq_id) > 0
            parts.service.training._trim()
    (folder / "facts.json").write_bytes(facts)
    async with served(tmp_path) as parts:
        again = parts.client()
        assert await again.result(loss) == expected
        assert await again.loss(damaged, 6) > 0


async def test_a_model_with_a_damaged_snapshot_can_be_unloaded(tmp_path: Path) -> None:
    async with served(tmp_path, snapshot_every=1) as parts:
        client = parts.client()
        model_id = await client.model()
        await client.loss(model_id, 1)
        folder = parts.service._snapshots._path(model_id)
    (folder / "facts.json").unlink()
    async with served(tmp_path) as parts:
        await parts.client().post("unload_model", model_id=model_id)
        assert not folder.exists()


async def test_results_that_are_damaged_are_lost_alone(tmp_path: Path) -> None:
    async with served(tmp_path, snapshot_every=1) as parts:
        client = parts.client()
        model_id = await client.model()
        await client.train(model_id, 1)
        await client.loss(model_id, 2)
        folder = parts.service._snapshots._path(model_id)
    content = bytearray((folder / "results.log").read_bytes())
    content[9] ^= 1
    (folder / "results.log").write_bytes(content)
    async with served(tmp_path) as parts:
        assert await parts.client().loss(model_id, 3) > 0


async def test_files_of_the_journal_do_not_pile_up(tmp_path: Path) -> None:
    async with served(tmp_path) as parts:
        parts.service.log._segment_bytes = 3000
        client = parts.client()
        await history(client, await client.model(), 1, 60)
        assert parts.service.log.files <= 4


async def test_an_operation_that_the_trainer_cannot_bear_ends_nobody_else(tmp_path: Path) -> None:
    async with served(tmp_path) as parts:
        one, two = parts.client("a"), parts.client("b")
        poisoned, healthy = await one.model(), await two.model()
        later = [await one.train(poisoned, 2), await two.train(healthy, 2)]
        bad = await one.train(poisoned, 1, (1, POISON, 2))
        good = await two.train(healthy, 1)
        answer = await one.result(bad)
        assert answer["category"] == "server"
        assert "IndexError: nobody has thought of this" in answer["error"]
        losses = [(await two.result(each))["loss:sum"] for each in (good, later[1])]
        assert losses[0] == losses[1] == (await one.result(later[0]))["loss:sum"]
    async with served(tmp_path) as parts:  # it is in the journal
        assert (await parts.client("a").result(bad))["category"] == "server"
        assert await parts.client("b").loss(healthy, 3) == losses[0]


@pytest.mark.parametrize("at_work", ["run_round", "step"])
async def test_what_the_learner_failed_at_is_not_done_by_its_next_life(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_work: str
) -> None:
    """It may have the memory by then, but the client has gone on without it."""
    async with served(tmp_path, snapshot_every=100) as parts:
        client = parts.client()
        model_id = await client.model()
        with monkeypatch.context() as broken:
            broken.setattr(parts.trainer, at_work, lambda _: (_ for _ in ()).throw(MemoryError("no memory")))
            failed = await (client.train if at_work == "run_round" else client.step)(model_id, 1)
            told = await client.result(failed)
        assert told["category"] == "server"
        later = await history(client, model_id, 2, 2)
        norms = [(await client.result({"request_id": f"{model_id}:{seq}"}))["metrics"] for seq in (3, 5)]
    for _ in range(2):
        async with served(tmp_path, snapshot_every=100) as parts:
            again = parts.client()
            assert await again.result(failed) == told
            losses = [(await again.result({"request_id": f"{model_id}:{seq}"}))["loss:sum"] for seq in (2, 4)]
            assert losses == later
            assert norms == [(await again.result({"request_id": f"{model_id}:{seq}"}))["metrics"] for seq in (3, 5)]


async def test_a_pass_that_never_ends_holds_up_no_end_and_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As after the loss of a rank that a collective waits for."""
    monkeypatch.setattr(trainer_thread, "_STOP_S", 0.1)
    async with served(tmp_path) as parts:
        client = parts.client()
        model_id = await client.model()
        parts.trainer.released.clear()
        await client.train(model_id, 1)
        assert await asyncio.to_thread(parts.trainer.entered.wait, 30)
    parts.trainer.released.set()
    said = f"the trainer is in the middle of forward_backward of {model_id} and is cut off; the journal holds its op"
    assert said in caplog.text
