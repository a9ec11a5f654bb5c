"""Logprobs of given tokens, by a real engine: exact, under one version, and none of them out of a cache."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
import torch

from protocol.generation import LogprobsAnswer, LogprobsRequest
from protocol.status import Readiness
from services.http.app import create_app
from services.http.client import HttpClient, ServiceRefused
from services.http.metrics import Metrics
from services.http.refusals import RequestRefused
from services.http.server import Listener, serve_http
from tests.generator.conftest import Rig, sample
from tests.generator.engine.test_engine import TOLERANCE
from tests.generator.test_weight_sync import serving_of, until

if TYPE_CHECKING:
    from generator.logprobs import LogprobScoring
    from generator.serving import Serving

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="session")]

SEQUENCES = ((3, 4, 5, 9, 11, 2, 30), (7, 7), tuple(3 + number % 20 for number in range(300)))


def scoring_of(rig: Rig) -> "LogprobScoring":
    from generator.logprobs import LogprobScoring
    from generator.serving import GeneratorMetrics

    return LogprobScoring(
        engine=rig.engine,
        serving=held(rig),
        metrics=GeneratorMetrics(Metrics("generator"), engine=rig.engine),
        generator_id="g",
        instance="i",
        tokenizer="70ken1",
        vocabulary_size=32,
        max_model_len=1024,
    )


def held(rig: Rig) -> "Serving":
    serving = serving_of(rig)
    serving.holds(rig.engine.version)
    return serving


def ask(*sequences: Sequence[int], top: int = 0) -> LogprobsRequest:
    return LogprobsRequest(request_id="r", sequences=tuple(map(tuple, sequences)), top=top)


def assert_exact(rig: Rig, answer: LogprobsAnswer, sequences: Sequence[Sequence[int]]) -> None:
    """Against the policy as it is now."""
    assert answer.instance == "i"
    for sequence, found in zip(sequences, answer.sequences, strict=True):
        assert found.logprobs == pytest.approx(rig.policy.logprobs(sequence), abs=TOLERANCE)


@asynccontextmanager
async def paused(rig: Rig) -> AsyncIterator[None]:
    """The engine takes requests and begins none."""
    await rig.engine.llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=False)
    try:
        yield
    finally:
        await rig.engine.llm.resume_generation()


async def test_logprobs_of_several_sequences_agree_with_transformers(rig: Rig) -> None:
    rig.policy.change(seed=41)
    version = await rig.publish()
    answer = await scoring_of(rig).answer(ask(*SEQUENCES))
    assert (answer.generator_id, answer.policy_version, answer.tokenizer) == ("g", version, "70ken1")
    assert [len(one.logprobs) for one in answer.sequences] == [6, 1, 299]
    assert not any(one.top_token_ids or one.top_logprobs for one in answer.sequences)
    assert_exact(rig, answer, SEQUENCES)


async def test_logprobs_are_at_temperature_1_and_float32(rig: Rig) -> None:
    """The numbers have no digits beyond float32's, and the top row of a whole vocabulary sums to 1."""
    await rig.publish()
    answer = await scoring_of(rig).answer(ask(*SEQUENCES, top=32))
    for one in answer.sequences:
        assert torch.tensor(one.logprobs, dtype=torch.float32).tolist() == list(one.logprobs)
        sums = torch.tensor(one.top_logprobs, dtype=torch.float64).exp().sum(-1)
        assert torch.allclose(sums, torch.ones_like(sums), atol=1e-5)


async def test_the_top_tokens_come_with_the_likeliest_first(rig: Rig) -> None:
    await rig.publish()
    tokens = SEQUENCES[0]
    answer = await scoring_of(rig).answer(ask(tokens, top=3))
    (found,) = answer.sequences
    assert_exact(rig, answer, [tokens])
    for position, (ids, logprobs) in enumerate(zip(found.top_token_ids, found.top_logprobs, strict=True), start=1):
        row = torch.tensor([rig.policy.logprobs((*tokens[:position], token))[-1] for token in range(32)])
        best = row.topk(3)
        assert logprobs == pytest.approx(best.values.tolist(), abs=TOLERANCE)
        assert ids == tuple(best.indices.tolist())


async def test_a_prompt_that_the_prefix_cache_holds_is_scored_in_full(rig: Rig) -> None:
    await rig.publish()
    (completion, *_) = await sample(rig, n=1, max_tokens=300)
    before = rig.engine.counters()
    tokens = (3, 4, 5, 6, 7, *completion.token_ids)
    for _ in range(2):
        answer = await scoring_of(rig).answer(ask(tokens))
        assert_exact(rig, answer, [tokens])
        assert answer.sequences[0].logprobs[4:] == pytest.approx(completion.behavior_logprobs, abs=TOLERANCE)
    after = rig.engine.counters()
    assert after.cached_tokens_total == before.cached_tokens_total
    assert after.cache_queries_total == before.cache_queries_total


async def test_a_request_that_a_commit_meets_is_wholly_under_one_version(rig: Rig) -> None:
    rig.policy.change(seed=42)
    old = await rig.publish()
    sequences = [tuple(3 + (number + at) % 20 for at in range(200)) for number in range(16)]
    expected = {old: [rig.policy.logprobs(sequence) for sequence in sequences]}
    rig.policy.change(seed=43)
    async with asyncio.TaskGroup() as group:
        async with paused(rig):
            asked = group.create_task(scoring_of(rig).answer(ask(*sequences)))
            await until(lambda: rig.engine.counters().waiting == len(sequences))
        new = await rig.publish()
    expected[new] = [rig.policy.logprobs(sequence) for sequence in sequences]
    answer = await asked
    for found, wanted in zip(answer.sequences, expected[answer.policy_version], strict=True):
        assert found.logprobs == pytest.approx(wanted, abs=TOLERANCE)


