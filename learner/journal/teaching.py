"""The teaching of a group in a step, as it stands in the batch log: a step that is trained again is taught the same."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from learner.teachers.teachers import GroupScores, TeacherScores, TeacherTopTokens, TextRefused
from protocol.codec import Frame

_POSITIONS, _TOKENS, _LOGPROBS = np.dtype("<u4"), np.dtype("<i4"), np.dtype("<f4")


@dataclass(frozen=True)
class LoggedTeaching:
    """The answer of a teacher for the group of a lease in the step at `version`, or why it was not taught."""

    version: int
    lease_id: int
    told: GroupScores | TextRefused


def teaching_frames(teaching: LoggedTeaching) -> list[Frame]:
    """A head, and four rows of each trajectory: the places of which something is known, and what that is. Elsewhere
    scores are 0.
    """
    told = teaching.told
    head: dict[str, Any] = {"version": teaching.version, "lease_id": teaching.lease_id}
    if isinstance(told, TextRefused):
        return [json.dumps({**head, "refused": str(told)}).encode()]
    head["scores"] = [
        [one.version, one.instance, len(one.logprobs), 0 if one.top is None else one.top.token_ids.shape[1], one.taught]
        for one in told
    ]
    return [json.dumps(head).encode(), *(row for one in told for row in _rows(one))]


def teaching_of(frames: Sequence[Frame]) -> LoggedTeaching:
    """The inverse of `teaching_frames`."""
    head = json.loads(bytes(frames[0]))
    told: GroupScores | TextRefused
    if "refused" in head:
        told = TextRefused(head["refused"])
    else:
        rows = [frames[at : at + 4] for at in range(1, len(frames), 4)]
        told = tuple(_scores(*row, facts=facts) for row, facts in zip(rows, head["scores"], strict=True))
    return LoggedTeaching(version=head["version"], lease_id=head["lease_id"], told=told)


def _rows(one: TeacherScores) -> list[bytes]:
    if not one.taught:
        return [b""] * 4
    known = one.logprobs != 0
    if one.top is not None:
        known |= one.top.token_ids.any(axis=1) | one.top.logprobs.any(axis=1)
    none = np.zeros((len(known), 0))
    ids, logprobs = (none, none) if one.top is None else (one.top.token_ids, one.top.logprobs)
    return [
        np.flatnonzero(known).astype(_POSITIONS).tobytes(),
        one.logprobs[known].astype(_LOGPROBS).tobytes(),
        ids[known].astype(_TOKENS).tobytes(),
        logprobs[known].astype(_LOGPROBS).tobytes(),
    ]


def _scores(positions: Frame, logprobs: Frame, ids: Frame, likeliest: Frame, *, facts: Sequence[Any]) -> TeacherScores:
    version, instance, length, top, taught = facts
    if not taught:
        return TeacherScores.nothing(length, top=top)
    at = np.frombuffer(positions, _POSITIONS)

    def over(row: Frame, dtype: np.dtype[Any], *shape: int) -> NDArray[Any]:
        placed = np.zeros((length, *shape), dtype)
        placed[at] = np.frombuffer(row, dtype).reshape(len(at), *shape)
        return placed

    tops = TeacherTopTokens(over(ids, _TOKENS, top), over(likeliest, _LOGPROBS, top)) if top else None
    return TeacherScores(over(logprobs, _LOGPROBS), version, tops, instance)
