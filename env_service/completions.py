"""Completions as they arrive, part by part, from a generator."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from env_service.failures import InfrastructureFailure
from protocol.generation import GeneratePart
from protocol.trajectories import FinishReason, VersionSpan
from protocol.versions import PolicyVersion


@dataclass
class Completion:
    """What one completion holds so far: n token ids, their n logprobs, and the versions that sampled them."""

    token_ids: list[int] = field(default_factory=list)
    behavior_logprobs: list[float] = field(default_factory=list)
    version_spans: tuple[VersionSpan, ...] = ()
    finish_reason: FinishReason | None = None

    def extend(self, part: GeneratePart) -> None:
        """Append a part. Raises InfrastructureFailure for one that cannot belong here."""
        if self.finish_reason is not None:
            raise InfrastructureFailure(f"the generator went on with completion {part.index} after its end")
        if len(part.token_ids) != len(part.behavior_logprobs):
            raise InfrastructureFailure(
                f"the generator sent {len(part.token_ids)} tokens with {len(part.behavior_logprobs)} logprobs"
            )
        self.token_ids += part.token_ids
        self.behavior_logprobs += part.behavior_logprobs
        self.version_spans = part.version_spans or self.version_spans
        self.finish_reason = part.finish_reason
        if part.finish_reason is not None:
            self._check()

    def _check(self) -> None:
        """A finished completion has tokens, every one of them with a version and a finite logprob."""
        if self.finish_reason == "abort":
            raise InfrastructureFailure("the generator aborted a completion")
        if not self.token_ids:
            raise InfrastructureFailure("the generator finished a completion that has no token")
        stamped = 0
        for span in self.version_spans:
            if span.start != stamped:
                break
            stamped = span.end
        if stamped != len(self.token_ids):
            raise InfrastructureFailure(f"the generator stamped versions on {stamped} of {len(self.token_ids)} tokens")
        if not all(map(math.isfinite, self.behavior_logprobs)):
            raise InfrastructureFailure("the generator sent a logprob that is not finite")


class CompletionGroup:
    """The `n` completions of one request. Raises InfrastructureFailure for an answer that breaks the contract."""

    def __init__(self, n: int) -> None:
        self.completions: Sequence[Completion] = [Completion() for _ in range(n)]
        self._unfinished = n

    @property
    def finished(self) -> bool:
        return self._unfinished == 0

    def take(self, part: GeneratePart) -> None:
        """Add a part to its completion."""
        if part.index >= len(self.completions):
            raise InfrastructureFailure(
                f"the generator sent completion {part.index} of a request for {len(self.completions)}"
            )
        self.completions[part.index].extend(part)
        self._unfinished -= part.finish_reason is not None

    def oldest_version(self) -> str | None:
        """The oldest version that sampled a token so far, None before the first."""
        versions = {span.version for completion in self.completions for span in completion.version_spans}
        return min(versions, key=_age, default=None)


def _age(version: str) -> tuple[int, int]:
    """Order by number: a restarted learner's number names the same policy as before."""
    parsed = PolicyVersion.parse(version)
    return parsed.number, parsed.incarnation
