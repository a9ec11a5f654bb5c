"""Completions as they arrive, part by part, from one generator or from several in turn.

What is asked for after a failure: the completions that are not finished, each from the tokens that it has.

Why this keeps the distribution. Each token is drawn from the policy given those before it, whoever draws it, so a
completion that goes on elsewhere is a sample of the policy like any other; its tokens carry their own versions and
logprobs. What would bias a group is a choice that looks at what was sampled. To keep the finished completions and draw
the others *anew* is such a choice: the short ones are finished at a failure, the long ones get a second chance to be
short. Here nothing that was received is thrown away, so nothing is chosen, and the finished ones stay.

What remains: tokens that a generator had sampled and not yet sent when it died, fewer than its `stream_interval` for
each completion, are drawn again, and a completion that ended among them was sent at once. A hand-back loses none where
the engine answers.

How far a rollout has come, for heartbeats and for the reason of a timeout.
"""

import asyncio
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass, field

from env_service.checkpoints.records import LeaseRecord
from env_service.environments.interface import Task
from env_service.rollouts.routing import TokenRouting
from protocol.generation import GeneratePart, GenerateRequest, Sampling
from protocol.messages import WaitsFor
from protocol.model import PolicyVersion
from protocol.trajectories import FinishReason, VersionSpan

_SEEDS = 1 << 63
_SEED_STRIDE = 0x9E3779B97F4A7C15 % _SEEDS
"""Odd, and far from small numbers: seeds of different prefixes differ in their low bits too."""
_FIRST_TO_NAME: Sequence[WaitsFor] = ("generators", "environment", "rewards", "host")


class BadAnswer(ValueError):
    """A generator sent what cannot belong to its answer; the text says what."""


EndOf = Callable[[Sequence[int]], int | None]
"""Tells of a completion's tokens how many there are up to its end, if its text says that it has ended."""


@dataclass
class Completion:
    """A completion of a request so far: n token ids, their n logprobs, the versions that sampled them,
    and the generators that did, in order.

    A request for it begins with `begin_request`; parts count their spans from the first token of that request.
    `end_of` tells where it ends besides where the generator does; `done` is set when it has ended. `asked_at` and
    `ended_at` are seconds of the monotonic clock. After each part, `on_growth` is called. `prefers` is the generator
    that holds what it goes on from; of those that wait for one, the lowest `rank` goes first. `routing` counts from the
    first of the `prompt_tokens` that its first request gave, begins where that asked for it, and ends before its last
    token.
    """

    index: int
    token_ids: list[int] = field(default_factory=list)
    behavior_logprobs: list[float] = field(default_factory=list)
    version_spans: tuple[VersionSpan, ...] = ()
    generator_ids: tuple[str, ...] = ()
    finish_reason: FinishReason | None = None
    handed_back: bool = False
    end_of: EndOf | None = None
    prefers: str = ""
    rank: tuple[int, ...] = ()
    done: asyncio.Event = field(default_factory=asyncio.Event)
    asked_at: float | None = None
    ended_at: float | None = None
    ended_by_text: bool = False
    prompt_tokens: int = 0
    routing: TokenRouting = field(default_factory=TokenRouting, repr=False)
    on_growth: Callable[[], None] = field(default=lambda: None, repr=False)
    _kept: int = 0
    _kept_spans: tuple[VersionSpan, ...] = ()

    @property
    def settled(self) -> int:
        """Number of its tokens that stay, whatever becomes of the present request: those that have a version."""
        return min(_stamped(self.version_spans), len(self.token_ids))

    @property
    def ended(self) -> bool:
        """True if the present request says no more about it."""
        return self.finish_reason is not None or self.handed_back

    def begin_request(self) -> None:
        """Keep what was received and has a version, and expect the tokens behind it."""
        self._kept = self.settled
        del self.token_ids[self._kept :], self.behavior_logprobs[self._kept :]
        self.version_spans = self._kept_spans = tuple(_cut(self.version_spans, self._kept))
        self.generator_ids = self.generator_ids if self._kept else ()
        self.routing.cut(self.prompt_tokens + self._kept - 1 if self._kept else 0)
        self.handed_back = False

    def begin_anew(self) -> None:
        """Forget everything."""
        self.token_ids, self.behavior_logprobs, self.version_spans = [], [], ()
        self.finish_reason = None
        self.done.clear()
        self.begin_request()

    def finish(self, reason: FinishReason) -> None:
        """Nothing follows."""
        self.finish_reason, self.ended_at = reason, time.monotonic()
        self.done.set()

    def extend(self, part: GeneratePart, *, generator_id: str) -> None:
        """Append a part. Raises BadAnswer for one that cannot belong here, and takes nothing of it."""
        if self.ended_by_text:
            return
        if self.ended:
            raise BadAnswer(f"the generator went on with completion {part.index} after its end")
        if len(part.token_ids) != len(part.behavior_logprobs):
            raise BadAnswer(
                f"the generator sent {len(part.token_ids)} tokens with {len(part.behavior_logprobs)} logprobs"
            )
        if not all(map(math.isfinite, part.behavior_logprobs)):
            raise BadAnswer("the generator sent a logprob that is not finite")
        spans = self.version_spans
        if part.version_spans:
            spans = _joined(self._kept_spans, part.version_spans, shift=self._kept)
        self._route(part)
        if part.finish_reason in ("stop", "length"):
            _check_whole(len(self.token_ids) + len(part.token_ids), spans)
            self.finish(part.finish_reason)
        self.handed_back = part.finish_reason == "abort"
        self.token_ids += part.token_ids
        self.behavior_logprobs += part.behavior_logprobs
        self.version_spans = spans
        if part.token_ids and generator_id not in self.generator_ids[-1:]:
            self.generator_ids += (generator_id,)
        self._end_by_text()
        self.on_growth()

    def _route(self, part: GeneratePart) -> None:
        """Take down its routed experts. Raises BadAnswer."""
        told = part.routed_experts
        if told is None:
            return
        given = self.prompt_tokens + len(self.token_ids) + len(part.token_ids)
        if told.end > given:
            raise BadAnswer(f"the generator told the routed experts of {told.end} tokens, and there are {given}")
        try:
            self.routing.add(told.pieces())
        except ValueError as error:
            raise BadAnswer(f"the generator sent {error}") from error

    def _end_by_text(self) -> None:
        """Leave out what was sampled behind the end; that it stops there is told by the tokens before it alone."""
        end = None if self.end_of is None else self.end_of(self.token_ids)
        if end is None or _stamped(self.version_spans) < end:
            return
        del self.token_ids[end:], self.behavior_logprobs[end:]
        self.version_spans = tuple(_cut(self.version_spans, end))
        self.routing.cut(self.prompt_tokens + end - 1)
        self.handed_back, self.ended_by_text = False, True
        self.finish("stop")


