"""The history of a run as `metrics.jsonl` tells it, and the table of the curves that are drawn of its steps.

    metrics.jsonl ──▶ RunHistory ──▶ page, report, picture, resume, replay
    FIGURES, CURVES ──▶ page, report, picture, TensorBoard, Prometheus, Grafana, reference

A learner that is started again goes on from a checkpoint. Its line `resume` says from which version: what was written
of later ones is lost, and no part of the history of the present weights.
"""

import contextlib
import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

S = TypeVar("S")
Entry = Mapping[str, Any]
Points = Sequence[tuple[float, float]]

_MAX_PARTS = 12
_PART_COLORS = ("blue", "orange", "green", "violet", "red", "grey")
_NO_NUMBERS = (
    "kind",
    "step",
    "version",
    "lag_counts",
    "token_lag_counts",
    "lease_ids",
    "reused_lease_ids",
    "generator_id",
    "unix_s",
)


@dataclass(frozen=True)
class FigureSpec:
    """A group of curves of one unit, and how they are drawn. `log`: where a logarithmic scale helps; `zero`: from 0 on.

    `stacked`: on top of each other; `whole`: over the whole width; `held_out`: with the accuracy of the evaluations.
    One that is not `drawn` is on the page where somebody asks for it, each of its curves by itself, and nowhere else.
    """

    id: str
    title: str
    unit: str = ""
    log: bool = False
    zero: bool = False
    stacked: bool = False
    whole: bool = False
    held_out: bool = False
    drawn: bool = True

    @property
    def heading(self) -> str:
        """Title and unit."""
        return f"{self.title}, {self.unit}" if self.unit else self.title


@dataclass(frozen=True)
class CurveSpec:
    """A number of the steps: its name in `metrics.jsonl`, its title in words, its figure and its colour there.

    `largest`: of steps that are joined to one point the largest is shown, and not the mean; it is never smoothed.
    `gauge`: its name as a Prometheus metric of the newest step. `by_name`: its values are numbers by name, such as the
    rewards of verifiers, of which each is a curve: see `parts_of`. `alone`: also where there is one name only.
    """

    name: str
    title: str
    figure: str
    color: str = "blue"
    largest: bool = False
    gauge: str = ""
    by_name: bool = False
    alone: bool = False


FIGURES = (
    FigureSpec("reward", "Reward", whole=True, held_out=True),
    FigureSpec("verifiers", "Reward by verifier"),
    FigureSpec("environments", "Reward by environment"),
    FigureSpec("components", "Components of the reward"),
    FigureSpec("spread", "Spread of rewards", zero=True),
    FigureSpec("kl", "KL of sampling to learning policy", "nats a token", log=True),
    FigureSpec("ratio", "Importance ratio", log=True),
    FigureSpec("entropy", "Entropy", "nats a token"),
    FigureSpec("length", "Length", "sampled tokens", log=True, zero=True),
    FigureSpec("share", "Shares", zero=True),
    FigureSpec("loss", "Loss"),
    FigureSpec("gradient", "Gradient norm", log=True, zero=True),
    FigureSpec("algorithm", "Means of the algorithm"),
    FigureSpec("experts", "Experts of a mixture", drawn=False),
    FigureSpec("replay", "Router replay", drawn=False),
    FigureSpec("lag", "Lag", "versions", zero=True),
    FigureSpec("lag_cosine", "Gradients by lag: cosine to lag 0"),
    FigureSpec("alignment", "Gradients of consecutive updates", drawn=False),
    FigureSpec("lag_norm", "Gradients by lag: norm over that of lag 0", log=True, drawn=False),
    FigureSpec("time", "Time of a step", "seconds", zero=True, stacked=True),
    FigureSpec("optimizer", "Optimizer", log=True, drawn=False),
    FigureSpec("training", "Time of training", "seconds", drawn=False),
    FigureSpec("lag_cost", "Comparing gradients by lag", "seconds", zero=True, drawn=False),
    FigureSpec("lag_error", "Gradients by lag: standard error of the cosine", zero=True, drawn=False),
    FigureSpec("sampling", "Sampling", zero=True, drawn=False),
    FigureSpec("volume", "Volume", drawn=False),
)

