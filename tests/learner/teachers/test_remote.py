"""A remote teacher and its generators, over real HTTP."""

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from pydantic import SecretStr

from learner.teachers.config import TeacherConfig
from learner.teachers.teachers import RemoteTeacher, TeacherFailed, TeacherMetrics, TextRefused, _parts
from services.http.backoff import Backoff
from services.http.breakers import Breakers, BreakerSettings
from services.http.client import HttpClient
from services.http.metrics import Metrics
from tests.learner.teachers.scripted_teacher import TOKEN, TOKENIZER, ScriptedTeacher, logprob


@asynccontextmanager
async def teacher(*urls: str, token: str | None = None, **settings: float) -> AsyncIterator[RemoteTeacher]:
    """Rests and pauses are so short that a test with many failures is over soon."""
    config = TeacherConfig.model_validate({"name": "math", "urls": urls, **settings})
    async with HttpClient(token=None if token is None else SecretStr(token)) as client:
        yield RemoteTeacher(
            config,
            client=client,
            tokenizer=TOKENIZER,
            metrics=TeacherMetrics(Metrics("learner")),
            breakers=Breakers("teacher", settings=BreakerSettings(rest_s=0.001, rest_max_s=0.01)),
            pause_s=0.001,
        )


def sequence(*tokens: int) -> NDArray[np.int32]:
    return np.array(tokens, dtype=np.int32)


