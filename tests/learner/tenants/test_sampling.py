import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from learner.tenants.keys import TenantKeys, hash_of
from protocol.tinker.messages import MESSAGES
from services import watched_files
from services.secret_files import write_secret
from tests.learner.tenants.service_client import BASE, Client, served


def refusing(*_: object, **__: object) -> None:
    raise OSError(28, "No space left on device")


async def base_session(client: Client) -> str:
    body: dict[str, Any] = {"session_id": client.session_id or await client.session(), "sampling_session_seq_id": 0}
    return str((await client.post("create_sampling_session", base_model=BASE, **body))["sampling_session_id"])


async def sample(client: Client, session: str, seq_id: int = 1, status: int = 200, **more: Any) -> Any:
    params = {"max_tokens": 4, "temperature": 0, "stop": [], **more.pop("params", {})}
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]}
    return await client.post(
        "asample", status, sampling_session_id=session, seq_id=seq_id, prompt=prompt, sampling_params=params, **more
    )


async def answer_of(client: Client, accepted: Any, status: int = 200) -> Any:
    answer = await client.http.post("/retrieve_future", json={"request_id": accepted["request_id"]})
    assert answer.status_code == status, answer.text
    return MESSAGES["SampleResponse"].FromString(answer.content) if status == 200 else answer.json()


def tokens_of(sequence: Any) -> list[int]:
    return [int(token) for token in np.frombuffer(sequence.tokens, "<i4")]


async def completions(client: Client, session: str, cursor: int = 0, clone: int = 0, **more: Any) -> Any:
    target = {"sampling_session_id": session, "cloned_sampler_id": clone}
    return await client.post("retrieve_futures", target=target, prev_cursor=cursor, **more)


async def test_a_sample_has_an_id_for_each_sequence_and_is_done_once(tmp_path: Path) -> None:
    async with served(tmp_path) as parts:
        client = parts.client()
        session = await base_session(client)
        accepted = await sample(client, session, num_samples=2)
        assert accepted["sample_sequence_ids"] == [f"{session}:1:0", f"{session}:1:1"]
        assert await sample(client, session, num_samples=2) == accepted
        answer = await answer_of(client, accepted)
        assert [len(tokens_of(each)) for each in answer.sequences] == [4, 4]
        await sample(client, session, status=422, num_samples=3)


async def test_ends_of_samples_are_told_once_to_the_client_they_are_of(tmp_path: Path) -> None:
    async with served(tmp_path) as parts:
        client = parts.client()
        session = await base_session(client)
        clone = (await client.post("join_sampling_session", sampling_session_id=session))["client_counter"]
        assert clone == 1
        mine = await sample(client, session)
        theirs = await sample(client, session, seq_id=10**9 + 1)
        told = await completions(client, session)
        assert [each["request_id"] for each in told["completions"]] == [mine["request_id"]]
        assert told["completions"][0]["state"] == "finished"
        told_other = await completions(client, session, clone=1)
        assert [each["request_id"] for each in told_other["completions"]] == [theirs["request_id"]]
        nothing = await completions(client, session, told["cursor"], timeout=0)
        assert nothing == {"completions": [], "cursor": told["cursor"]}


async def test_polls_by_numbers_that_no_client_has_leave_nothing(tmp_path: Path) -> None:
    async with served(tmp_path) as parts:
        client = parts.client()
        session = await base_session(client)
        waiting = asyncio.create_task(completions(client, session, clone=7))
        for clone in range(10):
            assert (await completions(client, session, clone=clone, timeout=0))["completions"] == []
        accepted = await sample(client, session, seq_id=7_000_000_000)
        told = (await waiting)["completions"]
        assert [each["request_id"] for each in told] == [accepted["request_id"]]
        assert len(parts.service.samples._feeds) == 1


async def test_an_acknowledged_sample_may_go(tmp_path: Path) -> None:
    async with served(tmp_path) as parts:
        client = parts.client()
        session = await base_session(client)
        accepted = await sample(client, session)
        told = await completions(client, session)
        request_id = accepted["request_id"]
        await completions(client, session, told["cursor"], timeout=0, retrieved_request_ids=[request_id])
        future = parts.service.futures.get(request_id, owner="a")
        assert future is not None
        assert future.retrieved_at is not None


