"""One game of several players: a conversation for each of them, in turns.

    first's conversation   ─▶ completion ─▶ step ─┐              ┌─▶ completion ─▶ …
                                                  ▼              │
                                         whose turn is it? ──────┤
                                                                 │
    second's conversation  ◀─────────── what it is told ─────────┘

A player's conversation begins with its first turn. Those that the policy plays become trajectories; what a frozen
opponent says is known to the others only as far as the game tells them, and is in no trajectory.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import cast

from env_service.environments.interface import Action, Environment, Round, SeveralPlayers, TurnOf
from env_service.environments.tokenization import Bridges, ChatTemplateError, Tokenization
from env_service.rollouts.completions import Completion, EndOf, Progress
from env_service.rollouts.conversation import Conversation, Fault, Nonsense, Speaker, check_numbers, check_said
from protocol.generation import GenerateRequest
from protocol.messages import WaitsFor
from protocol.trajectories import CutOff


@dataclass(frozen=True, kw_only=True)
class Opponent:
    """Who plays some of the players and is not trained. `plays` are their names; none: one, by the task's number.

    Its tokenizer is its own, and so are the ids that end its turns.
    """

    plays: tuple[str, ...]
    tokenization: Tokenization
    sample: Callable[[GenerateRequest, Sequence[Completion]], Awaitable[None]]
    temperature: float = 1.0
    bridges: Bridges = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "bridges", Bridges(self.tokenization))

    def played(self, players: Sequence[str], *, task_index: int) -> frozenset[str]:
        """The players that it is in a task."""
        return frozenset(self.plays or (players[task_index % len(players)],))

    def in_place_of(self, policy: Speaker) -> Speaker:
        """What a conversation of its own needs: nothing that it samples counts as the policy's."""
        sampling = policy.request.sampling.model_copy(update={"temperature": self.temperature, "stop_token_ids": ()})
        return replace(
            policy,
            language=replace(
                policy.language, tokenization=self.tokenization, bridges=self.bridges, stop_ids=frozenset()
            ),
            # For evaluation: it may be sampled greedily.
            request=policy.request.model_copy(update={"sampling": sampling, "purpose": "evaluate"}),
            sample=self.sample,
            progress=_Untold(policy.progress),
        )


class _Untold(Progress):
    """Of a frozen player: it is waited for like any other, and the versions that sampled its tokens are nobody's."""

    def __init__(self, policy: Progress) -> None:
        super().__init__()
        self._policy = policy

    def completions(self, count: int, *, end_of: EndOf | None = None) -> Sequence[Completion]:
        return tuple(Completion(index, end_of=end_of) for index in range(count))

    @contextmanager
    def waiting_for(self, whom: WaitsFor) -> Iterator[None]:
        with self._policy.waiting_for(whom):
            yield


@dataclass(frozen=True, kw_only=True)
class Table:
    """What all games of a lease have in common: how they begin, and for each player who speaks for it.

    A speaker's language and request are those of the policy, or of its opponent; the opening in them is replaced.
    """

    first: TurnOf
    players: tuple[str, ...]
    frozen: frozenset[str]
    policy: Speaker
    opponent: Speaker | None
    games: int

    def speaker(self, turn: TurnOf) -> Speaker:
        """Of the player who is about to have its first turn. Raises ChatTemplateError."""
        speaker = self.opponent if turn.player in self.frozen and self.opponent is not None else self.policy
        language = speaker.language
        if turn == self.first and speaker is self.policy:
            return speaker
        _, ids = language.tokenization.encode(turn.observation, tools=turn.tools, now=language.now)
        return replace(
            speaker,
            language=replace(language, opening=turn.opening, opening_ids=ids),
            request=speaker.request.model_copy(update={"prompt_token_ids": tuple(ids)}),
        )


@dataclass
class Match:
    """The `index`-th game of its lease; `sides` are the conversations by player, of those that had a turn."""

    index: int
    environment: SeveralPlayers
    table: Table
    sides: dict[str, Conversation] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._rules = self.table.policy.language.rules
        self._opened = self._seat(self.table.first)

    @property
    def speaker(self) -> Speaker:
        """Of the first turn."""
        return self._opened.speaker

    @property
    def spoilt(self) -> bool:
        """Whether its environment is at fault."""
        return any(side.fault is not None for side in self.sides.values())

    @property
    def trained(self) -> Iterator[Conversation]:
        """The conversations of those that the policy plays."""
        return (side for player, side in self.sides.items() if player not in self.table.frozen)

    async def hold(self, first: Completion | None = None) -> None:
        """Play until it is over. `first` is the first turn, if somebody samples it already.

        Raises RolloutFailure when a turn cannot be sampled.
        """
        limit = asyncio.timeout(self._rules.conversation_timeout_s)
        try:
            async with limit:
                await self._play(first)
        except TimeoutError:
            if not limit.expired():
                raise
            self._cut_off("time_limit")

    async def _play(self, first: Completion | None) -> None:
        side: Conversation | None = self._opened
        while side is not None:
            completion = await side.sampled(first)
            first = None
            if completion is None:
                self._cut_off("token_budget")
                return
            side = await self._answered(side, side.speech.hear(completion))

    async def _answered(self, side: Conversation, action: Action) -> Conversation | None:
        """Who speaks next; nobody, if the game is over."""
        given = await side.answer(partial(self.environment.step, action), self._checked)
        if given is None:
            self._blame_all(side)
            return None
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
            return self._seat(turn)
        except ChatTemplateError as error:
            acted.blame(Fault("nonsense", f"what the environment says cannot be shown to the model: {error}"))
            self._blame_all(acted)
            return None

    def _seat(self, turn: TurnOf) -> Conversation:
        place = self.table.players.index(turn.player)
        side = Conversation(
            self.index + self.table.games * place,
            cast("Environment", self.environment),
            self.table.speaker(turn),
            player=turn.player,
        )
        self.sides[turn.player] = side
        return side

    def _checked(self, given: object) -> Round:
        """Raises Nonsense."""
        if not isinstance(given, Round):
            raise Nonsense(f"the environment's step returned {type(given).__name__}, expected a Round")
        named = {*given.rewards, *given.verifications, *given.metrics, *((given.next.player,) if given.next else ())}
        if not named <= set(self.table.players):
            strange = ", ".join(sorted(named - set(self.table.players)))
            raise Nonsense(f"the environment's step names {strange}, expected one of {', '.join(self.table.players)}")
        check_numbers(("reward", reward) for reward in given.rewards.values())
        check_numbers(item for metrics in given.metrics.values() for item in metrics.items())
        if given.next is not None:
            known = self.sides.get(given.next.player)
            said = given.next.observation
            check_said(said, plain=isinstance(said, str) if known is None else known.speaker.language.is_plain)
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


def how_it_opens(given: object, players: Sequence[str]) -> TurnOf:
    """How a game begins. Raises Nonsense."""
    if not isinstance(given, TurnOf):
        raise Nonsense(f"the environment's reset returned {type(given).__name__}, expected a TurnOf")
    if given.player not in players:
        raise Nonsense(f"the environment begins with {given.player}, expected one of {', '.join(players)}")
    return given