CURVES = (
    CurveSpec("reward_mean", "mean reward", "reward", gauge="reward_mean"),
    CurveSpec("reward_by_verifier", "mean reward of each verifier", "verifiers", by_name=True),
    CurveSpec("reward_by_environment", "mean reward of each environment", "environments", by_name=True),
    CurveSpec("reward_by_component", "mean of each component", "components", by_name=True, alone=True),
    CurveSpec("reward_std", "standard deviation", "spread"),
    CurveSpec("behavior_kl", "KL with lag", "kl", gauge="behavior_kl_nats"),
    CurveSpec("mismatch_kl", "KL of numerics alone", "kl", "orange", gauge="mismatch_kl_nats"),
    CurveSpec("importance_ratio_mean", "mean ratio", "ratio", gauge="importance_ratio_mean"),
    CurveSpec("importance_ratio_max", "largest ratio", "ratio", "orange", largest=True, gauge="importance_ratio_max"),
    CurveSpec("entropy", "entropy", "entropy", gauge="entropy_nats"),
    CurveSpec("length_mean", "mean length", "length"),
    CurveSpec("truncated_share", "cut off", "share", "orange"),
    CurveSpec("uniform_groups_share", "groups without spread", "share", "grey"),
    CurveSpec("effective_sample_share", "effective samples", "share", "green", gauge="effective_sample_share"),
    CurveSpec("solved_share", "solved", "share", "violet"),
    CurveSpec("reused_share", "groups trained again", "share", "red", gauge="reused_share"),
    CurveSpec("loss", "loss", "loss"),
    CurveSpec("demonstration_loss", "cross-entropy of demonstrations", "loss", "orange"),
    CurveSpec("grad_norm", "gradient norm", "gradient"),
    CurveSpec("means", "means that the algorithm reports", "algorithm", by_name=True, alone=True),
    CurveSpec("expert_load_max", "largest load over an even one", "experts", largest=True, gauge="expert_load_max"),
    CurveSpec("dead_experts", "without a token", "experts", "red", largest=True, gauge="dead_experts"),
    CurveSpec("router_entropy", "routers' entropy in nats", "experts", "green", gauge="router_entropy_nats"),
    CurveSpec("router_aux_loss", "load-balancing loss", "experts", "violet"),
    CurveSpec("router_replayed_share", "routed as the engine did", "replay", gauge="router_replayed_share"),
    CurveSpec("router_changed_share", "otherwise routed alone", "replay", "orange", gauge="router_changed_share"),
    CurveSpec("lag_mean", "mean lag", "lag"),
    CurveSpec("lag_max", "largest lag", "lag", "orange", largest=True, gauge="lag_max_versions"),
    CurveSpec("reused_lag_mean", "mean lag of groups trained again", "lag", "green", gauge="reused_lag_mean_versions"),
    CurveSpec("lag_bound", "bound", "lag", "grey", largest=True),
    CurveSpec(
        "reused_lag_max",
        "largest lag of groups trained again, where they have a bound of their own",
        "lag",
        "red",
        largest=True,
        gauge="reused_lag_max_versions",
    ),
    CurveSpec(
        "reused_lag_bound",
        "bound of groups trained again",
        "lag",
        "violet",
        largest=True,
        gauge="reused_lag_bound_versions",
    ),
    CurveSpec("gradient_cosine", "cosine to lag 0", "lag_cosine", by_name=True, alone=True),
    CurveSpec("gradient_norm_ratio", "norm over that of lag 0", "lag_norm", by_name=True, alone=True),
    CurveSpec("alignment_cosine", "cosine", "alignment", gauge="alignment_cosine"),
    CurveSpec("alignment_projected_share", "projected", "alignment", "orange", gauge="alignment_projected_share"),
    CurveSpec("alignment_skipped_share", "skipped", "alignment", "red", gauge="alignment_skipped_share"),
    CurveSpec("train_s", "training", "time"),
    CurveSpec("copy_s", "copying weights", "time", "grey"),
    CurveSpec("wait_s", "waiting for groups", "time", "orange"),
    CurveSpec("learning_rate", "learning rate", "optimizer"),
    CurveSpec("clip_fraction", "clipped", "optimizer"),
    CurveSpec("correction_fraction", "corrections capped", "optimizer"),
    CurveSpec("updates", "updates", "optimizer"),
    CurveSpec("skipped_updates", "skipped updates", "optimizer", largest=True),
    CurveSpec("skipped_in_row", "skipped in a row", "optimizer", largest=True),
    CurveSpec("forward_backward_s", "forward and backward", "training"),
    CurveSpec("optimizer_s", "optimizer", "training", "violet"),
    CurveSpec("cpu_s", "computed by the trainer's thread", "training", "grey"),
    CurveSpec("early_s", "before the batch was complete", "training", "orange"),
    CurveSpec("gradient_wait_s", "waiting for groups of lag 0", "lag_cost", "orange"),
    CurveSpec("gradient_pass_s", "passes", "lag_cost"),
    CurveSpec("gradient_cosine_error", "standard error", "lag_error", by_name=True, alone=True),
    CurveSpec("end_token_share", "ended by the end token", "sampling"),
    CurveSpec("mixed_version_share", "of several versions", "sampling"),
    CurveSpec("level", "curriculum level", "sampling", largest=True),
    CurveSpec("tasks_effective", "effective tasks of 1,024 leases", "sampling"),
    CurveSpec("tasks_variance", "expected p(1 − p) of their tasks", "sampling"),
    CurveSpec("time_s", "time since the start", "volume"),
    CurveSpec("trajectories", "trajectories", "volume"),
    CurveSpec("sampled_tokens", "sampled tokens", "volume"),
    CurveSpec("groups", "groups", "volume"),
    CurveSpec("sequences", "sequences", "volume"),
    CurveSpec("microbatches", "microbatches", "volume"),
    CurveSpec("tokens", "tokens computed", "volume"),
    CurveSpec("trained_tokens", "trained tokens", "volume"),
    CurveSpec("tokens_beyond_max_lag", "tokens trained again that are older than max_lag", "volume"),
    CurveSpec("demonstration_tokens", "trained tokens of demonstrations", "volume"),
)
"""All curves. Another one is a line here, beside the field that writes it."""

