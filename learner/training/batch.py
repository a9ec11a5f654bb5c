"""A step's data as the trainer takes it, made from groups of trajectories: one record per sequence, numpy only.

A trajectory is one sequence, or several: contexts in which the policy did not see what was in those before.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from learner.algorithms.preset import Preset
from protocol.trajectories import SUMMARY_STATE, Trajectory, TrajectoryGroup, Turn

logger = logging.getLogger(__name__)

_NO_TOKENS = np.zeros(0, dtype=np.float32)
_NONE_OBSERVED = np.zeros(0, dtype=np.bool_)
UNTAUGHT = -2
"""In `FlatBatch.teachers`: of a sequence of which no teacher has anything to say."""
ARRAY_TYPES: Mapping[str, np.dtype[np.generic]] = {
    name: np.dtype(kind)
    for kind, names in {
        "bool": ("mixed_versions", "truncated", "labels", "mismatched", "loss_mask", "observed", "routed"),
        "int64": (
            "lengths",
            "trajectories",
            "groups",
            "roles",
            "pairs",
            "teachers",
            "turns",
            "turn_states",
            "turn_branches",
            "routing_shape",
        ),
        "uint8": ("routed_experts",),
        "int32": ("token_ids", "lags", "candidate_ids"),
        "float64": ("rewards", "greedy_rewards", "components", "margins", "turn_rewards"),
        "float32": ("behavior_logprobs", "teacher_logprobs", "reference_logprobs", "candidate_logprobs"),
    }.items()
    for name in names
}
"""The type of each array of a FlatBatch."""


@dataclass(frozen=True)
class Origin:
    """Owner of a sequence's tokens: those from the token `start` on of a trajectory of a group, both by their place in
    the step.
    """

    group: int
    trajectory: int
    start: int = 0


@dataclass(frozen=True)
class TrainTurn:
    """The policy's turn from token `start` on; `state` tells what it was given: equal for equal states of a task.

    `reward` is the turn's own, a part of the trajectory's. `branch`: equal for the turns of a step that were sampled
    once, for all trajectories that share them, and for those of a trajectory between two forks; 0 in one that shares
    nothing.
    """

    start: int
    state: int
    reward: float = 0.0
    branch: int = 0


@dataclass(frozen=True)
class Candidates:
    """A teacher's C most probable tokens at each of T positions: int32 and float32 [T, C]; 0 outside the mask."""

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]


@dataclass(frozen=True)
class SequenceRouting:
    """Experts that a sequence's T tokens were sent to: uint8 or uint16 [T, layers, k], and bool [T], true where they
    are `known`.
    """

    experts: NDArray[np.unsignedinteger[Any]]
    known: NDArray[np.bool_]

    def part(self, at: slice) -> SequenceRouting:
        """Of some of its tokens."""
        return SequenceRouting(self.experts[at], self.known[at])