def _check_whole(length: int, spans: Sequence[VersionSpan]) -> None:
    """A finished completion has tokens, every one of them with a version."""
    if length == 0:
        raise BadAnswer("the generator finished a completion that has no token")
    stamped = _stamped(spans)
    if stamped != length:
        raise BadAnswer(f"the generator stamped versions on {stamped} of {length} tokens")


def _stamped(spans: Iterable[VersionSpan]) -> int:
    """Number of tokens, from the first one on, that have a version."""
    end = 0
    for span in spans:
        if span.start != end:
            break
        end = span.end
    return end


def _cut(spans: Iterable[VersionSpan], length: int) -> Iterable[VersionSpan]:
    for span in spans:
        if span.start < length:
            yield span.model_copy(update={"end": min(span.end, length)})


def _joined(kept: tuple[VersionSpan, ...], new: Sequence[VersionSpan], *, shift: int) -> tuple[VersionSpan, ...]:
    """The new spans behind the kept ones, `shift` tokens later; two that meet become one if one process made both."""
    if not shift:
        return tuple(new)
    moved = [span.moved(shift) for span in new]
    if moved and kept and _goes_on(kept[-1], moved[0]):
        moved[0] = moved[0].model_copy(update={"start": kept[-1].start})
        kept = kept[:-1]
    return (*kept, *moved)


def _goes_on(span: VersionSpan, following: VersionSpan) -> bool:
    same = (span.version, span.instance, span.cache) == (following.version, following.instance, following.cache)
    return same and span.end == following.start


def _age(version: str) -> tuple[int, int]:
    """Order by number: a restarted learner's number names the same policy as before."""
    parsed = PolicyVersion.parse(version)
    return parsed.number, parsed.incarnation


@dataclass(frozen=True)
class CompletionPiece:
    """Completions asked for in one request: several that have no token yet, or one that goes on."""

    completions: tuple[Completion, ...]

    @property
    def received(self) -> int:
        """Tokens of all of them so far."""
        return sum(len(completion.token_ids) for completion in self.completions)

    @property
    def ended(self) -> bool:
        return all(completion.ended for completion in self.completions)

    @property
    def needs_no_more(self) -> bool:
        """True if the generator would go on although all have ended, one of them by its text."""
        return self.ended and any(completion.ended_by_text for completion in self.completions)

    def begin(self, whole: GenerateRequest) -> GenerateRequest:
        """The request for this piece of `whole`."""
        for completion in self.completions:
            completion.prompt_tokens = len(whole.prompt_token_ids)
            completion.routing.start = whole.routed_experts_from
            completion.begin_request()
        first = self.completions[0]
        prefix = first.token_ids
        return whole.model_copy(
            update={
                "prompt_token_ids": (*whole.prompt_token_ids, *prefix),
                "n": len(self.completions),
                "sampling": _sampling(whole.sampling, index=first.index, prefix=len(prefix)),
                "routed_experts_from": min(completion.routing.end for completion in self.completions),
            }
        )

    def take(self, part: GeneratePart, *, generator_id: str) -> None:
        """Add a part to its completion. Raises BadAnswer for one that breaks the contract."""
        if part.index >= len(self.completions):
            raise BadAnswer(f"the generator sent completion {part.index} of a request for {len(self.completions)}")
        self.completions[part.index].extend(part, generator_id=generator_id)


