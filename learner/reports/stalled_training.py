"""Training that gets nowhere, seen in its newest steps: what is said of it, and what to try."""

import statistics
from collections import deque
from collections.abc import Sequence

from learner.reports.tally import StepRecord

_STEPS_LOOKED_AT = 20
_HARDLY_MOVES = 1e-6
"""Mean rewards that differ by less than this are the same, but for rounding."""
_RISE = 0.02
"""Share of the earlier mean reward by which the later one is above it in training that learns."""
_NEARLY_ALL = 0.95
"""Share of a step's completions."""


class Doubts:
    """Doubts if training can get anywhere, from what its steps say; each doubt is said once, with what to try.

    `compares_in_group`: the algorithm learns of a group from how its rewards differ. `learns_from_rewards`: it learns
    from rewards at all.
    """

    def __init__(self, *, compares_in_group: bool = True, learns_from_rewards: bool = True) -> None:
        self._compares_in_group = compares_in_group
        self._learns_from_rewards = learns_from_rewards
        self._recent: deque[StepRecord] = deque(maxlen=_STEPS_LOOKED_AT)
        self._said: set[str] = set()

    def step(self, record: StepRecord) -> list[str]:
        """The lines that are new after this step."""
        self._recent.append(record)
        if len(self._recent) < _STEPS_LOOKED_AT:
            return []
        new = {name: text for name, text in self._doubts().items() if name not in self._said}
        self._said |= new.keys()
        return list(new.values())

    def _doubts(self) -> dict[str, str]:
        means = [record.reward_mean for record in self._recent]
        found = self._of_rewards(means) if self._learns_from_rewards else {}
        last = f"the last {len(self._recent)} steps"
        if all(record.truncated_share > _NEARLY_ALL for record in self._recent) and not _rises(means):
            found["cut off"] = (
                f"in {last} nearly all completions were cut off at their last permitted token: raise "
                "learner.rollouts.max_tokens (and generator.engine.max_model_len), or see whether the model knows its "
                "end token (learner.rollouts.stop_token_ids, and chat = false for a model without a chat template)"
            )
        return found

    def _of_rewards(self, means: Sequence[float]) -> dict[str, str]:
        found = {}
        last = f"the last {len(self._recent)} steps"
        if self._compares_in_group and all(record.uniform_groups_share == 1 for record in self._recent):
            found["equal"] = (
                f"in {last} the rewards of each group were all equal, so nothing is learned from them: take easier or "
                "harder tasks, a reward with values between, a larger learner.rollouts.group_size, or a higher "
                "learner.training.temperature; samples.jsonl in the run's folder shows completions with their rewards"
            )
        elif max(means) - min(means) < _HARDLY_MOVES:
            found["still"] = (
                f"the mean reward has been {means[-1]:g} in {last}: see in samples.jsonl in the run's folder what the "
                "verifier is given and says, and raise learner.training.optimizer.learning_rate if that is right"
            )
        return found


def _rises(rewards: Sequence[float]) -> bool:
    """True if the mean of the later half is more than 2 % above the earlier: such runs learn although cut off."""
    half = len(rewards) // 2
    early, late = statistics.fmean(rewards[:half]), statistics.fmean(rewards[half:])
    return late - early > _RISE * abs(early)