HELD_OUT = (
    CurveSpec("accuracy", "held out", "reward", "orange", largest=True),
    CurveSpec("reward", "held-out reward", "reward", "grey", largest=True),
)
"""Of evaluations; a reward that is the accuracy is drawn once."""

_FIGURE_OF = {curve.name: next(figure for figure in FIGURES if figure.id == curve.figure) for curve in CURVES}


def curves_in(figure: str) -> tuple[CurveSpec, ...]:
    """The curves of a figure, the lowest first where they are stacked."""
    return tuple(curve for curve in CURVES if curve.figure == figure)


def figure_of(curve: CurveSpec) -> FigureSpec:
    """The figure that a curve is drawn in."""
    return _FIGURE_OF[curve.name]


def words_of(curve: CurveSpec) -> str:
    """Title and unit of a curve that stands alone."""
    unit = figure_of(curve).unit
    return f"{curve.title}, {unit}" if unit else curve.title


def group_of(name: str) -> str:
    """The figure of a number of a step; `step` for one that is no curve."""
    return _FIGURE_OF[name].id if name in _FIGURE_OF else "step"


def lines_in(
    figure: FigureSpec, steps: Iterable[tuple[int, Entry]], evaluations: Iterable[Entry]
) -> list[tuple[CurveSpec, Points]]:
    """The curves of a figure that have a point. But for those of largest values, a moving mean over a twentieth."""
    rows, measured = list(steps), [(each["step"], each) for each in evaluations]
    drawn = (part for curve in curves_in(figure.id) for part in parts_of(curve, (entry for _, entry in rows)))
    found = [(curve, points_of(rows, curve.name)) for curve in drawn]
    if figure.held_out:
        accuracy, reward = (points_of(measured, curve.name) for curve in HELD_OUT)
        found += zip(HELD_OUT, (accuracy, reward if reward != accuracy else []), strict=True)
    return [(curve, points if curve.largest else _smoothed(points)) for curve, points in found if points]


def parts_of(curve: CurveSpec, entries: Iterable[Entry]) -> list[CurveSpec]:
    """The curve; of one by name a curve `name/part` for each name, at most 12, and none where there is only one that
    says nothing `alone`.
    """
    if not curve.by_name:
        return [curve]
    found = (value for entry in entries if isinstance(value := entry.get(curve.name), Mapping))
    names = sorted({name for value in found for name in value})[:_MAX_PARTS]
    colors = itertools.cycle(_PART_COLORS)
    return [
        replace(curve, name=f"{curve.name}/{name}", title=name, color=color, by_name=False)
        for name, color in zip(names if curve.alone or len(names) > 1 else [], colors, strict=False)
    ]


def _smoothed(rows: Points) -> Points:
    half, sums = len(rows) // 40, [0.0, *itertools.accumulate(y for _, y in rows)]
    found = []
    for place, (x, _) in enumerate(rows):
        first, end = max(0, place - half), min(len(rows), place + half + 1)
        found.append((x, (sums[end] - sums[first]) / (end - first)))
    return found


