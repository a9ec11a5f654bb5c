"""A conversation of the policy with an environment: a trajectory, turn by turn.

    prompt ─▶ completion ─▶ action ─▶ the environment's step ─┬─▶ ends: its reward, or a verifier judges it
       ▲                                                     └─▶ goes on ─▶ a limit? cut off
       └──────────────────── what it said, behind what was sampled ◀─────────┘

It waits for nobody else's conversation. Each turn is asked of whichever generator has room, under the weights that it
serves then. An environment that raises, hangs or answers nonsense costs this trajectory alone.
"""

import asyncio
import logging
import math
import traceback
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import fmean
from typing import Any, TypeVar, cast

from pydantic import ConfigDict, TypeAdapter, ValidationError

from env_service.checkpoints.records import LeaseRecord
from env_service.checkpoints.rows import AnswerRow, EnvironmentState, RecordedTurn
from env_service.environments.interface import (
    USER_LAST,
    Action,
    AgentResult,
    Aggregation,
    ChatMessage,
    Environment,
    EnvironmentFailed,
    EnvironmentUnavailable,
    FullContext,
    OfferedEnvironment,
    OnFull,
    Opening,
    Prompt,
    RoomMaker,
    Round,
    SavableEnvironment,
    ShorterContext,
    Step,
    SummaryRequest,
    Tool,
    TurnOf,
    Verification,
    text_of,
)
from env_service.environments.tokenization import ChatTemplateError, characters_of
from env_service.rollouts.branching import ForkEnvironment, firsts, shares
from env_service.rollouts.completions import Completion, RolloutProgress
from env_service.rollouts.environment_calls import Call, DidNotReturn, EnvironmentCalls
from env_service.rollouts.generation import beside_each_other
from env_service.rollouts.outcomes import RequestTooLong, RolloutMetrics, in_whole_characters
from env_service.rollouts.replay import (
    LOST_TURNS,
    OTHER_PROMPT,
    OTHER_STEP,
    ReplayMismatch,
    completion_of,
    digest_of,
    row_of,
    step_of,
    text_of_step,
)
from env_service.rollouts.speech import Language, Speech, Transcript
from protocol.generation import GenerateRequest, Sampling
from protocol.trajectories import CutOff, Fork
from services.user_code import checked_number, number_of

logger = logging.getLogger(__name__)

T = TypeVar("T")

LET_OUT = "its code cancelled the task that waits for it; expected a result or an Exception"

_STRICT = ConfigDict(strict=True, revalidate_instances="always")
_SAID: TypeAdapter[Prompt] = TypeAdapter(Prompt, config=_STRICT)
_TEXT = (TypeAdapter[Any](str, config=_STRICT), "text without halves of characters")
_FIELDS: Mapping[str, tuple[TypeAdapter[Any], str]] = {
    "state": _TEXT,
    "stop": _TEXT,
    "player": _TEXT,
    "tools": (TypeAdapter[Any](tuple[Tool, ...], config=_STRICT), "a tuple of dicts of JSON: write ({...},)"),
    "verification": (
        TypeAdapter[Any](Verification | None, config=_STRICT),
        "None, or a Verification with arguments of JSON: text, numbers, lists and dicts",
    ),
    "verifications": (
        TypeAdapter[Any](Mapping[str, Verification], config=_STRICT),
        "a dict of Verification by player, with arguments of JSON: text, numbers, lists and dicts",
    ),
}
_MAPPINGS = ("metrics", "rewards")
"""Fields of which the values are looked at as numbers."""
_WAYS_OUT: Mapping[type, str] = {
    ShorterContext: "shortened",
    SummaryRequest: "summary",
    Step: "step",
    type(None): "declined",
}
_SHOWN_CHARS = 200
_SEEDS = 1 << 63
_TURN_STRIDE = 0xD1B54A32D192ED03 % _SEEDS
"""Odd, and far from small numbers: seeds of different turns differ in their low bits too."""


class Nonsense(TypeError):
    """An environment answered with what no step can be; the text says what was expected."""


@dataclass(frozen=True)
class Fault:
    """A fault of an environment: `kind` is `raised`, `hung` or `nonsense`, of one in a process of its own also
    `crashed`; or, `passing`, what it suffered: `unavailable`, `killed`, `diverged`.
    """

    kind: str
    text: str
    passing: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", in_whole_characters(self.text))


