"""Completions as they arrive, part by part, from one generator or from several in turn."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from env_service.failures import InfrastructureFailure
from protocol.generation import GeneratePart
from protocol.trajectories import FinishReason, VersionSpan
from protocol.versions import PolicyVersion


@dataclass
class Completion:
    """What one completion of a request holds so far: n token ids, their n logprobs, the versions that sampled them,
    and the generators that did, in order.

    A request for it begins with `begin_request`; parts count their spans from the first token of that request.
    """

    index: int
    token_ids: list[int] = field(default_factory=list)
    behavior_logprobs: list[float] = field(default_factory=list)
    version_spans: tuple[VersionSpan, ...] = ()
    generator_ids: tuple[str, ...] = ()
    finish_reason: FinishReason | None = None
    handed_back: bool = False
    _kept: int = 0
    _kept_spans: tuple[VersionSpan, ...] = ()

    @property
    def ended(self) -> bool:
        """Whether the present request says no more about it."""
        return self.finish_reason is not None or self.handed_back

    def begin_request(self) -> None:
        """Keep what was received and has a version, and expect the tokens behind it."""
        self._kept = min(_stamped(self.version_spans), len(self.token_ids))
        del self.token_ids[self._kept :], self.behavior_logprobs[self._kept :]
        self.version_spans = self._kept_spans = tuple(_cut(self.version_spans, self._kept))
        self.generator_ids = self.generator_ids if self._kept else ()
        self.handed_back = False

    def begin_anew(self) -> None:
        """Forget everything."""
        self.token_ids, self.behavior_logprobs, self.version_spans = [], [], ()
        self.finish_reason = None
        self.begin_request()

    def extend(self, part: GeneratePart, *, generator_id: str) -> None:
        """Append a part. Raises InfrastructureFailure for one that cannot belong here, and takes nothing of it."""
        if self.ended:
            raise InfrastructureFailure(f"the generator went on with completion {part.index} after its end")
        if len(part.token_ids) != len(part.behavior_logprobs):
            raise InfrastructureFailure(
                f"the generator sent {len(part.token_ids)} tokens with {len(part.behavior_logprobs)} logprobs"
            )
        if not all(map(math.isfinite, part.behavior_logprobs)):
            raise InfrastructureFailure("the generator sent a logprob that is not finite")
        spans = self.version_spans
        if part.version_spans:
            spans = _joined(self._kept_spans, part.version_spans, shift=self._kept)
        if part.finish_reason in ("stop", "length"):
            _check_whole(len(self.token_ids) + len(part.token_ids), spans)
            self.finish_reason = part.finish_reason
        self.handed_back = part.finish_reason == "abort"
        self.token_ids += part.token_ids
        self.behavior_logprobs += part.behavior_logprobs
        self.version_spans = spans
        if part.token_ids and generator_id not in self.generator_ids[-1:]:
            self.generator_ids += (generator_id,)


class CompletionGroup:
    """The `n` completions of one rollout."""

    def __init__(self, n: int) -> None:
        self.completions: Sequence[Completion] = tuple(Completion(index) for index in range(n))

    def oldest_version(self) -> str | None:
        """The oldest version that sampled a token so far, None before the first."""
        versions = {span.version for completion in self.completions for span in completion.version_spans}
        return min(versions, key=_age, default=None)


def _check_whole(length: int, spans: Sequence[VersionSpan]) -> None:
    """A finished completion has tokens, every one of them with a version."""
    if length == 0:
        raise InfrastructureFailure("the generator finished a completion that has no token")
    stamped = _stamped(spans)
    if stamped != length:
        raise InfrastructureFailure(f"the generator stamped versions on {stamped} of {length} tokens")


def _stamped(spans: Iterable[VersionSpan]) -> int:
    """How many tokens, from the first one on, have a version."""
    end = 0
    for span in spans:
        if span.start != end:
            break
        end = span.end
    return end


def _cut(spans: Iterable[VersionSpan], length: int) -> Iterable[VersionSpan]:
    for span in spans:
        if span.start < length:
            yield VersionSpan(version=span.version, start=span.start, end=min(span.end, length))


def _joined(kept: tuple[VersionSpan, ...], new: Sequence[VersionSpan], *, shift: int) -> tuple[VersionSpan, ...]:
    """The new spans behind the kept ones, `shift` tokens later; two of one version that meet become one."""
    if not shift:
        return tuple(new)
    moved = [VersionSpan(version=span.version, start=span.start + shift, end=span.end + shift) for span in new]
    if moved and kept and kept[-1].version == moved[0].version and kept[-1].end == moved[0].start:
        moved[0] = VersionSpan(version=moved[0].version, start=kept[-1].start, end=moved[0].end)
        kept = kept[:-1]
    return (*kept, *moved)


def _age(version: str) -> tuple[int, int]:
    """Order by number: a restarted learner's number names the same policy as before."""
    parsed = PolicyVersion.parse(version)
    return parsed.number, parsed.incarnation
