import asyncio
import importlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from pydantic import JsonValue

from protocol.rewards import ScoreItem, ScoreRequest, ScoreResponse, ScoreResult
from reward_service.config import RewardServiceConfig
from reward_service.requests.scoring import Scorer
from reward_service.verifier.config import WorkerConfig
from reward_service.verifier.lanes import pool_settings
from reward_service.verifier.submission import Score, UserError
from reward_service.verifier.worker_pool import VerifierJob, WorkerPool
from services.http.refusals import RequestRefused
from tests.reward_service.serving import item_of, serving

OpenScorer = Callable[..., Awaitable[Scorer]]


def item(verifier: str, completion: str = "", /, **arguments: JsonValue) -> ScoreItem:
    return ScoreItem(id=f"{verifier}/{completion}", verifier=verifier, completion=completion, arguments=arguments)


async def score(scorer: Scorer, *items: ScoreItem, deadline_s: float = 30.0) -> tuple[ScoreResult, ...]:
    response = await scorer.score(ScoreRequest(items=items, deadline_s=deadline_s))
    assert [result.id for result in response.results] == [item.id for item in items]
    return response.results


@asynccontextmanager
async def held_back(scorer: Scorer) -> AsyncIterator[asyncio.Task[tuple[ScoreResult, ...]]]:
    """Keeps an item in scoring while the body runs, and gives it up at its end."""
    running = asyncio.create_task(score(scorer, item("hang_async")))
    await asyncio.sleep(0)
    assert scorer.pending == 1
    yield running
    running.cancel()
    await asyncio.wait([running])


def kind_of(result: ScoreResult) -> str:
    assert result.reward is None, "a failed score has no reward, not one of 0"
    assert result.error is not None
    return result.error.kind


def message_of(result: ScoreResult) -> str:
    assert result.error is not None
    return result.error.message


async def test_each_item_is_scored_by_its_own_verifier_in_order(open_scorer: OpenScorer) -> None:
    scorer = await open_scorer()
    results = await score(
        scorer,
        item("contains", "the sea is blue", word="sea"),
        item("exact_match", " 42\n", answer="42"),
        item("contains_async", "the sea", word="sky"),
        item("exact_match", "41", answer="42"),
    )
    assert [result.reward for result in results] == [1.0, 1.0, 0.0, 0.0]
    assert results[2].components == {"length": 7.0}
    assert [result.verifier_version for result in results] == ["7", "1", "7", "1"]


async def test_one_failing_item_never_disturbs_the_others(open_scorer: OpenScorer) -> None:
    scorer = await open_scorer()
    results = await score(
        scorer,
        item("no_such_verifier"),
        item("exact_match", "42", answer="42"),
        item("exact_match", "42", anwser="42"),
        item("raise_error"),
        item("reject"),
        item("not_a_number"),
        item("returns_text"),
        item("contains", "sea", word=3),
        item("contains", "sea", word="sea"),
    )
    assert [results[1].reward, results[8].reward] == [1.0, 1.0]
    kinds = [kind_of(result) for index, result in enumerate(results) if index not in (1, 8)]
    assert kinds == ["user", "user", "data", "data", "data", "user", "user"]
    assert "exact_match" in message_of(results[0])
    assert "anwser" in message_of(results[2])
    assert "ZeroDivisionError" in message_of(results[3])
    assert "the table of expected outputs is empty" in message_of(results[4])


