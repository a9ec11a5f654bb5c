"""The rollout of one lease.

                       ┌─▶ conversation ─▶ … ─▶ over ─┐
task ─▶ opening tokens ┼─▶ conversation ─▶ … ─▶ over ─┼─▶ scores ─▶ group
                       └─▶ conversation ─▶ … ─▶ over ─┘

The first turns of a group are asked for in one request, since their prompt is the same; from there on its conversations
do not wait for each other. With redundancy each is asked for by itself, so that those which are not needed can be
broken off.

What redundancy does to the distribution: the first to finish are mostly the short ones, so a group of them is not a
sample of the policy. Nothing corrects that here; what is broken off is counted, with the tokens that it had.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from typing import Any, Protocol, TypeVar, cast

from env_service.checkpoints.records import LeaseRecords
from env_service.environments.bridges import Bridges
from env_service.environments.interface import (
    Agent,
    Environment,
    EnvironmentFailed,
    EnvironmentUnavailable,
    ForkableEnvironment,
    OfferedEnvironment,
    Opening,
    SeveralPlayers,
    Task,
    TurnOf,
    text_of,
)
from env_service.environments.rules import SIBLING
from env_service.environments.tokenization import Tokenization, characters_of
from env_service.rollouts.branching import beginnings, firsts
from env_service.rollouts.completions import RolloutProgress, continues
from env_service.rollouts.conversation import (
    LET_OUT,
    Conversation,
    Nonsense,
    Speaker,
    as_opening,
    blame_unless_over,
    first_request,
)
from env_service.rollouts.environment_calls import Call, DidNotReturn, EnvironmentCalls, closed
from env_service.rollouts.generation import Generation, beside_each_other
from env_service.rollouts.greedy import greedy, refuse_without_greedy, set_apart
from env_service.rollouts.hints import hinted, solved_sibling
from env_service.rollouts.judging import GroupScoring, JudgedConversation, Judging, text_of_task
from env_service.rollouts.match import Match, Opponent, Table, how_it_opens, sides_of_the_policy
from env_service.rollouts.openings import Openings
from env_service.rollouts.outcomes import (
    DataFailure,
    Outcome,
    RequestTooLong,
    RolloutFailure,
    RolloutMetrics,
    in_whole_characters,
)
from env_service.rollouts.routing import within_limits
from env_service.rollouts.speech import Language
from protocol.generation import GenerateRequest, Sampling
from protocol.messages import FailedLease, FinishedLease, Lease
from protocol.trajectories import Fork, GreedyBaseline, Trajectory, TrajectoryGroup, group_of
from services.http.backoff import Backoff
from services.tracing import span
from services.user_code import is_being_cancelled
from services.user_loop import one_thread

logger = logging.getLogger(__name__)

_REASON_LENGTH = 4096
_BACKOFF = Backoff(first_s=0.2, max_s=5.0)
_PROMPT_LENGTH = 1 << 20
_NO_PROMPT = (0,)
"""Of a request that only says how an agent's turns are sampled; each turn has its own."""
_OPENS_DIFFERENTLY = "the environment opens differently for the same task and seed"
_WHOM = {
    "environment": "its environment",
    "generators": "the generators",
    "rewards": "the reward services",
    "host": "the host of its environment",
}
_Held = Conversation | Match
T = TypeVar("T")


@dataclass(frozen=True)
class _OpenEnvironments:
    """A lease's environments, reset, and how they open: games with the turn of the `first` player."""

    offered: OfferedEnvironment
    task: Task
    environments: list[Environment]
    opening: Opening
    first: TurnOf | None = None


@dataclass(frozen=True)
class _RolledOut:
    """Text of the prompt, the group's trajectories, and the greedy answer if one was asked for; of a group that
    branches, how many of its conversations had no turn; the prompt of a teacher that is shown more, and the reward
    from which a trajectory needs no teacher, if it shows what another one said.
    """

    prompt_text: str
    trajectories: tuple[Trajectory, ...]
    baseline: GreedyBaseline | None = None
    turnless: int = 0
    teacher_prompt: tuple[int, ...] | None = None
    solved_reward: float | None = None


