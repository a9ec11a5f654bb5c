"""The sessions of agents: one for each trajectory, with an address and a key of its own.

request ─▶ place in the tree ─▶ sampling, in a task of the session ─▶ answer, to as many readers as ask again
                                   └─ goes on when the client is gone: it will ask again for the same
"""

import asyncio
import json
import logging
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal, Protocol, runtime_checkable

from env_service.agents.commands import ComputerUser
from env_service.agents.matching import Branch, RecordedTurns
from env_service.agents.messages import AgentMessage, MadeCall, call_id_of
from env_service.agents.results import MAX_COMPLETIONS
from env_service.environments.interface import AgentClient, AgentResult, Task, Tool
from env_service.environments.tokenization import ChatTemplateError, TemplateArguments
from env_service.environments.tool_formats import ParsedTurn, shown_until
from env_service.rollouts.completions import Completion
from env_service.rollouts.conversation import Speaker
from env_service.rollouts.outcomes import RequestTooLong, RolloutFailure
from env_service.rollouts.speech import Language, cut_at_stop
from protocol.generation import Sampling
from protocol.trajectories import CutOff
from services.user_loop import at_home

logger = logging.getLogger(__name__)

OtherSampling = Literal["refuse", "ignore"]
"""Treatment of a request that wants other tokens to be likely than the run samples with."""

STARVED_S = 30.0
"""A turn without a token for so long is one that generators are to blame for, and not whoever gives it up."""
_SEEDS = 1 << 63
_STRIDE = 0xD1B54A32D192ED03 % _SEEDS


@runtime_checkable
class OwnSampling(Protocol):
    """An agent that says itself what becomes of its requests that want other sampling: it is somebody else's code."""

    other_sampling: OtherSampling