async def test_samples_of_a_former_life_are_failed_and_then_lost(tmp_path: Path) -> None:
    async with served(tmp_path) as parts:
        client = parts.client()
        session = await base_session(client)
        accepted = await sample(client, session)
        cursor = (await completions(client, session))["cursor"]
    async with served(tmp_path) as parts:
        again = parts.client()
        told = await completions(again, session, cursor)
        assert told["completions"] == [{"state": "failed", "request_id": accepted["request_id"]}]
        assert told["cursor"] > cursor
        lost = await answer_of(again, accepted, 410)
        assert "sample again" in lost["error"]["message"]
        other = parts.client("b")
        await answer_of(other, accepted, 404)


async def test_a_lost_sample_is_told_by_each_life_until_its_client_has_heard_of_it(tmp_path: Path) -> None:
    async with served(tmp_path) as parts:
        client = parts.client()
        session = await base_session(client)
        await client.model()
        accepted = [await sample(client, session, seq_id) for seq_id in (1, 2, 3)]
        read = await answer_of(client, accepted[0])
        assert len(read.sequences) == 1
        await completions(client, session)  # the answer was lost on its way: the client's cursor stays where it was
    names = [each["request_id"] for each in accepted]
    for _ in range(2):  # in each of which files of the life before go
        async with served(tmp_path) as parts:
            await parts.service.sweep()
            assert parts.service.log.files == 1
    async with served(tmp_path) as parts:
        await answer_of(parts.client(), accepted[1], 410)
        told = await completions(parts.client(), session)
        assert [each["request_id"] for each in told["completions"]] == names
        assert [name for _, name in parts.service.samples.awaited()] == [names[0], names[2]]
        await completions(parts.client(), session, told["cursor"], timeout=0)
        assert parts.service.samples.awaited() == []


async def test_only_those_of_whose_end_a_client_has_not_heard_are_awaited(tmp_path: Path) -> None:
    async with served(tmp_path) as parts:
        client = parts.client()
        session = await base_session(client)
        accepted = [await sample(client, session, seq_id) for seq_id in (1, 2)]
        told: dict[str, Any] = {"completions": []}
        while len(told["completions"]) < len(accepted):
            told = await completions(client, session)
        names = [each["request_id"] for each in accepted]
        assert {name for _, name in parts.service.samples.awaited()} == set(names)
        await answer_of(client, accepted[0])
        assert [name for _, name in parts.service.samples.awaited()] == [names[1]]
        await completions(client, session, told["cursor"], timeout=0)
        assert parts.service.samples.awaited() == []


async def test_a_snapshot_stays_and_an_inflight_client_sees_new_weights_in_the_middle(tmp_path: Path) -> None:
    async with served(tmp_path) as parts:
        client = parts.client()
        model_id = await client.model()
        names, seq_id = {}, 0
        for kind in ("snapshot", "inflight"):
            seq_id += 1
            accepted = await client.post(
                "save_weights_for_sampler", model_id=model_id, seq_id=seq_id, sampling_session_seq_id=seq_id, kind=kind
            )
            names[kind] = (await client.result(accepted))["sampling_session_id"]
        before = await answer_of(client, await sample(client, names["snapshot"]))
        gate, asked = asyncio.Event(), asyncio.Event()

        async def wait() -> None:
            asked.set()
            await gate.wait()

        first = await answer_of(client, await sample(client, names["inflight"]))
        parts.sampler.gate = wait
        live = await sample(client, names["inflight"], seq_id=2)
        await asked.wait()
        for _ in range(4):
            await client.result(await client.train(model_id, seq_id + 1))
            await client.result(await client.step(model_id, seq_id + 2))
            seq_id += 2
        accepted = await client.post(
            "save_weights_for_sampler", model_id=model_id, seq_id=seq_id + 1, sampling_session_seq_id=9, kind="inflight"
        )
        assert (await client.result(accepted))["sampling_session_id"] != names["inflight"]
        gate.set()
        (sequence,) = (await answer_of(client, live)).sequences
        assert np.frombuffer(sequence.versions, "<i8").tolist() == [4, 4, 4, 4]
        assert np.frombuffer(first.sequences[0].versions, "<i8").tolist() == [0, 0, 0, 0]
        after = await answer_of(client, await sample(client, names["snapshot"], seq_id=2))
        assert tokens_of(after.sequences[0]) == tokens_of(before.sequences[0])
        assert after.sequences[0].logprobs == before.sequences[0].logprobs
        assert len(parts.service.checkpoints.targets()) == 2


