"""The table and the figure of benchmarks/rlhf_chain.py."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Point:
    """A checkpoint of a run, judged. Rates are shares of held-out prompts, `kl` is in nats per continuation.

    `length` is in letters; `lag_mean` is over all tokens that the run trained, in policy versions.
    """

    algo: str
    max_lag: int
    step: int
    lag_mean: float
    train_wall_s: float
    gold_win_rate: float
    proxy_win_rate: float
    kl: float
    gold: float
    proxy: float
    length: float


def read_points(path: Path) -> list[Point]:
    """The points of a file, none if it is not there."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return [Point(**json.loads(line)) for line in text.splitlines()]


def runs(points: Sequence[Point]) -> dict[tuple[str, int], list[Point]]:
    """The points of each run by algorithm and max_lag, in the order of the steps."""
    found: dict[tuple[str, int], list[Point]] = {}
    for point in sorted(points, key=lambda point: (point.algo, point.max_lag, point.step)):
        found.setdefault((point.algo, point.max_lag), []).append(point)
    return found


def table(points: Sequence[Point]) -> str:
    """Of each run the checkpoint that the gold reward likes most, and the last one."""
    rows = [_row(run) for run in runs(points).values()]
    return "\n".join(
        [
            "# RLHF over max_lag",
            "",
            "`benchmarks/rlhf_chain.py`: every run starts from the same SFT model and follows the same learned reward",
            "model. Win rates are against the SFT model on held-out prompts, by the gold reward (which training never",
            "sees) and by the reward model; KL is to the SFT model, in nats per continuation. Best: the judged",
            "checkpoint of the highest gold win rate. One seed; wall times are of a shared machine.",
            "",
            "| algorithm | max_lag | mean lag | best: step | gold win | KL | last: step | gold win "
            "| reward model's win | gold reward | KL | length | training, s |",
            "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
            *rows,
            "",
            "![gold win rate over KL](rlhf_chain.png)",
            "",
        ]
    )


def _row(run: Sequence[Point]) -> str:
    best, last = max(run, key=lambda point: point.gold_win_rate), run[-1]
    return (
        f"| {last.algo} | {last.max_lag} | {last.lag_mean:.1f} "
        f"| {best.step} | **{best.gold_win_rate:.3f}** | {best.kl:.2f} "
        f"| {last.step} | {last.gold_win_rate:.3f} | {last.proxy_win_rate:.3f} | {last.gold:.1f} | {last.kl:.1f} "
        f"| {last.length:.1f} | {last.train_wall_s:.0f} |"
    )


def figure(points: Sequence[Point], path: Path) -> None:
    """Draws a panel for each algorithm, a colour for each max_lag: win rates over KL, gold and by the reward model."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import colormaps, pyplot

    algorithms = sorted({point.algo for point in points})
    lags = sorted({point.max_lag for point in points})
    drawing, axes = pyplot.subplots(1, len(algorithms), figsize=(6 * len(algorithms), 4.5), squeeze=False, sharey=True)
    panels = dict(zip(algorithms, axes[0], strict=True))
    for (algo, lag), run in runs(points).items():
        colour = colormaps["viridis"](lags.index(lag) / max(1, len(lags) - 1))
        kl = [0.0, *(point.kl for point in run)]
        gold = [0.5, *(point.gold_win_rate for point in run)]
        proxy = [0.5, *(point.proxy_win_rate for point in run)]
        panels[algo].plot(kl, gold, "o-", color=colour, markersize=4, label=f"max_lag {lag}")
        panels[algo].plot(kl, proxy, ":", color=colour, linewidth=1)
    for algo, panel in panels.items():
        panel.set(title=algo, xlabel="KL to the SFT model, nats per continuation", ylim=(0, 1.02))
        panel.axhline(0.5, color="grey", linewidth=0.5)
        panel.legend(title="gold; dotted: reward model")
    axes[0][0].set_ylabel("win rate against the SFT model")
    drawing.tight_layout()
    drawing.savefig(path, dpi=120)
    pyplot.close(drawing)