def fault_of_step(error: Exception, name: str, *, at: str = "") -> Fault:
    """The fault of a step of the environment `name` that raised; logged with the user's own traceback and where in the
    game that was.
    """
    match error:
        case DidNotReturn():
            return Fault("hung", str(error))
        case Nonsense():
            return Fault("nonsense", str(error))
        case ReplayMismatch():
            logger.warning("environment %s cannot be gone on with: %s", name, error)
            return Fault(error.kind, str(error), passing=True)
        case EnvironmentUnavailable():
            logger.warning("environment %s is not available: %s", name, error)
            return Fault(error.kind, str(error), passing=True)
        case EnvironmentFailed():
            logger.warning("a step of environment %s failed%s: %s%s", name, at, error, error.details)
            return Fault(error.kind, str(error))
    logger.warning("a step of environment %s raised%s", name, at, exc_info=error)
    return Fault("raised", f"{type(error).__name__}: {error}{_place(error)}")


@dataclass(frozen=True, kw_only=True)
class Speaker:
    """Shared by every conversation of a lease. `request` is that of a first turn, for one completion."""

    offered: OfferedEnvironment
    language: Language
    request: GenerateRequest
    sample: Callable[[GenerateRequest, Sequence[Completion]], Awaitable[None]]
    calls: EnvironmentCalls
    progress: RolloutProgress
    metrics: RolloutMetrics
    fork: ForkEnvironment | None = None
    record: LeaseRecord | None = None
    """Of the turns of all of them, those of a former process among them; None if none are recorded."""


def first_request(speaker: Speaker) -> GenerateRequest:
    """The request of a first turn, for no more tokens than the budget leaves behind the opening. Raises RequestTooLong
    if that is none.
    """
    request, budget, given = (
        speaker.request,
        speaker.language.rules.trajectory_tokens,
        len(speaker.language.opening_ids),
    )
    if budget is None:
        return request
    if given >= budget:
        raise RequestTooLong(
            f"the opening of {speaker.offered.name} has {given} tokens, and its rules' trajectory_tokens are {budget}; "
            "expected a budget that leaves room for an answer"
        )
    most = min(request.sampling.max_tokens, budget - given)
    fewer = {"max_tokens": most, "min_tokens": min(request.sampling.min_tokens, most)}
    return request.model_copy(update={"sampling": request.sampling.model_copy(update=fewer)})


