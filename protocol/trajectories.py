"""The record of a rollout: its tokens, which of them were sampled, how probably, and under which weights."""

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from operator import itemgetter
from typing import Annotated, Any, Literal, Self, get_args

import numpy as np
import numpy.typing as npt
from pydantic import Field, ValidationInfo, model_validator

from protocol.model import ByteRow, Float32Row, Int32Row, PolicyVersion, VersionText, WireModel
from protocol.routed_experts import RoutedExperts

FinishReason = Literal["stop", "length", "abort"]
ErrorKind = Literal["user", "data", "infrastructure"]
Purpose = Literal["train", "evaluate"]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]

MAX_TURNS = 1024
MAX_COMPONENTS = MAX_TURNS + 256
"""Of a reward: one for each turn, and others."""
MAX_VERSION_CHARS = 1024
"""Of a verifier's version: that of a composite holds those of its parts."""
MAX_STATE_CHARS = 256
SUMMARY_STATE = "headway:summary"
"""State of a turn in which the policy sums the conversation up: it is no action, and no environment hears of it."""
MAX_STOP_REASON_CHARS = 64
MAX_PLAYER_CHARS = 64
MAX_EXPLANATION_CHARS = 4096
MAX_REWARD = 1e6
"""By its size. What lies beyond is no judgement but a fault (a sentinel, a time stamp, a division by almost 0), and one
such number in a group hides what all others say.
"""
TOGETHER = object()
"""As the context of a validation: the rows of a group's trajectories are looked at afterwards, by `fits`. It counts
where groups are small and many: to look at each trajectory by itself costs ten times as much, and is done twice, once
more when its group is made.
"""
ROWS: Mapping[str, np.dtype[Any]] = {
    "token_ids": np.dtype("<i4"),
    "loss_mask": np.dtype("u1"),
    "behavior_logprobs": np.dtype("<f4"),
}
"""A trajectory's arrays, which travel end to end for all trajectories of a group."""


def fault_of_reward(*, verifier: object, reward: object, components: object) -> str | None:
    """Reason why nobody is to train on a verifier's reward, in words that name it; None if nothing speaks against it.

    A reward is finite and of at most MAX_REWARD, its components are finite.
    """
    if isinstance(components, dict) and all(map(_is_in_order, (reward, *components.values()))):
        return None  # as almost always, and without a text for each
    parts = components.items() if isinstance(components, dict) else ()
    for what, number in (("a reward", reward), *((f"a component {name!r}", part) for name, part in parts)):
        if isinstance(number, float) and not math.isfinite(number):
            return f"verifier {verifier} gave {what} of {number}, expected a finite number"
    if isinstance(reward, float | int) and abs(reward) > MAX_REWARD:
        return f"verifier {verifier} gave a reward of {str(reward)[:40]}, expected one of at most {MAX_REWARD:g}"
    return None


def _is_in_order(number: object) -> bool:
    return isinstance(number, float) and -MAX_REWARD <= number <= MAX_REWARD


class VersionSpan(WireModel):
    """Tokens `[start, end)` were sampled under `version`, as stamped by the generator's process `instance` (see
    Announcement): a version counts once this very process has proven that it serves it.

    `cache` is the version under which the oldest keys and values may have been computed that they were sampled with,
    if that is an older one: of a prompt that was read in, or was in the prefix cache, before the weights changed.
    """

    version: VersionText
    start: int = Field(ge=0)
    end: int = Field(ge=1)
    instance: str = Field(default="", max_length=64)
    cache: VersionText | None = Field(default=None, exclude_if=lambda version: version is None)

    @model_validator(mode="after")
    def _not_empty(self) -> Self:
        if self.end <= self.start:
            raise ValueError(f"version span [{self.start}, {self.end}) is empty")
        return self

    def moved(self, by: int) -> Self:
        """The same tokens in a row in which they stand `by` places later."""
        return type(self)(
            version=self.version, start=self.start + by, end=self.end + by, instance=self.instance, cache=self.cache
        )


