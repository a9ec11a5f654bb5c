"""Items of many requests through one reward model, whatever happens to its process: the right reward, or an error."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from protocol.rewards import ScoreItem, ScoreRequest, ScoreResult
from reward_service.config import RewardServiceConfig
from reward_service.included import build_registry
from reward_service.models.config import RewardModelConfig
from reward_service.models.folder import open_reward_model
from reward_service.models.reward_model import LaneEvents, RewardModelLane, open_lane
from reward_service.requests.scoring import Scorer
from reward_service.verifier.lanes import make_metrics
from reward_service.verifier.submission import Outcome, Score, UserError
from services.http.metrics import Metrics
from tests.reward_service.models.tiny_reward_model import (
    CHARACTERS,
    END,
    PLAIN,
    SPECIAL,
    alone,
    write_reward_model,
)

TEXTS = ("a", "no way", "is it so?")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_reward_model(tmp_path_factory.mktemp("model"), given=PLAIN)


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, float]:
    """The reward of each text after the prompt `hi`, by Hugging Face's own class."""

    def tokens(text: str) -> list[int]:
        return [len(SPECIAL) + CHARACTERS.index(character) for character in f"hi{text}"]

    return {text: alone(folder, [*tokens(text), END]) for text in TEXTS}


def item(text: str) -> ScoreItem:
    return ScoreItem(id=text, verifier="reward_model", completion=text, prompt="hi")


class Watched:
    """A lane, and what it reported. `on_batch` is called before each batch is sent."""

    def __init__(self) -> None:
        self.batches: list[int] = []
        self.killed = 0
        self.sent = asyncio.Event()
        self.on_batch: Callable[[], None] = lambda: None
        self.lane: RewardModelLane

    def events(self) -> LaneEvents:
        def killed() -> None:
            self.killed += 1

        def batch(items: int) -> None:
            self.batches.append(items)
            self.on_batch()
            self.sent.set()

        return LaneEvents(killed=killed, batch=batch)

    def signal(self, number: signal.Signals) -> None:
        process_id = self.lane.process.process_id
        assert process_id is not None
        os.kill(process_id, number)

    async def judge(self, text: str, *, within_s: float = 120.0) -> Outcome:
        outcome = self.lane.judge(item(text), deadline=asyncio.get_running_loop().time() + within_s)
        assert not isinstance(outcome, Outcome)
        return await outcome

    async def judge_together(self, *texts: str) -> list[Outcome]:
        """All of them are in the queue before the first batch is taken."""
        async with asyncio.TaskGroup() as tasks:
            judged = [tasks.create_task(self.judge(text)) for text in texts]
        return [each.result() for each in judged]


@asynccontextmanager
async def watched(folder: Path, **settings: float) -> AsyncIterator[Watched]:
    model = open_reward_model(RewardModelConfig.model_validate({"path": folder, **settings}))
    watch = Watched()
    async with open_lane(model=model, events=watch.events()) as lane:
        watch.lane = lane
        await lane.loaded()
        yield watch


def reward_of(outcome: Outcome) -> float:
    assert isinstance(outcome.result, Score), outcome
    return outcome.result.reward


def message_of(outcome: Outcome) -> str:
    assert not isinstance(outcome.result, Score), outcome
    assert outcome.result.kind == "infrastructure"
    return outcome.result.message


def close(value: float) -> object:
    return pytest.approx(value, abs=1e-5)


async def test_items_of_different_requests_are_scored_together_each_as_if_alone(
    folder: Path, expected: dict[str, float]
) -> None:
    async with watched(folder, wait_s=30.0, batch_size=3) as watch:
        outcomes = await watch.judge_together(*TEXTS)
        assert [reward_of(outcome) for outcome in outcomes] == [close(expected[text]) for text in TEXTS]
        assert [outcome.attempts for outcome in outcomes] == [1, 1, 1]
        assert watch.batches == [3]


async def test_while_a_batch_is_scored_the_next_one_gathers(folder: Path, expected: dict[str, float]) -> None:
    async with watched(folder, wait_s=0.0, batch_size=2) as watch, asyncio.TaskGroup() as tasks:
        watch.signal(signal.SIGSTOP)
        first = tasks.create_task(watch.judge("a"))
        await watch.sent.wait()
        others = [tasks.create_task(watch.judge(text)) for text in TEXTS]
        await asyncio.sleep(0)
        assert watch.lane.waiting == len(others)
        watch.signal(signal.SIGCONT)
        assert reward_of(await first) == close(expected["a"])
        assert [reward_of(await other) for other in others] == [close(expected[text]) for text in TEXTS]
        assert watch.batches == [1, 2, 1]