def rest_of(piece: CompletionPiece, sampling: Sampling) -> list[CompletionPiece]:
    """The request for what is still missing; empty if all is finished."""
    if not continues(sampling) and not all(completion.finish_reason for completion in piece.completions):
        for completion in piece.completions:
            completion.begin_anew()
        return [piece]
    for completion in piece.completions:
        completion.begin_request()
        reason = _reason_to_end(completion.token_ids, sampling)
        if completion.finish_reason is None and reason is not None:
            completion.finish(reason)
    open_ones = [completion for completion in piece.completions if completion.finish_reason is None]
    empty = [completion for completion in open_ones if not completion.token_ids]
    return _together(empty, seeded=sampling.seed is not None) + [
        CompletionPiece((completion,)) for completion in open_ones if completion.token_ids
    ]


def continues(sampling: Sampling) -> bool:
    """True if a prefix may move into the prompt: some penalties look at sampled tokens only, and would not see it."""
    return sampling.presence_penalty == 0 and sampling.frequency_penalty == 0


def _reason_to_end(token_ids: Sequence[int], sampling: Sampling) -> FinishReason | None:
    """Reason for which a completion that was cut off here has nothing to follow; None if it goes on."""
    if token_ids and token_ids[-1] in sampling.stop_token_ids and len(token_ids) >= sampling.min_tokens:
        return "stop"
    return "length" if len(token_ids) >= sampling.max_tokens else None


def _together(empty: Sequence[Completion], *, seeded: bool) -> list[CompletionPiece]:
    """A single request for all; with a seed, which counts up within a request, one for each row of neighbours."""
    rows: list[list[Completion]] = []
    for completion in empty:
        if rows and (not seeded or rows[-1][-1].index + 1 == completion.index):
            rows[-1].append(completion)
        else:
            rows.append([completion])
    return [CompletionPiece(tuple(row)) for row in rows]


def _sampling(whole: Sampling, *, index: int, prefix: int) -> Sampling:
    """The rest of a completion. Its seed is one of its own: the same draws again would depend on the prefix."""
    seed = None if whole.seed is None else (whole.seed + index + prefix * _SEED_STRIDE) % _SEEDS
    return whole.model_copy(
        update={
            "max_tokens": whole.max_tokens - prefix,
            "min_tokens": max(0, whole.min_tokens - prefix),
            "seed": seed,
        }
    )


