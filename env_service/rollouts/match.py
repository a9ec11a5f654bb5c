"""A game of several players: a conversation for each of them, in turns.

    first's conversation   ─▶ completion ─▶ step ─┐              ┌─▶ completion ─▶ …
                                                  ▼              │
                                         whose turn is it? ──────┤
                                                                 │
    second's conversation  ◀─────────── what it is told ─────────┘

A player's conversation begins with its first turn. Those that the policy plays become trajectories; what a frozen
opponent says is known to the others only as far as the game tells them, and is in no trajectory.

A game that the opponent ends before the policy's first turn says nothing about the policy: it is drawn again, the same
game with other moves of the opponent. One that comes to nothing at every draw leaves its group, and is counted.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import cast

from env_service.environments.bridges import Bridges
from env_service.environments.interface import (
    Action,
    Environment,
    EnvironmentUnavailable,
    Round,
    SeveralPlayers,
    TurnOf,
)
from env_service.environments.tokenization import ChatTemplateError, Tokenization, characters_of
from env_service.rollouts.completions import Completion, SilentProgress
from env_service.rollouts.conversation import (
    Conversation,
    Fault,
    Nonsense,
    Speaker,
    check_fields,
    check_numbers,
    check_prompt,
    check_said,
    fault_of_step,
)
from env_service.rollouts.judging import failure_of_all
from env_service.rollouts.outcomes import DataFailure, InfrastructureFailure, RolloutFailure, why_nothing
from env_service.rollouts.replay import OTHER_STEP, ReplayMismatch, completion_of, text_of_round
from protocol.generation import GenerateRequest
from protocol.trajectories import CutOff

logger = logging.getLogger(__name__)

_SEEDS = 1 << 63
_DRAW_STRIDE = 0x9E6C63D0876A9A62 % _SEEDS | 1
"""Another one than that of turns: the seeds of a second draw are nobody else's."""


@dataclass(frozen=True, kw_only=True)
class Opponent:
    """A model that plays and is not trained. `plays` are its players' names; none: one, by the task's number.

    Its tokenizer is its own, and so are the ids that end its turns. `most_draws` is how often a game is drawn in which
    the policy has no turn.
    """

    plays: tuple[str, ...]
    tokenization: Tokenization
    sample: Callable[[GenerateRequest, Sequence[Completion]], Awaitable[None]]
    temperature: float = 1.0
    most_draws: int = 8
    bridges: Bridges = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "bridges", Bridges(self.tokenization))

    def played(self, players: Sequence[str], *, task_index: int) -> frozenset[str]:
        """The players that it is in a task."""
        return frozenset(self.plays or (players[task_index % len(players)],))

    @property
    def draws(self) -> int:
        """Most times that a game is drawn: one for a greedy opponent, which says the same at every draw."""
        return self.most_draws if self.temperature else 1

    def in_place_of(self, policy: Speaker) -> Speaker:
        """A speaker for a conversation of its own: nothing that it samples counts as the policy's."""
        sampling = policy.request.sampling.model_copy(update={"temperature": self.temperature, "stop_token_ids": ()})
        return replace(
            policy,
            language=replace(
                policy.language, tokenization=self.tokenization, bridges=self.bridges, stop_ids=frozenset()
            ),
            # For evaluation: it may be sampled greedily, and nobody replays its experts.
            request=policy.request.model_copy(
                update={"sampling": sampling, "purpose": "evaluate", "routed_experts": False}
            ),
            sample=self.sample,
            progress=SilentProgress(policy.progress),
        )


@dataclass(frozen=True, kw_only=True)
class Table:
    """Shared by all games of a lease: how they begin, and for each player who speaks for it.

    A speaker's language and request are those of the policy, or of its opponent; the opening in them is replaced.
    `deal` gives a game in the place of another one, reset alike; a game is drawn `draws` times at most.
    """

    first: TurnOf
    players: tuple[str, ...]
    frozen: frozenset[str]
    policy: Speaker
    opponent: Speaker | None
    games: int
    deal: Callable[[SeveralPlayers], Awaitable[SeveralPlayers]] | None = None
    draws: int = 1

    def speaker(self, turn: TurnOf, *, draw: int = 0) -> Speaker:
        """Of the player who is about to have its first turn, in the `draw`-th draw. Raises ChatTemplateError."""
        speaker = self.policy
        if turn.player in self.frozen and self.opponent is not None:
            speaker = replace(self.opponent, request=_drawn(self.opponent.request, draw))
        language = speaker.language
        if turn == self.first and speaker is self.policy:
            return speaker
        most = language.tokenization.context_tokens
        if language.tokenization.beginning_beyond(turn.observation, most) is not None:
            speaker.metrics.note_overflow(speaker.offered.name, characters_of(turn.observation))
            raise ChatTemplateError(f"it is longer than the model's context of {most} tokens")
        _, ids = language.tokenization.encode(turn.observation, tools=turn.tools, now=language.now)
        return replace(
            speaker,
            language=replace(language, opening=turn.opening, opening_ids=ids),
            request=speaker.request.model_copy(update={"prompt_token_ids": tuple(ids)}),
        )