@dataclass(frozen=True, kw_only=True)
class TrainSequence:
    """A trajectory of T tokens, or a sequence of it; every array is [T].

    `token_ids` int32; `loss_mask` bool, true where the policy sampled the token and it is trained on (never the first
    token, which nothing predicts). For a trajectory that was sampled: `behavior_logprobs` float32 in nats at the
    sampling temperature, 0 outside the mask; `lags` int32, policy versions between the learner and the token;
    `mixed_versions`: whether more than one policy version sampled it, or computed the keys and values with which it was
    sampled, which are those of `old_cache`; `reward` and its `components`; `greedy_reward`, the greedy
    answer's, where the algorithm asks for one; `group`: equal for
    the trajectories of one task, and in a game of one player; `role`: equal for those of one player of one environment,
    whatever the task; `truncated`: cut off at a limit; `turns` in order, none
    for one turn. `continues`: it is of the same trajectory as the sequence before it.

    Of a preference pair: `pair` is its number in the step, the chosen sequence comes before the rejected one, `margin`
    is how much better it is. `label`: whether an unpaired example is a good one. `teacher` is the index of the model to
    ask, of those that the ranks hold, unless its logprobs are known already; nobody has any of one that is not
    `taught`. A `mismatched` sequence, a prompt with the
    completion of another one, is only measured. Those are [T] float32 or empty:
    `teacher_logprobs` and `reference_logprobs`. `observed` bool [T] or empty: true where the environment said the token
    between the policy's turns. `origin`: of a trajectory that was sampled, where it is in the step.
    `routing`: of one that a mixture of experts sampled, if its generator told it.
    """

    token_ids: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]
    behavior_logprobs: NDArray[np.float32]
    lags: NDArray[np.int32]
    mixed_versions: bool = False
    old_cache: bool = False
    reward: float = 0.0
    greedy_reward: float = 0.0
    components: tuple[float, ...] = ()
    group: int = 0
    role: int = 0
    continues: bool = False
    truncated: bool = False
    turns: tuple[TrainTurn, ...] = ()
    pair: int = -1
    margin: float = 0.0
    label: bool = True
    mismatched: bool = False
    teacher: int = 0
    taught: bool = True
    teacher_logprobs: NDArray[np.float32] = field(default_factory=lambda: _NO_TOKENS)
    reference_logprobs: NDArray[np.float32] = field(default_factory=lambda: _NO_TOKENS)
    observed: NDArray[np.bool_] = field(default_factory=lambda: _NONE_OBSERVED)
    candidates: Candidates | None = None
    origin: Origin | None = None
    routing: SequenceRouting | None = None

    def __post_init__(self) -> None:
        lengths = {len(self.token_ids), len(self.loss_mask), len(self.behavior_logprobs), len(self.lags)}
        optional = (self.teacher_logprobs, self.reference_logprobs, self.observed)
        lengths |= {len(known) for known in optional if len(known)}
        if self.candidates is not None:
            lengths |= {len(self.candidates.token_ids), len(self.candidates.logprobs)}
        if self.routing is not None:
            lengths |= {len(self.routing.experts), len(self.routing.known)}
        assert len(lengths) == 1, f"arrays of unequal lengths {sorted(lengths)}"
        assert len(self.token_ids) > 0, "a sequence without tokens"
        assert not self.loss_mask[0], "the first token cannot be trained: nothing predicts it"
        assert not self.observed[:1].any(), "the first token cannot be predicted: nothing is before it"

    @classmethod
    def supervised(
        cls,
        *,
        token_ids: NDArray[np.int32],
        loss_mask: NDArray[np.bool_],
        pair: int = -1,
        margin: float = 0.0,
        label: bool = True,
        reference_logprobs: NDArray[np.float32] = _NO_TOKENS,
        candidates: Candidates | None = None,
    ) -> TrainSequence:
        """A sequence that no policy sampled: behavior logprobs and lags are 0."""
        return cls(
            token_ids=token_ids,
            loss_mask=loss_mask,
            behavior_logprobs=np.zeros(len(token_ids), dtype=np.float32),
            lags=np.zeros(len(token_ids), dtype=np.int32),
            pair=pair,
            margin=margin,
            label=label,
            reference_logprobs=reference_logprobs,
            candidates=candidates,
        )