class Attempt(JudgedConversation, Protocol):
    """A trajectory of an agent, which runs in `hold`. It raises RolloutFailure when a turn cannot be sampled, and
    EnvironmentUnavailable where nobody was there to begin: it can be held again.
    """

    @property
    def opening_text(self) -> str: ...

    async def hold(self) -> None: ...


Attempts = Callable[[int, Agent, Task, int, Speaker], Attempt]
"""Makes the attempt of a lease that has this index, from the agent, its task, the lease's seed, and how to sample."""


class Rollout:
    """Turns leases into outcomes; holds no state of a lease. `timeout_s` bounds one rollout with all its retries,
    `environment_timeout_s` what its environment may take for a task, an opening of all its conversations, or a step.
    `opponents` play in games, by the name of the environment. Turns are kept in `records`, of environments that are
    replayable.
    """

    def __init__(
        self,
        *,
        env_id: str,
        environments: Mapping[str, OfferedEnvironment],
        tokenization: Tokenization,
        generation: Generation,
        scoring: GroupScoring,
        timeout_s: float,
        metrics: RolloutMetrics,
        environment_timeout_s: float = 300.0,
        opening_attempts: int = 8,
        backoff: Backoff = _BACKOFF,
        agents: Attempts | None = None,
        opponents: Mapping[str, Opponent] | None = None,
        records: LeaseRecords | None = None,
    ) -> None:
        self._env_id = env_id
        self._environments = environments
        self._tokenization = tokenization
        self._bridges: dict[frozenset[int], Bridges] = {}
        self._generation = generation
        self._judging = Judging(scoring=scoring, metrics=metrics)
        self._timeout_s = timeout_s
        self._calls = EnvironmentCalls(timeout_s=environment_timeout_s)
        self._metrics = metrics
        self._openings = Openings(attempts=opening_attempts, backoff=backoff)
        self._agents = agents
        self._opponents = opponents or {}
        self._records = records
        self._newest: dict[str, tuple[int, int]] = {}
        for name in environments:
            metrics.know(name)

    async def run(self, lease: Lease, progress: RolloutProgress) -> Outcome:
        """The lease's outcome: never raises but for cancellation."""
        started = progress.begin()
        try:
            async with progress.within(self._timeout_s):
                whose = span("rollout", parent=lease.trace, environment=lease.environment, attempt=lease.attempt)
                with whose, one_thread():
                    return FinishedLease(group=await self._roll_out(lease, progress, started))
        except RolloutFailure as failure:
            return self._failed(lease, progress, data_fault=failure.data_fault, reason=str(failure))
        except EnvironmentUnavailable as error:
            return self._failed(lease, progress, data_fault=False, reason=f"environment {lease.environment}: {error}")
        except EnvironmentFailed as error:
            logger.warning("task %s of %s: %s%s", lease.task_index, lease.environment, error, error.details)
            return self._failed(lease, progress, data_fault=True, reason=f"environment {lease.environment}: {error}")
        except asyncio.CancelledError:
            if is_being_cancelled():
                raise
            reason = f"environment {lease.environment}: {LET_OUT}"
            return self._failed(lease, progress, data_fault=True, reason=reason)
        except Exception as error:  # the rollout boundary: whatever an environment raises becomes a record
            if isinstance(error, TimeoutError) and progress.cut_short:
                # Not for whom it waits at the end: an outage that took most of the time is no fault of the task.
                whom, waited_s = progress.longest_wait()
                said = f": {progress.said}" if whom == "host" else ""
                share = f"{waited_s:.3g} s of them it was waiting for {_WHOM[whom]}{said}"
                reason = f"not finished within {self._timeout_s:g} s: {share}"
                return self._failed(lease, progress, data_fault=whom == "environment", reason=reason)
            logger.warning("task %s of %s raised", lease.task_index, lease.environment, exc_info=error)
            return self._failed(lease, progress, data_fault=True, reason=f"{type(error).__name__}: {error}")

    async def _roll_out(self, lease: Lease, progress: RolloutProgress, started: float) -> TrajectoryGroup:
        own = self._own(lease)
        offered = self._offered(own)
        refuse_without_greedy(own, offered)
        if self._records is not None and offered.is_recorded:
            progress.record = self._records.record_of(lease, rules=offered.rules.model_dump_json())
        roll_out = self._with_agents if offered.agent else self._with_environments
        rolled = await roll_out(own, progress)
        seconds = time.monotonic() - started
        self._count(own, rolled.trajectories, seconds=seconds)
        self._metrics.tokens.inc(0 if rolled.baseline is None else rolled.baseline.sampled_tokens)
        return group_of(
            within_limits(rolled.trajectories),
            incarnation=lease.incarnation,
            lease_id=lease.lease_id,
            attempt=lease.attempt,
            purpose=lease.purpose,
            environment=lease.environment,
            task_index=lease.task_index,
            prompt_text=rolled.prompt_text,
            rollout_s=seconds,
            scoring_s=progress.scoring_s,
            greedy_baseline=rolled.baseline,
            turnless=rolled.turnless,
            teacher_prompt=rolled.teacher_prompt,
            solved_reward=rolled.solved_reward,
        )

    async def _with_environments(self, lease: Lease, progress: RolloutProgress) -> _RolledOut:
        opened = await self._openings.opened(
            partial(self._open, lease, progress), name=lease.environment, progress=progress
        )
        try:
            prompt_text, language = self._language(lease, opened, now=self._now(progress))
            hints = _Hints(lease, opened, language)
            speaker = self._speaker(lease, opened.offered, language, progress)
            speaker = replace(speaker, fork=partial(self._fork, opened))
            conversations, answer = await self._held_with_greedy(lease, opened, speaker)
            trajectories = await self._judging.trajectories(
                [*conversations, *filter(None, (answer,))],
                prompt=text_of(opened.opening.prompt),
                progress=progress,
                apart=answer,
            )
            if answer is not None:
                own, greedy = set_apart(trajectories, answer)
                return _RolledOut(prompt_text, own, greedy, **hints.behind(own, conversations))
            turnless = len(conversations) - len(trajectories) if opened.offered.rules.branch_after else 0
            return _RolledOut(prompt_text, trajectories, turnless=turnless, **hints.behind(trajectories, conversations))
        finally:
            await self._close(opened.environments, opened.offered)

    async def _with_agents(self, lease: Lease, progress: RolloutProgress) -> _RolledOut:
        offered = self._offered(lease)
        if self._agents is None or offered.agent is None:
            raise DataFailure(f"{lease.environment} is an agent, and nothing here gives agents sessions")
        task = await self._openings.opened(
            partial(self._task, lease, offered, progress), name=lease.environment, progress=progress
        )
        players = await self._made(offered, offered.agent, lease.group_size)
        try:
            speaker = self._speaker(lease, offered, self._languages(lease, offered, Opening(()), ()), progress)
            attempts = [self._agents(index, each, task, lease.seed, speaker) for index, each in enumerate(players)]
            hold = partial(self._openings.opened, name=lease.environment, progress=progress)
            await beside_each_other(hold(each.hold) for each in attempts)
            prompt_text = text_of(task.prompt) or attempts[0].opening_text
            trajectories = await self._judging.trajectories(attempts, prompt=prompt_text, progress=progress)
            return _RolledOut(prompt_text[:_PROMPT_LENGTH], trajectories)
        finally:
            await self._close(players, offered)

    def _own(self, lease: Lease) -> Lease:
        """The same lease, as one of the environment that has its task where several are offered as one."""
        offered = self._offered(lease)
        if offered.parts is None or lease.task_index >= offered.task_count(lease.purpose):
            return lease
        self._note_level(lease, offered)
        part, index = offered.at(lease.purpose, lease.task_index)
        return lease.model_copy(update={"environment": part.name, "task_index": index})

    def _note_level(self, lease: Lease, offered: OfferedEnvironment) -> None:
        """A lease that was granted again may be of an older level."""
        number = (lease.incarnation, lease.lease_id)
        if lease.purpose == "train" and offered.levels > 1 and number >= self._newest.get(lease.environment, number):
            self._newest[lease.environment] = number
            self._metrics.level.labels(environment=lease.environment).set(offered.level_of(lease.task_index))

    def _offered(self, lease: Lease) -> OfferedEnvironment:
        offered = self._environments.get(lease.environment)
        if offered is None:
            names = ", ".join(sorted(self._environments))
            raise DataFailure(f"there is no environment {lease.environment!r} here; there are {names}")
        return offered

    async def _open(self, lease: Lease, progress: RolloutProgress) -> _OpenEnvironments:
        offered = self._offered(lease)
        task = await self._task(lease, offered, progress)
        count = len(_beginnings(lease, offered)) + _redundant(lease, offered) + lease.greedy_baseline
        environments = await self._made(offered, offered.start, count)
        try:
            return await self._opened(offered, environments, task, lease.seed)
        except BaseException:
            await self._close(environments, offered)
            raise

    async def _made(self, offered: OfferedEnvironment, make: Callable[[], T], count: int) -> list[T]:
        """So many of its instances; a user's constructor may block, or end more than itself."""
        if not offered.own_loop:
            return [make() for _ in range(count)]
        makes: list[Call[T]] = [make] * count
        return await self._calls.all(makes, what="the environment's constructor")

    async def _task(self, lease: Lease, offered: OfferedEnvironment, progress: RolloutProgress) -> Task:
        count = offered.task_count(lease.purpose)
        if lease.task_index >= count:
            raise DataFailure(f"{lease.environment} has {count} tasks to {lease.purpose}, got index {lease.task_index}")
        make = partial(offered.tasks.task, lease.purpose, lease.task_index)
        what = f"task {lease.task_index} of {lease.environment}"
        progress.task = task = await self._calls.one(
            make, what=what, at_once=offered.tasks_at_once, own_loop=offered.own_loop
        )
        return task

    async def _opened(
        self, offered: OfferedEnvironment, environments: list[Environment], task: Task, seed: int
    ) -> _OpenEnvironments:
        resets: list[Call[object]] = [partial(environment.reset, task, seed) for environment in environments]
        given = await self._calls.all(
            resets, what="the environment's reset", at_once=offered.at_once, own_loop=offered.own_loop
        )
        turns = [how_it_opens(each, offered.players) for each in given] if offered.players else []
        openings = [turn.opening for turn in turns] or [as_opening(each) for each in given]
        if any(opening != openings[0] for opening in openings) or len({turn.player for turn in turns}) > 1:
            raise DataFailure(_OPENS_DIFFERENTLY)
        return _OpenEnvironments(offered, task, environments, openings[0], next(iter(turns), None))

    async def _deal(self, opened: _OpenEnvironments, lease: Lease, game: SeveralPlayers) -> SeveralPlayers:
        """The same game from its beginning, by an instance of its own in the place of the other one."""
        old, (fresh,) = cast("Environment", game), await self._made(opened.offered, opened.offered.start, 1)
        opened.environments[next(at for at, each in enumerate(opened.environments) if each is old)] = fresh
        await self._close([old], opened.offered)
        again = await self._opened(opened.offered, [fresh], opened.task, lease.seed)
        if again.first != opened.first:
            raise DataFailure(_OPENS_DIFFERENTLY)
        return cast("SeveralPlayers", fresh)

    async def _fork(self, opened: _OpenEnvironments, environment: Environment) -> Environment:
        """A second instance that stands where this one does, closed with the others. Raises Nonsense, and what it
        raises.
        """
        offered, given = opened.offered, cast("ForkableEnvironment", environment)
        forked = await self._calls.one(
            given.fork,
            what="the environment's fork",
            timeout_s=offered.rules.step_timeout_s,
            at_once=offered.at_once,
            own_loop=offered.own_loop,
        )
        if forked is environment or not callable(getattr(forked, "step", None)):
            got = "itself" if forked is environment else type(forked).__name__
            raise Nonsense(
                f"the environment's fork returned {got}, expected another instance of {type(given).__name__}"
            )
        opened.environments.append(forked)
        return forked

    async def _close(self, environments: Sequence[Environment | Agent], offered: OfferedEnvironment) -> None:
        """Call `close` of those that have it; what that raises is logged, and changes nothing."""
        closings: list[Call[object]] = [partial(closed, each) for each in environments if hasattr(each, "close")]
        if not closings:
            return
        try:
            await self._calls.all(closings, what="the environment's close", own_loop=offered.own_loop)
        except (DidNotReturn, EnvironmentUnavailable) as error:  # the work is done by then
            logger.warning("%s", error)

    @staticmethod
    def _now(progress: RolloutProgress) -> datetime:
        """The date that a chat template shows: of a rollout that goes on, the one that it showed."""
        return datetime.now() if progress.record is None else progress.record.now

    def _language(self, lease: Lease, opened: _OpenEnvironments, *, now: datetime) -> tuple[str, Language]:
        """The rendered opening, and what the conversations need to go on from there."""
        opening = opened.opening
        if isinstance(opening.prompt, str) and opened.offered.rules.history == "summarize":
            raise DataFailure(
                f'{opened.offered.name} opens with plain text, and its rules have history = "summarize"; expected '
                'messages, since a model is asked for a summary by one, or history = "append"'
            )
        tokenization = self._tokenization.with_arguments(opened.offered.template_arguments)
        most = tokenization.context_tokens
        if tokenization.beginning_beyond(opening.prompt, most) is not None:
            self._metrics.note_overflow(opened.offered.name, characters_of(opening.prompt))
            raise RequestTooLong(
                f"the opening has {characters_of(opening.prompt)} characters, more than the model's context of {most} "
                "tokens; expected one that leaves room for an answer"
            )
        text, ids = tokenization.encode(opening.prompt, tools=opening.tools, now=now)
        return text, self._languages(lease, opened.offered, opening, ids, now=now)

    def _languages(
        self,
        lease: Lease,
        offered: OfferedEnvironment,
        opening: Opening,
        ids: Sequence[int],
        *,
        now: datetime | None = None,
    ) -> Language:
        stop_ids = frozenset(lease.sampling.stop_token_ids)
        if stop_ids not in self._bridges:
            self._bridges[stop_ids] = Bridges(self._tokenization, stop_ids=stop_ids)
        language = Language(
            tokenization=self._tokenization,
            bridges=self._bridges[stop_ids],
            rules=offered.rules,
            opening=opening,
            opening_ids=ids,
            stop_ids=stop_ids,
            now=now or datetime.now(),
        )
        return language.with_arguments(offered.template_arguments)

    def _speaker(
        self, lease: Lease, offered: OfferedEnvironment, language: Language, progress: RolloutProgress
    ) -> Speaker:
        return Speaker(
            offered=offered,
            language=language,
            request=GenerateRequest(
                request_id=f"{self._env_id}/{_name_of(lease, progress)}",
                prompt_token_ids=tuple(language.opening_ids) or _NO_PROMPT,
                purpose=lease.purpose,
                sampling=_sampling(lease, turn_tokens=language.rules.turn_tokens),
                routed_experts=lease.routed_experts,
            ),
            sample=self._generation.sample,
            calls=self._calls,
            progress=progress,
            metrics=self._metrics,
            record=progress.record,
        )

    async def _held_with_greedy(
        self, lease: Lease, opened: _OpenEnvironments, speaker: Speaker
    ) -> tuple[Sequence[Conversation], Conversation | None]:
        """The conversations of the policy when all are over, and the greedy one if the lease asks for it."""
        if not lease.greedy_baseline:
            return await self._held(lease, opened, speaker), None
        *rest, last = opened.environments
        answer = Conversation(len(rest), last, greedy(speaker))
        try:
            async with asyncio.TaskGroup() as tasks:
                others = tasks.create_task(self._held(lease, replace(opened, environments=rest), speaker))
                tasks.create_task(answer.hold())
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None
        blame_unless_over([answer])
        return others.result(), answer

    async def _held(self, lease: Lease, opened: _OpenEnvironments, speaker: Speaker) -> Sequence[Conversation]:
        """The conversations of the policy, when all are over."""
        if opened.first is None:
            kept = await self._kept(lease, opened.offered, _conversations(lease, opened, speaker))
            sides = (side for each in kept for side in each.trained)
            return sorted(sides, key=lambda side: side.index) if opened.offered.rules.branch_after else [*sides]
        opponent = self._opponents.get(opened.offered.name)
        players = opened.offered.players
        table = Table(
            first=opened.first,
            players=players,
            frozen=opponent.played(players, task_index=lease.task_index) if opponent else frozenset(),
            policy=speaker,
            opponent=opponent.in_place_of(speaker) if opponent else None,
            games=len(opened.environments),
            deal=partial(self._deal, opened, lease),
            draws=opponent.draws if opponent else 1,
        )
        games = [Match(index, cast("SeveralPlayers", each), table) for index, each in enumerate(opened.environments)]
        kept = await self._kept(lease, opened.offered, games)
        return sides_of_the_policy([game for game in kept if isinstance(game, Match)])

    async def _kept(self, lease: Lease, offered: OfferedEnvironment, members: Sequence[_Held]) -> Sequence[_Held]:
        """The members that make the group, when they are over."""
        if not _redundant(lease, offered):
            await _hold_all(members)
            blame_unless_over(side for member in members for side in member.trained)
            return members
        kept = await _hold_first(members, wanted=lease.group_size)
        for member in members:
            if member not in kept:
                self._metrics.redundant.labels(environment=lease.environment).inc()
                tokens = sum(side.transcript.sampled_tokens for side in member.trained)
                self._metrics.redundant_tokens.labels(environment=lease.environment).inc(tokens)
        return kept

    def _count(self, lease: Lease, trajectories: Sequence[Trajectory], *, seconds: float) -> None:
        self._metrics.groups.labels(environment=lease.environment).inc()
        self._metrics.tokens.inc(sum(trajectory.sampled_tokens for trajectory in trajectories))
        turns = [turn for trajectory in trajectories for turn in trajectory.own_turns]
        self._metrics.turns.labels(environment=lease.environment).inc(len(turns))
        self._metrics.continued.inc(sum(len(turn.generator_ids) > 1 for turn in turns))
        self._metrics.rollout_s.observe(seconds)

    def _failed(self, lease: Lease, progress: RolloutProgress, *, data_fault: bool, reason: str) -> FailedLease:
        self._metrics.failures.labels(kind="data" if data_fault else "infrastructure").inc()
        which = lease.model_dump(include={"incarnation", "lease_id", "attempt", "purpose"})
        task = "" if progress.task is None else text_of_task(progress.task)
        return FailedLease(
            **which, data_fault=data_fault, reason=in_whole_characters(reason)[:_REASON_LENGTH], task=task
        )


