"""Conversations that a second process goes on with, over real sockets; the first one ends in the middle of a step."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

import pytest

from env_service.checkpoints.records import LeaseRecords
from env_service.environments.imported import EnvironmentFault
from env_service.environments.imported import offered as offered_class
from env_service.environments.interface import (
    Action,
    ChatMessage,
    OfferedEnvironment,
    Opening,
    Round,
    Step,
    Task,
    TurnOf,
)
from env_service.environments.rules import Rules
from env_service.environments.task_configs import ClassTasks
from env_service.rollouts.completions import RolloutProgress
from protocol.generation import GeneratePart, GenerateRequest
from protocol.messages import FailedLease, FinishedLease, Lease
from protocol.trajectories import Trajectory
from services.http.metrics import Metrics
from services.run_lock import RunLock
from tests.env_service.bench import Bench, MakeBench
from tests.env_service.peers import eventually, lease
from tests.env_service.rollouts.test_branching import Spelling
from tests.env_service.rollouts.test_conversation import ConversationTasks, TrajectoryWords, counted

RULES = Rules(replayable=True)


class HangingSpelling(Spelling):
    """Never answers to `hang` in the first life of its process."""

    hangs: ClassVar[bool] = True
    heard: ClassVar[list[str]] = []

    async def step(self, action: Action) -> Step:  # type: ignore[override]
        self.heard.append(action.text)
        if action.text == "hang" and self.hangs:
            await asyncio.Event().wait()
        return super().step(action)


class ChangedSpelling(HangingSpelling):
    """Says in its second life something else, and cannot be asked `odd` again."""

    def reset(self, task: Task, seed: int) -> Opening:
        return super().reset(task, seed) if self.hangs else Opening((ChatMessage("user", self.opening),))

    opening: ClassVar[str] = "go"

    async def step(self, action: Action) -> Step:  # type: ignore[override]
        step = await super().step(action)
        if not self.hangs and action.text == "odd":
            raise ValueError("I am another one")
        if not self.hangs and action.text == "two":
            return Step((ChatMessage("user", "something else"),), reward=0.5, state="something else")
        return step


class SavedSpelling(HangingSpelling):
    """Is saved and restored; its steps depend on how often it was made, too."""

    saves: ClassVar[int] = 0
    fails: ClassVar[bool] = False

    def save(self) -> bytes:
        if self.fails:
            raise ValueError("there is no room for me")
        type(self).saves += 1
        return " ".join(self.words).encode()

    async def restore(self, saved: bytes) -> None:
        self.words = [f"{word}*" for word in saved.decode().split()]


class AskedWords(TrajectoryWords):
    """Notes the turns that it was asked for."""

    def __init__(self, model: Path, *said: str) -> None:
        super().__init__(model, *said)
        self.asked: list[str] = []
        self.names: list[str] = []

    def __call__(self, request: GenerateRequest) -> Sequence[GeneratePart]:
        self.names.append(request.request_id)
        self.asked.append(request.request_id.rpartition("/")[2])
        return super().__call__(request)


@dataclass
class TwoLives:
    """Two processes, one after the other, with the same records."""

    chat_bench: MakeBench
    model: Path
    folder: Path
    said: tuple[str, ...]
    rules: Rules = RULES
    start: type[HangingSpelling] = HangingSpelling
    group_size: int = 1
    made: list[Bench] = field(default_factory=list)

    @property
    def lease(self) -> Lease:
        return lease(environment="counting", group_size=self.group_size)

    async def first(self, *, until: int = 1) -> AskedWords:
        """It dies when this many conversations hang in a step."""
        self.start.hangs, self.start.heard = True, []
        words = AskedWords(self.model, *self.said)
        async with records_in(self.folder) as records:
            made = await self._bench(words, records)
            rollout = asyncio.create_task(made.rollout.run(self.lease, RolloutProgress()))
            await eventually(lambda: self.start.heard.count("hang") >= until and self.is_asked_all(words))
            rollout.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await rollout
        return words

    def is_asked_all(self, words: AskedWords) -> bool:
        """True once each conversation is where it hangs or ends."""
        turns = sum(min(len(line), (*line, "hang").index("hang") + 1) for line in map(str.split, self.said))
        return len(self.start.heard) == turns

    async def second(self, *, rules: Rules | None = None) -> tuple[FinishedLease | FailedLease, AskedWords]:
        """It goes on."""
        self.start.hangs, self.start.heard = False, []
        self.rules = rules or self.rules
        words = AskedWords(self.model, *self.said)
        async with records_in(self.folder) as records:
            (past,) = records.past().values()
            assert past.first.lease == self.lease
            made = await self._bench(words, records)
            progress = RolloutProgress(oldest=past.oldest_version, elapsed_s=past.elapsed_s)
            async with asyncio.timeout(20):
                outcome = await made.rollout.run(past.first.lease, progress)
        return outcome, words

    async def uninterrupted(self) -> Sequence[Trajectory]:
        """A process that does not die."""
        self.start.hangs = False
        async with records_in(self.folder) as records:
            made = await self._bench(AskedWords(self.model, *self.said), records)
            return told(await made.run(self.lease))

    async def _bench(self, words: AskedWords, records: LeaseRecords) -> Bench:
        environment = OfferedEnvironment(
            name="counting",
            tasks=ConversationTasks(),
            start=self.start,
            rules=self.rules,
            metrics={"words": "max"},
            saves=hasattr(self.start, "save"),
            players=getattr(self.start, "players", ()),
        )
        self.made.append(await self.chat_bench(words, extra=[environment], records=records))
        return self.made[-1]


@asynccontextmanager
async def records_in(folder: Path, *, max_bytes: int = 1 << 20) -> AsyncIterator[LeaseRecords]:
    with await RunLock.held(folder) as lock:
        records = LeaseRecords(folder, max_bytes=max_bytes, metrics=Metrics("env-service"), lock=lock)
        try:
            yield records
        finally:
            records.close()


@pytest.fixture
def lives(chat_bench: MakeBench, chat_model: Path, tmp_path: Path) -> TwoLives:
    return TwoLives(chat_bench, chat_model, tmp_path / "records", ("one two hang three stop",))


def told(outcome: FinishedLease | FailedLease) -> tuple[Trajectory, ...]:
    assert isinstance(outcome, FinishedLease), outcome
    return outcome.group.trajectories


def rows_of(trajectory: Trajectory) -> dict[str, object]:
    arrays = {name: getattr(trajectory, name).tolist() for name in ("token_ids", "loss_mask", "behavior_logprobs")}
    turns = [(turn.start, turn.end, turn.reward, turn.state, turn.generator_ids) for turn in trajectory.turns]
    spans = [(span.version, span.start, span.end) for span in trajectory.version_spans]
    return {**arrays, "turns": turns, "spans": spans, "text": trajectory.completion_text}


async def test_a_conversation_goes_on_at_the_turn_at_which_its_process_died(lives: TwoLives) -> None:
    before = await lives.first()
    outcome, after = await lives.second()
    (trajectory,) = told(outcome)

    assert before.asked == ["0", "0.1", "0.2"]
    assert after.asked == ["0.3", "0.4"]
    assert lives.start.heard == ["one", "two", "hang", "three", "stop"]
    assert [turn.reward for turn in trajectory.turns] == [0.5, 0.5, 0.5, 0.5, 5.0]
    assert [span.version for span in trajectory.version_spans] == ["1.3", "1.4", "1.5", "1.6", "1.7"]
    assert trajectory.reward.components == {"words": 5.0, "turns": 5.0, "invalid_actions": 0.0}

    (whole,) = await replace(lives, folder=lives.folder.with_name("other")).uninterrupted()
    assert rows_of(trajectory) == rows_of(whole)


async def test_times_of_turns_and_of_the_rollout_count_from_its_first_beginning(lives: TwoLives) -> None:
    await lives.first()
    outcome, _ = await lives.second()
    (trajectory,) = told(outcome)

    times = [(turn.asked_s, turn.ended_s) for turn in trajectory.turns]
    assert all(asked is not None and ended is not None and asked <= ended for asked, ended in times)
    assert times == sorted(times)
    assert isinstance(outcome, FinishedLease)
    assert outcome.group.rollout_s >= (trajectory.turns[-1].ended_s or 0.0)


async def test_of_a_group_each_conversation_goes_on_from_its_own_place_and_a_finished_one_stays(
    lives: TwoLives,
) -> None:
    lives = replace(lives, said=("one stop", "two bad hang stop", "hang three stop"), group_size=3)
    await lives.first(until=2)
    outcome, after = await lives.second()
    members = told(outcome)

    assert sorted(after.asked) == ["1.3", "2.1", "2.2"]
    assert [len(member.turns) for member in members] == [2, 4, 3]
    assert [member.reward.reward for member in members] == [2.5, 5.5, 4.0]
    assert members[1].reward.components["invalid_actions"] == 1.0


async def test_a_group_that_branches_goes_on_in_all_its_branches(lives: TwoLives) -> None:
    rules = Rules(replayable=True, branch_after=(1,))
    lives = replace(lives, said=("one two hang stop", "one three stop"), rules=rules, group_size=2)
    words = await first_of_branches(lives)
    outcome, after = await lives.second()
    members = told(outcome)

    assert sorted(words) == ["0", "0.1", "0.2", "1.1", "1.2"]
    assert after.asked == ["0.3"]
    assert [len(member.turns) for member in members] == [4, 3]
    assert members[0].turns[0] == members[1].turns[0]


async def first_of_branches(lives: TwoLives) -> list[str]:
    """Both begin with the same word, which is sampled once."""
    lives.is_asked_all = lambda words: len(lives.start.heard) == 5  # type: ignore[method-assign]
    return (await lives.first()).asked


async def test_an_answer_that_differs_ends_the_conversation_as_a_failure_of_infrastructure(lives: TwoLives) -> None:
    lives = replace(lives, start=ChangedSpelling, said=("one hang stop", "one two hang stop"), group_size=2)
    await lives.first(until=2)
    outcome, after = await lives.second()
    kept, diverged = told(outcome)

    assert kept.reward.reward == 3.5 + 0.5
    assert diverged.reward.reward is None
    assert diverged.reward.error_kind == "infrastructure"
    assert "answers a recorded action otherwise" in (diverged.reward.error or "")
    assert after.asked == ["0.2"]
    assert counted(lives.made[1], "environment_faults_total", environment="counting", kind="diverged") == 1


async def test_an_environment_that_raises_where_it_had_answered_is_no_fault_of_the_task(lives: TwoLives) -> None:
    lives = replace(lives, start=ChangedSpelling, said=("odd hang stop",))
    await lives.first()
    outcome, _ = await lives.second()

    assert isinstance(outcome, FailedLease)
    assert not outcome.data_fault
    assert "I am another one" in outcome.reason


async def test_an_opening_of_other_tokens_ends_all_of_the_lease(
    lives: TwoLives, monkeypatch: pytest.MonkeyPatch
) -> None:
    lives = replace(lives, start=ChangedSpelling)
    await lives.first()
    monkeypatch.setattr(ChangedSpelling, "opening", "start")
    outcome, after = await lives.second()

    assert isinstance(outcome, FailedLease)
    assert not outcome.data_fault
    assert "its words make other tokens" in outcome.reason
    assert after.asked == []


async def test_with_other_rules_the_lease_is_rolled_out_anew(lives: TwoLives) -> None:
    await lives.first()
    outcome, after = await lives.second(rules=Rules(replayable=True, max_turns=31))

    assert len(told(outcome)[0].turns) == 5
    assert after.asked == ["0", "0.1", "0.2", "0.3", "0.4"]


async def test_a_process_that_goes_on_asks_under_a_name_of_its_own(lives: TwoLives) -> None:
    before = await lives.first()
    _, after = await lives.second()
    assert {name.rpartition("/")[0] for name in after.names}.isdisjoint(
        {name.rpartition("/")[0] for name in before.names}
    )


async def test_what_is_not_replayable_or_has_one_turn_leaves_no_record(lives: TwoLives) -> None:
    for rules in (Rules(), Rules(replayable=True, max_turns=1)):
        one = replace(lives, rules=rules, said=("one hang",) if rules.max_turns > 1 else ("hang",))
        await one.first()
        async with records_in(lives.folder) as records:
            assert records.keys() == ()


async def test_an_environment_that_saves_is_restored_and_hears_no_action_again(lives: TwoLives) -> None:
    lives = replace(lives, start=SavedSpelling, rules=Rules())
    await lives.first()
    outcome, after = await lives.second()
    (trajectory,) = told(outcome)

    assert lives.start.heard == ["hang", "three", "stop"]
    assert after.asked == ["0.3", "0.4"]
    assert [turn.state for turn in trajectory.turns] == ["", "one", "one two", "one* two* hang", "one* two* hang three"]
    assert [turn.reward for turn in trajectory.turns] == [0.5, 0.5, 0.5, 0.5, 5.0]
    assert trajectory.reward.components == {"words": 5.0, "turns": 5.0, "invalid_actions": 0.0}


async def test_turns_behind_the_last_save_are_made_again_and_have_to_be_answered_as_they_were(lives: TwoLives) -> None:
    lives = replace(lives, start=SavedSpelling, rules=Rules(save_every=2), said=("one two three hang stop",))
    await lives.first()
    outcome, _ = await lives.second()
    assert lives.start.heard == ["three"]
    assert isinstance(outcome, FailedLease)
    assert "answers a recorded action otherwise" in outcome.reason


async def test_an_answer_that_the_policy_never_heard_may_be_another_one(lives: TwoLives) -> None:
    """It came after the last save, and the process died before another turn was sampled."""
    lives = replace(lives, start=SavedSpelling, rules=Rules(save_every=3), said=("one two hang stop",))
    await lives.first()
    for path in lives.folder.glob("*.turns"):
        *rows, last = path.read_bytes().splitlines(keepends=True)
        assert b'"row":"turn"' in last
        path.write_bytes(b"".join(rows))
    outcome, after = await lives.second()
    assert after.asked == ["0.2", "0.3"]
    assert [turn.state for turn in told(outcome)[0].turns] == ["", "one", "one two", "one two hang"]


async def test_a_state_behind_an_answer_that_is_damaged_is_not_gone_on_with(lives: TwoLives) -> None:
    """The environment that has just been reset would answer the turn in the place of the one that is restored."""
    lives = replace(lives, start=SavedSpelling, rules=Rules(), said=("one two hang stop",))
    await lives.first()
    for path in lives.folder.glob("*.turns"):
        *rows, answer, last = path.read_bytes().splitlines(keepends=True)
        assert b'"row":"answer"' in answer
        assert b'"row":"turn"' in last
        path.write_bytes(b"".join((*rows, answer.replace(b"answer", b"damage"), last)))
    outcome, _ = await lives.second()
    assert lives.start.heard == []
    assert isinstance(outcome, FailedLease)
    assert "which is damaged" in outcome.reason


async def test_where_an_environment_cannot_be_saved_its_lease_goes_on_without_a_record(
    lives: TwoLives, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SavedSpelling, "fails", True)
    lives = replace(lives, start=SavedSpelling, rules=Rules())
    (trajectory,) = await lives.uninterrupted()
    assert len(trajectory.turns) == 5
    async with records_in(lives.folder) as records:
        assert records.past() == {}


class LoneTalker:
    async def run(self, task: Task, client: object) -> float:
        return 0.0


def test_an_agent_that_calls_itself_replayable_is_refused_by_name() -> None:
    entry = ClassTasks(name="one", source=f"{__name__}:LoneTalker", rules=RULES)
    with pytest.raises(EnvironmentFault, match=r"environment one .*rules\.replayable is true, and it is an agent"):
        offered_class(entry)


class SpellingDuel:
    """Two who spell in turn; `hang` is not answered in the first life, `stop` ends it. `odd`: it changes its mind."""

    players = ("first", "second")
    hangs: ClassVar[bool] = True
    heard: ClassVar[list[str]] = []

    def __init__(self) -> None:
        self.words: list[str] = []

    def reset(self, task: Task, seed: int) -> TurnOf:
        return TurnOf("first", (ChatMessage("user", "go"),))

    async def step(self, action: Action) -> Round:
        self.heard.append(action.text)
        if action.text == "hang" and self.hangs:
            await asyncio.Event().wait()
        self.words.append(action.text)
        if action.text == "stop":
            return Round(stop="stopped", rewards={"first": float(len(self.words)), "second": -1.0})
        said = "something" if action.text == "odd" and not self.hangs else " ".join(self.words)
        player = self.players[len(self.words) % 2]
        return Round(TurnOf(player, (ChatMessage("user", said),)), rewards={self.players[len(self.words) % 2 - 1]: 0.5})


@dataclass
class TwoLivesOfGames(TwoLives):
    """The same of games of two players, both of whom are the policy."""

    def is_asked_all(self, words: AskedWords) -> bool:
        return True


async def test_a_game_goes_on_at_the_turn_of_the_player_whose_it_was(lives: TwoLives) -> None:
    games = TwoLivesOfGames(lives.chat_bench, lives.model, lives.folder, ("one three stop", "two hang"))
    games.start = SpellingDuel  # type: ignore[assignment]
    before = await games.first()
    outcome, after = await games.second()
    first, second = told(outcome)

    assert before.asked == ["0", "1.0", "0.1", "1.1"]
    assert after.asked == ["0.2"]
    assert SpellingDuel.heard == ["one", "two", "three", "hang", "stop"]
    assert [len(first.turns), len(second.turns)] == [3, 2]
    assert [first.player, second.player] == ["first", "second"]
    assert [first.reward.reward, second.reward.reward] == [6.0, 0.0]


async def test_a_game_that_answers_otherwise_is_a_failure_of_infrastructure(lives: TwoLives) -> None:
    games = TwoLivesOfGames(lives.chat_bench, lives.model, lives.folder, ("odd three stop", "two hang"))
    games.start = SpellingDuel  # type: ignore[assignment]
    await games.first()
    outcome, _ = await games.second()
    assert isinstance(outcome, FailedLease)
    assert not outcome.data_fault
    assert "answers a recorded action otherwise" in outcome.reason