@dataclass(frozen=True)
class FlatBatch:
    """S sequences end to end, N tokens in all: what is sent to the other ranks, and what is packed.

    [S]: `lengths` int64; `mixed_versions`, `truncated`, `labels` and `mismatched` bool; `rewards`, `greedy_rewards` and
    `margins` float64; `trajectories` (ascending from 0), `groups`, `roles`, `pairs` and `teachers` int64;
    `components` float64 [S x C], flat. [N]: as in `TrainSequence`;
    `turns` int64, the number of the token's turn in the step, of which there are T; [T]: `turn_states` and
    `turn_branches` int64, and `turn_rewards` float64. What nobody gave is empty; of `teacher_logprobs` that some
    sequences have, those of the others are 0, and `teachers` is -1 for who has them.
    `candidate_ids` and `candidate_logprobs` are [N x C], flat, 0 where those of others are told. `routed` bool [N] says
    which tokens' experts are known;
    `routed_experts` are their bytes, flat, and `routing_shape` how many layers there are, experts of a token in each,
    and bytes of each number: see `routing`.
    """

    lengths: NDArray[np.int64]
    mixed_versions: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    rewards: NDArray[np.float64]
    greedy_rewards: NDArray[np.float64]
    components: NDArray[np.float64]
    trajectories: NDArray[np.int64]
    groups: NDArray[np.int64]
    roles: NDArray[np.int64]
    pairs: NDArray[np.int64]
    margins: NDArray[np.float64]
    labels: NDArray[np.bool_]
    mismatched: NDArray[np.bool_]
    teachers: NDArray[np.int64]
    token_ids: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]
    observed: NDArray[np.bool_]
    behavior_logprobs: NDArray[np.float32]
    lags: NDArray[np.int32]
    turns: NDArray[np.int64]
    turn_states: NDArray[np.int64]
    turn_branches: NDArray[np.int64]
    turn_rewards: NDArray[np.float64]
    teacher_logprobs: NDArray[np.float32]
    reference_logprobs: NDArray[np.float32]
    candidate_ids: NDArray[np.int32]
    candidate_logprobs: NDArray[np.float32]
    routed: NDArray[np.bool_]
    routed_experts: NDArray[np.uint8]
    routing_shape: NDArray[np.int64]

    @property
    def routing(self) -> SequenceRouting | None:
        """Experts of the N tokens; None if none are known."""
        if not len(self.routed):
            return None
        layers, chosen, width = self.routing_shape.tolist()
        narrow = self.routed_experts
        experts: NDArray[np.unsignedinteger[Any]] = narrow if width == 1 else narrow.view(np.uint16)
        return SequenceRouting(experts.reshape(-1, layers, chosen), self.routed)

    @property
    def starts(self) -> NDArray[np.int64]:
        """The first token of each sequence, [S]."""
        return np.cumsum(self.lengths) - self.lengths

    @property
    def firsts(self) -> NDArray[np.int64]:
        """The first sequence of each trajectory."""
        return np.flatnonzero(np.diff(self.trajectories, prepend=-1))

    @property
    def trained_lengths(self) -> NDArray[np.int64]:
        """Number of tokens of each sequence that are trained on, [S]."""
        if not len(self.lengths):
            return np.zeros(0, dtype=np.int64)
        return np.add.reduceat(self.loss_mask.astype(np.int64), self.starts)

    @property
    def observed_lengths(self) -> NDArray[np.int64]:
        """Number of tokens of each sequence that the environment said, as far as that was asked for, [S]."""
        if not len(self.observed):
            return np.zeros(len(self.lengths), dtype=np.int64)
        return np.add.reduceat(self.observed.astype(np.int64), self.starts)

    @property
    def taught(self) -> NDArray[np.bool_] | None:
        """True at tokens of sequences of which a teacher has something to say, [N]; None if that is all of them."""
        untaught = self.teachers == UNTAUGHT
        return ~untaught[self.owners] if untaught.any() else None

    @property
    def owners(self) -> NDArray[np.int64]:
        """The sequence of each token, [N]."""
        return np.repeat(np.arange(len(self.lengths)), self.lengths)


