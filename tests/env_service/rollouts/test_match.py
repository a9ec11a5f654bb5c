"""Games of several players, over real sockets, against scripted generators."""

import asyncio
import shutil
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, ClassVar

import pytest

from env_service.app import opponents_of
from env_service.builtin.duels import NimDuel, NimDuelOptions
from env_service.config import EnvServiceConfig
from env_service.environments import catalog
from env_service.environments.imported import EnvironmentFault
from env_service.environments.interface import (
    Action,
    ChatMessage,
    OfferedEnvironment,
    Round,
    Task,
    TurnOf,
    Verification,
    text_of,
)
from env_service.environments.rules import Rules
from env_service.environments.task_configs import ClassTasks, OpponentConfig
from env_service.environments.tokenization import Tokenization
from env_service.rollouts.completions import Completion, RolloutProgress
from env_service.rollouts.match import Opponent
from env_service.rollouts.outcomes import RolloutMetrics
from protocol.generation import GeneratePart, GenerateRequest, Sampling
from protocol.messages import FailedLease, FinishedLease
from protocol.trajectories import Purpose, Trajectory
from services.http.metrics import Metrics
from tests.env_service.bench import MakeBench
from tests.env_service.chat_models import FOLDER, model_with
from tests.env_service.peers import ScriptedCompletions, lease, part, served


class MatchTasks:
    """Any number of tasks."""

    train_tasks = 10
    evaluation_tasks = 10

    def task(self, purpose: Purpose, index: int) -> Task:
        return Task(seed=index)


class Countdown:
    """From `left` on, players a, b and c take one each in turn. Who takes the last one wins."""

    players: ClassVar[tuple[str, ...]] = ("a", "b", "c")
    left = 5

    def reset(self, task: Task, seed: int) -> TurnOf:
        self.at, self.mover = self.left, 0
        return TurnOf("a", (ChatMessage("user", f"you are a, {self.at} left"),), state=str(self.at))

    def step(self, action: Action) -> Round:
        acted = self.players[self.mover]
        if action.text == "boom":
            raise ValueError("a bug of mine")
        if action.text == "odd":
            return Round(TurnOf("nobody", (ChatMessage("user", "?"),)))
        if action.text == "bad":
            return Round(TurnOf(acted, (ChatMessage("user", "again"),)), invalid=True)
        self.at -= 1
        self.mover = (self.mover + 1) % len(self.players)
        now = self.players[self.mover]
        if self.at == 0:
            judge = {acted: Verification("exact_match", {"answer": "judged"})} if action.text == "judged" else {}
            rewards = {name: 1.0 if name == acted else -0.5 for name in self.players}
            return Round(stop="taken", rewards=rewards, verifications=judge, metrics={acted: {"won": 1.0}})
        told = f"{acted} took one, {self.at} left"
        text = told if self.left - self.at >= len(self.players) else f"you are {now}; {told}"
        return Round(TurnOf(now, (ChatMessage("user", text),), state=str(self.at)), rewards={acted: 0.125})


def offered(rules: Rules | None = None, *, left: int = 5) -> OfferedEnvironment:
    start = type("CountdownFrom", (Countdown,), {"left": left})
    return OfferedEnvironment(
        name="countdown", tasks=MatchTasks(), start=start, rules=rules or Rules(), players=Countdown.players
    )


class PlayerLines:
    """Lines of the players, by the index of the conversation (member + members x place of the player) and turn."""

    def __init__(self, model: Path, said: Callable[[int, int], str], *, members: int) -> None:
        self._tokenization = Tokenization(model)
        self._end = self._tokenization.special_tokens["<|im_end|>"]
        self._said = said
        self._members = members
        self.prompts: dict[tuple[int, int], tuple[int, ...]] = {}

    def tokens(self, word: str) -> list[int]:
        return [*self._tokenization.encode_after("", word), self._end]

    def __call__(self, request: GenerateRequest) -> Sequence[GeneratePart]:
        name = request.request_id.rpartition("/")[2]
        if "." not in name:
            for index in range(request.n):
                self.prompts[index, 0] = request.prompt_token_ids
            return [part(index, self.tokens(self._said(index, 0))) for index in range(request.n)]
        index, turn = map(int, name.split("."))
        self.prompts[index, turn] = request.prompt_token_ids
        return [part(0, self.tokens(self._said(index, turn)), version=f"1.{3 + index // self._members}")]