@dataclass
class Conversation:
    """The `index`-th of its lease. When it is over, `stop_reason`, `verification` and `fault` say how. `player` is the
    policy's part in a game of several, which then leads the conversation.

    It becomes as many as `leaves` where it branches, the next ones by number; `forks` is its way so far.
    """

    index: int
    environment: Environment
    speaker: Speaker
    player: str = ""
    stop_reason: str = ""
    verification: Verification | None = None
    fault: Fault | None = None
    over: bool = False
    invalid_actions: int = 0
    leaves: int = 1
    forks: tuple[Fork, ...] = ()
    inherited_invalid: int = 0
    """Invalid actions of its beginning that another branch counts."""
    _ends_at: float | None = None
    _metrics: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    _branches: "list[Conversation]" = field(default_factory=list)
    _not_restored: EnvironmentState | None = None
    """State of its environment, up to which its answers are those that were recorded."""

    def __post_init__(self) -> None:
        self.speech = Speech(self.speaker.language)
        self._rules = self.speaker.language.rules

    async def hold(self, first: Completion | None = None) -> None:
        """Talk until it is over, and until all that branch off from it are. `first` is the first turn, if somebody
        samples it already.

        Raises RolloutFailure when a turn cannot be sampled.
        """
        await self._go_through_the_past()
        if not self.over and not self._is_at_a_fork:
            await self._talk_in_time(first)
        if not self.over and self._is_at_a_fork:
            branches = await self._branch_off()
            await beside_each_other(each.hold() for each in (self, *branches))

    def past_turn(self) -> RecordedTurn | None:
        """The next turn that a former process has recorded; None if there is no other one, or it is not one behind
        these tokens, in which case its environment is at fault.
        """
        past = None if self.speaker.record is None else self.speaker.record.next_turn(self.index)
        if past is not None and past.turn.prompt != digest_of(self.speech.transcript.context):
            self.blame(fault_of_step(ReplayMismatch(OTHER_PROMPT), self.name))
            return None
        return past

    async def _go_through_the_past(self) -> None:
        """Says once more what a former process has recorded, up to where it ended: an environment that is replayable
        stands then where it stood, and one that saves is restored. Nothing is sampled again.
        """
        record = self.speaker.record
        if record is not None and self.speaker.offered.saves:
            self._not_restored = await record.saved(self.index)
        while record is not None and not self.over and not self._is_at_a_fork:
            past = self.past_turn()
            has_answer = past is not None and (past.step is not None or self.speech.sums_up)
            if self._not_restored is not None and self.fault is None and not has_answer:
                self.blame(fault_of_step(ReplayMismatch(LOST_TURNS), self.name))
            if past is None or self.over:
                return
            if not (self.speaker.offered.rules.replayable or record.has_more(self.index)):
                # The policy has heard nothing of the last answer, so that another one is as good.
                past = RecordedTurn(past.turn, past.step if self._not_restored is not None else None)
            await self._take(completion_of(past.turn, began=self.speaker.progress.began), past)
            await self._restore()

    async def _restore(self) -> None:
        """Puts its environment where it was saved, once the conversation is there."""
        saved = self._not_restored
        if saved is None or self.over or self.speech.actions < saved.answers:
            return
        self._not_restored = None
        restore = cast("SavableEnvironment", self.environment).restore
        try:
            await self._called(partial(restore, saved.data), what="the environment's restore")
        except Exception as error:  # noqa: BLE001 - the rollout boundary: whatever it raises becomes a record
            self.blame(replace(fault_of_step(error, self.name, at=" in its restore"), passing=True))

    async def _save(self) -> None:
        """Takes down where its environment stands; where it cannot be saved, the lease goes on without a record."""
        record, offered = self.speaker.record, self.speaker.offered
        if record is None or self.over or not offered.saves or self.speech.actions % offered.rules.save_every:
            return
        save = cast("SavableEnvironment", self.environment).save
        try:
            data = await self._called(partial(save), what="the environment's save")
            if not isinstance(data, bytes):
                raise Nonsense(f"the environment's save returned {type(data).__name__}, expected bytes")
        except Exception as error:
            logger.warning("environment %s cannot be saved", self.name, exc_info=error)
            record.give_up("unsaved", error)
        else:
            await record.save(self.index, EnvironmentState(self.speech.actions, data))

    async def _called(self, call: Call[object], *, what: str) -> object:
        """The result of a call of its environment."""
        with self.speaker.progress.waiting_for("environment"):
            return await self.speaker.calls.one(
                call,
                what=what,
                timeout_s=self._rules.step_timeout_s,
                at_once=self.speaker.offered.at_once,
                own_loop=self.speaker.offered.own_loop,
            )

    async def _talk_in_time(self, first: Completion | None) -> None:
        if self._rules.conversation_timeout_s is None:
            await self._talk(first)
            return
        if self._ends_at is None:  # of a branch it counts from its beginning on
            left_s = max(0.0, self._rules.conversation_timeout_s - self.speaker.progress.elapsed_s)
            self._ends_at = asyncio.get_running_loop().time() + left_s
        limit = asyncio.timeout_at(self._ends_at)
        try:
            async with limit:
                await self._talk(first)
        except TimeoutError:
            if not limit.expired():
                raise
            self.cut_off("time_limit")

    @property
    def has_erred_enough(self) -> bool:
        """True if there were as many invalid actions as are borne."""
        return self._rules.max_invalid is not None and self.invalid_actions >= self._rules.max_invalid

    @property
    def name(self) -> str:
        """The environment's."""
        return self.speaker.offered.name

    @property
    def spoilt(self) -> bool:
        """True if its environment is at fault."""
        return self.fault is not None

    @property
    def trained(self) -> "Iterator[Conversation]":
        """Itself, as there is no other player, and what has branched off."""
        yield self
        for branch in self._branches:
            yield from branch.trained

    @property
    def given(self) -> float | None:
        """None: its turns have the rewards."""
        return None

    @property
    def transcript(self) -> Transcript:
        """Its tokens."""
        return self.speech.transcript

    @property
    def text(self) -> str:
        """All behind the opening, as a person reads it."""
        return self.speech.text

    @property
    def opening_text(self) -> str:
        """Text of its opening, as a person reads it."""
        return text_of(self.speaker.language.opening.prompt)

    @property
    def last_text(self) -> str:
        """The last text of the policy."""
        return self.speech.last_text

    @property
    def messages_before_last(self) -> tuple[ChatMessage, ...]:
        """Messages of the present context that the last text of the policy answers; none in plain text."""
        return self.speech.messages_before_last

    @property
    def single_turn(self) -> bool:
        """True if it could not have had several turns."""
        return self._rules.max_turns == 1

    @property
    def metrics(self) -> Mapping[str, float]:
        """The environment's metrics over all turns, each put together as its class says."""
        how = self.speaker.offered.metrics
        return {name: _aggregated(values, how.get(name, "last")) for name, values in self._metrics.items()}

    async def _talk(self, first: Completion | None) -> None:
        while not self.over:
            completion = await self.sampled(first)
            if completion is None:
                return
            first = None
            self.record_turn(completion)
            await self._take(completion)
            if self._is_at_a_fork:
                return

    def record_turn(self, completion: Completion) -> None:
        """Takes a turn that was sampled down, before anybody hears of it."""
        if self.speaker.record is not None:
            prompt, progress = self.speech.transcript.context, self.speaker.progress
            row = row_of(
                completion, self.index, prompt=prompt, began=progress.began, is_trained=progress.speaks_of_the_trained
            )
            self.speaker.record.add_turn(row)

    async def _take(self, completion: Completion, past: RecordedTurn | None = None) -> None:
        """Goes on with a turn that was sampled; `past`, if a former process has recorded it."""
        if self.speech.sums_up:
            self._shown(partial(self.speech.take_summary, completion))
            return
        action = self.speech.hear(completion)
        step = await self._step(action, None if past is None else past.step)
        if step is not None:
            self._account(step, action)
            await self._go_on(step)
            if past is None or past.step is None:
                await self._save()

    @property
    def _is_at_a_fork(self) -> bool:
        """True if its next turn is one of several, and it has not branched here yet."""
        here = self.speech.actions in self._rules.branch_after and self.speech.transcript.sampled_end
        return not self.over and self.leaves > 1 and bool(here) and all(fork.at != here for fork in self.forks)

    async def _branch_off(self) -> "Sequence[Conversation]":
        """The other branches from here on, while it goes on as the first one. Where its environment cannot be forked a
        branch is spoilt, and this one goes on.
        """
        of_each = shares(self.leaves, self._rules.branch_width)
        at = self.speech.transcript.sampled_end
        made = [
            replace(
                self,
                index=self.index + first,
                leaves=leaves,
                forks=(*self.forks, Fork(at=at, branch=branch)),
                inherited_invalid=self.invalid_actions,
                _metrics=defaultdict(list, {name: list(values) for name, values in self._metrics.items()}),
                _branches=[],
            )
            for branch, (first, leaves) in enumerate(zip(firsts(of_each), of_each, strict=True))
        ][1:]
        for each in made:
            each.speech = self.speech.copy()
            await each.take_fork_of(self)
        self.leaves, self.forks = of_each[0], (*self.forks, Fork(at=at, branch=0))
        self._branches += made
        return [each for each in made if not each.over]

    async def take_fork_of(self, other: "Conversation") -> None:
        """Goes on with a fork of the other one's environment; it is at fault where there is none."""
        fork = self.speaker.fork
        assert fork is not None, "environments that branch are forked"
        try:
            with self.speaker.progress.waiting_for("environment"):
                self.environment = await fork(other.environment)
            self.speaker.metrics.forked.labels(environment=self.name).inc()
        except Exception as error:  # noqa: BLE001 - the rollout boundary: whatever it raises becomes a record
            self.blame(fault_of_step(error, self.name, at=" in its fork"))

    async def sampled(self, first: Completion | None) -> Completion | None:
        """The next turn; None if there is no room for it at the generators."""
        if first is not None and first.done.is_set():
            return first
        with self.speaker.progress.waiting_for("generators"):
            if first is not None:
                await first.done.wait()
                return first
            (completion,) = self.speaker.progress.completions(1, end_of=self.speaker.language.end_of())
            completion.prefers = self.speech.transcript.sampled_by
            try:
                await self.speaker.sample(self._request(), [completion])
            except RequestTooLong:
                if not self.speech.transcript.turns:
                    raise
                self.cut_off("token_budget")
                return None
        return completion

    def _request(self) -> GenerateRequest:
        turn = self.speech.transcript.turns
        request = self.speaker.request if turn else first_request(self.speaker)
        return request.model_copy(
            update={
                "request_id": f"{request.request_id}/{self.index}.{turn}",
                "prompt_token_ids": self.speech.transcript.context,
                "sampling": self._sampling(request.sampling, turn),
                "routed_experts_from": self.speech.transcript.routed,
            }
        )

    def _sampling(self, first: Sampling, turn: int) -> Sampling:
        """Of a turn: no more tokens than the budget leaves, and a seed of its own."""
        room = self.speech.room
        most = first.max_tokens if room is None else min(first.max_tokens, room)
        seed = None if first.seed is None else (first.seed + self.index + turn * _TURN_STRIDE) % _SEEDS
        return first.model_copy(update={"max_tokens": most, "min_tokens": min(first.min_tokens, most), "seed": seed})

    async def _step(self, action: Action, recorded: str | None) -> Step | None:
        """The environment's answer; of a turn whose answer was `recorded` the same one, or it is at fault."""
        plain = self.speaker.language.is_plain
        if recorded is not None and self._not_restored is not None:
            return step_of(recorded)

        def check(given: object) -> Step:
            step = checked(given, plain=plain)
            if recorded is not None and text_of_step(step) != recorded:
                raise ReplayMismatch(OTHER_STEP)
            return step

        step = await self.answer(partial(self.environment.step, action), check)
        if step is None:
            self.excuse(recorded)
        elif recorded is None:
            await self.record_answer(partial(text_of_step, step))
        return step

    def excuse(self, recorded: str | None) -> None:
        """An environment that is at fault where it had answered is so by no fault of its task: nobody knows where it
        stands now.
        """
        if recorded is not None and self.fault is not None:
            self.fault = replace(self.fault, passing=True)

    async def record_answer(self, text: Callable[[], str]) -> None:
        """Takes the answer to its newest turn down, as JSON."""
        if self.speaker.record is not None:
            await self.speaker.record.add_answer(AnswerRow(conversation=self.index, step=text()))

    async def answer(self, step: Call[object], check: Callable[[object], T]) -> T | None:
        """The environment's answer, if it passes the check, which raises Nonsense; None if it is at fault."""
        try:
            return check(await self._called(step, what="the environment's step"))
        except Exception as error:  # noqa: BLE001 - the rollout boundary: whatever it raises becomes a record
            at = f" at {_brief(self.last_text)}, of a game that began with {_brief(self.opening_text)}"
            self.blame(fault_of_step(error, self.speaker.offered.name, at=at))
        return None

    def blame(self, fault: Fault) -> None:
        """End it by its environment's fault."""
        self.speaker.metrics.faults.labels(environment=self.speaker.offered.name, kind=fault.kind).inc()
        self.fault, self.over = fault, True

    def _account(self, step: Step, action: Action) -> None:
        """Add up what the step was worth."""
        self.earn(step.reward, metrics=step.metrics)
        self.judge_action(action, invalid=step.invalid)

    def earn(self, reward: float, *, metrics: Mapping[str, float]) -> None:
        """Adds what the last turn was worth."""
        self.speech.transcript.earn(checked_number(reward))
        for name, value in metrics.items():
            self._metrics[name].append(checked_number(value))

    def judge_action(self, action: Action, *, invalid: bool) -> None:
        """An action that is not allowed, or cannot be read, is counted and costs the penalty."""
        invalid = bool(invalid) or _unreadable(action, self._rules.action)
        self.speech.transcript.earn(-invalid * self._rules.invalid_penalty)
        self.invalid_actions += invalid

    async def _go_on(self, step: Step) -> None:
        if step.ends:
            self._end(step)
        elif self.speech.actions >= self._rules.max_turns:
            self.cut_off("turn_limit")
        elif self.has_erred_enough:
            self.cut_off("invalid_actions")
        elif self.speaker.offered.makes_room and (tokens := self.speech.tokens_beyond(step.observation)) is not None:
            await self._make_room(step, tokens)
        else:
            self.say(step.observation, state=step.state)

    def _end(self, step: Step) -> None:
        self.stop_reason, self.verification, self.over = step.stop, step.verification, True

    async def _make_room(self, step: Step, tokens: int) -> None:
        """Go on as the environment wants it, or end, before the prompt of the next turn has so many tokens."""
        speech, most = self.speech, self._rules.context_tokens
        assert most is not None, "only a bounded context is full"
        full = FullContext(speech.messages, step.observation, tokens=tokens, context_tokens=most)
        ask = cast("RoomMaker", self.environment).on_full
        found = await self.answer(partial(ask, full), lambda given: _WayOut(checked_way_out(given, speech)))
        if found is None:
            return
        self.speaker.metrics.full.labels(environment=self.name, answer=_WAYS_OUT[type(found.way)]).inc()
        match found.way:
            case ShorterContext(prompt):
                self._shown(partial(self._go_on_from, prompt, state=step.state))
            case SummaryRequest(request):
                self._shown(partial(speech.ask_for_summary, step.observation, state=step.state, request=request))
            case Step() as other:
                self.earn(other.reward, metrics=other.metrics)
                if other.ends:
                    self._end(other)
                elif speech.tokens_beyond(other.observation) is None:
                    self.say(other.observation, state=other.state)
                else:
                    self.cut_off("token_budget")
            case None if self._rules.history == "summarize":
                self.say(step.observation, state=step.state)
            case None:
                self.cut_off("token_budget")

    def _go_on_from(self, prompt: Prompt, *, state: str) -> None:
        if not self.speech.go_on_from(prompt, state=state):
            self.cut_off("token_budget")

    def say(self, observation: Prompt, *, state: str) -> None:
        """Show the policy what comes behind its last turn, if there is room for another one."""
        if self.speech.overflows(observation):
            self.speaker.metrics.note_overflow(self.name, characters_of(observation))
            self.cut_off("token_budget")
            return
        self._shown(partial(self.speech.say, observation, state=state))

    def _shown(self, show: Callable[[], None]) -> None:
        """Has `show` put the prompt of the next turn behind what there is."""
        try:
            show()
        except ChatTemplateError as error:
            self.blame(Fault("nonsense", f"what the environment says cannot be shown to the model: {error}"))
        else:
            if self.speech.room is not None and self.speech.room < 1:
                self.cut_off("token_budget")

    def cut_off(self, reason: CutOff) -> None:
        """End it where its environment would have gone on."""
        self.stop_reason, self.over = reason, True