def flatten(sequences: Sequence[TrainSequence]) -> FlatBatch:
    """Sequences end to end. At least one is needed."""
    assert sequences, "a step without sequences"
    turns = _turns(sequences)
    return FlatBatch(
        lengths=np.array([len(sequence.token_ids) for sequence in sequences], dtype=np.int64),
        mixed_versions=np.array([sequence.mixed_versions for sequence in sequences], dtype=np.bool_),
        truncated=np.array([sequence.truncated for sequence in sequences], dtype=np.bool_),
        rewards=np.array([sequence.reward for sequence in sequences], dtype=np.float64),
        greedy_rewards=np.array([sequence.greedy_reward for sequence in sequences], dtype=np.float64),
        components=np.array([sequence.components for sequence in sequences], dtype=np.float64).reshape(-1),
        trajectories=np.cumsum([not sequence.continues for sequence in sequences], dtype=np.int64) - 1,
        groups=np.array([sequence.group for sequence in sequences], dtype=np.int64),
        roles=np.array([sequence.role for sequence in sequences], dtype=np.int64),
        pairs=np.array([sequence.pair for sequence in sequences], dtype=np.int64),
        margins=np.array([sequence.margin for sequence in sequences], dtype=np.float64),
        labels=np.array([sequence.label for sequence in sequences], dtype=np.bool_),
        mismatched=np.array([sequence.mismatched for sequence in sequences], dtype=np.bool_),
        teachers=np.array([_teacher(sequence) for sequence in sequences], dtype=np.int64),
        token_ids=np.concatenate([sequence.token_ids for sequence in sequences]).astype(np.int32, copy=False),
        loss_mask=np.concatenate([sequence.loss_mask for sequence in sequences]).astype(np.bool_, copy=False),
        observed=_observed(sequences),
        behavior_logprobs=np.concatenate([s.behavior_logprobs for s in sequences]).astype(np.float32, copy=False),
        lags=np.concatenate([sequence.lags for sequence in sequences]).astype(np.int32, copy=False),
        turns=turns,
        turn_states=np.array([turn.state for s in sequences for turn in _turns_of(s)], dtype=np.int64),
        turn_branches=_turn_branches(sequences),
        turn_rewards=np.array([turn.reward for s in sequences for turn in _turns_of(s)], dtype=np.float64),
        teacher_logprobs=_told(sequences),
        reference_logprobs=_known([sequence.reference_logprobs for sequence in sequences]),
        **_flat_candidates(sequences),
        **_flat_routing(sequences),
    )


def _flat_candidates(sequences: Sequence[TrainSequence]) -> dict[str, Any]:
    """0 for sequences of which no teacher has told any yet; empty if that is all of them."""
    told = [sequence.candidates for sequence in sequences if sequence.candidates is not None]
    if not told:
        return {name: np.zeros(0, ARRAY_TYPES[name]) for name in ("candidate_ids", "candidate_logprobs")}
    counts = {each.token_ids.shape[1] for each in told}
    assert len(counts) == 1, f"sequences with {sorted(counts)} candidates at each token"
    none = [np.zeros((len(s.token_ids), *counts), np.int32) for s in sequences if s.candidates is None]
    unknown = iter(none)
    known = [s.candidates or Candidates(zeros := next(unknown), zeros.astype(np.float32)) for s in sequences]
    return {
        "candidate_ids": np.concatenate([each.token_ids.reshape(-1) for each in known]),
        "candidate_logprobs": np.concatenate([each.logprobs.reshape(-1) for each in known]),
    }


def _flat_routing(sequences: Sequence[TrainSequence]) -> dict[str, Any]:
    told = [sequence.routing.experts for sequence in sequences if sequence.routing is not None]
    if not told:
        return {name: np.zeros(0, ARRAY_TYPES[name]) for name in ("routed", "routed_experts", "routing_shape")}
    shapes = {(*experts.shape[1:], experts.itemsize) for experts in told}
    if len(shapes) > 1:
        raise ValueError(f"routed experts of several shapes, {sorted(shapes)}: the generators serve different models")
    (shape,) = shapes
    parts, known = [], []
    for sequence in sequences:
        length, routing = len(sequence.token_ids), sequence.routing
        parts.append(np.zeros((length, *shape[:2]), told[0].dtype) if routing is None else routing.experts)
        known.append(np.zeros(length, np.bool_) if routing is None else routing.known)
    return {
        "routed": np.concatenate(known),
        "routed_experts": np.concatenate(parts).reshape(-1).view(np.uint8),
        "routing_shape": np.array(shape, dtype=np.int64),
    }