def closed_address() -> str:
    """Nobody listens there."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"http://127.0.0.1:{listener.getsockname()[1]}"


async def test_logprobs_come_back_in_order_for_all_tokens_but_the_first() -> None:
    async with ScriptedTeacher().running() as url, teacher(url) as math:
        found = await math.scores([sequence(3, 4, 5), sequence(8, 0)])
    assert [one.logprobs.dtype for one in found] == [np.float32, np.float32]
    # logprob(token, position) = -token / 8 - position / 1024, all of them exact in float32
    assert found[0].logprobs.tolist() == [-4 / 8 - 1 / 1024, -5 / 8 - 2 / 1024]
    assert found[1].logprobs.tolist() == [-1 / 1024]


async def test_many_sequences_are_asked_for_in_several_requests() -> None:
    scripted = ScriptedTeacher()
    sequences = [sequence(*range(length)) for length in (3, 3, 9, 2, 2, 2, 2)]
    async with scripted.running() as url, teacher(url, request_tokens=6) as math:
        found = await math.scores(sequences)
    assert [len(request.sequences) for request in scripted.requests] == [2, 1, 3, 1]
    assert [one.logprobs.tolist() for one in found] == [
        [logprob(at, at) for at in range(1, len(one))] for one in sequences
    ]


async def test_the_likeliest_tokens_of_each_position_may_be_asked_for() -> None:
    async with ScriptedTeacher().running() as url, teacher(url) as math:
        (found, _) = await math.scores([sequence(3, 4, 5), sequence(8, 0)], top=3)
        with pytest.raises(TeacherFailed, match="8193 tokens is too long for an answer with top 128: at most 8192 are"):
            await math.scores([np.ones(8193, dtype=np.int32)], top=128)
    assert found.top is not None
    assert found.top.token_ids.tolist() == [[0, 1, 2], [0, 1, 2]]
    assert (found.top.token_ids.dtype.name, found.top.logprobs.dtype.name) == ("int32", "float32")
    assert found.logprobs.tolist() == [logprob(4, 1), logprob(5, 2)]
    assert found.top.logprobs.tolist() == [[logprob(token, at) for token in range(3)] for at in (1, 2)]


@given(
    lengths=st.lists(st.integers(min_value=2, max_value=9), max_size=600), most=st.integers(min_value=2, max_value=99)
)
def test_parts_hold_every_sequence_once_in_order_and_within_the_bounds(lengths: list[int], most: int) -> None:
    sequences = [np.full(length, number, dtype=np.int32) for number, length in enumerate(lengths)]
    parts = list(_parts(sequences, most_tokens=most))
    assert [one[0] for part in parts for one in part] == list(range(len(lengths)))
    assert all(sum(map(len, part)) <= most or len(part) == 1 for part in parts)
    assert all(1 <= len(part) <= 256 for part in parts)


@pytest.mark.parametrize("trouble", [500, 503, 429, "short"])
async def test_a_request_that_failed_is_sent_again(trouble: int | str) -> None:
    scripted = ScriptedTeacher(script=lambda number: trouble if number == 0 else None)
    async with scripted.running() as url, teacher(url) as math:
        found = await math.scores([sequence(3, 4, 5)])
    assert found[0].logprobs.tolist() == [logprob(4, 1), logprob(5, 2)]
    assert scripted.requests[0] == scripted.requests[1]


async def test_a_request_goes_to_another_address_if_one_is_gone() -> None:
    async with ScriptedTeacher().running() as url, teacher(closed_address(), url) as math:
        found = await math.scores([sequence(3, 4)])
    assert found[0].logprobs.tolist() == [logprob(4, 1)]


async def test_a_request_goes_to_another_address_if_one_hangs() -> None:
    hanging, well = ScriptedTeacher(script=lambda _: "hang"), ScriptedTeacher()
    async with (
        hanging.running() as first,
        well.running() as second,
        teacher(first, second, request_timeout_s=1.0) as math,
    ):
        found = await math.scores([sequence(3, 4)])
    assert found[0].logprobs.tolist() == [logprob(4, 1)]
    assert hanging.requests


async def test_requests_spread_over_the_addresses_and_are_bounded() -> None:
    hold = asyncio.Event()
    scripted = [ScriptedTeacher(hold=hold) for _ in range(2)]
    async with scripted[0].running() as first, scripted[1].running() as second:
        async with teacher(first, second, requests_at_once=2) as math, asyncio.TaskGroup() as group:
            asked = [group.create_task(math.scores([sequence(3, number)])) for number in range(9)]
            async with asyncio.timeout(60):
                while sum(one.under_way for one in scripted) < 4:  # noqa: ASYNC110  the server has no event for it
                    await asyncio.sleep(0.005)
            hold.set()
        assert [(await one)[0].logprobs.tolist() for one in asked] == [[logprob(number, 1)] for number in range(9)]
    assert [one.most_under_way for one in scripted] == [2, 2]


@pytest.mark.parametrize(
    ("status", "remedy"), [(422, "learner's vocabulary"), (404, "of this release"), (413, "its log says more")]
)
async def test_a_refusal_names_teacher_counterpart_and_remedy_at_once(status: int, remedy: str) -> None:
    scripted = ScriptedTeacher(script=lambda _: status)
    async with scripted.running() as url, teacher(url) as math:
        with pytest.raises(TeacherFailed, match=rf"teacher math refuses: {url}\S+ refused with {status}.*{remedy}"):
            await math.scores([sequence(3, 4)])
    assert len(scripted.requests) == 1


@pytest.mark.parametrize(("kind", "refused"), [("too_long", [5, 3, 3]), ("engine_refused", [None, None, None])])
async def test_a_refusal_of_one_text_is_told_apart_and_the_shortest_that_was_too_long_is_known(
    kind: str, refused: list[int | None]
) -> None:
    async with ScriptedTeacher(script=lambda _: kind).running() as url, teacher(url) as math:
        lengths = []
        for texts in ((sequence(3, 4, 5, 6, 7), sequence(3, 4)), (sequence(3, 4, 5),), (sequence(3, 4, 5, 6),)):
            with pytest.raises(TextRefused, match=rf"teacher math refuses its text: {url}\S+ refused with 422 {kind}"):
                await math.scores(texts)
            lengths.append(math.refused_tokens)
    assert lengths == refused


async def test_a_token_is_shown_and_a_wrong_one_is_named() -> None:
    async with ScriptedTeacher(token=TOKEN).running() as url:
        async with teacher(url, token=TOKEN) as math:
            assert len(await math.scores([sequence(3, 4)])) == 1
        async with teacher(url, token="another") as math:
            with pytest.raises(TeacherFailed, match=r"401 .*set the teacher's token"):
                await math.scores([sequence(3, 4)])


@pytest.mark.parametrize("trouble", [500, "short"])
async def test_a_request_that_fails_again_and_again_is_given_up(trouble: int | str) -> None:
    scripted = ScriptedTeacher(script=lambda _: trouble)
    async with scripted.running() as url, teacher(url) as math:
        with pytest.raises(TeacherFailed, match=rf"teacher math at {url}: 8 attempts at one request failed, last: "):
            await math.scores([sequence(3, 4, 5)])
    assert len(scripted.requests) == 8


async def test_another_tokenizer_is_refused_with_both_fingerprints() -> None:
    async with ScriptedTeacher(tokenizer="0ther").running() as url:
        async with teacher(url) as math:
            with pytest.raises(TeacherFailed, match="fingerprint 0ther, the learner's has 70ken1"):
                await math.scores([sequence(3, 4)])
        async with teacher(url, same_tokenizer=False) as math:
            assert len(await math.scores([sequence(3, 4)])) == 1


async def test_a_teacher_that_changes_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    scripted = ScriptedTeacher(version="1.3")
    async with scripted.running() as url, teacher(url) as math:
        await math.scores([sequence(3, 4)])
        assert "changes" not in caplog.text
        scripted.version = "1.4"
        await math.scores([sequence(3, 4)])
        assert "it answered with version 1.3 at first, now with 1.4" in caplog.text
        scripted.version = "1.5"
        await math.scores([sequence(3, 4)])
        assert "1.5" not in caplog.text


async def test_a_teacher_that_is_away_is_waited_for() -> None:
    address = closed_address()
    async with teacher(address) as math, asyncio.TaskGroup() as group:
        asked = group.create_task(math.scores([sequence(3, 4)]))
        async with asyncio.timeout(60):
            while "cannot connect" not in math.last_problem:  # noqa: ASYNC110  it tells nobody of a failure
                await asyncio.sleep(0.005)
        async with ScriptedTeacher().running(port=int(address.rpartition(":")[2])):
            found = await asked
    assert found[0].logprobs.tolist() == [logprob(4, 1)]


def test_pauses_double_up_to_a_limit_however_long_a_teacher_is_away() -> None:
    backoff = Backoff(first_s=0.5, max_s=5)
    assert [backoff.nominal_s(rounds) for rounds in (1, 2, 3, 4, 5, 100_001)] == [0.5, 1, 2, 4, 5, 5]


def test_names_of_errors_are_those_of_the_config() -> None:
    urls: Sequence[str] = ("http://a:1", "http://b:2")
    config = TeacherConfig(name="math", urls=tuple(urls))
    made = RemoteTeacher(config, client=HttpClient(), tokenizer=TOKENIZER, metrics=TeacherMetrics(Metrics("learner")))
    assert str(made) == "teacher math at http://a:1 or http://b:2"