def blame_unless_over(sides: "Iterable[Conversation]") -> None:
    """Lay conversations that stopped without an end at their environment's door: nobody may judge half of one."""
    for side in sides:
        if not side.over:
            logger.warning("environment %s: %s", side.name, LET_OUT)
            side.blame(Fault("raised", LET_OUT))


def as_opening(given: object) -> Opening:
    """The opening that `reset` returned. Raises Nonsense."""
    if isinstance(given, str | tuple):
        given = Opening(given)
    if not isinstance(given, Opening):
        raise Nonsense(
            f"the environment's reset returned {type(given).__name__}, expected an Opening, text or a tuple of messages"
        )
    check_prompt(given.prompt, field="Opening.prompt")
    check_fields(given, "state", "tools")
    return given


def checked(step: object, *, plain: bool) -> Step:
    """The step, if it is one. Raises Nonsense."""
    if not isinstance(step, Step):
        raise Nonsense(f"the environment's step returned {type(step).__name__}, expected a Step")
    check_said(step.observation, plain=plain)
    check_fields(step, "state", "stop", "verification", "metrics")
    check_numbers((("reward", step.reward), *step.metrics.items()))
    return step


@dataclass(frozen=True)
class _WayOut:
    """The answer of `on_full`, which may be None."""

    way: OnFull