def _turn_branches(sequences: Sequence[TrainSequence]) -> NDArray[np.int64]:
    """Of a trajectory that shares nothing a number that no other one has, [T]."""
    numbers = np.cumsum([not sequence.continues for sequence in sequences]).tolist()
    told = zip(sequences, numbers, strict=True)
    return np.array([turn.branch or -number for s, number in told for turn in _turns_of(s)], dtype=np.int64)


def _turns_of(sequence: TrainSequence) -> tuple[TrainTurn, ...]:
    return sequence.turns or (TrainTurn(start=0, state=0),)


def _turns(sequences: Sequence[TrainSequence]) -> NDArray[np.int64]:
    """The number of each token's turn, counted over all sequences, [N]; what precedes the first turn belongs to it."""
    lengths = [len(sequence.token_ids) for sequence in sequences]
    if all(len(sequence.turns) <= 1 for sequence in sequences):
        return np.repeat(np.arange(len(sequences)), lengths)
    numbers: list[NDArray[np.int64]] = []
    before = 0
    for sequence in sequences:
        starts = [turn.start for turn in _turns_of(sequence)]
        places = np.searchsorted(starts, np.arange(len(sequence.token_ids)), side="right") - 1
        numbers.append((np.maximum(places, 0) + before).astype(np.int64))
        before += len(starts)
    return np.concatenate(numbers)


def _known(parts: Sequence[NDArray[np.float32]]) -> NDArray[np.float32]:
    given = sum(len(part) > 0 for part in parts)
    assert given in (0, len(parts)), f"logprobs are given for {given} of {len(parts)} sequences"
    return np.concatenate(parts).astype(np.float32, copy=False)


def _teacher(sequence: TrainSequence) -> int:
    if not sequence.taught:
        return UNTAUGHT
    return -1 if len(sequence.teacher_logprobs) else sequence.teacher


def _observed(sequences: Sequence[TrainSequence]) -> NDArray[np.bool_]:
    """Empty if nobody asked for it."""
    if not any(len(sequence.observed) for sequence in sequences):
        return _NONE_OBSERVED
    return np.concatenate([s.observed if len(s.observed) else np.zeros(len(s.token_ids), np.bool_) for s in sequences])


def _told(sequences: Sequence[TrainSequence]) -> NDArray[np.float32]:
    """0 for sequences of which no teacher has told anything yet; empty if that is all of them."""
    if not any(len(sequence.teacher_logprobs) for sequence in sequences):
        return _NO_TOKENS
    parts = [s.teacher_logprobs if len(s.teacher_logprobs) else np.zeros(len(s.token_ids)) for s in sequences]
    return np.concatenate(parts).astype(np.float32, copy=False)


class LagBoundBroken(AssertionError):
    """A token older than its bound was about to enter a loss."""


class ComponentMissing(RuntimeError):
    """An algorithm weighs a component that a trajectory's reward does not have."""


class BaselineMissing(RuntimeError):
    """An algorithm compares with the reward of a greedy answer, and a group has none."""


class SeveralSequences(RuntimeError):
    """An algorithm wants each trajectory as one sequence, and one consists of several."""


@dataclass(frozen=True)
class Teaching:
    """Teacher of a group: the index of a model that the ranks hold, or logprobs of each trajectory, [T] each, and its
    candidates if the preset wants them. Of a trajectory that is not `taught` they count for nothing; None: all are.
    """

    index: int = 0
    logprobs: Sequence[NDArray[np.float32]] | None = None
    candidates: Sequence[Candidates] | None = None
    taught: Sequence[bool] | None = None

    def of(self, trajectory: int) -> dict[str, Any]:
        """The fields of a TrainSequence that it sets."""
        if self.logprobs is None:
            return {"teacher": self.index}
        candidates = None if self.candidates is None else self.candidates[trajectory]
        taught = self.taught is None or self.taught[trajectory]
        return {"teacher_logprobs": self.logprobs[trajectory], "candidates": candidates, "taught": taught}


