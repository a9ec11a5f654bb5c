"""The pulls of a step's groups, and how they differ between a run and a what-if of it.

TokenPulls of a step, and whose tokens they are ─▶ StepPulls ─┬▶ GroupChange of each group
                           the same of the run ─▶ StepPulls ─┘
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from learner.training.batch import TrainSequence
from learner.training.pulls import TokenPulls
from protocol.trajectories import TrajectoryGroup

_Sequence = tuple[int, int, int]


@dataclass(frozen=True, kw_only=True)
class StepPulls:
    """The values of `TokenPulls` at a step's trained tokens, T of S sequences, end to end.

    `origins` int64 [S, 3]: group and trajectory of each sequence by their places in the step, and its first token in
    the trajectory. `lengths` int64 [S]: its trained tokens. `pulls`, `advantages`, `clipped` float32 [T]; the last is
    empty where there is no clip, or the ratio that it bounds is always 1. `epochs`: in how many of the step's updates
    each token was.
    """

    origins: NDArray[np.int64]
    lengths: NDArray[np.int64]
    pulls: NDArray[np.float32]
    advantages: NDArray[np.float32]
    clipped: NDArray[np.float32]
    epochs: int

    @classmethod
    def made(cls, sequences: Sequence[TrainSequence], tokens: TokenPulls, *, epochs: int, clips: bool) -> "StepPulls":
        """Of the sequences of a step that a trainer has taken; `clips` says whether its clip can hold anything back."""
        trained = np.concatenate([each.loss_mask for each in sequences])
        origins = [each.origin for each in sequences]
        clipped = tokens.clipped[trained] if tokens.clipped is not None and clips else np.zeros(0, dtype=np.float32)
        return cls(
            origins=np.array([(o.group, o.trajectory, o.start) for o in origins if o is not None], dtype=np.int64),
            lengths=np.array([each.loss_mask.sum() for each in sequences], dtype=np.int64),
            pulls=tokens.pulls[trained],
            advantages=tokens.advantages[trained],
            clipped=clipped,
            epochs=epochs,
        )

    def save(self, path: Path) -> None:
        """Writes it as .npz."""
        fields: Mapping[str, Any] = vars(self)
        np.savez(path, **fields)

    @classmethod
    def load(cls, path: Path) -> "StepPulls":
        """Reads what `save` wrote."""
        with np.load(path) as found:
            arrays = {name: found[name] for name in found.files}
        return cls(**{**arrays, "epochs": int(arrays["epochs"])})

    def of_sequences(self) -> dict[_Sequence, NDArray[np.float32]]:
        """The pulls of each sequence's trained tokens, by its origin."""
        parts = np.split(self.pulls, np.cumsum(self.lengths)[:-1])
        return {(int(g), int(t), int(s)): part for (g, t, s), part in zip(self.origins, parts, strict=True)}

    def sums(self, values: NDArray[np.float32], *, groups: int) -> NDArray[np.float64]:
        """The sum of the magnitudes of values [T] over the tokens of each of so many groups."""
        of_tokens = np.repeat(self.origins[:, 0], self.lengths)
        found: NDArray[np.float64] = np.bincount(of_tokens, weights=np.abs(values), minlength=groups).astype(np.float64)
        return found


@dataclass(frozen=True, kw_only=True)
class GroupChange:
    """Change of a group's part in a step between the run, whose values have names with `_run`, and a what-if of it.

    `pull`: sum of the magnitudes of its tokens' pulls, and `pull_change` that of the differences, token by token.
    `clipped_share`: share of its tokens that the clip held back, over the step's epochs, None where it holds back
    none. `advantage`: mean magnitude of its tokens' advantages. A group that is not trained has zeros.
    """

    step: int
    lease_id: int
    environment: str
    task_index: int
    rewards: tuple[float | None, ...]
    pull_change: float
    pull_run: float
    pull: float
    clipped_share_run: float | None
    clipped_share: float | None
    advantage_run: float
    advantage: float

    def line(self) -> dict[str, Any]:
        """As it is written to groups.jsonl."""
        return dataclasses.asdict(self)


def changes_of_groups(
    groups: Sequence[TrajectoryGroup], *, step: int, run: StepPulls, now: StepPulls
) -> list[GroupChange]:
    """The change of each group of a step's batch, in order."""
    count = len(groups)
    changed = np.zeros(count)
    before, after = run.of_sequences(), now.of_sequences()
    for key in before.keys() | after.keys():
        tokens = len(before[key] if key in before else after[key])
        nothing = np.zeros(tokens, dtype=np.float32)
        changed[key[0]] += float(np.abs(after.get(key, nothing) - before.get(key, nothing)).sum(dtype=np.float64))
    of_run, of_now = _means(run, count), _means(now, count)
    return [
        GroupChange(
            step=step,
            lease_id=group.lease_id,
            environment=group.environment,
            task_index=group.task_index,
            rewards=tuple(each.reward.reward for each in group.trajectories),
            pull_change=float(changed[place]),
            pull_run=of_run["pull"][place],
            pull=of_now["pull"][place],
            clipped_share_run=of_run["clipped"][place],
            clipped_share=of_now["clipped"][place],
            advantage_run=of_run["advantage"][place],
            advantage=of_now["advantage"][place],
        )
        for place, group in enumerate(groups)
    ]


def _means(step: StepPulls, count: int) -> Mapping[str, Sequence[Any]]:
    tokens = np.maximum(step.sums(np.ones_like(step.pulls), groups=count), 1)
    clipped: Sequence[float | None] = [None] * count
    if len(step.clipped):
        clipped = (step.sums(step.clipped, groups=count) / tokens / step.epochs).tolist()
    return {
        "pull": step.sums(step.pulls, groups=count).tolist(),
        "advantage": (step.sums(step.advantages, groups=count) / tokens).tolist(),
        "clipped": clipped,
    }
