"""What is asked for after a failure: the completions that are not finished, each from the tokens that it has.

Why this keeps the distribution. Each token is drawn from the policy given those before it, whoever draws it, so a
completion that goes on elsewhere is a sample of the policy like any other; its tokens carry their own versions and
logprobs. What would bias a group is a choice that looks at what was sampled. To keep the finished completions and draw
the others *anew* is such a choice: the short ones are finished at a failure, the long ones get a second chance to be
short. Here nothing that was received is thrown away, so nothing is chosen, and the finished ones stay.

What remains: tokens that a generator had sampled and not yet sent when it died, fewer than its `stream_interval` for
each completion, are drawn again, and a completion that ended among them was sent at once. A hand-back loses none.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from env_service.completions import Completion
from env_service.failures import InfrastructureFailure
from protocol.generation import GeneratePart, GenerateRequest, Sampling
from protocol.trajectories import FinishReason

_SEEDS = 1 << 63
_SEED_STRIDE = 0x9E3779B97F4A7C15 % _SEEDS
"""Odd, and far from small numbers: seeds of different prefixes differ in their low bits too."""


@dataclass(frozen=True)
class Piece:
    """Completions asked for in one request: several that have no token yet, or one that goes on."""

    completions: tuple[Completion, ...]

    @property
    def received(self) -> int:
        """Tokens of all of them so far."""
        return sum(len(completion.token_ids) for completion in self.completions)

    @property
    def ended(self) -> bool:
        return all(completion.ended for completion in self.completions)

    def begin(self, whole: GenerateRequest) -> GenerateRequest:
        """The request for this piece of `whole`."""
        for completion in self.completions:
            completion.begin_request()
        first = self.completions[0]
        prefix = first.token_ids
        return whole.model_copy(
            update={
                "prompt_token_ids": (*whole.prompt_token_ids, *prefix),
                "n": len(self.completions),
                "sampling": _sampling(whole.sampling, index=first.index, prefix=len(prefix)),
            }
        )

    def take(self, part: GeneratePart, *, generator_id: str) -> None:
        """Add a part to its completion. Raises InfrastructureFailure for one that breaks the contract."""
        if part.index >= len(self.completions):
            raise InfrastructureFailure(
                f"the generator sent completion {part.index} of a request for {len(self.completions)}"
            )
        self.completions[part.index].extend(part, generator_id=generator_id)


def rest_of(piece: Piece, sampling: Sampling) -> list[Piece]:
    """What is still to be asked for; empty if all is finished."""
    if not continues(sampling) and not all(completion.finish_reason for completion in piece.completions):
        for completion in piece.completions:
            completion.begin_anew()
        return [piece]
    for completion in piece.completions:
        completion.begin_request()
        completion.finish_reason = completion.finish_reason or _end_of(completion.token_ids, sampling)
    open_ones = [completion for completion in piece.completions if completion.finish_reason is None]
    empty = [completion for completion in open_ones if not completion.token_ids]
    return _together(empty, seeded=sampling.seed is not None) + [
        Piece((completion,)) for completion in open_ones if completion.token_ids
    ]


def continues(sampling: Sampling) -> bool:
    """Whether a prefix may move into the prompt: some penalties look at sampled tokens only, and would not see it."""
    return sampling.presence_penalty == 0 and sampling.frequency_penalty == 0


def _end_of(token_ids: Sequence[int], sampling: Sampling) -> FinishReason | None:
    """Why a completion that was cut off here has nothing to follow; None if it goes on."""
    if token_ids and token_ids[-1] in sampling.stop_token_ids and len(token_ids) >= sampling.min_tokens:
        return "stop"
    return "length" if len(token_ids) >= sampling.max_tokens else None


def _together(empty: Sequence[Completion], *, seeded: bool) -> list[Piece]:
    """One request for all; with a seed, which counts up within a request, one for each row of neighbours."""
    rows: list[list[Completion]] = []
    for completion in empty:
        if rows and (not seeded or rows[-1][-1].index + 1 == completion.index):
            rows[-1].append(completion)
        else:
            rows.append([completion])
    return [Piece(tuple(row)) for row in rows]


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