@dataclass(frozen=True)
class GroupsBefore:
    """Groups of a step whose sequences were made before: how many there are, and labels of their sequences."""

    groups: int = 0
    labels: int = 0

    @classmethod
    def of(cls, groups: int, sequences: Sequence[TrainSequence]) -> GroupsBefore:
        """So many, with these sequences in all."""
        return cls(groups=groups, labels=sequences[-1].group + 1 if sequences else 0)


@dataclass(frozen=True)
class GroupsAgain:
    """The last `groups` of a step, which were trained before: no token of them lags more than `max_lag`."""

    groups: int = 0
    max_lag: int = 0

    def bounds(self, groups: int, *, max_lag: int) -> list[int]:
        """The bound of each of a step's `groups`, of which the others have `max_lag`."""
        return [max_lag] * (groups - self.groups) + [self.max_lag] * self.groups


_NONE_BEFORE = GroupsBefore()
_NONE_AGAIN = GroupsAgain()


def sequences_of(
    groups: Sequence[TrajectoryGroup],
    *,
    version: int,
    max_lag: int,
    preset: Preset,
    teaching: Sequence[Teaching] | None = None,
    before: GroupsBefore = _NONE_BEFORE,
    again: GroupsAgain = _NONE_AGAIN,
) -> list[TrainSequence]:
    """The sequences of each trajectory that the preset selects of its group; of a pair the chosen one first.

    Where a game has several players, those of each are a group by themselves: what one wins the other may lose.

    `version` is the learner's; `teaching` says of each group who teaches it; `before` are the step's groups that come
    before these, and `again` those among these that have a bound of their own. Raises LagBoundBroken rather than
    letting a token with lag > max_lag through, ComponentMissing, BaselineMissing, and SeveralSequences.
    """
    bounds = again.bounds(len(groups), max_lag=max_lag)
    chosen = [(number, indices) for number, group in enumerate(groups) for indices in _selected(group, preset)]
    return [
        sequence
        for label, (number, indices) in enumerate(chosen, start=before.labels)
        for index in indices
        for sequence in _split(
            replace(
                _sequence(groups[number].trajectories[index], version=version, max_lag=bounds[number]),
                turns=_in_branches(
                    _trajectory_turns(groups[number].trajectories[index], preset, groups[number].environment),
                    groups[number].trajectories[index],
                    group=label,
                ),
                components=_components(groups[number].trajectories[index], preset, groups[number].environment),
                greedy_reward=_greedy_reward(groups[number], preset),
                group=label,
                role=_role(groups[number].trajectories[index], groups[number].environment),
                observed=observed_in(groups[number].trajectories[index]) if preset.observes else _NONE_OBSERVED,
                origin=Origin(before.groups + number, index),
                pair=label if preset.paired else -1,
                **({} if teaching is None else teaching[number].of(index)),
            ),
            groups[number].trajectories[index],
            preset,
        )
    ]


def _split(whole: TrainSequence, trajectory: Trajectory, preset: Preset) -> Sequence[TrainSequence]:
    """A trajectory's sequences. One without a token to train is left out, unless all of them are."""
    if not trajectory.sequence_starts:
        return [whole]
    if preset.paired or len(whole.teacher_logprobs):
        raise SeveralSequences(
            f"algo {preset.name} takes each trajectory as one sequence, and one has "
            f'{1 + len(trajectory.sequence_starts)}: set history = "append" in the rules of its environment, and leave '
            "out an on_full that makes a context shorter"
        )
    bounds = [slice(start, end) for start, end in pairwise((0, *trajectory.sequence_starts, len(whole.token_ids)))]
    trained = [at for at in bounds if whole.loss_mask[at].any()]
    # One of which nothing is trained any more stays, since the others of its group are compared with its reward.
    parts = [_part(whole, at) for at in trained or bounds[:1]]
    return [replace(part, continues=number > 0) for number, part in enumerate(parts)]