class Turn(WireModel):
    """An exchange: tokens `[start, completion_start)` were given to the policy, then it sampled
    `[completion_start, end)`. `generator_ids` are those that sampled, in order: more than one if the first ones died or
    left in the middle.

    `reward` is the turn's own, a part of the trajectory's; None where nobody gave rewards to turns. `state` is a key of
    what the policy was given, equal for equal states of a task; empty where the tokens that it was given say it.
    `asked_s` and `ended_s` are when the policy was asked for it and when its last token was there, in seconds since the
    rollout began; None where nobody noted them.
    """

    start: int = Field(ge=0)
    completion_start: int = Field(ge=0)
    end: int = Field(ge=0)
    finish_reason: FinishReason
    generator_ids: tuple[Annotated[str, Field(max_length=256)], ...] = Field(max_length=1024)
    reward: float | None = Field(default=None, allow_inf_nan=False, exclude_if=lambda reward: reward is None)
    state: str = Field(default="", max_length=MAX_STATE_CHARS, exclude_if=lambda state: not state)
    asked_s: Seconds | None = Field(default=None, exclude_if=lambda at: at is None)
    ended_s: Seconds | None = Field(default=None, exclude_if=lambda at: at is None)

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if not self.start <= self.completion_start <= self.end:
            raise ValueError(f"a turn of tokens [{self.start}, {self.end}) samples from {self.completion_start} on")
        return self


class RewardRecord(WireModel):
    """A reward service's result, and how it was made. Exactly one of `reward` and `error` is set.

    `service_id` is who said it, at the address `endpoint`; it took `latency_s` seconds there. `attempts` counts the
    requests for it over all endpoints. `explanation` is for people: what the verifier said, and what it was given.
    """

    reward: float | None = None
    components: dict[str, float] = Field(default_factory=dict, max_length=MAX_COMPONENTS)
    verifier: str = Field(max_length=256)
    verifier_version: str = Field(default="", max_length=MAX_VERSION_CHARS)
    service_id: str = Field(default="", max_length=256)
    endpoint: str = Field(default="", max_length=2048)
    latency_s: float = Field(default=0.0, ge=0)
    attempts: int = Field(default=1, ge=1)
    error_kind: ErrorKind | None = None
    error: str | None = Field(default=None, max_length=4096)
    explanation: str = Field(default="", max_length=MAX_EXPLANATION_CHARS, exclude_if=lambda text: not text)

    @model_validator(mode="after")
    def _reward_or_error(self) -> Self:
        if (self.reward is None) == (self.error is None):
            raise ValueError("a reward record holds either a reward or an error, got both or neither")
        fault = fault_of_reward(verifier=self.verifier, reward=self.reward, components=self.components)
        if fault is not None:
            raise ValueError(fault)
        return self


class Fork(WireModel):
    """A place in which a conversation went on in several ways, of which this trajectory is number `branch`.

    The tokens before `at`, which is where a turn ends, were sampled once for all ways of this fork. At 0 the policy had
    said nothing yet: there `branch` tells apart the beginnings of the group.
    """

    at: int = Field(ge=0)
    branch: int = Field(ge=0, lt=4096)


CutOff = Literal["turn_limit", "token_budget", "time_limit", "invalid_actions"]
CUT_OFF: frozenset[str] = frozenset(get_args(CutOff))
"""Reasons for the end of a conversation that its environment would have gone on with."""


@lru_cache(maxsize=4096)
def _number(version: str) -> int:
    return PolicyVersion.parse(version).number


