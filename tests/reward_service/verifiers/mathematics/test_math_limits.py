"""Answers out of all proportion: judged at once where their text shows it, an error where only a deadline ends them."""

import asyncio
import gc
import sys
import weakref
from collections.abc import Callable, Iterator

import pytest

from protocol.rewards import ScoreError
from reward_service.config import RewardServiceConfig
from reward_service.verifier.config import WorkerConfig
from reward_service.verifier.lanes import pool_settings
from reward_service.verifier.submission import DataError, Outcome, Score, Submission
from reward_service.verifier.worker_pool import VerifierJob, WorkerPool
from reward_service.verifiers.arguments import MathArguments
from reward_service.verifiers.mathematics.math_answer import TooManyCalls, at_most_calls, math_answer

# One call into C that takes hours: no limit of ours sees it, as the exponent is a product.
BURNS = r"\boxed{\sum_{k=1}^{1} 7^{(9999 \cdot 9999 \cdot 99)}}"

BEYOND = [
    "9^{9^{9^{9}}}",
    "9^9^9^9",
    "((10^{10})^{10})^{10^{10}}",
    "10^{-10^{12}}",
    "123456!",
    "((9!)!)!",
    r"\binom{10^{9}}{5}",
    "1.0000001^{10^{15}}",
    "e^{e^{e^{e^{9}}}}",
    r"\sin(10^{1000000})",
    "2^{10^{6}} + x",
    "(" * 200 + "5" + ")" * 200,
    "{" * 500 + "5" + "}" * 500,
    r"\sqrt{" * 200 + "5" + "}" * 200,
    r"\frac{1}{" * 200 + "5" + "}" * 200,
    r"\frac12" * 250,
    r"\frac" * 700,
    r"\ln" * 700,
    "-" * 700 + "5",
    "5" + "!" * 100,
    "2^" * 300 + "2",
    "+".join(["x"] * 380),
    ",".join(map(str, range(300))),
    "7" * 3000,
    r"\sum_{k=1}^{9999}\sum_{j=1}^{9999} \sin(kj)",
    r"\int_0^1 x^{100000000} \, dx",
]


def judged(answer: str, completion: str) -> Score:
    return math_answer(Submission(completion=completion), MathArguments(answer=answer))


@pytest.mark.parametrize("content", BEYOND)
def test_an_answer_beyond_the_limits_earns_nothing_and_says_so(content: str) -> None:
    score = judged("5", rf"\boxed{{{content}}}")
    assert (score.reward, score.components["over_limits"]) == (0.0, 1.0)


@pytest.mark.parametrize("content", ["9^{9^{9^{9}}}", "123456!", "7" * 3000])
def test_a_right_answer_beyond_the_limits_is_an_error_of_the_data(content: str) -> None:
    with pytest.raises(DataError, match="beyond the limits"):
        judged(content, r"\boxed{5}")


@pytest.mark.parametrize("content", ["9^{9^{9^{9}}}", "123456!", r"2^{10^{6}} - 1"])
def test_a_right_answer_beyond_the_limits_can_be_repeated(content: str) -> None:
    assert judged(content, rf"\boxed{{{content}}}").reward == 1.0


def test_code_is_stopped_after_so_many_calls() -> None:
    def forever() -> None:
        while True:
            _nothing()

    with pytest.raises(TooManyCalls), at_most_calls(1000):
        forever()
    with at_most_calls(1000):
        _nothing()


def _nothing() -> None:
    return None


def _one() -> int:
    return 1


class _Finalised:
    def __del__(self) -> None:
        _nothing()


def _collected() -> None:
    gc.collect()


def _finalised() -> None:
    _Finalised()


def _forgotten() -> None:
    held = _Finalised()
    reference = weakref.finalize(held, _nothing)
    del held
    assert not reference.alive


def _unreferenced() -> None:
    held = _Finalised()
    reference = weakref.ref(held, lambda _: _nothing())
    del held
    assert reference() is None


def _closed() -> None:
    def numbers() -> Iterator[int]:
        try:
            yield 1
        finally:
            _nothing()

    next(numbers())


