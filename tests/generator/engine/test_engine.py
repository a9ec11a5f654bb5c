import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from generator.weights.plan import LoadReport, WeightSyncError
from protocol.generation import Sampling
from tests.generator.conftest import (
    PROMPT,
    CompletionSoFar,
    Rig,
    SentBucket,
    group_at,
    largest_gap,
    pack,
    plan_of,
    sample,
)

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="session")]

TOLERANCE = 1e-3


def covers(completion: CompletionSoFar) -> bool:
    """True if the spans follow each other without a gap from 0 to the last token."""
    ends = [0] + [span.end for span in completion.spans]
    starts = [span.start for span in completion.spans] + [len(completion.token_ids)]
    return ends == starts and all(span.start < span.end for span in completion.spans)


async def gaps(rig: Rig) -> float:
    return max(largest_gap(rig, completion) for completion in await sample(rig))


async def test_logprobs_agree_with_transformers_after_each_update_of_a_tied_model(rig: Rig) -> None:
    for seed in (1, 2, 3):
        rig.policy.change(seed=seed)
        assert await gaps(rig) > 0.1
        version = await rig.publish()
        completions = await sample(rig)
        assert max(largest_gap(rig, completion) for completion in completions) < TOLERANCE
        assert {span.version for completion in completions for span in completion.spans} == {version}
        assert all(covers(completion) for completion in completions)


async def test_score_agrees_with_transformers(rig: Rig) -> None:
    await rig.publish()
    tokens = (3, 4, 5, 9, 11, 2, 30)
    for _ in range(2):
        scores = await rig.engine.score(request_id=rig.next_request(), token_ids=tokens)
        assert scores.version == rig.engine.version
        assert scores.logprobs == pytest.approx(rig.policy.logprobs(tokens), abs=TOLERANCE)


async def test_behavior_logprobs_are_those_of_the_temperature(rig: Rig) -> None:
    await rig.publish()
    sampling = Sampling(max_tokens=1, temperature=2.0)
    logits = torch.tensor([rig.policy.logprobs((*PROMPT, token))[-1] for token in range(32)])
    expected = torch.log_softmax(logits / 2.0, -1)
    async for (part,) in rig.engine.generate(
        request_id=rig.next_request(), prompt_token_ids=PROMPT, n=1, sampling=sampling
    ):
        assert part.behavior_logprobs[0] == pytest.approx(expected[part.token_ids[0]].item(), abs=TOLERANCE)


async def test_logprobs_come_packed_and_no_part_holds_the_first_token_alone(rig: Rig) -> None:
    await rig.publish()
    chosen = rig.engine.llm.vllm_config.scheduler_config.scheduler_cls
    assert str(chosen).startswith("generator.engine.packing.Packing")
    asked = rig.engine.generate(
        request_id=rig.next_request(), prompt_token_ids=PROMPT, n=2, sampling=Sampling(max_tokens=9, min_tokens=9)
    )
    parts = [part async for some in asked for part in some]
    assert all(len(part.token_ids) == len(part.behavior_logprobs) for part in parts)
    whole = [part for part in parts if part.index == 0]
    assert len(whole[0].token_ids) == min(9, rig.engine._options.stream_interval)


@pytest.mark.parametrize("clear_cache", [False, True])
async def test_a_running_request_survives_an_update_and_its_spans_say_which_tokens_are_whose(
    rig: Rig, clear_cache: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rig.engine, "_options", replace(rig.engine._options, recompute_on_update=clear_cache))
    old_version = await rig.publish()
    old_policy = rig.policy.snapshot()
    completions = [CompletionSoFar() for _ in range(4)]
    new_version = ""
    sampling = Sampling(max_tokens=600)
    async for parts in rig.engine.generate(
        request_id=rig.next_request(), prompt_token_ids=PROMPT, n=4, sampling=sampling
    ):
        for part in parts:
            completions[part.index].add(part)
            assert covers(completions[part.index])
        if not new_version:
            rig.policy.change(seed=7)
            new_version = await rig.publish()
    new_policy = rig.policy.snapshot()
    for completion in completions:
        assert [span.version for span in completion.spans] == [old_version, new_version]
        assert completion.finish_reason == "length"
        assert len(completion.token_ids) == 600
        boundary = completion.spans[1].start
        rig.policy.restore(old_policy)
        assert largest_gap(rig, completion, end=boundary) < TOLERANCE
        rig.policy.restore(new_policy)
        gap = largest_gap(rig, completion, start=boundary)
        assert gap < TOLERANCE if clear_cache else gap > TOLERANCE