def _drawn(request: GenerateRequest, draw: int) -> GenerateRequest:
    """The opponent's, in the `draw`-th draw of a game: under a name and with a seed that no former draw had."""
    if draw == 0:
        return request
    seed = request.sampling.seed
    sampling = request.sampling.model_copy(
        update={"seed": None if seed is None else (seed + draw * _DRAW_STRIDE) % _SEEDS}
    )
    return request.model_copy(update={"request_id": f"{request.request_id}/again{draw}", "sampling": sampling})


@dataclass
class Match:
    """The `index`-th game of its lease, in its `draw`-th draw; `sides` are the conversations by player, of those that
    had a turn.
    """

    index: int
    environment: SeveralPlayers
    table: Table
    sides: dict[str, Conversation] = field(default_factory=dict)
    draw: int = 0

    def __post_init__(self) -> None:
        self._rules = self.table.policy.language.rules
        self._opened = self._seat(self.table.first)

    @property
    def speaker(self) -> Speaker:
        """Of the first turn."""
        return self._opened.speaker

    @property
    def spoilt(self) -> bool:
        """True if its environment is at fault, or the policy had no turn: others of the lease are worth more."""
        return self.fault is not None or self.unplayed

    @property
    def fault(self) -> Fault | None:
        """The fault of its environment."""
        return next((side.fault for side in self.sides.values() if side.fault is not None), None)

    @property
    def unplayed(self) -> bool:
        """True if the policy had no turn in it."""
        return not any(side.transcript.turns for side in self.trained)

    @property
    def why(self) -> str:
        """Reason for its end, as it is counted where the policy had no turn."""
        stop = next((side.stop_reason for side in self.sides.values() if side.stop_reason), "")
        return why_nothing(spoilt=self.fault is not None, stop_reason=stop)

    @property
    def trained(self) -> Iterator[Conversation]:
        """The conversations of those that the policy plays."""
        return (side for player, side in self.sides.items() if player not in self.table.frozen)

    async def hold(self, first: Completion | None = None) -> None:
        """Play until it is over, again if the opponent has ended it before the policy's first turn. `first` is the
        first turn, if somebody samples it already.

        Raises RolloutFailure when a turn cannot be sampled, and what a reset raises.
        """
        await self._hold(first)
        while self._is_worth_another_draw and await self._draw_again():
            await self._hold(None)

    @property
    def _is_worth_another_draw(self) -> bool:
        """False for what its environment or the clock has ended: it would hardly end otherwise."""
        return self.unplayed and self.draw + 1 < self.table.draws and self.why not in ("fault", "time_limit")

    async def _draw_again(self) -> bool:
        """True if there is another game in this one's place."""
        speaker = self.speaker
        if self.table.deal is None:
            return False
        try:
            self.environment = await self.table.deal(self.environment)
        except EnvironmentUnavailable as error:
            self._opened.blame(fault_of_step(error, speaker.offered.name))
            return False
        speaker.metrics.drawn_again.labels(environment=speaker.offered.name, reason=self.why).inc()
        self.draw += 1
        self.sides = {}
        self._opened = self._seat(self.table.first)
        return True

    async def _hold(self, first: Completion | None) -> None:
        limit = asyncio.timeout(None)
        try:
            async with limit:
                await self._play(first, limit)
        except TimeoutError:
            if not limit.expired():
                raise
            self._cut_off("time_limit")

    async def _play(self, first: Completion | None, limit: asyncio.Timeout) -> None:
        """Goes first through the turns that a former process has recorded, for which no time is counted."""
        side: Conversation | None = self._opened
        while side is not None and (past := side.past_turn()) is not None:
            completion = completion_of(past.turn, began=side.speaker.progress.began)
            side = await self._answered(side, side.speech.hear(completion), past.step)
        if side is not None and side.fault is not None:
            self._blame_all(side)
            return
        if self._rules.conversation_timeout_s is not None:
            left_s = max(0.0, self._rules.conversation_timeout_s - self.speaker.progress.elapsed_s)
            limit.reschedule(asyncio.get_running_loop().time() + left_s)
        while side is not None:
            sampled = await side.sampled(first)
            first = None
            if sampled is None:
                self._cut_off("token_budget")
                return
            side.record_turn(sampled)
            side = await self._answered(side, side.speech.hear(sampled))

    async def _answered(self, side: Conversation, action: Action, recorded: str | None = None) -> Conversation | None:
        """The next speaker's conversation; None if the game is over. An answer that was recorded has to come again."""

        def check(answer: object) -> Round:
            checked = self._checked(answer)
            if recorded is not None and text_of_round(checked) != recorded:
                raise ReplayMismatch(OTHER_STEP)
            return checked

        given = await side.answer(partial(self.environment.step, action), check)
        if given is None:
            side.excuse(recorded)
            self._blame_all(side)
            return None
        if recorded is None:
            await side.record_answer(partial(text_of_round, given))
        side.judge_action(action, invalid=given.invalid)
        for player, reward in given.rewards.items():
            self._earn(player, reward)
        for player, metrics in given.metrics.items():
            self._earn(player, 0.0, metrics)
        if given.next is None:
            self._end(given)
            return None
        return self._next(side, given.next)

    def _earn(self, player: str, reward: float, metrics: Mapping[str, float] | None = None) -> None:
        if player in self.sides:
            self.sides[player].earn(reward, metrics=metrics or {})

    def _next(self, acted: Conversation, turn: TurnOf) -> Conversation | None:
        if acted.has_erred_enough:
            self._cut_off("invalid_actions")
            return None
        known = self.sides.get(turn.player)
        if known is None:
            return self._begun(acted, turn)
        if known.speech.transcript.turns >= self._rules.max_turns:
            self._cut_off("turn_limit")
            return None
        known.say(turn.observation, state=turn.state)
        if known.fault is not None:
            self._blame_all(known)
        elif known.over:
            self._cut_off("token_budget")
        return None if known.over else known

    def _begun(self, acted: Conversation, turn: TurnOf) -> Conversation | None:
        try:
            side = self._seat(turn)
        except ChatTemplateError as error:
            acted.blame(Fault("nonsense", f"what the environment says cannot be shown to the model: {error}"))
            self._blame_all(acted)
            return None
        if side.speech.room is not None and side.speech.room < 1:
            self._cut_off("token_budget")
            return None
        return side

    def _seat(self, turn: TurnOf) -> Conversation:
        place = self.table.players.index(turn.player)
        side = Conversation(
            self.index + self.table.games * place,
            cast("Environment", self.environment),
            self.table.speaker(turn, draw=self.draw),
            player=turn.player,
        )
        self.sides[turn.player] = side
        return side

    def _checked(self, given: object) -> Round:
        """Raises Nonsense."""
        if not isinstance(given, Round):
            raise Nonsense(f"the environment's step returned {type(given).__name__}, expected a Round")
        check_fields(given, "stop", "verifications", "rewards", "metrics")
        if given.next is not None:
            check_fields(given.next, "player", "state", "tools")
        named = {*given.rewards, *given.verifications, *given.metrics, *((given.next.player,) if given.next else ())}
        if not named <= set(self.table.players):
            strange = ", ".join(sorted(named - set(self.table.players)))
            raise Nonsense(f"the environment's step names {strange}, expected one of {', '.join(self.table.players)}")
        check_numbers(("reward", reward) for reward in given.rewards.values())
        check_numbers(item for metrics in given.metrics.values() for item in metrics.items())
        if given.next is not None:
            known = self.sides.get(given.next.player)
            said = given.next.observation
            plain = isinstance(said, str) if known is None else known.speaker.language.is_plain
            check_said(said, plain=plain, field="TurnOf.observation")
        return given

    def _end(self, given: Round) -> None:
        for player, side in self.sides.items():
            side.stop_reason, side.verification, side.over = given.stop, given.verifications.get(player), True

    def _cut_off(self, reason: CutOff) -> None:
        for side in self.sides.values():
            side.cut_off(reason)

    def _blame_all(self, at_fault: Conversation) -> None:
        """A game that its environment has spoilt is so for all players."""
        fault = at_fault.fault
        assert fault is not None, "nobody is at fault"
        for side in self.sides.values():
            if side is not at_fault:
                side.blame(fault)