async def played(
    chat_bench: MakeBench,
    model: Path,
    said: Callable[[int, int], str] = lambda index, turn: f"move {index}.{turn}",
    *,
    rules: Rules | None = None,
    left: int = 5,
    members: int = 2,
) -> tuple[PlayerLines, tuple[Trajectory, ...]]:
    lines = PlayerLines(model, said, members=members)
    made = await chat_bench(lines, extra=[offered(rules, left=left)])
    group = (await made.finished(lease(environment="countdown", group_size=members))).group
    return lines, group.trajectories


async def test_each_player_is_a_trajectory_of_its_own_with_its_own_reward(
    chat_bench: MakeBench, chat_model: Path
) -> None:
    _, trajectories = await played(chat_bench, chat_model)

    assert [one.player for one in trajectories] == ["a", "b", "c"] * 2
    assert [one.reward.reward for one in trajectories[:3]] == [0.25 - 0.5, 0.125 + 1.0, 0.125 - 0.5]
    assert [[turn.reward for turn in one.turns] for one in trajectories[:3]] == [
        [0.125, -0.375],
        [0.125, 1.0],
        [-0.375],
    ]
    assert [turn.state for turn in trajectories[1].turns] == ["4", "1"]
    assert [one.reward.verifier for one in trajectories[:3]] == ["countdown/a", "countdown/b", "countdown/c"]
    assert {one.stop_reason for one in trajectories} == {"taken"}
    assert trajectories[1].reward.components == {"won": 1.0, "turns": 2.0, "invalid_actions": 0.0}


async def test_what_is_trained_of_each_player_is_what_it_was_shown_and_sampled(
    chat_bench: MakeBench, chat_model: Path
) -> None:
    lines, trajectories = await played(chat_bench, chat_model)

    for place, trajectory in enumerate(trajectories):
        member, player = divmod(place, 3)
        for number, turn in enumerate(trajectory.turns):
            index = member + 2 * player
            assert tuple(trajectory.token_ids[: turn.completion_start]) == lines.prompts[index, number]
            sampled = trajectory.token_ids[turn.completion_start : turn.end].tolist()
            assert sampled == lines.tokens(f"move {index}.{number}")
        sampled_at = [range(turn.completion_start, turn.end) for turn in trajectory.turns]
        assert trajectory.loss_mask.nonzero()[0].tolist() == [at for span in sampled_at for at in span]
    (text,) = Tokenization(chat_model).decode([trajectories[1].token_ids.tolist()], special=True)
    assert text == (
        "<|im_start|>user\nyou are b; a took one, 4 left<|im_end|>\n<|im_start|>assistant\nmove 2.0<|im_end|>\n"
        "<|im_start|>user\na took one, 1 left<|im_end|>\n<|im_start|>assistant\nmove 2.1<|im_end|>"
    )


async def test_the_oldest_version_is_that_of_any_player_whom_the_policy_plays(
    chat_bench: MakeBench, chat_model: Path
) -> None:
    lines = PlayerLines(chat_model, lambda index, turn: "x", members=1)
    made = await chat_bench(lines, extra=[offered()])
    progress = RolloutProgress()
    outcome = await made.rollout.run(lease(environment="countdown", group_size=1), progress)

    assert isinstance(outcome, FinishedLease)
    assert [one.oldest_version for one in outcome.group.trajectories] == [3, 4, 5]
    assert outcome.group.oldest_version == 3
    assert progress.oldest_version() == "1.3"


async def test_a_player_without_a_turn_has_no_trajectory(chat_bench: MakeBench, chat_model: Path) -> None:
    _, trajectories = await played(chat_bench, chat_model, left=2)
    assert [one.player for one in trajectories] == ["a", "b"] * 2


