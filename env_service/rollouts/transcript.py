"""The tokens of one conversation as it grows: what was shown and sampled stays as it was, and more is put behind it."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from env_service.rollouts.completions import Completion
from protocol.trajectories import MAX_STATE_CHARS, FinishReason, RewardRecord, Trajectory, Turn, VersionSpan


@dataclass
class _Exchange:
    """A turn that was sampled. `reward` and `state` as in `Turn`."""

    start: int
    completion_start: int
    end: int
    finish_reason: FinishReason
    generator_ids: tuple[str, ...]
    state: str
    reward: float = 0.0


@dataclass
class Transcript:
    """T tokens so far, which of them were sampled, their logprobs and versions; contexts and turns in it."""

    token_ids: list[int] = field(default_factory=list)
    _logprobs: list[float] = field(default_factory=list)
    _spans: list[VersionSpan] = field(default_factory=list)
    _starts: list[int] = field(default_factory=list)
    _turns: list[_Exchange] = field(default_factory=list)

    @property
    def context(self) -> tuple[int, ...]:
        """What the policy is given next: the tokens from the last start on."""
        return tuple(self.token_ids[self._starts[-1] if self._starts else 0 :])

    @property
    def turns(self) -> int:
        """How many turns were sampled."""
        return len(self._turns)

    @property
    def sampled_by(self) -> str:
        """The generator that sampled last, and holds the conversation so far; empty before the first turn."""
        return self._turns[-1].generator_ids[-1] if self._turns and self._turns[-1].generator_ids else ""

    @property
    def sampled_tokens(self) -> int:
        """How many tokens were sampled."""
        return sum(turn.end - turn.completion_start for turn in self._turns)

    def begin(self, prompt_ids: Sequence[int]) -> None:
        """Open a context with its prompt: the first one, or another one, which sees nothing of those before it."""
        if self.token_ids:
            self._starts.append(len(self.token_ids))
        self.show(prompt_ids)

    def show(self, token_ids: Sequence[int]) -> None:
        """Append what the policy is given."""
        self.token_ids += token_ids
        self._logprobs += [0.0] * len(token_ids)

    def sampled(self, completion: Completion, *, state: str) -> None:
        """Append a turn. `state` is a key of what the policy was given in it."""
        assert completion.finish_reason is not None, "an unfinished completion"
        start = len(self.token_ids)
        self.token_ids += completion.token_ids
        self._logprobs += completion.behavior_logprobs
        self._spans += [span.moved(start) for span in completion.version_spans]
        given = max(self._turns[-1].end if self._turns else 0, self._starts[-1] if self._starts else 0)
        self._turns.append(
            _Exchange(
                given, start, len(self.token_ids), completion.finish_reason, completion.generator_ids, _key(state)
            )
        )

    def earn(self, reward: float) -> None:
        """Add to the last turn's reward."""
        self._turns[-1].reward += reward

    @property
    def has_rewards(self) -> bool:
        """Whether a turn earned something, or lost it."""
        return any(turn.reward for turn in self._turns)

    @property
    def earned(self) -> float:
        """The sum of the turns' rewards."""
        return sum(turn.reward for turn in self._turns)

    def record(
        self, reward: RewardRecord, *, text: str, stop_reason: str, turn_rewards: bool, player: str = ""
    ) -> Trajectory:
        """The whole up to the last turn's end, as it goes to the learner; `turn_rewards` says whether its turns have
        rewards of their own. At least one turn was sampled.
        """
        length = self._turns[-1].end
        loss_mask = np.zeros(length, dtype=np.uint8)
        for turn in self._turns:
            loss_mask[turn.completion_start : turn.end] = 1
        return Trajectory(
            token_ids=np.array(self.token_ids[:length], dtype=np.int32),
            loss_mask=loss_mask,
            behavior_logprobs=np.array(self._logprobs[:length], dtype=np.float32),
            version_spans=tuple(self._spans),
            turns=tuple(
                Turn(
                    start=turn.start,
                    completion_start=turn.completion_start,
                    end=turn.end,
                    finish_reason=turn.finish_reason,
                    generator_ids=turn.generator_ids,
                    reward=turn.reward if turn_rewards else None,
                    state=turn.state,
                )
                for turn in self._turns
            ),
            reward=reward,
            completion_text=text,
            sequence_starts=tuple(start for start in self._starts if start < length),
            stop_reason=stop_reason,
            player=player,
        )


def _key(state: str) -> str:
    """A long key is told by its hash, which is as good."""
    return state if len(state) <= MAX_STATE_CHARS else hashlib.sha256(state.encode()).hexdigest()
