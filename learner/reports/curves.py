"""The picture of a run: reward and accuracy, lag, and where the time went, over steps."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure

from learner.reports.records import Records

_BLUE, _ORANGE, _GREY = "#1f6fb4", "#d95f02", "#8a8a8a"


def draw_curves(records: Records, *, title: str, path: Path) -> None:
    """Writes a PNG with three panels."""
    steps = np.array([record.step for record in records.steps])
    figure = Figure(figsize=(9.0, 7.2), layout="constrained")
    rewards, lags, times = figure.subplots(3, 1, sharex=True, height_ratios=(3, 1.4, 1.4))
    figure.suptitle(title)

    reward = np.array([record.reward_mean for record in records.steps])
    rewards.plot(steps, reward, color=_BLUE, alpha=0.25, linewidth=0.8)
    rewards.plot(steps, _smoothed(reward), color=_BLUE, label="reward of training rollouts (smoothed)")
    rewards.plot(
        [result.version for result in records.evaluations],
        [result.accuracy for result in records.evaluations],
        "o-", color=_ORANGE, markersize=4, label="held-out accuracy",
    )  # fmt: skip
    rewards.set_ylabel("reward, accuracy")
    rewards.legend(loc="lower right", frameon=False)

    lags.fill_between(
        steps, [record.lag_max for record in records.steps], color=_GREY, alpha=0.3, label="largest", step="mid"
    )
    lags.plot(steps, _smoothed(np.array([record.lag_mean for record in records.steps])), color=_BLUE, label="mean")
    lags.set_ylabel("lag (versions)")
    lags.legend(loc="upper left", frameon=False, ncols=2)
    lags.set_ylim(0, 1.4 * max(1, max(record.lag_max for record in records.steps)))

    parts = [("train", _BLUE, "train_s"), ("copy weights", _GREY, "copy_s"), ("wait for groups", _ORANGE, "wait_s")]
    times.stackplot(
        steps,
        [_smoothed(np.array([getattr(record, name) for record in records.steps])) for _, _, name in parts],
        labels=[label for label, _, _ in parts], colors=[color for _, color, _ in parts], alpha=0.7,
    )  # fmt: skip
    times.set_ylabel("seconds per step")
    times.set_xlabel("step")
    times.legend(loc="upper right", frameon=False, ncols=3)
    for axes in (rewards, lags, times):
        axes.spines[["top", "right"]].set_visible(False)
    rewards.set_ylim(min(0.0, reward.min()), max(1.0, reward.max()))
    times.set_ylim(bottom=0)
    figure.savefig(path, dpi=110)


def _smoothed(values: npt.NDArray[np.float64] | Sequence[float]) -> npt.NDArray[np.float64]:
    """A centred moving mean over a twentieth of the run, shorter at its ends."""
    row = np.asarray(values, dtype=np.float64)
    window = max(1, len(row) // 20)
    kernel = np.ones(window)
    return np.convolve(row, kernel, "same") / np.convolve(np.ones_like(row), kernel, "same")