def _part(whole: TrainSequence, at: slice) -> TrainSequence:
    lags, mask = whole.lags[at], whole.loss_mask[at]
    turns = [turn for turn in whole.turns if at.start <= turn.start < at.stop]
    return replace(
        whole,
        token_ids=whole.token_ids[at],
        loss_mask=mask,
        behavior_logprobs=whole.behavior_logprobs[at],
        lags=lags,
        mixed_versions=whole.old_cache or len(np.unique(lags[mask])) > 1,
        observed=whole.observed[at] if len(whole.observed) else whole.observed,
        origin=None if whole.origin is None else replace(whole.origin, start=at.start),
        routing=None if whole.routing is None else whole.routing.part(at),
        turns=tuple(replace(turn, start=turn.start - at.start) for turn in turns),
    )


def _selected(group: TrajectoryGroup, preset: Preset) -> Sequence[Sequence[int]]:
    """True at the trajectories that are trained, those of each player by themselves. Of a player whose rewards are all
    equal none is better than another, although the group as a whole has spread.
    """
    rewards = [_reward(trajectory, group) for trajectory in group.trajectories]
    players = list(group.by_player.values())
    if preset.select is None:
        return players
    if len(players) > 1:
        players = [alike for alike in players if len({rewards[index] for index in alike}) > 1]
    return [[alike[place] for place in preset.select([rewards[index] for index in alike])] for alike in players]


def _reward(trajectory: Trajectory, group: TrajectoryGroup) -> float:
    reward = trajectory.reward.reward
    assert reward is not None, f"lease {group.lease_id}: a trajectory without a reward reached the batch"
    return reward


def _greedy_reward(group: TrajectoryGroup, preset: Preset) -> float:
    if not preset.greedy_baseline:
        return 0.0
    if (reward := group.greedy_reward) is None:
        raise BaselineMissing(
            f"algo {preset.name} compares with the reward of a greedy answer, and lease {group.lease_id} has none: it "
            "was sampled for another algorithm. Train what was sampled before by that one, and begin a run of its own "
            f"with {preset.name}"
        )
    return reward


def _role(trajectory: Trajectory, environment: str) -> int:
    """The number of a player of an environment, the same in every step and after a resume."""
    digest: int = xxhash.xxh3_64_intdigest(f"{environment}\0{trajectory.player}".encode())
    return digest - (1 << 63)


def _components(trajectory: Trajectory, preset: Preset, environment: str) -> tuple[float, ...]:
    have = trajectory.reward.components
    missing = [name for name in preset.components if name not in have]
    if missing:
        raise ComponentMissing(
            f"algo {preset.name} weighs the reward components {', '.join(preset.components)}, and a reward of "
            f"environment {environment} has no {missing[0]}: verifier {trajectory.reward.verifier} gave "
            f"{', '.join(sorted(have)) or 'none'}. Name in algo.components what the verifier gives, or use a verifier "
            "that gives it"
        )
    return tuple(have[name] for name in preset.components)


def _trajectory_turns(trajectory: Trajectory, preset: Preset, environment: str) -> tuple[TrainTurn, ...]:
    """The policy's turns, with rewards of their own where the preset asks for them."""
    have = trajectory.reward.components
    # An environment and a verifier know of actions alone: the turn of a summary has no number, and earns nothing.
    acts = np.array([turn.state != SUMMARY_STATE for turn in trajectory.turns])
    names = [f"turn_{number}" if action else "" for number, action in zip(np.cumsum(acts) - 1, acts, strict=True)]
    rewards = [have.get(name, turn.reward) if name else 0.0 for turn, name in zip(trajectory.turns, names, strict=True)]
    wanted = preset.turn_rewards or preset.turn_discounts
    missing = [name for name, reward in zip(names, rewards, strict=True) if preset.turn_rewards and reward is None]
    if missing:
        raise ComponentMissing(
            f"algo.turn_rewards is true, and the turns of environment {environment} have no rewards: a reward for "
            f"{int(acts.sum())} turns has no component {missing[0]}: it has {', '.join(sorted(have)) or 'none'}. Use "
            "an environment whose steps give rewards, or a verifier that gives turn_0, turn_1, ... for each turn, or "
            "set algo.turn_rewards to false"
        )
    return tuple(
        TrainTurn(start=turn.start, state=_state(trajectory, turn), reward=(reward or 0.0) * wanted)
        for turn, reward in zip(trajectory.turns, rewards, strict=True)
    )