@pytest.mark.parametrize("dropping", [_collected, _finalised, _forgotten, _unreferenced, _closed])
@pytest.mark.parametrize("before", range(8))
def test_code_is_stopped_also_where_an_exception_would_be_dropped(dropping: Callable[[], None], before: int) -> None:
    """The limit is reached at each of the first calls, one of which Python makes itself."""
    gc.callbacks.append(_called_back)
    try:
        with pytest.raises(TooManyCalls):
            _limited(dropping, before=before)
    finally:
        gc.callbacks.remove(_called_back)


def _limited(dropping: Callable[[], None], *, before: int) -> None:
    with at_most_calls(before):
        dropping()
        for _ in range(10_000):
            _nothing()


def test_another_exception_that_is_dropped_is_told_of_as_ever() -> None:
    told: list[object] = []

    def hear(args: "sys.UnraisableHookArgs") -> None:
        _nothing()
        told.append(args.exc_value)

    class Broken:
        def __del__(self) -> None:
            raise ValueError("of its own")

    def breaking() -> None:
        Broken()

    before, sys.unraisablehook = sys.unraisablehook, hear
    try:
        for limit in range(6):
            with pytest.raises(TooManyCalls):
                _limited(breaking, before=limit)
        assert sys.unraisablehook is hear
    finally:
        sys.unraisablehook = before
    assert {str(error) for error in told} == {"of its own"}


def test_code_that_is_all_in_a_generator_is_stopped_too() -> None:
    with pytest.raises(TooManyCalls), at_most_calls(1000):
        sum(_one() for _ in iter(int, 1))


def _called_back(phase: str, info: object) -> None:
    _nothing()


def job(answer: str, completion: str) -> VerifierJob:
    return VerifierJob(completion=completion, prompt="", arguments={"answer": answer})


async def test_an_expression_that_burns_delays_no_neighbour_and_ends_as_an_error() -> None:
    """The neighbours are answered while it burns, by the worker that is left; it ends when its worker is killed."""
    config = RewardServiceConfig(workers=WorkerConfig(count=2, compute_timeout_s=3600.0, start_timeout_s=240.0))
    killed: list[None] = []
    pool = WorkerPool(
        path="reward_service.verifiers.mathematics.math_answer:math_answer",
        settings=pool_settings(config, trusted=False),
        on_kill=lambda: killed.append(None),
    )
    async with pool:
        now = asyncio.get_running_loop().time()
        first = await pool.run(job=job("5", r"\boxed{5}"), deadline=now + 240)
        assert first.result == Score(reward=1.0, components={"parsed": 1.0, "over_limits": 0.0})
        burning, neighbours = await _beside(pool)
        assert [_reward(outcome) for outcome in neighbours] == [1.0, 0.0] * 10
        assert not burning.done()
        burning.cancel()
        await asyncio.wait([burning])
        assert killed == [None]
        # The pool is whole again, and what burns until its own deadline is an error and not a 0.
        after, late = await asyncio.gather(
            pool.run(job=job("7", r"\boxed{7}"), deadline=asyncio.get_running_loop().time() + 240),
            pool.run(job=job("5", BURNS), deadline=asyncio.get_running_loop().time() + 10),
        )
    assert _reward(after) == 1.0
    assert isinstance(late.result, ScoreError)
    assert late.result.kind == "infrastructure"


async def _beside(pool: WorkerPool) -> tuple[asyncio.Task[Outcome], list[Outcome]]:
    deadline = asyncio.get_running_loop().time() + 240
    burning = asyncio.create_task(pool.run(job=job("5", BURNS), deadline=deadline))
    await asyncio.sleep(0)  # it takes its worker first
    jobs = [job("5", rf"\boxed{{{answer}}}") for answer in (5, 6)] * 10
    return burning, [await pool.run(job=one, deadline=deadline) for one in jobs]


def _reward(outcome: Outcome) -> float:
    assert isinstance(outcome.result, Score), outcome.result
    return outcome.result.reward