class RolloutProgress:
    """Progress of a rollout: written by its conversations, read when a heartbeat is due. `rank` is that of its
    lease, the lowest first. One that goes on has had `elapsed_s` seconds in a former process, and `oldest` is the
    oldest version that sampled a token there.
    """

    speaks_of_the_trained = True
    """True if the age of what it samples counts."""

    def __init__(self, *, rank: tuple[int, ...] = (), oldest: str | None = None, elapsed_s: float = 0.0) -> None:
        self._rank = rank
        self._completions: list[Completion] = []
        self._oldest = oldest
        self.elapsed_s = elapsed_s
        self.record: LeaseRecord | None = None
        """Of its turns; None if none are recorded."""
        self._waiting: Counter[WaitsFor] = Counter()
        self.waits_for: WaitsFor = "environment"
        """For whom the rollout waits: of several, the generators are named first."""
        self.began = self.waits_since = self._named_at = time.monotonic()
        self._waited_s: dict[WaitsFor, float] = {}
        self.scoring_s: tuple[float, float] | None = None
        """Beginning and end of its scoring, in seconds since it began."""
        self.task: Task | None = None
        """The task that is rolled out, once it was made."""
        self.cut_short = False
        """True if its time was over before it was."""
        self.said = ""
        """Reason for which the host of its environment was last waited for."""

    def begin(self) -> float:
        """Counts its times from now on, or from when it had begun; that is returned."""
        self._named_at = time.monotonic()
        self.began = self._named_at - self.elapsed_s
        return self.began

    def scored(self, asked_at: float) -> None:
        """Its verifiers, which were asked at a time of the monotonic clock, have answered."""
        began, ended = (seconds_since(self.began, at) for at in (asked_at, time.monotonic()))
        self.scoring_s = None if began is None or ended is None else (began, ended)

    def completions(self, count: int, *, end_of: EndOf | None = None) -> Sequence[Completion]:
        """New completions, to be sampled."""
        self._completions = [each for each in self._completions if not self._counted(each)]
        now = time.monotonic()
        made = tuple(Completion(index, end_of=end_of, rank=self._rank, asked_at=now) for index in range(count))
        self._completions += made
        return made

    def _counted(self, completion: Completion) -> bool:
        """True if it has ended, so that its versions are known for good."""
        if not completion.done.is_set():
            return False
        self._oldest = _oldest(self._oldest, completion)
        return True

    def oldest_version(self) -> str | None:
        """The oldest version that sampled a token so far, in any turn; None before the first."""
        oldest = self._oldest
        for completion in self._completions:
            oldest = _oldest(oldest, completion)
        return oldest

    def waiting_for(self, whom: WaitsFor) -> AbstractContextManager[None]:
        """Within it one of the rollout's conversations waits, however that ends."""
        return _Wait(self, whom)

    @asynccontextmanager
    async def within(self, seconds: float) -> AsyncIterator[None]:
        """End what is done in it after so many seconds of the rollout, by TimeoutError; whom it waited for until then
        stays as it was.
        """
        loop = asyncio.get_running_loop()
        end = loop.time() + max(0.0, seconds - self.elapsed_s)
        at_end = loop.call_at(end, self._cut_short)
        try:
            async with asyncio.timeout_at(end):
                yield
        finally:
            at_end.cancel()

    def found(self) -> None:
        """The host of its environment is there, which works now."""
        if self.waits_for == "host" and not self._waiting["host"]:
            self._name("environment")
            self.waits_since = self._named_at

    def longest_wait(self) -> tuple[WaitsFor, float]:
        """For whom it waited the longest in this process, and for how many seconds; of one that was cut short, until
        then.
        """
        return max(self._waited_s.items(), key=lambda each: each[1], default=(self.waits_for, 0.0))

    def _name(self, whom: WaitsFor) -> None:
        now = time.monotonic()
        self._waited_s[self.waits_for] = self._waited_s.get(self.waits_for, 0.0) + now - self._named_at
        self.waits_for, self._named_at = whom, now

    def _cut_short(self) -> None:
        self._name(self.waits_for)
        self.cut_short = True

    def count(self, whom: WaitsFor, by: int) -> None:
        """So many more conversations wait for them. What ends since its time is over changes nothing."""
        if self.cut_short:
            return
        self._waiting[whom] += by
        before = self.waits_for
        named = next((each for each in _FIRST_TO_NAME if self._waiting[each]), before)
        if named != before:
            self._name(named)
        goes_on = whom == "host" and before == "host"  # between two tries it is waited for, too
        if self.waits_for != before or (self._waiting[self.waits_for] <= 1 and not goes_on):
            self.waits_since = time.monotonic()


class _Wait(AbstractContextManager[None]):
    """A class, since it is entered at every step: a generator costs three times as much."""

    __slots__ = ("_progress", "_whom")

    def __init__(self, progress: RolloutProgress, whom: WaitsFor) -> None:
        self._progress, self._whom = progress, whom

    def __enter__(self) -> None:
        self._progress.count(self._whom, 1)

    def __exit__(self, *_: object) -> None:
        self._progress.count(self._whom, -1)


def seconds_since(began: float | None, at: float | None) -> float | None:
    """Seconds from one time of the monotonic clock to another, to the millisecond; None if one is not known."""
    return None if began is None or at is None else round(max(0.0, at - began), 3)


def _oldest(version: str | None, completion: Completion) -> str | None:
    versions = {span.version for span in completion.version_spans} | ({version} if version else set())
    return min(versions, key=_age, default=None)


class SilentProgress(RolloutProgress):
    """Progress of what nobody trains, such as a frozen player: it is waited for like any other, and the versions that
    sampled its tokens are nobody's.
    """

    speaks_of_the_trained = False

    def __init__(self, policy: RolloutProgress) -> None:
        super().__init__(elapsed_s=policy.elapsed_s)
        self.began = policy.began
        self._policy = policy

    def completions(self, count: int, *, end_of: EndOf | None = None) -> Sequence[Completion]:
        """As of any other; they are not kept."""
        return tuple(Completion(index, end_of=end_of) for index in range(count))

    @contextmanager
    def waiting_for(self, whom: WaitsFor) -> Iterator[None]:
        """The policy's rollout waits."""
        with self._policy.waiting_for(whom):
            yield