class RunHistory(Generic[S]):
    """The history of the present weights: steps by their number, in order, and events.

    `step` makes of a line what is kept of it. So does `event`, which gets its kind too; one of None is left out. An
    event has `kind` and `step`, the version at which it was. What is measured on held-out examples of a run on files
    is an `evaluation` as well. Of more than `max_steps` every second one is left out, as often as it takes.
    """

    def __init__(
        self,
        step: Callable[[Entry], S],
        event: Callable[[str, Entry], Entry | None] = lambda kind, entry: None,
        *,
        max_steps: int | None = None,
    ) -> None:
        self.steps: dict[int, S] = {}
        self.events: list[dict[str, Any]] = []
        self.unread = 0
        self._step, self._event, self._max_steps = step, event, max_steps
        self._stride = 1

    def read(self, path: Path, *, at: int = 0) -> "RunHistory[S]":
        """Takes the lines of a file from the byte `at` on; one that is not there is empty. Returns itself."""
        for line in lines_of(path, at=at):
            self.add(line)
        return self

    def add(self, line: bytes) -> Entry | None:
        """Takes a line and returns what it holds; None for one that cannot be read, which is counted."""
        try:
            entry: Entry = json.loads(line)
            self._take(entry)
        except (ValueError, KeyError, TypeError, AttributeError):
            self.unread += 1
            return None
        return entry

    def _take(self, entry: Entry) -> None:
        kind, at = entry["kind"], _step_of(entry)
        if kind in ("step", "replay"):
            self._take_step(at, entry, again=kind == "replay")
            return
        if kind == "resume":
            self.cut(at)
        kind = "evaluation" if kind == "held_out" else kind
        if (kept := self._event(kind, entry)) is not None:
            self.events.append({**kept, "kind": kind, "step": at})

    def _take_step(self, at: int, entry: Entry, *, again: bool) -> None:
        if self.steps and at <= next(reversed(self.steps)):
            if again:
                return
            self._cut_steps(at - 1)
        made = self._step(entry)
        if at % self._stride == 0:
            self.steps[at] = made
        if self._max_steps is not None and len(self.steps) > self._max_steps:
            self._stride *= 2
            self.steps = {step: kept for step, kept in self.steps.items() if step % self._stride == 0}

    def cut(self, version: int) -> None:
        """Forgets what came after a version."""
        self._cut_steps(version)
        self.events = [one for one in self.events if one["step"] <= version or one["kind"] == "resume"]

    def _cut_steps(self, version: int) -> None:
        while self.steps and (last := next(reversed(self.steps))) > version:
            del self.steps[last]


def lines_of(path: Path, *, at: int = 0) -> Iterator[bytes]:
    """The lines of a file from a byte on; of one that is not there, none."""
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        file.seek(at)
        yield from file


def objects_in(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file of lines; a line that a death cut short is left out."""
    for line in lines_of(path):
        with contextlib.suppress(ValueError):
            if isinstance(entry := json.loads(line), dict):
                yield entry


def _step_of(entry: Entry) -> int:
    """The step of a line, or the version after it. Raises KeyError or TypeError for one that has neither."""
    return int(entry["step"] if "step" in entry else entry["version"])


def is_number(value: object) -> bool:
    """Tells whether a value can be drawn: a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def points_of(steps: Iterable[tuple[int, Entry]], name: str) -> list[tuple[float, float]]:
    """A number by step, where it was measured; `name/part` is that of a part, as in `parts_of`."""
    whole, _, part = name.partition("/")
    found = [(float(step), entry.get(whole)) for step, entry in steps]
    if part:
        found = [(step, value.get(part)) for step, value in found if isinstance(value, Mapping)]
    return [(step, float(value)) for step, value in found if value is not None and is_number(value)]


def numbers_of(entry: Entry) -> tuple[int, dict[str, float]] | None:
    """Step and numbers of a line of `metrics.jsonl`; None for a line that is an event, or has none."""
    kind = entry["kind"]
    if kind not in ("step", "replay", "publish", "evaluation", "held_out"):
        return None
    prefix = "" if kind in ("step", "replay") else f"{kind}/"
    return _step_of(entry), {f"{prefix}{name}": value for name, value in _numbers(entry)}


def _numbers(entry: Entry) -> Iterator[tuple[str, float]]:
    for name, value in entry.items():
        if name in _NO_NUMBERS:
            continue
        if isinstance(value, Mapping):
            yield from ((f"{name}/{inner}", number) for inner, number in _numbers(value))
        elif isinstance(value, int | float) and math.isfinite(value):
            yield name, float(value)
