"""The sampler over generators: where a sample goes, what a death, a refusal or a full fleet makes of it, and offers."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from learner.tenants.fleet_sampler import FleetSampler, SamplingLimits, _Attempts
from learner.tenants.prompt_scores import PromptExtras
from learner.tenants.sampling import SampleFailed
from learner.tenants.served_adapters import ServedAdapters
from learner.tenants.turns import BASE_TARGET, TargetWeights
from protocol.adapters import ADAPTER_FILES
from protocol.tinker.sampling import SampleRequest
from protocol.tinker.tensors import TinkerWireError
from services.http import faults
from services.http.breakers import Breakers, BreakerSettings
from services.http.client import HttpClient, ServiceFailed, ServiceUnreachable
from tests.learner.tenants.scripted_generator import SAMPLED, ScriptedAdapterGenerator

BASE = TargetWeights(BASE_TARGET)
NOBODY = "http://127.0.0.1:1"
INFLIGHT = "inflight://session-1:train:0"
IMPATIENT = SamplingLimits(silence_s=0.5, pause_s=0.01)


def weights(folder: Path, target_id: str, *, version: int, seq_id: int, rank: int = 4) -> TargetWeights:
    """Files that no other version has."""
    folder.mkdir(parents=True)
    config, tensors = ADAPTER_FILES
    (folder / config).write_text(json.dumps({"r": rank}))
    (folder / tensors).write_bytes(f"{target_id} {seq_id}".encode())
    return TargetWeights(target_id, version, folder, seq_id)


@asynccontextmanager
async def sampler(*urls: str, limits: SamplingLimits = IMPATIENT, **parts: Any) -> AsyncIterator[FleetSampler]:
    breakers = parts.pop("breakers", Breakers("generator at", settings=BreakerSettings(rest_s=0.02, rest_max_s=0.05)))
    async with (
        HttpClient(connect_timeout_s=2) as client,
        FleetSampler(urls, client=client, adapters=ServedAdapters(), limits=limits, breakers=breakers, **parts) as ours,
    ):
        yield ours


def ask(**more: Any) -> SampleRequest:
    return SampleRequest(**{"prompt": (1, 2, 3), "max_tokens": 8, **more})


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110  what is waited for has no event of its own
            await asyncio.sleep(0.005)


async def test_a_sample_of_the_base_model_comes_back_as_it_was_sampled() -> None:
    generator = ScriptedAdapterGenerator()
    async with generator.running() as url, sampler(f"{url}/") as ours:
        answer = await ours.sample(BASE, ask(samples=2, topk_sample=2), namespace="s")
    first, second = answer.sequences
    assert first.tokens == SAMPLED
    assert first.logprobs == tuple(-token / 8 for token in SAMPLED)
    assert first.stopped
    assert first.top is not None
    assert first.top.token_ids.tolist() == [[0, 1]] * 3
    assert second.versions == [0, 0, 0]
    assert answer.prompt_logprobs is None
    (asked,) = generator.asked
    assert (asked.adapter, asked.namespace, asked.n, asked.top_k) == (None, "s", 2, 0)


async def test_requests_go_to_whom_the_least_is_under_way_at() -> None:
    held, first, second = asyncio.Event(), ScriptedAdapterGenerator(), ScriptedAdapterGenerator()
    first.hold = second.hold = held
    async with first.running() as a, second.running() as b, sampler(a, b) as ours:
        samples = [asyncio.create_task(ours.sample(BASE, ask(), namespace="s")) for _ in range(4)]
        await until(lambda: len(first.asked) + len(second.asked) == 4)
        assert (len(first.asked), len(second.asked)) == (2, 2)
        held.set()
        await asyncio.gather(*samples)


@pytest.mark.parametrize("trouble", [503, 429, 500, "short", "abort"])
async def test_what_one_generator_cannot_do_another_does(trouble: int | str) -> None:
    broken, well = ScriptedAdapterGenerator(script=lambda _: trouble), ScriptedAdapterGenerator()
    async with broken.running() as a, well.running() as b, sampler(a, b) as ours:
        for _ in range(2):
            answer = await ours.sample(BASE, ask(), namespace="s")
            assert answer.sequences[0].tokens == SAMPLED
    assert broken.asked
    assert len({asked.request_id for asked in (*broken.asked, *well.asked)}) == len(broken.asked) + len(well.asked)


async def test_a_generator_that_is_not_there_is_no_failure() -> None:
    well = ScriptedAdapterGenerator()
    async with well.running() as url, sampler(NOBODY, url) as ours:
        assert (await ours.sample(BASE, ask(), namespace="s")).sequences[0].tokens == SAMPLED


async def test_a_sample_waits_for_a_generator_that_is_busy_or_starts() -> None:
    troubles = [429, 503, None]
    generator = ScriptedAdapterGenerator(script=lambda number: troubles[min(number, 2)])
    limits = SamplingLimits(silence_s=20, pause_s=0.01)
    async with generator.running() as url, sampler(url, limits=limits) as ours:
        assert (await ours.sample(BASE, ask(), namespace="s")).sequences[0].tokens == SAMPLED
    assert len(generator.asked) == 3


async def test_failures_are_counted_and_the_last_one_is_named() -> None:
    generator = ScriptedAdapterGenerator(script=lambda _: 500)
    limits = SamplingLimits(failures=3, silence_s=20, pause_s=0.01)
    async with generator.running() as url, sampler(url, limits=limits) as ours:
        with pytest.raises(
            SampleFailed, match=r"3 attempts at one sample failed, last: http.*failed with 500 scripted"
        ):
            await ours.sample(BASE, ask(), namespace="s")
    assert len(generator.asked) == 3


async def test_an_adapter_that_cannot_be_loaded_fails_alone_and_leaves_the_generator_in_use(tmp_path: Path) -> None:
    unfit = weights(tmp_path / "a", "tinker://run/sampler_weights/a", version=1, seq_id=1)
    generator = ScriptedAdapterGenerator(script=lambda number: "unfit" if generator.asked[number].adapter else None)
    limits = SamplingLimits(failures=3, silence_s=60, pause_s=0.01)
    rests = Breakers("generator at", settings=BreakerSettings(rest_s=60, rest_max_s=60))
    async with generator.running() as url, sampler(url, limits=limits, breakers=rests) as ours:
        with pytest.raises(SampleFailed, match=r"3 attempts .* it does not fit"):
            await ours.sample(unfit, ask(), namespace="s")
        async with asyncio.timeout(60):
            assert (await ours.sample(BASE, ask(), namespace="s")).sequences[0].tokens == SAMPLED


async def test_a_sample_that_every_generator_turns_away_has_an_end_though_others_are_taken() -> None:
    generator = ScriptedAdapterGenerator(script=lambda number: 503 if generator.asked[number].n == 2 else None)
    async with generator.running() as url, sampler(url) as ours:
        refused = asyncio.create_task(ours.sample(BASE, ask(samples=2), namespace="s"))
        async with asyncio.timeout(60):
            while not refused.done():
                await ours.sample(BASE, ask(), namespace="s")
                await asyncio.sleep(0.02)
        with pytest.raises(SampleFailed, match=r"no generator has taken it for 0\.5 s, last: .*503"):
            await refused


def test_a_long_sample_whose_generators_die_is_not_one_that_nobody_takes() -> None:
    """The third generator turns it away: the time counts from the end of the attempt before that one."""
    attempts = _Attempts(SamplingLimits(failures=3, silence_s=180), began=0.0)
    died = ServiceUnreachable(NOBODY, "the connection broke", sent=True)
    away = ServiceFailed(NOBODY, status=503, kind="starting", message="no weights yet")
    attempts.failed(NOBODY, away, now=1.0)
    for now in (300.0, 600.0):
        attempts.failed(NOBODY, died, now=now)
    attempts.failed(NOBODY, away, now=780.0)
    with pytest.raises(SampleFailed, match="no generator has taken it for 180 s"):
        attempts.failed(NOBODY, away, now=781.0)


async def test_silence_has_an_end_and_says_whom_it_is_of() -> None:
    async with sampler(NOBODY) as ours:
        with pytest.raises(
            SampleFailed, match=r"no generator has answered for 0\.5 s, last: http://127.*cannot connect"
        ):
            await ours.sample(BASE, ask(), namespace="s")


async def test_a_refusal_of_the_request_is_the_clients_and_not_sent_elsewhere() -> None:
    first, second = ScriptedAdapterGenerator(script=lambda _: 422), ScriptedAdapterGenerator(script=lambda _: 422)
    async with first.running() as a, second.running() as b, sampler(a, b) as ours:
        with pytest.raises(TinkerWireError, match=r"^as the test wants it$"):
            await ours.sample(BASE, ask(), namespace="s")
    assert len(first.asked) + len(second.asked) == 1


async def test_samples_of_a_generator_that_hangs_go_to_another_one_and_slow_ones_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(faults, "_SIGN_OF_LIFE_S", 0.5)
    frozen, held, slow = ScriptedAdapterGenerator(script=lambda _: "hang"), asyncio.Event(), ScriptedAdapterGenerator()
    slow.hold = held
    limits = SamplingLimits(silence_s=60, pause_s=0.01, look_every_s=0.05)
    async with frozen.running() as a, slow.running() as b, sampler(a, b, limits=limits) as ours:
        samples = [asyncio.create_task(ours.sample(BASE, ask(), namespace="s")) for _ in range(2)]
        await until(lambda: frozen.asked and slow.asked)
        await asyncio.sleep(0.3)
        assert len(slow.asked) == 1, "one that answers other questions is at work"
        frozen.frozen = True
        await until(lambda: len(slow.asked) == 2)
        held.set()
        answers = await asyncio.gather(*samples)
    assert [answer.sequences[0].tokens for answer in answers] == [SAMPLED] * 2
    assert len(frozen.asked) == 1
    assert not ours._lifelines._watches


async def test_a_cancelled_sample_leaves_its_generator() -> None:
    generator = ScriptedAdapterGenerator(script=lambda _: "hang")
    async with generator.running() as url, sampler(url) as ours:
        sample = asyncio.create_task(ours.sample(BASE, ask(), namespace="s"))
        await until(lambda: generator.asked)
        sample.cancel()
        async with asyncio.timeout(60):
            await generator.left.wait()
        with pytest.raises(asyncio.CancelledError):
            await sample


async def test_a_snapshot_goes_by_its_files_and_its_tokens_have_its_version(tmp_path: Path) -> None:
    generator = ScriptedAdapterGenerator()
    snapshot = weights(tmp_path / "a", "tinker://run/sampler_weights/a", version=5, seq_id=9, rank=8)
    async with generator.running() as url, sampler(url) as ours:
        answer = await ours.sample(snapshot, ask(), namespace="s")
    assert answer.sequences[0].versions == [5, 5, 5]
    adapter = generator.asked[0].adapter
    assert adapter is not None
    assert adapter.target_id == adapter.name
    assert (adapter.rank, adapter.version, adapter.is_replaced) == (8, 0, False)


async def test_each_token_of_an_inflight_target_has_the_version_that_it_was_sampled_with(tmp_path: Path) -> None:
    generator = ScriptedAdapterGenerator(spans=[(10, 0, 1), (20, 1, 3)])
    old = weights(tmp_path / "a", INFLIGHT, version=3, seq_id=10)
    new = weights(tmp_path / "b", INFLIGHT, version=4, seq_id=20)
    async with generator.running() as url, sampler(url) as ours:
        await ours.offer(old)
        await ours.offer(new)
        answer = await ours.sample(old, ask(), namespace="s")
    assert answer.sequences[0].versions == [3, 4, 4]
    adapter = generator.asked[0].adapter
    assert adapter is not None
    # The newest is asked for: the files of what was replaced are removed.
    assert (adapter.target_id, adapter.version, adapter.is_replaced) == (INFLIGHT, 20, True)


async def test_a_sample_that_is_sent_again_asks_for_weights_that_have_come_meanwhile(tmp_path: Path) -> None:
    new = weights(tmp_path / "b", INFLIGHT, version=4, seq_id=20)
    old = weights(tmp_path / "a", INFLIGHT, version=3, seq_id=10)
    held = asyncio.Event()
    generator = ScriptedAdapterGenerator(script=lambda number: 500 if number == 0 else None)
    async with generator.running() as url, sampler(url, limits=SamplingLimits(silence_s=20, pause_s=0.3)) as ours:
        sample = asyncio.create_task(ours.sample(old, ask(), namespace="s"))
        await until(lambda: generator.asked)
        await ours.offer(new)
        held.set()
        await sample
    versions = [asked.adapter.version for asked in generator.asked if asked.adapter is not None]
    assert versions == [10, 20]


async def test_an_offer_waits_for_nobody_and_the_newest_is_told_last(tmp_path: Path) -> None:
    generator, held = ScriptedAdapterGenerator(), asyncio.Event()
    generator.hold_offers = held
    offered = [weights(tmp_path / str(each), INFLIGHT, version=each, seq_id=each) for each in range(1, 6)]
    async with generator.running() as url, sampler(NOBODY, url) as ours:
        await ours.offer(offered[0])
        await until(lambda: generator.offers)
        for each in offered[1:]:
            await ours.offer(each)
        held.set()
        await until(lambda: generator.offers[-1].version == 5)
    assert [each.version for each in generator.offers] == [1, 5]


async def test_weights_whose_files_are_gone_fail_the_sample_and_not_the_save(tmp_path: Path) -> None:
    gone = TargetWeights("tinker://run/sampler_weights/a", 1, tmp_path / "nothing", 1)
    async with sampler(NOBODY) as ours:
        await ours.offer(gone)
        with pytest.raises(SampleFailed, match="the weights of tinker://run/sampler_weights/a cannot be read"):
            await ours.sample(gone, ask(), namespace="s")


async def test_what_generators_do_not_compute_is_asked_of_whoever_can_and_else_refused() -> None:
    extras = PromptExtras(np.array([[-1.0], [-2.0]], np.float32), (np.array([[7], [8]]), np.zeros((2, 1), np.float32)))

    async def score(_: TargetWeights, request: SampleRequest) -> PromptExtras:
        return extras

    named, drawn = ask(targets=np.array([[4], [5]])), ask(alternatives=1)
    generator = ScriptedAdapterGenerator()
    async with generator.running() as url:
        async with sampler(url, score_prompt=score) as ours:
            assert (await ours.sample(BASE, named, namespace="s")).targets is extras.targets
            assert (await ours.sample(BASE, drawn, namespace="s")).alternatives is extras.alternatives
            assert (await ours.sample(BASE, ask(), namespace="s")).alternatives is None
        async with sampler(url) as ours:
            with pytest.raises(TinkerWireError, match=r"^target_prompt_logprobs: "):
                await ours.sample(BASE, named, namespace="s")
            with pytest.raises(TinkerWireError, match=r"^prompt_alt_tokens_k: "):
                await ours.sample(BASE, drawn, namespace="s")


async def test_the_generators_are_told_with_what_was_last_heard_of_them() -> None:
    generator = ScriptedAdapterGenerator()
    async with generator.running() as url, sampler(url, NOBODY) as ours:
        assert [peer.state for peer in ours.peers()] == ["not called yet"] * 2
        for _ in range(2):
            await ours.sample(BASE, ask(), namespace="s")
        states: Sequence[str] = [peer.state for peer in ours.peers()]
    assert states[0] == "answers"
    assert "failed" in states[1]