def sides_of_the_policy(games: Sequence[Match]) -> Sequence[Conversation]:
    """The policy's conversations in games that are over. Those in which it had no turn are counted and left out.

    Raises RolloutFailure if there is no other one.
    """
    idle = [game for game in games if game.unplayed]
    for game in idle:
        offered = game.speaker.offered
        game.speaker.metrics.turnless.labels(environment=offered.name, reason=game.why).inc()
        logger.info("a game of %s leaves its group: the policy had no turn (%s)", offered.name, game.why)
    if len(idle) == len(games):
        raise _nothing_played(games)
    return [side for game in games if not game.unplayed for side in game.trained]


def _nothing_played(games: Sequence[Match]) -> RolloutFailure:
    """Failure of games without a turn of the policy; another attempt may help where clock or environment had a part."""
    faults = [game.fault for game in games if game.fault is not None]
    if len(faults) == len(games) or any(fault.passing for fault in faults):
        return failure_of_all(faults)
    if any(game.why == "time_limit" for game in games):
        return InfrastructureFailure("the policy had no turn within the time of a conversation")
    stops = {side.stop_reason for game in games for side in game.sides.values()} - {""}
    draws = max(game.draw for game in games) + 1
    often = f"at each of {draws} draws" if draws > 1 else "at its only draw: opponent.temperature is 0"
    return DataFailure(
        f"the policy had no turn: its opponent ended every game before it ({', '.join(sorted(stops))}) {often}"
    )


def how_it_opens(given: object, players: Sequence[str]) -> TurnOf:
    """Opening of a game. Raises Nonsense."""
    if not isinstance(given, TurnOf):
        raise Nonsense(f"the environment's reset returned {type(given).__name__}, expected a TurnOf")
    check_prompt(given.observation, field="TurnOf.observation")
    check_fields(given, "player", "state", "tools")
    if given.player not in players:
        raise Nonsense(f"the environment begins with {given.player}, expected one of {', '.join(players)}")
    return given