@pytest.mark.parametrize(
    ("word", "said"), [("boom", "a bug of mine"), ("odd", "names nobody, expected one of a, b, c")]
)
async def test_a_game_that_is_spoilt_is_so_for_its_players_and_for_no_other_game(
    chat_bench: MakeBench, chat_model: Path, word: str, said: str
) -> None:
    _, trajectories = await played(chat_bench, chat_model, lambda index, turn: word if (index, turn) == (2, 0) else "x")

    assert [one.player for one in trajectories] == ["a", "b", "a", "b", "c"]
    assert [one.reward.reward is None for one in trajectories] == [True, True, False, False, False]
    assert all(said in (one.reward.error or "") for one in trajectories[:2])


async def test_a_limit_of_one_player_cuts_the_game_off_for_all(chat_bench: MakeBench, chat_model: Path) -> None:
    _, trajectories = await played(chat_bench, chat_model, rules=Rules(max_turns=1), members=1)
    assert [(one.stop_reason, len(one.turns), one.truncated) for one in trajectories] == [("turn_limit", 1, True)] * 3

    _, trajectories = await played(chat_bench, chat_model, rules=Rules(trajectory_tokens=40), members=1, left=9)
    assert {one.stop_reason for one in trajectories} == {"token_budget"}


async def test_an_opening_of_a_later_player_beyond_the_budget_cuts_the_game_off(
    chat_bench: MakeBench, chat_model: Path
) -> None:
    lines, _ = await played(chat_bench, chat_model, members=1)
    first, second = len(lines.prompts[0, 0]), len(lines.prompts[1, 0])
    assert first + 2 < second

    lines, trajectories = await played(
        chat_bench, chat_model, lambda *_: "x", rules=Rules(trajectory_tokens=second), members=1
    )

    assert [(one.player, one.stop_reason) for one in trajectories] == [("a", "token_budget")]
    assert set(lines.prompts) == {(0, 0)}


async def test_who_does_what_is_not_allowed_pays_for_it_alone(chat_bench: MakeBench, chat_model: Path) -> None:
    rules = Rules(invalid_penalty=0.25, max_invalid=2)
    _, trajectories = await played(
        chat_bench, chat_model, lambda index, turn: "bad" if (index, turn) == (1, 0) else "x", rules=rules, members=1
    )
    assert [one.reward.components["invalid_actions"] for one in trajectories] == [0.0, 1.0, 0.0]
    assert trajectories[1].turns[0].reward == -0.25


async def test_a_verifier_may_judge_a_player_at_the_end(chat_bench: MakeBench, chat_model: Path) -> None:
    lines = PlayerLines(chat_model, lambda index, turn: "judged", members=1)
    made = await chat_bench(lines, extra=[offered()])
    group = (await made.finished(lease(environment="countdown", group_size=1))).group

    assert [one.reward.verifier for one in group.trajectories] == ["countdown/a", "exact_match", "countdown/c"]
    assert group.trajectories[1].reward.reward == 0.125 + 1.0 + 1.0
    (request,) = made.rewards[0].requests
    assert request.items[0].prompt == "you are b; a took one, 4 left"


# A frozen opponent


def opponent(model: Path, *plays: str, heard: list[GenerateRequest]) -> Opponent:
    tokenization = Tokenization(model)
    end = next(number for text, number in tokenization.special_tokens.items() if text in tokenization.end_tokens)

    async def sample(request: GenerateRequest, completions: Sequence[Completion]) -> None:
        heard.append(request)
        for completion in completions:
            tokens = [*tokenization.encode_after("", "frozen"), end]
            completion.extend(part(0, tokens, version="1.0"), generator_id="other")

    return Opponent(plays=plays, tokenization=tokenization, sample=sample, temperature=0.0)