class CallRefused(Exception):
    """A request of an agent that is not served: an HTTP status, OpenAI's code for it, and the field it is about."""

    def __init__(self, status: int, code: str, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param


@dataclass(frozen=True, kw_only=True)
class AgentRequest:
    """A request, whatever API it came by. `max_tokens` of None takes what the lease allows. `ignored` names fields
    that wanted other sampling than the lease's, and did not get it. `template_arguments` are what it tells the chat
    template, over what the run and the environment do. `no_thinking` is the field by which it wants none, if it does.
    """

    messages: tuple[AgentMessage, ...]
    tools: tuple[Tool, ...] = ()
    calls_wanted: bool = True
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    template_arguments: TemplateArguments = field(default_factory=dict)
    no_thinking: str = ""
    ignored: tuple[str, ...] = ()
    digest: str = ""
    again: bool = False


@dataclass(eq=False)
class PendingTurn:
    """A turn that is being sampled, or was. `reply` is set when it is finished, `refusal` when it cannot be."""

    id: str
    asked: AgentRequest
    branch: Branch
    completion: Completion
    language: Language
    done: asyncio.Event = field(default_factory=asyncio.Event)
    reply: AgentMessage | None = None
    refusal: CallRefused | None = None
    readers: int = 0
    _news: asyncio.Event = field(default_factory=asyncio.Event)
    _grown_at: float = field(default_factory=lambda: asyncio.get_running_loop().time())

    def __post_init__(self) -> None:
        self.completion.on_growth = self._tell

    def stalled(self, for_s: float) -> bool:
        """True if it is unfinished, and no token of it has come for so many seconds."""
        return not self.done.is_set() and asyncio.get_running_loop().time() - self._grown_at >= for_s

    def _tell(self) -> None:
        self._grown_at = asyncio.get_running_loop().time()
        self._news.set()
        self._news = asyncio.Event()

    @property
    def prompt(self) -> tuple[int, ...]:
        """The tokens that the policy was given."""
        parent = self.branch.parent
        return (*(parent.context if parent else ()), *self.branch.given)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Within it somebody waits for it."""
        self.readers += 1
        try:
            yield
        finally:
            self.readers -= 1

    async def texts(self) -> AsyncIterator[str]:
        """The answer's text in pieces, until it is done. Raises CallRefused if it cannot be."""
        sent = ""
        while not self.done.is_set():
            news = self._news
            text = self.safe_text
            if len(text) > len(sent) and text.startswith(sent):
                yield text[len(sent) :]
                sent = text
            if not self.done.is_set():
                await news.wait()
        if self.refusal is not None:
            raise self.refusal
        assert self.reply is not None, "an answer that is done has its reply"
        if self.reply.text.startswith(sent) and len(self.reply.text) > len(sent):
            yield self.reply.text[len(sent) :]

    def end(self) -> None:
        """Nothing follows."""
        self.done.set()
        self._tell()

    @property
    def text(self) -> str:
        """The sampled text so far, as the agent may read it: without the end of turn and the stop text."""
        said = self.language.tokenization.said(self.completion.token_ids[: self.completion.settled])
        return cut_at_stop(said, self.asked.stop)

    @property
    def safe_text(self) -> str:
        """The part of an unfinished turn that can be shown: what may yet become a call is held back, and half a
        character.
        """
        if not (self.asked.tools and self.asked.calls_wanted):
            return self.text.rstrip("\ufffd")
        ids = self.completion.token_ids[: self.completion.settled]
        whole = cut_at_stop(self.language.text(ids, special=True), self.asked.stop)
        return (
            _without(whole[: shown_until(whole, formats=self.language.tool_formats)], self.language)
            .rstrip()
            .rstrip("\ufffd")
        )

    def read_off(self, *, taken: Collection[str] = ()) -> AgentMessage:
        """The finished turn as a message. Of calls with a fault all is text: clients know no others than they offer.
        Calls keep the ids that the policy wrote, if none is `taken`; else they get some that all templates take.
        """
        completion, language = self.completion, self.language
        ids = completion.token_ids[:-1] if language.ended_itself(completion) else completion.token_ids
        whole = cut_at_stop(language.text(ids, special=True), self.asked.stop)
        wanted = self.asked.tools and self.asked.calls_wanted
        reading = language.reading(whole, tools=self.asked.tools) if wanted else ParsedTurn(whole)
        self.branch.invalid = bool(reading.fault)
        if reading.fault or not reading.calls:
            return AgentMessage("assistant", self.text)
        written = [call.id for call in reading.calls]
        fresh = all(written) and len({*written, *taken}) == len(written) + len(taken)
        calls = tuple(
            MadeCall(
                call.id if fresh else call_id_of(f"{self.id}/{number}"),
                call.name,
                json.dumps(call.arguments, ensure_ascii=False),
            )
            for number, call in enumerate(reading.calls)
        )
        return AgentMessage("assistant", _without(reading.text, language).rstrip(), calls)


@dataclass(eq=False)
class AgentSession:
    """An agent's access to the policy. `limits` bound it; it is `over` when its trajectory is made, or given up.
    `told` are the environments and fields of which the log says already that they are ignored, in any session.
    `computer` runs commands on the computer of its task, if that has one.
    """

    id: str
    key: str
    url: str
    model: str
    task: Task
    speaker: Speaker
    index: int
    calls_at_once: int
    offer: Callable[[], Awaitable[None]]
    other_sampling: OtherSampling = "refuse"
    told: set[tuple[str, str]] = field(default_factory=set)
    computer: ComputerUser | None = None
    cut_off: CutOff | None = None
    over: bool = False
    stopping: bool = False
    under_way: int = 0
    attached: int = 0
    unclaimed: bool = False
    _touched: float = 0.0
    _made: int = 0
    _works: set[asyncio.Task[None]] = field(default_factory=set)
    _call_ids: set[str] = field(default_factory=set)
    _known: dict[str, list[PendingTurn]] = field(default_factory=lambda: defaultdict(list))

    def __post_init__(self) -> None:
        self.recorded = RecordedTurns(self.speaker.language, self.speaker.language.now)
        self.failed: asyncio.Future[RolloutFailure] = asyncio.get_running_loop().create_future()
        self.posted: asyncio.Future[AgentResult] = asyncio.get_running_loop().create_future()

    def client(self, *, seed: int) -> AgentClient:
        """The client that the agent is given."""

        home = asyncio.get_running_loop()
        # The agent may run in another loop.
        posted = partial(at_home, home, lambda: asyncio.shield(self.posted))
        offer = partial(at_home, home, self.offer)
        return AgentClient(
            base_url=f"{self.url}/v1",
            key=self.key,
            model=self.model,
            seed=seed,
            posted=posted,
            offer=offer,
            room=self.room,
            max_turns=self._max_turns,
            cut_off=lambda: self.cut_off,
        )

    @property
    def _max_turns(self) -> int:
        return min(self.speaker.language.rules.max_turns, MAX_COMPLETIONS)

    def room(self) -> int:
        """Tokens that may still come behind the newest turn: of the budget, or of the model's context."""
        language, turns = self.speaker.language, self.recorded.turns
        most = language.tokenization.context_tokens
        budget = language.rules.trajectory_tokens
        used = len(turns[-1].context) if turns else 0
        return max(0, (most if budget is None else min(budget, most)) - used)

    def post(self, result: AgentResult) -> None:
        """Take the agent's word. Raises CallRefused if it has said one before."""
        if self.posted.done():
            raise CallRefused(409, "already_rewarded", "this session has its reward already")
        self.posted.set_result(result)

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Within it a request is served: the session is not idle. Raises CallRefused for one too many."""
        if self.under_way >= self.calls_at_once:
            raise CallRefused(
                429, "rate_limit_exceeded", f"{self.under_way} calls of this session are in flight already"
            )
        self.under_way += 1
        try:
            yield
        finally:
            self.under_way -= 1
            self._touched = asyncio.get_running_loop().time()

    @property
    def starved(self) -> bool:
        """True if the agent has waited in vain for one of its turns: no generator samples it."""
        return any(turn.stalled(STARVED_S) for turns in self._known.values() for turn in turns)

    async def silence(self, idle_s: float) -> None:
        """Return when nobody has asked for anything in so many seconds."""
        clock = asyncio.get_running_loop().time
        self._touched = clock()
        while (left := self._touched + idle_s - clock()) > 0 or self.under_way or self.unclaimed:  # noqa: ASYNC110
            await asyncio.sleep(max(left, idle_s / 8))

    def answer(self, asked: AgentRequest) -> PendingTurn:
        """The answer to a request: a new one, or for one that is sent again that of the first. Raises CallRefused."""
        found = self._first(asked) if asked.again else None
        if found is not None:
            self.attached += 1
            return found
        self._check_room()
        language = self._language(asked)
        try:
            self._check_length(asked, language)
        except CallRefused:
            self.cut_off = self.cut_off or "token_budget"
            raise
        with _shown_messages():
            branch = self.recorded.place(asked.messages, asked.tools, language)
        self._note_ignored(asked)
        answering = self._begun(asked, branch, language)
        self._known[asked.digest].append(answering)
        work = asyncio.get_running_loop().create_task(self._sample(answering))
        self._works.add(work)
        work.add_done_callback(self._works.discard)
        return answering

    def count(self, asked: AgentRequest) -> int:
        """Number of tokens that the policy would be given for a request. Raises CallRefused."""
        language = self._language(asked)
        self._check_length(asked, language)
        with _shown_messages():
            return self.recorded.count(asked.messages, asked.tools, language)

    def _language(self, asked: AgentRequest) -> Language:
        """The language of the answer. Raises CallRefused for what the chat template does not read."""
        language = self.speaker.language
        told = {**_told_not_to_think(asked, language), **asked.template_arguments}
        if not told:
            return language
        try:
            language.tokenization.template.check_arguments(told)
        except ChatTemplateError as error:
            name = "chat_template_kwargs"
            raise CallRefused(400, "unsupported_value", f"{name}: {error}; leave it out", param=name) from error
        return language.with_arguments(told)

    def _check_length(self, asked: AgentRequest, language: Language) -> None:
        """Raises CallRefused for messages of which the beginning alone is longer than the model's context."""
        text = "\n".join([*(each.text for each in asked.messages), *(json.dumps(dict(tool)) for tool in asked.tools)])
        most = language.tokenization.context_tokens
        if language.tokenization.beginning_beyond(text, most) is not None:
            self.speaker.metrics.note_overflow(self.speaker.offered.name, len(text))
            raise _too_long(f"the messages have {len(text)} characters, and the model takes {most} tokens")

    def _note_ignored(self, asked: AgentRequest) -> None:
        environment = self.speaker.offered.name
        for name in asked.ignored:
            self.speaker.metrics.ignored_fields.labels(environment=environment, field=name).inc()
            if (environment, name) not in self.told:
                self.told.add((environment, name))
                logger.warning(
                    "agents of %s set %s, which is ignored (other_sampling): the run's own sampling holds; each such "
                    "request is counted in headway_env_service_agent_fields_ignored_total",
                    environment,
                    name,
                )

    def _first(self, asked: AgentRequest) -> PendingTurn | None:
        """Of those that were asked alike: one that nobody reads and nobody has, else the newest."""
        known = self._known.get(asked.digest, [])
        waiting = [each for each in known if not each.readers and not each.branch.delivered]
        return waiting[0] if waiting else known[-1] if known else None

    def _check_room(self) -> None:
        rules = self.speaker.language.rules
        if self.over or self.posted.done():
            raise CallRefused(404, "session_over", "this session has ended")
        if self._made >= self._max_turns:
            self.cut_off = self.cut_off or "turn_limit"
            raise CallRefused(400, "turn_limit", f"this session has had its {self._made} calls")
        invalid = self.recorded.invalid
        if rules.max_invalid is not None and invalid >= rules.max_invalid:
            self.cut_off = self.cut_off or "invalid_actions"
            raise CallRefused(400, "turn_limit", f"this session has had {invalid} answers with calls that are none")

    def _begun(self, asked: AgentRequest, branch: Branch, language: Language) -> PendingTurn:
        speaker, rules = self.speaker, language.rules
        language = replace(language, rules=rules.model_copy(update={"stop": (*rules.stop, *asked.stop)}))
        (completion,) = speaker.progress.completions(1, end_of=language.end_of())
        before = branch.parent.completion if branch.parent is not None else None
        completion.prefers = next(reversed(before.generator_ids), "") if before is not None else ""
        self._made += 1
        branch.number, branch.name = self._made, f"{self.id}-{self._made}"
        return PendingTurn(branch.name, asked, branch, completion, language)

    async def _sample(self, answering: PendingTurn) -> None:
        try:
            prompt = answering.branch.context
            sampling = self._sampling(answering.asked, len(prompt), answering.branch.number)
            request = self.speaker.request.model_copy(
                update={
                    "request_id": f"{self.speaker.request.request_id}/{self.index}.{answering.id.rpartition('-')[2]}",
                    "prompt_token_ids": prompt,
                    "sampling": sampling,
                    "routed_experts_from": answering.branch.routed,
                }
            )
            with self.speaker.progress.waiting_for("generators"):
                await self.speaker.sample(request, [answering.completion])
            self._finish(answering)
        except RequestTooLong as error:
            self.cut_off = self.cut_off or "token_budget"
            answering.refusal = _too_long(str(error))
        except CallRefused as refusal:
            answering.refusal = refusal
        except asyncio.CancelledError:
            answering.refusal = self._ended()
            raise
        except RolloutFailure as failure:
            answering.refusal = CallRefused(410, "session_over", "the turn could not be sampled: the session has ended")
            if not self.failed.done():
                self.failed.set_result(failure)
        finally:
            self._lighten(answering)
            answering.end()

    def _lighten(self, answering: PendingTurn) -> None:
        """Let go of what nobody will ask for: a session may have many calls, and each holds the whole history."""
        answering.asked = replace(answering.asked, messages=())
        if answering.reply is None:
            answering.branch.given = ()

    def _sampling(self, asked: AgentRequest, given: int, turn: int) -> Sampling:
        """Of a turn: no more tokens than the request, the lease and the budget leave, and a seed of its own."""
        whole, rules = self.speaker.request.sampling, self.speaker.language.rules
        most = min(whole.max_tokens, asked.max_tokens or whole.max_tokens)
        if rules.trajectory_tokens is not None:
            most = min(most, rules.trajectory_tokens - given)
        if most < 1:
            self.cut_off = self.cut_off or "token_budget"
            raise _too_long(f"{given} tokens are given, and {rules.trajectory_tokens} are the most")
        seed = None if whole.seed is None else (whole.seed + self.index + turn * _STRIDE) % _SEEDS
        return whole.model_copy(update={"max_tokens": most, "min_tokens": min(whole.min_tokens, most), "seed": seed})

    def _finish(self, answering: PendingTurn) -> None:
        if self.over:
            answering.refusal = self._ended()
            return
        answering.branch.completion = answering.completion
        answering.reply = answering.read_off(taken=self._call_ids)
        self._call_ids |= {call.id for call in answering.reply.calls}
        asked = answering.asked
        self.recorded.record(
            answering.branch,
            answering.reply,
            messages=asked.messages,
            tools=asked.tools,
            language=answering.language,
        )

    def _ended(self) -> CallRefused:
        """The answer to who still waits for a turn that will not be finished."""
        if self.stopping:
            return CallRefused(503, "stopping", "the env-service stops: ask another one for a task")
        return CallRefused(410, "session_over", "this session has ended before the turn was sampled")

    async def close(self, *, stopping: bool = False) -> None:
        """Stop what is being sampled; nothing is served from now on. `stopping`: for the whole process ends."""
        self.over, self.stopping = True, stopping
        works = list(self._works)
        for work in works:
            work.cancel()
        await asyncio.gather(*works, return_exceptions=True)


@contextmanager
def _shown_messages() -> Iterator[None]:
    """Within it messages are shown to the model. Raises CallRefused for what its chat template cannot show."""
    try:
        yield
    except ChatTemplateError as error:
        raise CallRefused(400, "invalid_messages", str(error), param="messages") from error


def _without(text: str, language: Language) -> str:
    """The text without special tokens, which no client shall see or send back; thoughts are in tags."""
    text = language.tokenization.in_tags(text)
    for special in language.tokenization.special_tokens:
        text = text.replace(special, "")
    return text


def _told_not_to_think(asked: AgentRequest, language: Language) -> TemplateArguments:
    """Tells the template of a request that wants no thinking so. Raises CallRefused where it cannot be told."""
    name, also = asked.no_thinking, asked.template_arguments
    if not name:
        return {}
    try:
        told = language.tokenization.template.without_thinking()
    except ChatTemplateError as error:
        raise CallRefused(400, "unsupported_value", f"{name}: {error}; leave the field out", param=name) from error
    if contrary := [each for each, value in told.items() if also.get(each, value) != value]:
        message = f"{name}: it wants no thinking, and chat_template_kwargs sets {contrary[0]}; leave one of them out"
        raise CallRefused(400, "unsupported_value", message, param=name)
    return told


def _too_long(text: str) -> CallRefused:
    # Not retried by clients, and known to agents that shorten their history then.
    return CallRefused(400, "context_length_exceeded", f"no room for an answer: {text}", param="messages")