class Trajectory(WireModel):
    """A rollout of a task. All arrays have the length T of the whole conversation in tokens.

    `loss_mask` is 1 where the policy sampled the token. `behavior_logprobs` are those of the sampled tokens under the
    weights that sampled them, and 0 elsewhere. `version_spans` cover exactly the sampled tokens: a token without a
    stamp makes the trajectory invalid.

    `sequence_starts` are the places, besides 0, where a new context begins: what is before one of them the policy did
    not see from there on. `stop_reason` is the environment's word for its end, or one of CUT_OFF; empty for a
    trajectory of one turn. `player` is whose part the policy played, where there are several: a game gives a trajectory
    for each player that the policy is, and only those of the same player are compared. `routed_experts` are those that
    its tokens were sent to, where they were asked for and are known.

    `forks` is its way through the tree of a group that branches, the first of them at 0; empty where nothing does. Two
    trajectories share what is before the first fork in which their branches differ.
    """

    token_ids: Int32Row
    loss_mask: ByteRow
    behavior_logprobs: Float32Row
    version_spans: tuple[VersionSpan, ...] = Field(max_length=4096)
    turns: tuple[Turn, ...] = Field(min_length=1, max_length=MAX_TURNS)
    reward: RewardRecord
    completion_text: str = Field(default="", max_length=1 << 20)
    sequence_starts: tuple[int, ...] = Field(default=(), max_length=1024, exclude_if=lambda starts: not starts)
    stop_reason: str = Field(default="", max_length=MAX_STOP_REASON_CHARS, exclude_if=lambda reason: not reason)
    player: str = Field(default="", max_length=MAX_PLAYER_CHARS, exclude_if=lambda player: not player)
    routed_experts: RoutedExperts | None = Field(default=None, exclude_if=lambda told: told is None)
    forks: tuple[Fork, ...] = Field(default=(), max_length=1024, exclude_if=lambda forks: not forks)

    @model_validator(mode="after")
    def _consistent(self, info: ValidationInfo) -> Self:
        if self.forks:
            self._check_forks()
        if info.context is TOGETHER:
            return self
        length = self.token_ids.shape[0]
        for name in ("loss_mask", "behavior_logprobs"):
            got = getattr(self, name).shape[0]
            if got != length:
                raise ValueError(f"{name} has {got} entries for {length} tokens")
        if length == 0 or int(self.token_ids.min()) < 0:
            raise ValueError("token_ids must hold at least one token and no negative id")
        if int(self.loss_mask.max()) > 1:
            raise ValueError("loss_mask holds something other than 0 and 1")
        if max(turn.end for turn in self.turns) > length:
            raise ValueError(f"a turn ends beyond the {length} tokens")
        if self.routed_experts is not None and self.routed_experts.end > length:
            raise ValueError(f"routed_experts are told of {self.routed_experts.end} tokens, and there are {length}")
        self._check_starts(length)
        self._check_stamps(length)
        return self

    def starts_fit(self, length: int) -> bool:
        """True if its sequences are in order, of a trajectory of `length` tokens."""
        try:
            self._check_starts(length)
        except ValueError:
            return False
        return True

    def _check_forks(self) -> None:
        places, ends = [fork.at for fork in self.forks], {turn.end for turn in self.turns}
        if places[0] != 0 or places != sorted(set(places)) or not ends.issuperset(places[1:]):
            raise ValueError(f"forks at tokens {places}: expected 0, and then rising ends of turns")

    def _check_starts(self, length: int) -> None:
        starts = (0, *self.sequence_starts)
        if any(later <= earlier for earlier, later in pairwise((*starts, length))):
            raise ValueError(f"sequence_starts {self.sequence_starts} do not rise within the {length} tokens")
        if any(self.loss_mask[start] for start in self.sequence_starts):
            raise ValueError("a sequence begins with a sampled token, yet nothing precedes it there")
        crossed = [turn for turn in self.turns for start in self.sequence_starts if turn.start < start < turn.end]
        if crossed:
            raise ValueError(f"the turn of tokens [{crossed[0].start}, {crossed[0].end}) is in two sequences")

    def _check_stamps(self, length: int) -> None:
        stamped = np.zeros(length, dtype=np.uint8)
        last_end = 0
        for span in self.version_spans:
            if span.start < last_end or span.end > length:
                raise ValueError(f"version span [{span.start}, {span.end}) overlaps another or exceeds {length} tokens")
            stamped[span.start : span.end] = 1
            last_end = span.end
        if (self.loss_mask > stamped).any():
            raise ValueError("a sampled token has no version stamp")
        if not np.isfinite(self.behavior_logprobs).all():
            raise ValueError("behavior_logprobs holds a value that is not finite")

    @property
    def own_start(self) -> int:
        """Place of the first token that is not also counted as another branch's: what is before a fork is of the branch
        0 that goes on from it.
        """
        return max((fork.at for fork in self.forks if fork.branch), default=0)

    @property
    def sampled_tokens(self) -> int:
        """Number of tokens that were sampled for it, those before a fork in branch 0 alone."""
        return int(self.loss_mask[self.own_start :].sum())

    @property
    def own_turns(self) -> tuple[Turn, ...]:
        """Turns that were sampled for it, those before a fork in branch 0 alone."""
        return tuple(turn for turn in self.turns if turn.end > self.own_start)

    def token_versions(self) -> npt.NDArray[np.int32]:
        """Policy version number of each sampled token, [T]; −1 where the policy did not sample."""
        versions = np.full(self.token_ids.shape[0], -1, dtype=np.int32)
        for span in self.version_spans:
            versions[span.start : span.end] = _number(span.version)
        versions[self.loss_mask == 0] = -1
        return versions

    @property
    def versions(self) -> frozenset[str]:
        """The policy versions that sampled its tokens, and those of older keys and values with which they did."""
        return frozenset(version for span in self.version_spans for version in (span.version, span.cache) if version)

    @property
    def has_old_cache(self) -> bool:
        """True if tokens of it were sampled with keys and values that may be of an older version than theirs."""
        return any(span.cache is not None for span in self.version_spans)

    @property
    def truncated(self) -> bool:
        """True if it was cut off: by a limit on its turns or tokens, or in the middle of its only turn."""
        if self.stop_reason:
            return self.stop_reason in CUT_OFF
        return self.turns[-1].finish_reason == "length"

    @property
    def oldest_version(self) -> int | None:
        """The number of the oldest policy version that sampled one of its tokens; None if it sampled nothing."""
        numbered = sorted((_number(span.version), span.start, span.end) for span in self.version_spans)
        return next((number for number, start, end in numbered if self.loss_mask[start:end].any()), None)