def _name_of(lease: Lease, progress: RolloutProgress) -> str:
    """Another one in each process that goes on with a lease: a generator may still be at work for the one before."""
    lives = 0 if progress.record is None else progress.record.lives
    name = f"{lease.incarnation}/{lease.purpose}/{lease.lease_id}/{lease.attempt}"
    return f"{name}/{lives}" if lives else name


class _Hints:
    """A teacher's prompt, if the lease asks for it and the rules have a hint: the tokens of the opening with it.

    Made before the rollout, so that a task without text for it fails at once.
    """

    def __init__(self, lease: Lease, opened: _OpenEnvironments, language: Language) -> None:
        self._lease, self._opened, self._language = lease, opened, language
        self._hint = language.rules.teacher_hint if lease.teacher_prompt else None
        self._prompt = None if self._hint is None else self._tokens(self._hint)

    def behind(self, trajectories: Sequence[Trajectory], conversations: Sequence[Conversation]) -> dict[str, Any]:
        """The fields of a group that are of its teacher, once its trajectories have rewards. They are of those of the
        `conversations` that had a turn, in order: a trajectory's own text may have lost its end.
        """
        if self._hint is None or SIBLING not in self._hint:
            return {"teacher_prompt": self._prompt}
        reward = self._language.rules.hint_reward
        texts = [each.text for each in conversations if each.transcript.turns]
        sibling = solved_sibling([each.reward.reward for each in trajectories], reward=reward)
        prompt = None if sibling is None else self._tokens(self._hint, sibling=texts[sibling])
        return {"teacher_prompt": prompt, "solved_reward": reward}

    def _tokens(self, hint: str, *, sibling: str = "") -> tuple[int, ...]:
        opening, language = self._opened.opening, self._language
        prompt = hinted(opening.prompt, hint, self._opened.task, environment=self._lease.environment, sibling=sibling)
        return tuple(language.tokenization.encode(prompt, tools=opening.tools, now=language.now)[1])