def checked_way_out(given: object, speech: Speech) -> OnFull:
    """The answer of `on_full`, if it is one. Raises Nonsense."""
    plain = speech.language.is_plain
    match given:
        case None:
            return None
        case Step():
            return checked(given, plain=plain)
        case ShorterContext(prompt=prompt):
            if not prompt:
                raise Nonsense("the environment's on_full returned ShorterContext without a message, expected some")
            check_said(prompt, plain=plain, field="ShorterContext.prompt")
            return given
        case SummaryRequest(request):
            if plain or not _crosses(_TEXT[0], request):
                got = "plain text" if plain else f"the request {_sendable(request)}"
                raise Nonsense(
                    f"the environment's on_full returned SummaryRequest with {got}, expected messages and text"
                )
            return given
    raise Nonsense(
        f"the environment's on_full returned {type(given).__name__}, expected a ShorterContext, a SummaryRequest, a "
        "Step or None"
    )


def check_fields(given: Opening | Step | TurnOf | Round | AgentResult, *names: str) -> None:
    """Raises Nonsense, naming it, for a field that would not cross to another process as it is."""
    for name in names:
        value = getattr(given, name)
        if name in _MAPPINGS:
            expected = "a dict with names of text"
            fits = isinstance(value, Mapping) and all(isinstance(key, str) for key in value)
        else:
            adapter, expected = _FIELDS[name]
            fits = _crosses(adapter, value)
        if not fits:
            field = f"{type(given).__name__}.{name}"
            raise Nonsense(
                f"the environment's {field} is {type(value).__name__} {_sendable(value)}, expected {expected}"
            )