async def test_a_request_that_comes_within_a_commit_begins_after_it(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else what the prefix cache holds of its prompt would be of the old weights, under the new version's name."""
    await rig.publish()
    rig.policy.change(seed=8)
    load = rig.engine._load
    asked: list[asyncio.Task[list[CompletionSoFar]]] = []
    held = -1

    async def load_and_ask() -> list[LoadReport]:
        nonlocal held
        asked.append(asyncio.create_task(sample(rig, n=2)))
        while not rig.engine.llm.waiting_at_the_gate and not rig.engine.counters().waiting:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        held = rig.engine.llm.waiting_at_the_gate
        return await load()

    monkeypatch.setattr(rig.engine, "_load", load_and_ask)
    version = await rig.publish()

    assert held == 1
    for completion in await asked[0]:
        assert {span.version for span in completion.spans} == {version}
        assert largest_gap(rig, completion) < TOLERANCE


async def test_the_engine_samples_while_an_update_is_staged(rig: Rig) -> None:
    sender = await rig.connect()
    buckets = pack(rig.policy.tensors())
    staging = asyncio.create_task(rig.engine.stage(plan_of(buckets, version=rig.next_version())))
    await sample(rig)
    assert not staging.done()
    await asyncio.to_thread(sender.send, buckets)
    await staging


@pytest.mark.parametrize("wrong", [0, -1], ids=["first", "last"])
async def test_a_bucket_with_a_wrong_hash_leaves_the_old_weights_serving(rig: Rig, wrong: int) -> None:
    version = await rig.publish()
    before = await rig.engine.fingerprint()
    good = rig.policy.snapshot()
    rig.policy.change(seed=11)
    buckets = pack(rig.policy.tensors())
    buckets[wrong].payload[5] ^= 1
    await rig.connect(bucket_timeout_s=2.0)  # the sender waits for it with what follows the wrong one
    with pytest.raises(WeightSyncError, match="hash"):
        await rig.stage(buckets, version=rig.next_version())
    with pytest.raises(WeightSyncError, match="not what is staged here, but nothing") as nothing:
        await rig.engine.commit(version="9.9")
    assert not nothing.value.unloaded
    rig.policy.restore(good)
    assert await gaps(rig) < TOLERANCE
    assert rig.engine.version == version
    assert await rig.engine.fingerprint() == before


async def test_a_load_that_fails_before_it_touches_the_weights_leaves_them_and_their_version(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = await rig.publish()
    good = rig.policy.snapshot()
    rig.policy.change(seed=13)
    later = rig.next_version()
    await rig.stage(pack(rig.policy.tensors()), version=later)

    async def refused() -> list[str]:
        return [LoadReport(error="nothing was loaded").to_json()]

    monkeypatch.setattr(rig.engine, "_load_answers", refused)
    with pytest.raises(WeightSyncError, match="nothing was loaded") as failed:
        await rig.engine.commit(version=later)
    monkeypatch.undo()
    assert not failed.value.unloaded
    rig.policy.restore(good)
    completions = await sample(rig)
    assert max(largest_gap(rig, completion) for completion in completions) < TOLERANCE
    assert {span.version for completion in completions for span in completion.spans} == {version}
    rig.sender = None
    await rig.publish()


async def test_a_silent_sender_leaves_the_old_weights_serving_and_a_new_group_works(rig: Rig) -> None:
    version = await rig.publish()
    await rig.connect(bucket_timeout_s=1.0)
    buckets = pack(rig.policy.tensors())
    with pytest.raises(WeightSyncError, match="bucket 0 did not arrive"):
        await rig.engine.stage(plan_of(buckets, version=rig.next_version()))
    assert await gaps(rig) < TOLERANCE
    assert rig.engine.version == version
    rig.sender = None
    rig.policy.change(seed=12)
    await rig.publish()
    assert await gaps(rig) < TOLERANCE


async def test_a_group_that_nobody_else_joins_is_refused_after_the_timeout(rig: Rig) -> None:
    with pytest.raises(WeightSyncError, match="could not join"):
        await rig.engine.join_group(group_at(9, epoch=999, meet_timeout_s=1.0))
    rig.sender = None
    await rig.publish()
    assert await gaps(rig) < TOLERANCE


async def test_a_load_that_fails_midway_freezes_the_engine_until_a_good_one(rig: Rig) -> None:
    await rig.publish()
    buckets = pack(with_a_wrong_shape(rig.policy.tensors()))
    await rig.stage(buckets, version="9.9")
    with pytest.raises(WeightSyncError) as failure:
        await rig.engine.commit(version="9.9")
    assert failure.value.unloaded
    assert rig.engine.unloaded
    frozen = asyncio.create_task(sample(rig, n=2))
    rig.sender = None
    rig.policy.change(seed=13)
    version = await rig.publish()
    assert not rig.engine.unloaded
    for completion in await frozen:
        assert {span.version for span in completion.spans} == {version}
        assert largest_gap(rig, completion) < TOLERANCE


async def test_a_plan_without_all_parameters_is_never_served(rig: Rig) -> None:
    await rig.publish()
    tensors = rig.policy.tensors()
    del tensors["model.layers.1.mlp.down_proj.weight"]
    await rig.stage(pack(tensors), version="9.9")
    with pytest.raises(WeightSyncError, match="no value") as failure:
        await rig.engine.commit(version="9.9")
    assert failure.value.unloaded
    rig.sender = None
    await rig.publish()
    assert await gaps(rig) < TOLERANCE


async def test_downloaded_buckets_are_loaded_from_files(rig: Rig, tmp_path: Path) -> None:
    rig.policy.change(seed=14)
    buckets = pack(rig.policy.tensors())
    paths = [written(bucket, tmp_path / f"{i}.bucket") for i, bucket in enumerate(buckets)]
    version = rig.next_version()
    await rig.engine.stage_files(plan_of(buckets, version=version), paths=paths)
    await rig.engine.commit(version=version)
    assert await gaps(rig) < TOLERANCE


async def test_fingerprints_follow_the_weights_and_not_the_version(rig: Rig) -> None:
    versions = [rig.next_version() for _ in range(3)]
    found = []
    for version, seed in zip(versions, (None, None, 15), strict=True):
        if seed is not None:
            rig.policy.change(seed=seed)
        await rig.stage(pack(rig.policy.tensors()), version=version)
        report = await rig.engine.commit(version=version)
        found.append(await rig.engine.fingerprint(version=version))
        assert report.version == version
    assert found[0] == found[1] != found[2]
    assert await rig.engine.fingerprint() == found[2]


async def test_a_request_that_its_caller_leaves_is_gone_and_the_engine_drains(rig: Rig) -> None:
    before = rig.engine.counters()
    sampling = Sampling(max_tokens=900)
    parts = rig.engine.generate(request_id=rig.next_request(), prompt_token_ids=PROMPT, n=2, sampling=sampling)
    assert all(part.finish_reason is None for part in await anext(parts))
    assert rig.engine.counters().running + rig.engine.counters().waiting == 2
    assert not await rig.engine.drain(timeout_s=0.01)
    await parts.aclose()
    assert await rig.engine.drain(timeout_s=5)
    after = rig.engine.counters()
    assert after.running + after.waiting == 0
    assert after.tokens_total > before.tokens_total


def with_a_wrong_shape(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Layers before the second are whole, one projection of it does not fit."""
    name = "model.layers.1.self_attn.v_proj.weight"
    return {**tensors, name: tensors[name][:64]}


def written(bucket: SentBucket, path: Path) -> str:
    path.write_bytes(bucket.payload.numpy().tobytes())
    return str(path)


async def test_a_probe_does_not_wait_behind_the_requests_that_wait(rig: Rig) -> None:
    await rig.publish()
    waiting = 80  # more than the engine samples at once, 64
    begun = asyncio.Event()
    ended = 0

    async def ask(number: int) -> None:
        nonlocal ended
        sampling = Sampling(max_tokens=60 if number < waiting else 40)
        async for _ in rig.engine.generate(
            request_id=f"{rig.next_request()}", prompt_token_ids=PROMPT, n=4, sampling=sampling
        ):
            begun.set()
        ended += 1

    async with asyncio.TaskGroup() as group:
        for number in range(waiting):
            group.create_task(ask(number))
        await begun.wait()
        await rig.engine.score(request_id="first", token_ids=PROMPT, before_others=True)
        assert ended < waiting // 2, "requests that waited were begun before it"


async def test_the_weights_are_hashed_after_the_pause(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    ask, resume = rig.engine.llm.collective_rpc, rig.engine.llm.resume_generation

    async def asked(method: str, **given: object) -> object:
        calls.append(method)
        return await ask(method, **given)

    async def resumed() -> None:
        calls.append("resume")
        await resume()

    monkeypatch.setattr(rig.engine.llm, "collective_rpc", asked)
    monkeypatch.setattr(rig.engine.llm, "resume_generation", resumed)
    before = await rig.engine.fingerprint()
    rig.policy.change(seed=77)
    await rig.publish()
    assert calls.index("headway_load") < calls.index("resume")
    assert "headway_begin_fingerprint" not in calls[calls.index("headway_load") : calls.index("resume")]
    assert await rig.engine.fingerprint() != before