def _redundant(lease: Lease, offered: OfferedEnvironment) -> int:
    """Conversations that are begun beyond the group's size."""
    return offered.rules.redundant if lease.purpose == "train" else 0


def _beginnings(lease: Lease, offered: OfferedEnvironment) -> Sequence[int]:
    return beginnings(offered.rules, group_size=lease.group_size, purpose=lease.purpose)


def _conversations(lease: Lease, opened: _OpenEnvironments, speaker: Speaker) -> Sequence[Conversation]:
    """Of the environments that were opened, each with its place in the group's tree if it has one."""
    leaves = _beginnings(lease, opened.offered)
    if len(leaves) == lease.group_size:
        return [Conversation(index, each, speaker) for index, each in enumerate(opened.environments)]
    return [
        Conversation(first, each, speaker, leaves=count, forks=(Fork(at=0, branch=number),))
        for number, (first, count, each) in enumerate(zip(firsts(leaves), leaves, opened.environments, strict=True))
    ]


def _sampling(lease: Lease, *, turn_tokens: int | None) -> Sampling:
    """Evaluation is seeded by its lease, so that it can be repeated; training only if its sampling asks for a seed."""
    sampling = lease.sampling
    if turn_tokens is not None and turn_tokens < sampling.max_tokens:
        fewest = min(sampling.min_tokens, turn_tokens)
        sampling = sampling.model_copy(update={"max_tokens": turn_tokens, "min_tokens": fewest})
    if lease.purpose == "train" and sampling.seed is None:
        return sampling
    return sampling.model_copy(update={"seed": lease.seed})