class GreedyBaseline(WireModel):
    """An answer to a group's task that was sampled at temperature 0, where the lease asked for one: the worth of the
    policy's likeliest answer, with which the others are compared.

    Its tokens do not travel, so that nothing can be trained on them. `version_spans` are their stamps, `generator_ids`
    those who sampled them.
    """

    reward: RewardRecord
    version_spans: tuple[VersionSpan, ...] = Field(min_length=1, max_length=4096)
    sampled_tokens: int = Field(ge=1)
    generator_ids: tuple[Annotated[str, Field(max_length=256)], ...] = Field(
        default=(), max_length=1024, exclude_if=lambda names: not names
    )


class TrajectoryGroup(WireModel):
    """All trajectories of one lease: the same task, rolled out `group_size` times, by an attempt that the learner's
    incarnation `incarnation` granted. A rollout with several players gives one for each that the policy plays.

    `teacher_prompt` are the tokens of the task's prompt as a teacher sees it that is shown more than the policy, which
    is trained on its own. With `solved_reward` they show the completion of a trajectory of at least that reward, to
    teach those of less; without such a trajectory there is no prompt, and nobody is taught.
    """

    incarnation: int = Field(ge=1)
    lease_id: int = Field(ge=0)
    attempt: int = Field(ge=0)
    purpose: Purpose
    environment: str = Field(max_length=256)
    task_index: int = Field(ge=0)
    prompt_text: str = Field(default="", max_length=1 << 20)
    trajectories: tuple[Trajectory, ...] = Field(min_length=1, max_length=4096)
    rollout_s: float = Field(default=0.0, ge=0)
    """Wall time from grant to finish, in seconds."""
    scoring_s: tuple[Seconds, Seconds] | None = Field(default=None, exclude_if=lambda scoring: scoring is None)
    """Beginning and end of its scoring, in seconds since the rollout began; None where no verifier was asked."""
    greedy_baseline: GreedyBaseline | None = Field(default=None, exclude_if=lambda baseline: baseline is None)
    turnless: int = Field(default=0, ge=0, exclude_if=lambda count: not count)
    """Conversations of a group that branches that were over before the policy had a turn; they left no trajectory."""
    teacher_prompt: tuple[Annotated[int, Field(ge=0, lt=1 << 31)], ...] | None = Field(
        default=None, min_length=1, max_length=1 << 20, exclude_if=lambda prompt: prompt is None
    )
    solved_reward: float | None = Field(default=None, allow_inf_nan=False, exclude_if=lambda reward: reward is None)

    @property
    def stamps(self) -> frozenset[tuple[str, str]]:
        """Processes that sampled its tokens, those of a greedy answer too, each with a version."""
        return self.own_stamps | self.greedy_stamps

    @property
    def own_stamps(self) -> frozenset[tuple[str, str]]:
        """The same of its trajectories alone."""
        return frozenset((span.instance, span.version) for one in self.trajectories for span in one.version_spans)

    @property
    def greedy_stamps(self) -> frozenset[tuple[str, str]]:
        """The same of its greedy answer; empty if it has none."""
        spans = () if self.greedy_baseline is None else self.greedy_baseline.version_spans
        return frozenset((span.instance, span.version) for span in spans)

    @property
    def greedy_reward(self) -> float | None:
        """The reward of its greedy answer; None if it has none."""
        return None if self.greedy_baseline is None else self.greedy_baseline.reward.reward

    def teaches(self, trajectory: Trajectory) -> bool:
        """True if a teacher that is shown more has something to say of one of its trajectories."""
        if self.solved_reward is None:
            return True
        reward = trajectory.reward.reward
        return self.teacher_prompt is not None and reward is not None and reward < self.solved_reward

    @property
    def by_player(self) -> dict[str, tuple[int, ...]]:
        """The trajectories of each player, by its name; all of them of one without a name, mostly."""
        found: dict[str, list[int]] = {}
        for index, trajectory in enumerate(self.trajectories):
            found.setdefault(trajectory.player, []).append(index)
        return {player: tuple(indices) for player, indices in found.items()}

    @property
    def oldest_version(self) -> int | None:
        """The oldest version number over its trajectories; None if none sampled a token."""
        spans = [(_number(span.version), span, one) for one in self.trajectories for span in one.version_spans]
        spans.sort(key=itemgetter(0))
        # The first one has sampled tokens, as almost always, and nobody looks at the others.
        sampled = (number for number, span, one in spans if one.loss_mask[span.start : span.end].any())
        return next(sampled, None)