def _crosses(adapter: TypeAdapter[Any], value: object) -> bool:
    try:
        adapter.validate_python(value)
        adapter.dump_json(value)
    except (ValueError, TypeError, RecursionError):  # half a character is found when it is written
        return False
    return True


def _sendable(value: object) -> str:
    return f"{value!r:.60}".encode("utf-8", errors="backslashreplace").decode()


def check_said(said: Prompt, *, plain: bool, field: str = "Step.observation") -> None:
    """Raises Nonsense for an observation that cannot follow the opening."""
    check_prompt(said, field=field)
    if said and isinstance(said, str) != plain:
        kinds = ("messages", "plain text")
        raise Nonsense(f"the environment opened with {kinds[plain]} and went on with {kinds[not plain]}")


def check_prompt(said: Prompt, *, field: str) -> None:
    """Raises Nonsense for what neither text nor a tuple of messages is, as it would not cross to another process."""
    try:
        _SAID.validate_python(said)
    except ValidationError as error:
        fault = max(error.errors(include_url=False), key=lambda each: len(each["loc"]))
        raise Nonsense(_amiss(field, said, fault["loc"][1:], fault["input"])) from error
    if not isinstance(said, str) and said and said[-1].role == "assistant":
        raise Nonsense(f"the environment's {field} ends with a message of the assistant: {USER_LAST}")
    texts = {(): said} if isinstance(said, str) else {(at, "content"): each.content for at, each in enumerate(said)}
    for place, text in texts.items():
        if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
            raise Nonsense(_amiss(field, said, place, text))