async def test_sequences_that_came_in_before_a_commit_are_scored_anew_after_it(rig: Rig) -> None:
    """The engine held them back all the while, so that their version is the new one, and came in under the old."""
    rig.policy.change(seed=44)
    await rig.publish()
    await rig.connect()
    before = rig.engine.counters().completions_total
    async with asyncio.TaskGroup() as group:
        await rig.engine.llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=False)
        asked = group.create_task(scoring_of(rig).answer(ask(*SEQUENCES)))
        await until(lambda: rig.engine.counters().waiting == len(SEQUENCES))
        rig.policy.change(seed=45)
        version = await rig.publish()  # it resumes what it finds paused
    answer = await asked
    assert answer.policy_version == version
    assert rig.engine.counters().completions_total - before == 2 * len(SEQUENCES)
    assert_exact(rig, answer, SEQUENCES)


async def test_weights_that_change_again_and_again_are_told(rig: Rig) -> None:
    await rig.publish()
    version = rig.engine.llm.cache_version
    rig.engine.llm.cache_version = "7.7"  # whatever comes in seems to come in under another version
    try:
        with pytest.raises(RequestRefused, match="weights changed under each of 4 attempts") as refusal:
            await scoring_of(rig).answer(ask((3, 4)))
    finally:
        rig.engine.llm.cache_version = version
    assert (refusal.value.status_code, refusal.value.problem.kind) == (503, "weights_changed")


async def test_a_sequence_may_be_one_token_shorter_than_the_engines_limit(rig: Rig) -> None:
    await rig.publish()
    longest = tuple(3 + number % 20 for number in range(1023))
    answer = await scoring_of(rig).answer(ask(longest))
    assert_exact(rig, answer, [longest])
    with pytest.raises(RequestRefused, match="scores at most 1023, one less than its engine") as refusal:
        await scoring_of(rig).answer(ask((3, 4), (*longest, 3)))
    assert refusal.value.problem.field == "sequences.1"


async def test_tokens_that_the_model_does_not_have_are_refused(rig: Rig) -> None:
    with pytest.raises(RequestRefused, match="token id 32 is not in the vocabulary") as refusal:
        await scoring_of(rig).answer(ask((3, 4), (3, 32)))
    assert refusal.value.problem.field == "sequences.1"
    with pytest.raises(RequestRefused, match="33 tokens of a vocabulary of 32"):
        await scoring_of(rig).answer(ask((3, 4), top=33))


async def test_a_generator_that_hands_its_requests_back_says_so(rig: Rig) -> None:
    await rig.publish()
    async with paused(rig):
        asked = asyncio.ensure_future(scoring_of(rig).answer(ask(*SEQUENCES)))
        await until(lambda: rig.engine.counters().waiting == len(SEQUENCES))
        await rig.engine.hand_back()
        with pytest.raises(RequestRefused, match="try another generator") as refusal:
            await asked
    assert (refusal.value.status_code, refusal.value.problem.kind) == (503, "handed_back")


async def test_requests_that_wait_at_the_gate_are_handed_back_too(rig: Rig) -> None:
    await rig.engine.llm.close_gate()
    try:
        asked = asyncio.ensure_future(scoring_of(rig).answer(ask(*SEQUENCES)))
        await until(lambda: rig.engine.llm.waiting_at_the_gate == len(SEQUENCES))
        await rig.engine.hand_back()
        with pytest.raises(RequestRefused, match="try another generator"):
            await asked
    finally:
        rig.engine.llm.open_gate()


@asynccontextmanager
async def served(rig: Rig) -> AsyncIterator[str]:
    from generator.routes import add_token_routes

    app = create_app(
        service="generator", version="1", token=None, readiness=lambda: Readiness(ready=True), metrics=Metrics("g")
    )
    add_token_routes(app, serving=held(rig), scoring=scoring_of(rig))
    with Listener(host="127.0.0.1", port=0) as listener:
        server = asyncio.create_task(serve_http(app, listener, finish_s=0))
        try:
            yield f"{listener.url}/v1/logprobs"
        finally:
            server.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await server


async def test_the_route_answers_and_refuses(rig: Rig) -> None:
    await rig.publish()
    async with served(rig) as url, HttpClient() as client:
        answer = await client.post(url, ask(*SEQUENCES), LogprobsAnswer, deadline_s=60)
        assert_exact(rig, answer, SEQUENCES)
        with pytest.raises(ServiceRefused, match="token_out_of_range"):
            await client.post(url, ask((3, 99)), LogprobsAnswer, deadline_s=60)


async def test_a_client_that_leaves_takes_its_request_along(rig: Rig) -> None:
    await rig.publish()
    async with served(rig) as url, HttpClient() as client, paused(rig):
        asked = asyncio.ensure_future(client.post(url, ask(*SEQUENCES), LogprobsAnswer, deadline_s=60))
        await until(lambda: rig.engine.counters().waiting == len(SEQUENCES))
        asked.cancel()
        assert await rig.engine.drain(timeout_s=60)