async def test_a_frozen_player_is_asked_elsewhere_and_never_trained(
    chat_bench: MakeBench, chat_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other_model = model_with("plain_headers", tmp_path_factory.mktemp("other"))
    heard: list[GenerateRequest] = []
    lines = PlayerLines(chat_model, lambda index, turn: f"move {index}.{turn}", members=2)
    frozen = opponent(other_model, "b", heard=heard)
    made = await chat_bench(lines, extra=[offered()], opponents={"countdown": frozen})
    progress = RolloutProgress()
    asked = lease(environment="countdown").model_copy(update={"routed_experts": True})
    outcome = await made.rollout.run(asked, progress)

    assert isinstance(outcome, FinishedLease)
    trajectories = outcome.group.trajectories
    assert [one.player for one in trajectories] == ["a", "c"] * 2
    assert {index for index, _ in lines.prompts} == {0, 1, 4, 5}, "b's turns were asked of the policy"
    assert len(heard) == 4
    assert {(request.purpose, request.sampling.temperature) for request in heard} == {("evaluate", 0.0)}
    assert not any(request.routed_experts for request in heard), "nobody learns from what it samples"
    texts = frozen.tokenization.decode([list(request.prompt_token_ids) for request in heard], special=True)
    assert all("you are b" in text and "<|im_start|>" not in text for text in texts), "in the opponent's own template"
    # The opponent is older than any of the policy's versions, and that is of no account.
    assert outcome.group.oldest_version == 3
    assert progress.oldest_version() == "1.3"
    spoken = Tokenization(chat_model).decode([one.token_ids.tolist() for one in trajectories], special=True)
    assert not any("frozen" in text for text in spoken)


async def test_an_opponent_that_names_no_player_is_each_in_turn_by_the_task(
    chat_bench: MakeBench, chat_model: Path
) -> None:
    trained = []
    for index in range(4):
        frozen = opponent(chat_model, heard=[])
        lines = PlayerLines(chat_model, lambda index, turn: "x", members=1)
        made = await chat_bench(lines, extra=[offered()], opponents={"countdown": frozen})
        granted = lease(environment="countdown", group_size=1, task_index=index)
        first, again = await made.finished(granted), await made.finished(granted)
        trained.append([one.player for one in first.group.trajectories])
        assert trained[-1] == [one.player for one in again.group.trajectories]
    assert trained == [["b", "c"], ["a", "c"], ["a", "b"], ["b", "c"]]


class Resigning(Countdown):
    """A game that is lost at once by "resign", and that "break" makes fail."""

    left = 4
    closed: ClassVar[list[Any]] = []

    def step(self, action: Action) -> Round:
        match action.text:
            case "resign":
                return Round(stop="resigned", rewards=dict.fromkeys(self.players, 1.0))
            case "break":
                raise ValueError("a bug of mine")
        return super().step(action)

    def close(self) -> None:
        self.closed.append(self)


class Moody:
    """An opponent that says one word after the other, then "frozen"; the requests that it got are in `heard`."""

    def __init__(self, model: Path, words: Sequence[str], *, temperature: float = 1.0) -> None:
        self._tokenization = Tokenization(model)
        self._left = list(words)
        self.heard: list[GenerateRequest] = []
        self.opponent = Opponent(
            plays=("a",), tokenization=self._tokenization, sample=self._sample, temperature=temperature
        )

    async def _sample(self, request: GenerateRequest, completions: Sequence[Completion]) -> None:
        self.heard.append(request)
        (end, *_) = (self._tokenization.special_tokens[text] for text in self._tokenization.end_tokens)
        for completion in completions:
            word = self._left.pop(0) if self._left else "frozen"
            tokens = [*self._tokenization.encode_after("", word), end]
            completion.extend(part(0, tokens, version="1.0"), generator_id="other")


async def against(
    chat_bench: MakeBench, model: Path, moody: Moody, *, rules: Rules | None = None, **granted: Any
) -> tuple[FinishedLease | FailedLease, dict[str, float]]:
    """A lease of games that `moody` begins, and what was counted."""
    start: Any = Resigning
    game = OfferedEnvironment(
        name="countdown", tasks=MatchTasks(), start=start, rules=rules or Rules(), players=Countdown.players
    )
    lines = PlayerLines(model, lambda index, turn: "x", members=granted.get("group_size", 2))
    made = await chat_bench(lines, extra=[game], opponents={"countdown": moody.opponent})
    outcome = await made.run(lease(environment="countdown", **granted))
    samples = [sample for family in made.metrics.registry.collect() for sample in family.samples if sample.value]
    counted = {
        f"{what}/{sample.labels['reason']}": sample.value
        for sample in samples
        for what in ("games_drawn_again", "turnless_rollouts")
        if sample.name == f"headway_env_service_{what}_total"
    }
    return outcome, counted


@pytest.mark.parametrize("purpose", ["train", "evaluate"])
async def test_a_game_that_the_opponent_ends_at_once_is_drawn_again(
    chat_bench: MakeBench, chat_model: Path, purpose: Purpose
) -> None:
    Resigning.closed.clear()
    moody = Moody(chat_model, ["resign", "frozen", "resign"])
    outcome, counted = await against(chat_bench, chat_model, moody, purpose=purpose)

    assert isinstance(outcome, FinishedLease)
    assert [one.player for one in outcome.group.trajectories] == ["b", "c"] * 2, "a whole group"
    assert counted == {"games_drawn_again/ended": 2.0}
    names = [request.request_id for request in moody.heard]
    assert len(set(names)) == len(names), "no generator is asked twice under one name"
    assert {part for name in names for part in name.split("/") if "again" in part} == {"again1", "again2"}
    seeds = [request.sampling.seed for request in moody.heard]
    assert len(set(seeds)) == (len(seeds) if purpose == "evaluate" else 1), "another draw has another seed"
    assert len(set(map(id, Resigning.closed))) == len(Resigning.closed) == 4, "each instance is closed, once"


async def test_a_game_that_ends_at_once_at_every_draw_leaves_its_group_and_is_counted(
    chat_bench: MakeBench, chat_model: Path
) -> None:
    moody = Moody(chat_model, ["frozen", *["resign"] * 9])
    outcome, counted = await against(chat_bench, chat_model, moody)

    assert isinstance(outcome, FinishedLease)
    assert [one.player for one in outcome.group.trajectories] == ["b", "c"]
    assert counted == {"games_drawn_again/ended": 7.0, "turnless_rollouts/ended": 1.0}


async def test_redundant_games_take_the_place_of_those_without_a_turn(chat_bench: MakeBench, chat_model: Path) -> None:
    moody = Moody(chat_model, ["resign"], temperature=0.0)
    outcome, counted = await against(chat_bench, chat_model, moody, rules=Rules(redundant=1))
    assert isinstance(outcome, FinishedLease)
    assert [one.player for one in outcome.group.trajectories] == ["b", "c"] * 2
    assert counted == {}


@pytest.mark.parametrize(
    ("words", "temperature", "draws", "reason"),
    [
        (["resign"] * 99, 1.0, 8, "every game before it (resigned) at each of 8 draws"),
        (["resign"] * 2, 0.0, 1, "every game before it (resigned) at its only draw: opponent.temperature is 0"),
    ],
)
async def test_a_task_in_which_the_policy_never_moves_is_at_fault(
    chat_bench: MakeBench, chat_model: Path, words: list[str], temperature: float, draws: int, reason: str
) -> None:
    moody = Moody(chat_model, words, temperature=temperature)
    outcome, counted = await against(chat_bench, chat_model, moody)

    assert isinstance(outcome, FailedLease)
    assert (outcome.data_fault, outcome.reason) == (True, f"the policy had no turn: its opponent ended {reason}")
    assert counted.get("games_drawn_again/ended", 0.0) == 2.0 * (draws - 1)
    assert counted["turnless_rollouts/ended"] == 2.0


async def test_a_game_that_breaks_before_the_policys_turn_is_no_opponents_doing(
    chat_bench: MakeBench, chat_model: Path
) -> None:
    moody = Moody(chat_model, ["break"] * 2)
    outcome, counted = await against(chat_bench, chat_model, moody)
    assert isinstance(outcome, FailedLease)
    assert outcome.data_fault
    assert "a bug of mine" in outcome.reason, "the user's own error is told"

    outcome, counted = await against(chat_bench, chat_model, Moody(chat_model, ["frozen", "break"]))
    assert isinstance(outcome, FinishedLease)
    assert [one.player for one in outcome.group.trajectories] == ["b", "c"]
    assert counted == {"turnless_rollouts/fault": 1.0}


async def test_a_limit_that_the_opponent_meets_before_the_policys_turn_is_its_end(
    chat_bench: MakeBench, chat_model: Path
) -> None:
    moody = Moody(chat_model, ["bad", "bad", "bad", "frozen"])
    outcome, counted = await against(
        chat_bench, chat_model, moody, rules=Rules(max_turns=3, max_invalid=2), group_size=1
    )
    assert isinstance(outcome, FinishedLease)
    assert counted == {"games_drawn_again/invalid_actions": 1.0}


async def test_a_game_in_which_only_the_opponent_had_time_may_go_otherwise(
    chat_bench: MakeBench, chat_model: Path
) -> None:
    async def never(request: GenerateRequest, completions: Sequence[Completion]) -> None:
        await asyncio.Event().wait()

    moody = Moody(chat_model, [])
    moody.opponent = Opponent(plays=("a",), tokenization=Tokenization(chat_model), sample=never)
    outcome, counted = await against(chat_bench, chat_model, moody, rules=Rules(conversation_timeout_s=0.05))
    assert isinstance(outcome, FailedLease)
    assert (outcome.data_fault, outcome.reason) == (False, "the policy had no turn within the time of a conversation")
    assert counted == {"turnless_rollouts/time_limit": 2.0}


@pytest.mark.parametrize(
    ("source", "plays", "said"),
    [
        ("nim_duel", ("third",), "opponent.plays is third; expected some, not all, of first, second"),
        ("nim_duel", ("first", "second"), "expected some, not all"),
        ("nim", (), "is not one of several players"),
    ],
)
def test_an_opponent_that_cannot_play_is_refused_at_the_start(source: str, plays: tuple[str, ...], said: str) -> None:
    entry = ClassTasks(source=source, name="game", opponent=OpponentConfig(urls=("http://127.0.0.1:1",), plays=plays))
    with pytest.raises(EnvironmentFault, match=said):
        catalog.build([entry])


# The games that come with us


def test_nim_is_won_by_who_takes_the_last_object() -> None:
    game = NimDuel(NimDuelOptions(heaps=2, most=3))
    turn = game.reset(Task(seed=3), 0)
    moves = 0
    while True:
        assert turn.player == ("first", "second")[moves % 2]
        heaps = turn.state
        heap = next(place for place, left in enumerate(heaps) if left != "0")
        given = game.step(Action(f"{'ab'[heap]}{heaps[heap]}"))
        moves += 1
        if given.next is None:
            break
        turn = given.next
    winner = ("first", "second")[(moves - 1) % 2]
    assert given.stop == f"{winner}_won"
    assert given.rewards[winner] == 1.0
    assert sum(given.rewards.values()) == 1.0


def test_an_illegal_move_loses_the_game_or_is_asked_again() -> None:
    game = NimDuel(NimDuelOptions())
    game.reset(Task(seed=3), 0)
    lost = game.step(Action("d9"))
    assert (lost.stop, lost.rewards, lost.invalid) == ("illegal", {"first": 0.0, "second": 1.0}, True)

    patient = NimDuel(NimDuelOptions(illegal="again"))
    opening = patient.reset(Task(seed=3), 0)
    again = patient.step(Action("what?"))
    assert again.next is not None
    assert (again.next.player, again.next.state, again.invalid) == ("first", opening.state, True)


def test_tic_tac_toe_ends_with_three_in_a_line_or_a_full_board() -> None:
    entry = ClassTasks(source="tic_tac_toe", name="game", rules=Rules(max_turns=9))
    environment = catalog.build([entry])["game"]
    assert environment.players == ("first", "second")
    start: Any = environment.start
    seed = next(seed for seed in range(1000) if start().reset(Task(seed=seed), 0).state == "012\n345\n678")
    for moves, stop in (("04182", "first_won"), ("012435768", "draw"), ("304182", "second_won"), ("00", "illegal")):
        game: Any = environment.start()
        game.reset(Task(seed=seed), 0)
        for move in moves:
            given = game.step(Action(move))
        assert given.stop == stop


@pytest.mark.parametrize(("game", "moves", "stop"), [
    ("TicTacToe-v0", "0 4 1 8 2", "player_0_won"),
    ("TicTacToe-v0", "0 0 0", "invalid_move"),
])  # fmt: skip
def test_a_game_of_textarena_is_played_by_two(game: str, moves: str, stop: str) -> None:
    pytest.importorskip("textarena")
    entry = ClassTasks(source="textarena_match", name="match", options={"id": game})
    environment = catalog.build([entry])["match"]
    assert environment.players == ("player_0", "player_1")
    match: Any = environment.start()
    turn: TurnOf = match.reset(Task(seed=7), 0)
    seen: dict[str, list[str]] = {name: [] for name in environment.players}
    for move in moves.split():
        seen[turn.player].append(text_of(turn.observation))
        given = match.step(Action(move))
        assert isinstance(given, Round)
        if given.next is not None:
            turn = given.next
    assert given.stop == stop
    assert sum(given.rewards.values()) == 0
    assert all("Tic" in told[0] for told in seen.values() if told), "each is told the rules"


async def test_the_opponent_of_an_entry_is_asked_at_its_own_address(chat_model: Path, tmp_path: Path) -> None:
    other_model = model_with("plain_headers", tmp_path)
    generator = ScriptedCompletions(lambda request: [part(0, [5, 6, 7], version="1.9")])
    async with served(generator.handle, "/v1/generate") as url, AsyncExitStack() as stack:
        opponent = {"urls": [url], "model": str(other_model), "plays": ["second"], "temperature": 0.5}
        entries = [{"source": "nim_duel", "name": "nim", "opponent": opponent}, {"source": "nim", "name": "alone"}]
        config = EnvServiceConfig.model_validate({"model": str(chat_model), "environments": entries})
        metrics = RolloutMetrics(Metrics("env-service"))
        found = await opponents_of(config, stack, tokenization=Tokenization(chat_model), metrics=metrics)

        assert list(found) == ["nim"]
        assert (found["nim"].plays, found["nim"].temperature) == (("second",), 0.5)
        assert found["nim"].tokenization.end_tokens == Tokenization(other_model).end_tokens
        completion = Completion(0)
        request = GenerateRequest(request_id="r", prompt_token_ids=(1, 2), sampling=Sampling(max_tokens=4))
        await found["nim"].sample(request, [completion])
        assert completion.token_ids == [5, 6, 7]
        assert [asked.prompt_token_ids for asked in generator.requests] == [(1, 2)]


def nim_against(**opponent: object) -> ClassTasks:
    return ClassTasks.model_validate(
        {"source": "nim_duel", "name": "nim", "opponent": {"urls": ["http://x"], **opponent}}
    )


def test_the_chat_template_of_the_run_is_the_policys_and_that_of_an_opponent_with_its_model(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "mine").mkdir()
    model, another = model_with("chatml", tmp_path / "mine"), model_with("plain_headers", tmp_path / "theirs")
    policy = Tokenization(model, chat_template=FOLDER / "words_as_headers.jinja")

    assert catalog.opponent_tokenization(nim_against(), policy) is policy
    assert catalog.opponent_tokenization(nim_against(model=str(model)), policy) is policy
    own = catalog.opponent_tokenization(nim_against(model=str(another)), policy)
    assert own.template.text == (FOLDER / "plain_headers.jinja").read_text()
    given = catalog.opponent_tokenization(nim_against(chat_template=FOLDER / "chatml.jinja"), policy)
    assert given.template.text == (FOLDER / "chatml.jinja").read_text()


@pytest.mark.parametrize(
    ("opponent", "said"),
    [
        ({"model": "nowhere"}, "environment nim: opponent.model: nowhere/tokenizer.json does not exist"),
        ({"chat_template": "mine.jinja"}, "environment nim: opponent.chat_template: mine.jinja is not a file"),
        ({"model": "mute"}, "environment nim: its opponent, mute: the model's chat template cannot carry role user"),
    ],
)
def test_an_opponent_that_cannot_play_is_named_at_the_start(
    opponent: dict[str, str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    shutil.copytree(model := model_with("chatml", tmp_path / "mine"), tmp_path / "mute")
    (tmp_path / "mute/tokenizer_config.json").write_text("{}")
    (tmp_path / "mute/chat_template.jinja").unlink(missing_ok=True)
    entry = nim_against(**opponent)

    with pytest.raises(EnvironmentFault, match=said):
        catalog.check_opponents([entry], catalog.build([entry]), Tokenization(model))
    _, (fault,) = catalog.made_of([entry], Tokenization(model))
    assert fault.startswith(said)
