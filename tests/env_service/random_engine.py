"""An engine that samples random tokens, and remembers exactly what it was shown and what it sampled."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from env_service.rollouts.completions import Completion, CompletionPiece, rest_of
from protocol.generation import GeneratePart, GenerateRequest
from protocol.routed_experts import RoutedExperts
from protocol.trajectories import VersionSpan


@dataclass
class Shown:
    """The engine's record of a turn."""

    prompt: tuple[int, ...]
    sampled: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)


@dataclass
class RandomEngine:
    """Samples ids below `tokens`. A turn ends with one of `stops`, or at its limit; some are handed from generator to
    generator in the middle, under newer weights. `turns` are by the name of the request. Each token is sent to the
    expert of its id.
    """

    chance: random.Random
    tokens: int
    stops: Sequence[int]
    end_chance: float = 0.3
    hand_over_chance: float = 0.2
    version: int = 1
    turns: dict[str, Shown] = field(default_factory=dict)

    async def sample(self, request: GenerateRequest, completions: Sequence[Completion]) -> None:
        """As `Generation.sample`."""
        pieces = [CompletionPiece((completion,)) for completion in completions]
        while pieces:
            piece = pieces.pop()
            asked = piece.begin(request.model_copy(update={"n": 1}))
            self._answer(request, asked, piece)
            pieces += rest_of(piece, request.sampling)

    def _answer(self, whole: GenerateRequest, asked: GenerateRequest, piece: CompletionPiece) -> None:
        name = f"{whole.request_id}:{piece.completions[0].index}"
        shown = self.turns.setdefault(name, Shown(whole.prompt_token_ids))
        assert asked.prompt_token_ids == (*shown.prompt, *shown.sampled), "another prompt than what was shown before"
        self.version += self.chance.random() < 0.3
        fresh: list[int] = []
        reason = None
        while reason is None and not (fresh and self.chance.random() < self.hand_over_chance / 4):
            ends = self.chance.random() < self.end_chance
            fresh.append(self.chance.choice(self.stops) if ends else self.chance.randrange(self.tokens))
            reason = "stop" if fresh[-1] in self.stops else None
            reason = reason or ("length" if len(fresh) == asked.sampling.max_tokens else None)
        logprobs = [-self.chance.random() for _ in fresh]
        spans = (VersionSpan(version=f"1.{self.version}", start=0, end=len(fresh)),)
        piece.take(
            GeneratePart(
                index=0,
                token_ids=tuple(fresh),
                behavior_logprobs=tuple(logprobs),
                version_spans=spans,
                finish_reason=reason or "abort",  # type: ignore[arg-type]
                routed_experts=_told(asked, fresh) if asked.routed_experts else None,
            ),
            generator_id=f"g{self.chance.randrange(3)}",
        )
        kept = len(piece.completions[0].token_ids) - len(shown.sampled)
        shown.sampled += fresh[:kept]
        shown.logprobs += logprobs[:kept]
        shown.versions += [self.version] * kept


def _told(asked: GenerateRequest, fresh: Sequence[int]) -> RoutedExperts:
    first = asked.routed_experts_from
    ids = np.array([*asked.prompt_token_ids, *fresh][first:-1], dtype=np.uint16)
    return RoutedExperts.of([(first, ids[:, None, None])])