async def test_targets_are_there_after_a_start(tmp_path: Path) -> None:
    async with served(tmp_path) as parts:
        client = parts.client()
        model_id = await client.model()
        await client.result(await client.train(model_id, 1))
        await client.result(await client.step(model_id, 2))
        accepted = await client.post(
            "save_weights_for_sampler", model_id=model_id, seq_id=3, sampling_session_seq_id=0, kind="inflight"
        )
        session = (await client.result(accepted))["sampling_session_id"]
    async with served(tmp_path) as parts:
        again = parts.client()
        answer = await answer_of(again, await sample(again, session))
        assert np.frombuffer(answer.sequences[0].versions, "<i8").tolist() == [1, 1, 1, 1]


async def test_saves_that_are_done_again_do_not_bring_an_inflight_target_back(tmp_path: Path) -> None:
    async with served(tmp_path, snapshot_every=100) as parts:
        client = parts.client()
        model_id = await client.model()
        live: dict[str, Any] = {"model_id": model_id, "kind": "inflight"}
        first = await client.post("save_weights_for_sampler", seq_id=1, sampling_session_seq_id=0, **live)
        session = (await client.result(first))["sampling_session_id"]
        await client.result(await client.step(model_id, 2))
        second = await client.post("save_weights_for_sampler", seq_id=3, sampling_session_seq_id=1, **live)
        await client.result(second)
    async with served(tmp_path) as parts:
        again = parts.client()
        await again.result(first)
        parts.trainer.released.clear()
        answer = await answer_of(again, await sample(again, session))
        assert np.frombuffer(answer.sequences[0].versions, "<i8").tolist() == [1, 1, 1, 1]
        parts.trainer.released.set()
        await again.result(second)
        assert len(parts.service.checkpoints.targets()) == 1


async def test_weights_that_a_death_left_of_targets_that_are_no_more_go_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with served(tmp_path, snapshot_every=1) as parts:
        client, targets = parts.client(), parts.service._targets
        model_id = await client.model()
        monkeypatch.setattr(targets, "_remove_files", lambda _: None)
        names = []
        for seq_id, kind in ((1, "inflight"), (2, "inflight"), (3, "snapshot")):
            saved = await client.post(
                "save_weights_for_sampler", model_id=model_id, seq_id=seq_id, sampling_session_seq_id=seq_id, kind=kind
            )
            names.append((await client.result(saved))["sampling_session_id"])
        await targets.drop(parts.service.log.catalog.samplings[names[2]])
        paths = [each.path for each in parts.service.checkpoints.targets()]
        assert len(paths) == 3
        body = {"session_id": client.session_id, "sampling_session_seq_id": 9}
        await client.post("create_sampling_session", 404, **body, model_path=paths[0])
    async with served(tmp_path) as parts:
        (left,) = parts.service.checkpoints.targets()
        assert left.seq_id == 2
        again = parts.client()
        await answer_of(again, await sample(again, names[0]))


async def test_a_sample_that_fails_says_whose_fault_it_was(tmp_path: Path) -> None:
    async with served(tmp_path) as parts:
        client = parts.client()
        session = await base_session(client)
        parts.sampler.failing = True
        accepted = await sample(client, session)
        told = await completions(client, session)
        assert told["completions"] == [{"state": "failed", "request_id": accepted["request_id"]}]
        assert (await client.result(accepted)) == {"error": "the generators are gone", "category": "server"}


async def test_a_sample_that_was_given_up_stops(tmp_path: Path) -> None:
    async with served(tmp_path) as parts:
        client = parts.client()
        session = await base_session(client)
        never = asyncio.Event()
        parts.sampler.gate = never.wait
        accepted = await sample(client, session)
        await client.post("cancel_future", 204, request_id=accepted["request_id"])
        told = await completions(client, session)
        assert told["completions"][0]["state"] == "failed"


async def test_more_samples_than_a_tenant_may_have_are_told_to_come_again(tmp_path: Path) -> None:
    async with served(tmp_path, max_samples=2) as parts:
        client = parts.client()
        session = await base_session(client)
        parts.sampler.gate = asyncio.Event().wait
        await sample(client, session, num_samples=2)
        refused = await sample(client, session, seq_id=2, status=429)
        assert "2 samples of yours" in refused["queue_state_reason"]
        await sample(client, session, num_samples=2)  # a retry is none


