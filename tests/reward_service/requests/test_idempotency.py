"""A request that is sent twice is answered once, and nothing is kept for ever."""

import asyncio

import pytest

from reward_service.requests.answering import Repetitions
from reward_service.verifier.config import IdempotencyConfig
from services.http.refusals import RequestRefused


class ExpiryClock:
    """A time that a test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def repetitions(
    config: IdempotencyConfig | None = None, *, clock: ExpiryClock | None = None, wait_s: float = 60.0
) -> Repetitions:
    return Repetitions(config=config or IdempotencyConfig(), wait_s=wait_s, clock=clock or ExpiryClock())


async def answered(
    known: Repetitions, key: str | None, answer: bytes, *, body: bytes = b"body", keep: bool = True
) -> bytes:
    """Answer to a caller whose own computation would give `answer`."""
    async with known.claimed(key=key, body=body) as claim:
        if claim.answer is None:
            claim.settle(answer, keep=keep)
        return claim.answer or answer


async def test_the_same_key_and_body_get_the_same_answer_until_it_is_forgotten() -> None:
    clock = ExpiryClock()
    known = repetitions(IdempotencyConfig(keep_s=10.0), clock=clock)
    assert await answered(known, "k", b"first") == b"first"
    clock.now = 9.0
    assert await answered(known, "k", b"second") == b"first"
    clock.now = 10.0
    assert await answered(known, "k", b"third") == b"third"


async def test_without_a_key_every_request_is_answered_anew() -> None:
    known = repetitions()
    assert [await answered(known, None, answer) for answer in (b"1", b"2")] == [b"1", b"2"]


async def test_the_same_key_with_another_body_is_refused_before_and_after_the_answer() -> None:
    known = repetitions()
    async with known.claimed(key="k", body=b"body") as claim:
        with pytest.raises(RequestRefused) as under_way:
            await answered(known, "k", b"", body=b"other")
        claim.settle(b"answer", keep=True)
    with pytest.raises(RequestRefused) as settled:
        await answered(known, "k", b"", body=b"other")
    for refused in (under_way.value, settled.value):
        assert (refused.status_code, refused.problem.kind) == (409, "key_reused")


async def test_a_repetition_joins_the_request_that_is_under_way() -> None:
    known = repetitions()
    async with asyncio.TaskGroup() as tasks, known.claimed(key="k", body=b"body") as claim:
        joined = [tasks.create_task(answered(known, "k", b"mine")) for _ in range(3)]
        await asyncio.sleep(0)
        claim.settle(b"theirs", keep=False)
    assert [each.result() for each in joined] == [b"theirs"] * 3
    assert await answered(known, "k", b"again") == b"again", "it was not to be kept"


async def test_when_the_first_request_is_given_up_one_that_waits_takes_its_place() -> None:
    known = repetitions()
    async with asyncio.TaskGroup() as tasks, known.claimed(key="k", body=b"body"):
        joined = [tasks.create_task(answered(known, "k", answer)) for answer in (b"1", b"2")]
        await asyncio.sleep(0)
    assert [each.result() for each in joined] == [b"1", b"1"]


async def test_the_wait_for_an_answer_under_way_is_bounded() -> None:
    known = repetitions(wait_s=0.01)
    async with known.claimed(key="k", body=b"body"):
        with pytest.raises(RequestRefused) as refused:
            await answered(known, "k", b"")
    assert (refused.value.status_code, refused.value.problem.kind) == (503, "under_way")


@pytest.mark.parametrize("config", [IdempotencyConfig(max_answers=2), IdempotencyConfig(memory_mib=1)])
async def test_the_oldest_answers_are_forgotten_when_there_are_too_many(config: IdempotencyConfig) -> None:
    known = repetitions(config)
    large = b"x" * (400 << 10)
    for key in ("a", "b", "c"):
        await answered(known, key, key.encode() + large)
    assert await answered(known, "c", b"new") == b"c" + large
    assert await answered(known, "b", b"new") == b"b" + large
    assert await answered(known, "a", b"new") == b"new"