async def test_a_reward_on_which_nobody_is_to_train_is_counted_and_said_as_the_error_that_it_is(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sample = {"name": "large", "function": "sample_verifiers:far_too_large"}
    async with serving(RewardServiceConfig.model_validate({"verifiers": (sample,)})) as service:
        kind, message = await service.error(item_of("large", "a fox"))
        assert service.counted("errors", verifier="large", kind="data") == 1.0
    assert (kind, message) == ("data", "verifier large gave a reward of 2000000.0, expected one of at most 1e+06")
    assert [message in record.getMessage() for record in caplog.records] == [True]


@pytest.mark.parametrize(("name", "said"), [("cancels", "CancelledError"), ("exits", "SystemExit: I quit")])
async def test_a_verifier_that_would_end_more_than_itself_is_at_fault(
    open_scorer: OpenScorer, name: str, said: str
) -> None:
    scorer = await open_scorer()
    items = (item(f"{name}_async"), item(f"{name}_sync"), item("exact_match", "1", answer="1"))
    results = await score(scorer, *items)
    assert [kind_of(result) for result in results[:2]] == ["data", "data"]
    assert all(f"the verifier let out {said} (" in message_of(result) for result in results[:2])
    assert results[2].reward == 1.0


async def test_async_functions_run_beside_the_services_event_loop(open_scorer: OpenScorer) -> None:
    scorer = await open_scorer()
    (result,) = await score(scorer, item("knows_its_thread"))
    assert result.reward == 0.0


@pytest.fixture
def let_go() -> Iterator[None]:
    """Verifiers that block do so until the test ends."""
    event = importlib.import_module("sample_verifiers").LET_GO
    event.clear()
    yield
    event.set()


@pytest.mark.usefixtures("let_go")
async def test_an_async_function_that_blocks_is_named_and_nobody_else_is_at_fault(
    open_scorer: OpenScorer, caplog: pytest.LogCaptureFixture
) -> None:
    scorer = await open_scorer(workers=WorkerConfig(count=1, compute_timeout_s=0.5))
    names = ("knows_its_thread", "contains_async", "blocks_async", "knows_its_thread", "hang_async")
    items = [item(name, "the sea", **({"word": "sea"} if name.startswith("contains") else {})) for name in names]
    at_once = await score(scorer, item("exact_match", "1", answer="1"), deadline_s=20.0)
    *judged, hanging = await score(scorer, *items, deadline_s=5.0)
    assert at_once[0].reward == 1.0
    assert [result.error for result in judged[:2]] == [None, None]
    assert judged[3].error is None
    assert kind_of(judged[2]) == "infrastructure"
    assert "it blocked its event loop (" in message_of(judged[2])
    assert "sample_verifiers.py, line" in message_of(judged[2])
    assert "in blocks_async)" in message_of(judged[2])
    assert message_of(hanging) == "deadline: the verifier took too long"
    assert any("in blocks_async" in record.getMessage() for record in caplog.records)


@pytest.mark.usefixtures("let_go")
async def test_the_service_answers_while_an_async_function_blocks(open_scorer: OpenScorer) -> None:
    scorer = await open_scorer(workers=WorkerConfig(count=1, compute_timeout_s=30.0))
    blocked = asyncio.create_task(score(scorer, item("blocks_async"), deadline_s=20.0))
    (other,) = await score(scorer, item("exact_match", "1", answer="1"))
    assert other.reward == 1.0
    assert not blocked.done()
    importlib.import_module("sample_verifiers").LET_GO.set()
    (result,) = await blocked
    assert result.reward == 1.0


@pytest.mark.usefixtures("let_go")
async def test_who_waits_behind_one_that_blocks_does_not_hear_that_he_was_slow(open_scorer: OpenScorer) -> None:
    scorer = await open_scorer(workers=WorkerConfig(count=1, compute_timeout_s=60.0))
    long = asyncio.create_task(score(scorer, item("blocks_async"), deadline_s=20.0))
    (waits,) = await score(scorer, item("knows_its_thread"), deadline_s=1.0)
    assert message_of(waits) == "deadline: others' code blocks its event loop"
    importlib.import_module("sample_verifiers").LET_GO.set()
    assert (await long)[0].reward == 1.0


async def test_what_cannot_be_sent_is_an_error_of_its_item_alone(open_scorer: OpenScorer) -> None:
    scorer = await open_scorer()
    response = await scorer.score(ScoreRequest(items=(item("half_a_character"), item("half_a_name"))))
    message, name = ScoreResponse.model_validate_json(response.model_dump_json()).results
    assert (kind_of(message), message_of(message)) == ("data", "? is not a character")
    assert (kind_of(name), name.attempts) == ("user", 1)


async def test_a_verifier_that_hangs_is_killed_and_the_next_item_is_scored(open_scorer: OpenScorer) -> None:
    scorer = await open_scorer(workers=WorkerConfig(count=1, compute_timeout_s=0.3))
    hanging, after, other = await score(
        scorer, item("hang_on_request", "hang"), item("hang_on_request", "go"), item("exact_match", "1", answer="1")
    )
    assert kind_of(hanging) == "infrastructure"
    assert "deadline" in message_of(hanging)
    assert [after.reward, other.reward] == [1.0, 1.0]


async def test_the_deadline_of_the_request_is_kept_by_every_kind_of_verifier(open_scorer: OpenScorer) -> None:
    scorer = await open_scorer(workers=WorkerConfig(count=1, compute_timeout_s=60.0))
    await score(scorer, item("hang_on_request", "warm the worker"))
    items = (item("hang_on_request", "hang"), item("hang_on_request", "waits behind"), item("hang_async"))
    results = await score(scorer, *items, deadline_s=0.3)
    assert [kind_of(result) for result in results] == ["infrastructure"] * 3
    assert all("deadline" in message_of(result) for result in results)
    assert max(result.latency_s for result in results) < 5.0


async def test_an_item_whose_deadline_passes_while_its_worker_starts_leaves_the_worker_to_the_next(
    open_scorer: OpenScorer,
) -> None:
    scorer = await open_scorer()
    (early,) = await score(scorer, item("process_id"), deadline_s=0.001)
    assert kind_of(early) == "infrastructure"
    first, second = await score(scorer, item("process_id"), item("process_id"))
    assert first.reward == second.reward


async def test_an_item_is_tried_again_when_its_worker_dies(open_scorer: OpenScorer, tmp_path: Path) -> None:
    scorer = await open_scorer()
    once, always = await score(scorer, item("die_once", file=str(tmp_path / "marker")), item("die"))
    assert (once.reward, once.attempts) == (1.0, 2)
    assert (kind_of(always), always.attempts) == ("infrastructure", 2)


async def test_a_cancelled_request_leaves_its_worker_fit_for_the_next(open_scorer: OpenScorer) -> None:
    scorer = await open_scorer(workers=WorkerConfig(count=1, compute_timeout_s=60.0))
    await score(scorer, item("hang_on_request", "warm the worker"))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await score(scorer, item("hang_on_request", "hang"))
    (after,) = await score(scorer, item("hang_on_request", "go"))
    assert (after.reward, after.attempts) == (1.0, 1)


async def test_a_verifier_that_prints_does_not_break_the_exchange(open_scorer: OpenScorer) -> None:
    scorer = await open_scorer()
    results = await score(scorer, item("chatty"), item("chatty"))
    assert [result.reward for result in results] == [0.5, 0.5]


async def test_a_verifier_without_memory_is_an_error_of_the_infrastructure(open_scorer: OpenScorer) -> None:
    scorer = await open_scorer()
    (result,) = await score(scorer, item("too_much_memory"))
    assert kind_of(result) == "infrastructure"


@pytest.mark.parametrize("trusted", [True, False])
async def test_only_the_workers_of_a_trusted_verifier_see_the_environment(
    monkeypatch: pytest.MonkeyPatch, trusted: bool
) -> None:
    monkeypatch.setenv("HEADWAY_TEST_SECRET", "token")
    settings = pool_settings(RewardServiceConfig(), trusted=trusted)
    async with WorkerPool(path="sample_verifiers:sees_variable", settings=settings, on_kill=lambda: None) as pool:
        job = VerifierJob(completion="", prompt="", arguments={})
        outcome = await pool.run(job=job, deadline=asyncio.get_running_loop().time() + 30)
    assert outcome.result == Score(reward=float(trusted))


async def test_a_sync_verifier_of_the_users_own_runs_in_a_worker_that_sees_the_environment(
    open_scorer: OpenScorer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADWAY_TEST_SECRET", "token")
    scorer = await open_scorer()
    process, variable = await score(scorer, item("process_id"), item("sees_variable"))
    assert process.reward not in (None, float(os.getpid()))
    assert variable.reward == 1.0


async def test_a_request_with_more_items_than_are_ever_taken_is_refused_for_good(open_scorer: OpenScorer) -> None:
    scorer = await open_scorer(max_pending_items=2)
    with pytest.raises(RequestRefused) as refused:
        await score(scorer, *[item("exact_match", "1", answer="1")] * 3)
    assert refused.value.status_code == 413
    accepted = await score(scorer, *[item("exact_match", "1", answer="1")] * 2)
    assert [result.reward for result in accepted] == [1.0, 1.0]


async def test_items_for_which_there_is_no_room_now_are_to_come_again(open_scorer: OpenScorer) -> None:
    scorer = await open_scorer(max_pending_items=2)
    async with held_back(scorer):
        with pytest.raises(RequestRefused) as refused:
            await score(scorer, *[item("exact_match", "1", answer="1")] * 2)
    assert (refused.value.status_code, refused.value.problem.kind) == (429, "busy")


async def test_requests_that_come_at_one_moment_wait_for_their_turn_and_those_without_room_are_sent_away(
    open_scorer: OpenScorer,
) -> None:
    scorer = await open_scorer(max_pending_items=2)
    right = item("exact_match", "1", answer="1")
    ended = await asyncio.gather(*[score(scorer, right) for _ in range(5)], return_exceptions=True)
    refused = [each for each in ended if isinstance(each, RequestRefused)]
    assert [each.status_code for each in refused] == [429, 429, 429]
    assert [each[0].reward for each in ended if isinstance(each, tuple)] == [1.0, 1.0]


async def test_an_item_may_have_a_shorter_deadline_than_its_request_and_no_longer_one(open_scorer: OpenScorer) -> None:
    scorer = await open_scorer()
    short = item("hang_async").model_copy(update={"deadline_s": 0.1})
    (early,) = await score(scorer, short, deadline_s=3000.0)
    assert kind_of(early) == "infrastructure"
    long = item("hang_async").model_copy(update={"deadline_s": 3000.0})
    (also_early,) = await score(scorer, long, deadline_s=0.1)
    assert kind_of(also_early) == "infrastructure"


async def test_items_that_wait_behind_others_of_their_request_end_at_their_deadlines_too(
    open_scorer: OpenScorer,
) -> None:
    scorer = await open_scorer()
    waiting = RewardServiceConfig().async_concurrency + 10
    results = await score(scorer, *[item("hang_async")] * waiting, deadline_s=0.2)
    assert {kind_of(result) for result in results} == {"infrastructure"}
    assert "other items of the request were before it" in message_of(results[-1])


async def test_a_large_request_that_is_cancelled_leaves_nothing_behind(open_scorer: OpenScorer) -> None:
    scorer = await open_scorer()
    running = asyncio.create_task(score(scorer, *[item("process_id")] * 300))
    await asyncio.sleep(0)
    running.cancel()
    await asyncio.wait([running])
    assert scorer.pending == 0
    assert await scorer.drain(timeout_s=1.0)


async def test_a_draining_service_finishes_what_runs_and_takes_nothing_new(open_scorer: OpenScorer) -> None:
    scorer = await open_scorer()
    async with held_back(scorer) as running:
        assert not await scorer.drain(timeout_s=0.01)
        with pytest.raises(RequestRefused) as refused:
            await score(scorer, item("exact_match", "1", answer="1"))
        assert (refused.value.status_code, refused.value.problem.kind) == (503, "draining")
        draining = asyncio.create_task(scorer.drain(timeout_s=60))
        assert not running.done()
    assert await draining


async def test_scores_say_which_instance_made_them(open_scorer: OpenScorer) -> None:
    scorer = await open_scorer()
    response = await scorer.score(ScoreRequest(items=(item("exact_match", "1", answer="1"),)))
    assert response.service_id == "rewards-0"


async def test_a_prewarmed_verifier_must_have_workers(open_scorer: OpenScorer) -> None:
    with pytest.raises(UserError, match="exact_match"):
        await open_scorer(workers=WorkerConfig(count=1, prewarm=("exact_match",)))


async def test_prewarmed_workers_start_with_the_scorer(open_scorer: OpenScorer) -> None:
    scorer = await open_scorer(workers=WorkerConfig(count=2, prewarm=("process_id",)))
    first, second = await score(scorer, item("process_id"), item("process_id"))
    assert first.reward is not None
    assert second.reward is not None