def _amiss(field: str, said: object, place: Sequence[int | str], got: object) -> str:
    """Says what stands at a place in an observation, and what was expected there."""
    if not place:
        expected = "text without halves of characters, or a tuple of ChatMessage: write (ChatMessage(...),)"
        return f"the environment's {field} is {type(said).__name__} {said!r:.60}, expected {expected}"
    at, *inner = place
    expected = "a ChatMessage" if not inner else "text, without halves of characters"
    if inner == ["role"]:
        expected = "system, user, assistant or tool"
    name = ".".join((f"{field}[{at}]", *map(str, inner)))
    return f"the environment's {name} is {type(got).__name__} {got!r:.60}, expected {expected}"


def check_numbers(given: Iterable[tuple[object, object]]) -> None:
    """Raises Nonsense for a reward or metric, by its name, that is no finite number, or whose name cannot be sent."""
    for name, number in given:
        if not isinstance(name, str) or in_whole_characters(name) != name:
            raise Nonsense(f"the environment's step has a metric {name!r}, expected a name of whole characters")
        plain = number_of(number)
        if plain is None or not math.isfinite(plain):
            raise Nonsense(f"the environment's step gives {number!r} as its {name}, expected a finite number")


def _unreadable(action: Action, form: str) -> bool:
    if form == "tools":
        return bool(action.fault)
    return form != "text" and action.value is None


def _aggregated(values: Sequence[float], how: Aggregation) -> float:
    match how:
        case "sum":
            return sum(values)
        case "mean":
            return fmean(values)
        case "min":
            return min(values)
        case "max":
            return max(values)
        case "last":
            return values[-1]


def _place(error: BaseException) -> str:
    """Place of its origin in the user's own code: file, line and function."""
    frames = traceback.extract_tb(error.__traceback__)
    return f" ({frames[-1].filename}:{frames[-1].lineno}, in {frames[-1].name})" if frames else ""


def _brief(text: str) -> str:
    shown = repr(text)
    return shown if len(shown) <= _SHOWN_CHARS else f"{shown[:_SHOWN_CHARS]}..."