def _in_branches(turns: Sequence[TrainTurn], trajectory: Trajectory, *, group: int) -> tuple[TrainTurn, ...]:
    """The turns of a trajectory with their branches, numbered by the way up to each of them; of its `group` in the
    step.
    """
    if not trajectory.forks:
        return tuple(turns)
    # A turn's tokens begin where the one before it ends, hence behind the forks there.
    ways = [[fork.branch for fork in trajectory.forks if fork.at <= turn.start] for turn in trajectory.turns]
    return tuple(
        replace(turn, branch=_number_of(f"branch {group} {way}")) for turn, way in zip(turns, ways, strict=True)
    )


def _number_of(text: str) -> int:
    digest: int = xxhash.xxh3_64_intdigest(text.encode())
    return digest - (1 << 63)


def _sequence(trajectory: Trajectory, *, version: int, max_lag: int) -> TrainSequence:
    mask = trajectory.loss_mask.astype(np.bool_)
    lags = np.where(mask, version - trajectory.token_versions(), 0).astype(np.int32)
    if lags.max(initial=0) > max_lag or lags.min(initial=0) < 0:
        raise LagBoundBroken(f"lags {lags.min()} to {lags.max()} at version {version}; the bound is 0 to {max_lag}")
    return TrainSequence(
        token_ids=trajectory.token_ids,
        loss_mask=mask,
        behavior_logprobs=trajectory.behavior_logprobs,
        lags=lags,
        mixed_versions=len(trajectory.versions) > 1,
        old_cache=trajectory.has_old_cache,
        reward=trajectory.reward.reward or 0.0,
        truncated=trajectory.truncated,
        routing=_routing(trajectory),
    )


def observed_in(trajectory: Trajectory) -> NDArray[np.bool_]:
    """True at tokens that the environment said between the policy's turns, [T], with the chat template's around them.

    A context begins with its prompt, and a summary is asked for by the rules: these are nobody's answer to the policy.
    """
    found = np.zeros(len(trajectory.token_ids), dtype=np.bool_)
    contexts = [bisect_right(trajectory.sequence_starts, turn.start) for turn in trajectory.turns]
    for turn, before, context in zip(trajectory.turns[1:], contexts, contexts[1:], strict=False):
        if context == before and turn.state != SUMMARY_STATE:
            found[turn.start : turn.completion_start] = True
    return found


def _routing(trajectory: Trajectory) -> SequenceRouting | None:
    """Of the tokens that it is told of. What does not unpack is as good as nothing: no rollout ends a run."""
    told, length = trajectory.routed_experts, len(trajectory.token_ids)
    if told is None:
        return None
    try:
        pieces = told.pieces()
    except ValueError as error:
        logger.warning("a trajectory is trained with the learner's own routing: %s", error)
        return None
    experts = np.zeros((length, told.layers, told.chosen), dtype=pieces[0][1].dtype)
    known = np.zeros(length, dtype=np.bool_)
    for start, rows in pieces:
        experts[start : start + len(rows)] = rows
        known[start : start + len(rows)] = True
    return SequenceRouting(experts, known)


def _state(trajectory: Trajectory, turn: Turn) -> int:
    """The policy's context in this turn, as a number: the same key, or without one the same tokens."""
    if turn.state:
        keyed: int = xxhash.xxh3_64_intdigest(b"key " + turn.state.encode())
        return keyed - (1 << 63)
    given = np.ascontiguousarray(trajectory.token_ids[turn.start : turn.completion_start])
    digest: int = xxhash.xxh3_64_intdigest(given.tobytes())
    return digest - (1 << 63)