async def _hold_all(all_of_them: Sequence[_Held]) -> None:
    """Return when all are over. Raises RolloutFailure when a turn of one cannot be sampled."""
    speaker = all_of_them[0].speaker
    request, end_of = speaker.request, speaker.language.end_of()
    has_past = speaker.record is not None and speaker.record.has_past
    if end_of is not None or not continues(request.sampling) or has_past:
        # One request each: one that has ended by its text is broken off, one that cannot go on is drawn anew, and of
        # those that a former process had begun some have their first turn.
        await beside_each_other(each.hold() for each in all_of_them)
        return
    firsts = speaker.progress.completions(len(all_of_them))
    first = speaker.sample(first_request(speaker).model_copy(update={"n": len(firsts)}), firsts)
    if _end_at_once(speaker):
        with speaker.progress.waiting_for("generators"):
            await first
        for each, one in zip(all_of_them, firsts, strict=True):
            await each.hold(one)
        return
    try:
        async with asyncio.TaskGroup() as tasks:
            sampling = tasks.create_task(_done(first))
            holds = [tasks.create_task(each.hold(one)) for each, one in zip(all_of_them, firsts, strict=True)]
            await asyncio.wait(holds)
            if not all(one.done.is_set() for one in firsts):  # their time was over before their first turn was
                sampling.cancel()
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None


def _end_at_once(speaker: Speaker) -> bool:
    """True if conversations end with their first turn, in an environment that nobody waits for: they need no tasks of
    their own, which would cost more than all else that is done for a short completion.
    """
    offered, rules = speaker.offered, speaker.language.rules
    return offered.at_once and rules.max_turns == 1 and not offered.players and rules.conversation_timeout_s is None


async def _hold_first(all_of_them: Sequence[_Held], *, wanted: int) -> Sequence[_Held]:
    """The first `wanted` that are over and whose environment has not spoilt them, when there are so many; the others
    are broken off. Where too many are spoilt, some of those.
    """
    running = {asyncio.ensure_future(each.hold()): each for each in all_of_them}
    over: list[_Held] = []
    pending = set(running)
    try:
        while pending and sum(not each.spoilt for each in over) < wanted:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in (task for task in running if task in done):
                if not task.cancelled():
                    task.result()
                blame_unless_over(running[task].trained)
                over.append(running[task])
    finally:
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
    return sorted(over, key=lambda each: each.spoilt)[:wanted]


async def _done(sampling: Awaitable[None]) -> None:
    await sampling
