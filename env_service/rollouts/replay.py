"""Turns of conversations as they are recorded, and taken up again by the next process.

An environment is rebuilt by `reset` and the actions that were recorded; where it answers otherwise than before, or its
words make other tokens, it stands nobody knows where, and its conversation is at an end.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import xxhash
from pydantic import TypeAdapter

from env_service.checkpoints.rows import TurnRow
from env_service.environments.interface import EnvironmentUnavailable, Round, Step
from env_service.rollouts.completions import Completion, seconds_since
from env_service.rollouts.routing import TokenRouting
from protocol.routed_experts import RoutedExperts
from services.user_code import checked_number

_STEP: TypeAdapter[Step] = TypeAdapter(Step)
_ROUND: TypeAdapter[Round] = TypeAdapter(Round)
_REMEDY = (
    "it is rolled out anew; leave replayable out of its rules if its steps depend on more than task, seed and actions"
)
OTHER_PROMPT = f"its words make other tokens than before this process was started: {_REMEDY}"
OTHER_STEP = f"it answers a recorded action otherwise than before this process was started: {_REMEDY}"

LOST_TURNS = "it was saved behind the last turn of its record, which is damaged: it is rolled out anew"


class ReplayMismatch(EnvironmentUnavailable):
    """An environment that was rebuilt does not stand where it stood."""

    kind = "diverged"


def digest_of(token_ids: Sequence[int]) -> str:
    """Tells one row of tokens from another."""
    digest: str = xxhash.xxh3_128_hexdigest(np.array(token_ids, dtype=np.int32).tobytes())
    return digest


def text_of_step(step: Step) -> str:
    """A step in JSON, its numbers as plain ones: equal steps have equal texts."""
    metrics = {name: checked_number(step.metrics[name]) for name in sorted(step.metrics)}
    plain = replace(step, reward=checked_number(step.reward), invalid=bool(step.invalid), metrics=metrics)
    return _STEP.dump_json(plain).decode()


def text_of_round(given: Round) -> str:
    """A game's answer in JSON, as that of a step."""
    plain = replace(
        given,
        invalid=bool(given.invalid),
        rewards={name: checked_number(given.rewards[name]) for name in sorted(given.rewards)},
        metrics={
            player: {name: checked_number(given.metrics[player][name]) for name in sorted(given.metrics[player])}
            for player in sorted(given.metrics)
        },
    )
    return _ROUND.dump_json(plain).decode()


def step_of(text: str) -> Step:
    """The step of such a text."""
    return _STEP.validate_json(text)


def row_of(
    completion: Completion, conversation: int, *, prompt: Sequence[int], began: float, is_trained: bool
) -> TurnRow:
    """A finished turn as it is recorded, behind the tokens of `prompt`, in a rollout that `began` at a time of the
    monotonic clock.
    """
    assert completion.finish_reason is not None, "an unfinished completion"
    routing = completion.routing
    return TurnRow(
        conversation=conversation,
        prompt=digest_of(prompt),
        token_ids=tuple(completion.token_ids),
        behavior_logprobs=tuple(completion.behavior_logprobs),
        version_spans=completion.version_spans,
        generator_ids=completion.generator_ids,
        finish_reason=completion.finish_reason,
        prompt_tokens=completion.prompt_tokens,
        routed_from=routing.start,
        routed_experts=RoutedExperts.of(routing.pieces) if routing.pieces else None,
        asked_s=seconds_since(began, completion.asked_at),
        ended_s=seconds_since(began, completion.ended_at),
        is_trained=is_trained,
    )


def completion_of(row: TurnRow, *, began: float) -> Completion:
    """The turn as it was sampled, in a rollout that counts its times from `began` on."""
    told = row.routed_experts
    completion = Completion(
        0,
        token_ids=list(row.token_ids),
        behavior_logprobs=list(row.behavior_logprobs),
        version_spans=row.version_spans,
        generator_ids=row.generator_ids,
        finish_reason=row.finish_reason,
        asked_at=None if row.asked_s is None else began + row.asked_s,
        ended_at=None if row.ended_s is None else began + row.ended_s,
        prompt_tokens=row.prompt_tokens,
        routing=TokenRouting([] if told is None else told.pieces(), start=row.routed_from),
    )
    completion.done.set()
    return completion