async def test_items_are_tried_again_one_by_one_when_the_process_dies_and_the_one_that_kills_it_takes_nobody_along(
    folder: Path, expected: dict[str, float]
) -> None:
    async with watched(folder, wait_s=30.0, batch_size=3) as watch:
        # The batch of three is killed, and then the first item alone.
        watch.on_batch = lambda: watch.signal(signal.SIGKILL) if len(watch.batches) <= 2 else None
        outcomes = await watch.judge_together(*TEXTS)
        assert message_of(outcomes[0]) == "the reward model's process died at each of 2 attempts"
        assert [reward_of(outcome) for outcome in outcomes[1:]] == [close(expected[text]) for text in TEXTS[1:]]
        assert [outcome.attempts for outcome in outcomes] == [2, 2, 2]
        assert (watch.batches, watch.killed) == ([3, 1, 1, 1], 2)


async def test_the_process_of_a_batch_that_takes_too_long_is_killed_and_replaced(folder: Path) -> None:
    async with watched(folder, wait_s=0.0, compute_timeout_s=0.2) as watch:
        former = watch.lane.process.process_id
        watch.signal(signal.SIGSTOP)
        assert message_of(await watch.judge("a")) == "deadline: the reward model took too long, and was killed"
        assert watch.killed == 1
        assert watch.lane.process.process_id not in (former, None)


async def test_an_item_whose_deadline_passes_in_a_batch_leaves_its_reward_to_nobody(
    folder: Path, expected: dict[str, float]
) -> None:
    async with watched(folder, wait_s=0.0) as watch:
        watch.signal(signal.SIGSTOP)
        assert message_of(await watch.judge("a", within_s=0.1)).startswith("deadline: ")
        watch.signal(signal.SIGCONT)
        for text in TEXTS[1:]:
            assert reward_of(await watch.judge(text)) == close(expected[text])
        assert watch.killed == 0


@asynccontextmanager
async def scorer_of(*models: RewardModelConfig) -> AsyncIterator[Scorer]:
    config = RewardServiceConfig(reward_models=models)
    registry = build_registry(config)
    metrics = make_metrics(Metrics("reward-service"))
    async with Scorer(registry=registry, config=config, metrics=metrics, service_id="rewards-0") as scorer:
        await scorer.loaded()
        yield scorer


async def test_a_service_scores_with_its_reward_models_and_says_which_gave_the_reward(
    folder: Path, expected: dict[str, float]
) -> None:
    model = RewardModelConfig(path=folder)
    long = item("b" * 100)
    exact = ScoreItem(id="x", verifier="exact_match", completion="7", arguments={"answer": "7"})
    async with scorer_of(model) as scorer:
        assert scorer.workers()[1] >= 1
        response = await scorer.score(ScoreRequest(items=(item("a"), long, exact)))
    first, too_long, other = response.results
    assert (first.reward, other.reward) == (close(expected["a"]), 1.0)
    assert first.verifier_version == f"2+{open_reward_model(model).fingerprint}"
    assert kind_and_message(too_long) == ("data", "the input has 103 tokens, and the reward model takes at most 64")


def kind_and_message(result: ScoreResult) -> tuple[str, str]:
    assert result.reward is None, "a failed score has no reward, not one of 0"
    assert result.error is not None
    return result.error.kind, result.error.message


async def test_a_model_that_cannot_be_loaded_ends_the_start_with_its_name(tmp_path: Path) -> None:
    broken = RewardModelConfig(name="helpful", path=write_reward_model(tmp_path, causal=True))
    with pytest.raises(UserError, match=r"reward model 'helpful' at .*lack score\.weight"):
        async with scorer_of(broken):
            pass


async def test_a_model_that_is_replaced_on_disk_never_scores_under_the_old_name(folder: Path, tmp_path: Path) -> None:
    model = open_reward_model(RewardModelConfig(path=folder))
    other = replace(model, config=RewardModelConfig(path=write_reward_model(tmp_path, seed=1, given=PLAIN)))
    watch = Watched()
    async with open_lane(model=other, events=watch.events()) as watch.lane:
        assert "have changed since the service was started" in message_of(await watch.judge("a"))