async def test_samples_that_come_together_find_no_room_twice(tmp_path: Path) -> None:
    async with served(tmp_path, max_samples=2) as parts:
        client = parts.client()
        session = await base_session(client)
        parts.sampler.gate = asyncio.Event().wait
        prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]}
        body = {"sampling_session_id": session, "prompt": prompt, "sampling_params": {"max_tokens": 4}}
        answers = await asyncio.gather(*(client.http.post("/asample", json={**body, "seq_id": n}) for n in range(5)))
        assert sorted(answer.status_code for answer in answers) == [200, 200, 429, 429, 429]
        assert parts.service.samples.count("a") == 2


async def test_a_sample_that_the_disk_refused_takes_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with served(tmp_path) as parts:
        client = parts.client()
        session = await base_session(client)
        with monkeypatch.context() as broken:
            broken.setattr(parts.service.log, "_append_synced", refusing)
            await sample(client, session, status=503)
        assert parts.service.samples.count("a") == 0
        await answer_of(client, await sample(client, session))


@pytest.mark.parametrize(
    "fields", [{"prompt_logprobs_last_n": 9, "prompt_logprobs": True}, {"num_samples": 0}, {"params": {"top_p": 2}}]
)
async def test_a_sample_that_does_not_fit_is_refused_by_its_field(tmp_path: Path, fields: dict[str, Any]) -> None:
    async with served(tmp_path) as parts:
        client = parts.client()
        session = await base_session(client)
        refused = await sample(client, session, status=422, **fields)
        assert next(iter(fields)) in refused["error"]["message"] or "top_p" in refused["error"]["message"]


async def test_training_on_what_was_never_sampled_is_refused_and_stays_refused(tmp_path: Path) -> None:
    async with served(tmp_path) as parts:
        client = parts.client()
        model_id = await client.model()
        session = await base_session(client)
        accepted = await sample(client, session, record_stability_info=True)
        (name,) = accepted["sample_sequence_ids"]
        tokens = [1, 2, 3, *tokens_of((await answer_of(client, accepted)).sequences[0])]
        honest = await client.train(model_id, 1, tokens, sequence_id=name, prompt=3)
        lying = await client.train(model_id, 2, [*tokens[:-1], tokens[-1] - 1], sequence_id=name, prompt=3)
        assert (await client.result(honest))["loss:sum"] > 0
        refused = await client.result(lying)
        assert refused["category"] == "user"
        assert "loss_fn_input_spans[1]: position 5 holds token" in refused["error"]
    shutil.rmtree(tmp_path / "sequences")
    async with served(tmp_path) as parts:
        again = parts.client()
        assert await again.result(lying) == refused
        assert (await again.result(honest))["loss:sum"] > 0


async def test_a_key_that_leaves_the_file_ends_the_sessions_of_its_tenant_and_one_that_comes_works_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that waits with a removed key gets no answer; others notice nothing."""
    monkeypatch.setattr(watched_files, "LOOK_EVERY_S", 0.0)
    file = tmp_path / "keys.json"

    def allow(*names: str) -> None:
        keys = [{"name": name, "sha256": hash_of(f"tml-{name}")} for name in names]
        write_secret(file, json.dumps({"keys": keys}))

    allow("a", "b")
    async with served(tmp_path / "state", keys=TenantKeys.read(file), long_poll_s=0.2) as parts:
        gone, stays, comes = parts.client("a"), parts.client("b"), parts.client("c")
        model_id, other = await gone.model(), await stays.model()
        early = (await gone.train(model_id, 2))["request_id"]
        parts.sampler.gate = asyncio.Event().wait
        await sample(gone, await base_session(gone))
        waits = asyncio.create_task(gone.post("retrieve_future", 401, request_id=early))
        await asyncio.sleep(0.05)
        allow("b", "c")
        assert "no longer in the keys file" in (await waits)["error"]["message"]
        await gone.post("retrieve_future", 401, request_id=early)
        await comes.model()

        await parts.service.sweep()
        living = {entry.owner for entry in parts.service.sessions.living()}
        assert living == {"b", "c"}
        await asyncio.sleep(0)
        assert parts.service.samples.count("a") == 0
        assert not parts.service.models.by_id[model_id].early
        assert await stays.loss(other, 1) > 0