def group_of(trajectories: Sequence[Trajectory], **fields: object) -> TrajectoryGroup:
    """The group of trajectories that were made TOGETHER, which are looked at here. Raises ValidationError."""
    group = TrajectoryGroup.model_validate({**fields, "trajectories": tuple(trajectories)}, context=TOGETHER)
    lengths = [trajectory.token_ids.shape[0] for trajectory in trajectories]
    rows = {name: np.concatenate([getattr(each, name) for each in trajectories]) for name in ROWS}
    if not _as_long(trajectories, lengths) or not fits(group, rows, lengths):
        for trajectory in trajectories:
            Trajectory.model_validate(dict(trajectory))
    return group


def _as_long(trajectories: Sequence[Trajectory], lengths: Sequence[int]) -> bool:
    return all(
        trajectory.loss_mask.shape[0] == length == trajectory.behavior_logprobs.shape[0]
        for trajectory, length in zip(trajectories, lengths, strict=True)
    )


def fits(group: TrajectoryGroup, rows: Mapping[str, npt.NDArray[Any]], lengths: Sequence[int]) -> bool:
    """True if a group that was validated TOGETHER would have been taken one trajectory at a time.

    `rows` are its arrays end to end, [N] each, `lengths` those of its trajectories. False says only that something may
    be wrong: a validation without context then tells what, and of which trajectory.
    """
    if not all(lengths):
        return False
    tokens, mask, logprobs = (rows[name] for name in ROWS)
    if int(tokens.min()) < 0 or int(mask.max()) > 1 or not np.isfinite(logprobs).all():
        return False
    stamped = np.zeros(mask.shape[0], dtype=np.uint8)
    first = 0
    for trajectory, length in zip(group.trajectories, lengths, strict=True):
        end = 0
        for span in trajectory.version_spans:
            if span.start < end:
                return False
            end = span.end
            stamped[first + span.start : first + end] = 1
        if end > length or any(turn.end > length for turn in trajectory.turns):
            return False
        if trajectory.sequence_starts and not trajectory.starts_fit(length):
            return False
        if trajectory.routed_experts is not None and trajectory.routed_experts.end > length:
            return False
        first += length
    return not (mask > stamped).any()
