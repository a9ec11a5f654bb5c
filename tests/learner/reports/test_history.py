"""The history of a run: what a resume takes back, what is thinned, and the table of curves."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from learner.reports.history import (
    CURVES,
    FIGURES,
    Entry,
    RunHistory,
    curves_in,
    group_of,
    lines_in,
    points_of,
    words_of,
)
from learner.reports.tally import StepRecord
from learner.training.step import StepMetrics

ADDED = {"lag_bound", "level", "tasks_effective", "tasks_variance"} | {
    f"gradient_{what}" for what in ("cosine", "cosine_error", "norm_ratio", "wait_s", "pass_s")
}
"""Numbers that a line of a step holds beside its record and the trainer's metrics."""


def step(number: int, value: float = 0.0, *, kind: str = "step") -> dict[str, Any]:
    return {"kind": kind, "step": number, "loss": value}


def resume(version: int) -> dict[str, Any]:
    return {"kind": "resume", "version": version}


def history_of(lines: Sequence[Mapping[str, Any]], *, max_steps: int | None = None) -> RunHistory[Any]:
    history = RunHistory(lambda entry: entry["loss"], lambda kind, entry: entry, max_steps=max_steps)
    for line in lines:
        history.add(json.dumps(line).encode())
    return history


def evaluation(version: int, accuracy: float) -> dict[str, Any]:
    return {"kind": "evaluation", "version": version, "accuracy": accuracy}


@pytest.mark.parametrize(
    ("lines", "kept"),
    [
        ([step(1), step(2, 9.0), resume(1), step(2, 2.0)], {1: 0.0, 2: 2.0}),
        ([step(1), step(2), step(3), resume(2), resume(1)], {1: 0.0}),
        ([step(1, 1.0), step(1, 9.0, kind="replay"), step(2, 2.0, kind="replay")], {1: 1.0, 2: 2.0}),
        ([step(1, 1.0), step(2), step(3), step(2, 2.0)], {1: 1.0, 2: 2.0}),
        ([step(1, 1.0), resume(5), step(2, 2.0)], {1: 1.0, 2: 2.0}),
        ([step(1, 1.0), resume(0)], {}),
    ],
    ids=["lost and trained again", "twice", "replayed", "a resume that was not written", "nothing lost", "from zero"],
)
def test_a_resume_takes_back_what_came_after_its_version(
    lines: Sequence[Mapping[str, Any]], kept: Mapping[int, float]
) -> None:
    assert history_of(lines).steps == kept


def test_events_of_lost_versions_go_and_resumes_stay() -> None:
    history = history_of([evaluation(0, 0.1), step(4), evaluation(4, 0.9), resume(2), evaluation(2, 0.2), resume(1)])

    assert [(one["kind"], one["step"]) for one in history.events] == [("evaluation", 0), ("resume", 2), ("resume", 1)]


def test_what_a_run_on_files_measures_is_an_evaluation() -> None:
    (event,) = history_of([{"kind": "held_out", "step": 7, "accuracy": 0.5}]).events

    assert (event["kind"], event["step"], event["accuracy"]) == ("evaluation", 7, 0.5)


def test_lines_that_cannot_be_read_are_counted_and_a_file_that_is_not_there_is_empty(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b'{"kind": "step", "step": 1}\n[]\n7\n{"kind": "leave"}\n{"kind": "st')
    history: RunHistory[Entry] = RunHistory(dict)

    assert list(history.read(tmp_path / "metrics.jsonl").steps) == [1]
    assert history.unread == 4
    assert list(RunHistory(dict).read(tmp_path / "none").steps) == []


def test_a_long_history_is_thinned_evenly_and_a_resume_cuts_it_too() -> None:
    lines = [step(number, number) for number in range(1, 1001)]
    history = history_of([*lines, resume(500), *lines[500:900]], max_steps=100)

    apart = {later - former for former, later in zip(list(history.steps), list(history.steps)[1:], strict=False)}
    assert 50 < len(history.steps) <= 100
    assert len(apart) == 1
    assert list(history.steps)[-1] > 880


def test_a_figure_has_the_curves_that_were_measured_smoothed_but_for_the_largest() -> None:
    figure = next(each for each in FIGURES if each.id == "lag")
    steps = [(step, {"lag_mean": step % 2, "lag_max": step % 2, "lag_bound": None}) for step in range(1, 201)]

    lines = {curve.name: dict(points) for curve, points in lines_in(figure, steps, [])}

    assert lines.keys() == {"lag_mean", "lag_max"}
    assert lines["lag_mean"][100] == pytest.approx(6 / 11)
    assert lines["lag_max"][100] == 0


def test_a_curve_by_name_is_one_for_each_name_and_none_where_there_is_only_one() -> None:
    figure = next(each for each in FIGURES if each.id == "verifiers")
    steps = [(1, {"reward_by_verifier": {"math": 0.25}}), (2, {"reward_by_verifier": {"nim/first": 1.0, "math": 0.5}})]

    lines = [(curve.title, curve.color, points) for curve, points in lines_in(figure, [*steps, (3, {})], [])]

    assert lines == [("math", "blue", [(1.0, 0.25), (2.0, 0.5)]), ("nim/first", "orange", [(2.0, 1.0)])]
    assert lines_in(figure, steps[:1], []) == []


def test_of_many_names_the_first_twelve_are_drawn() -> None:
    figure = next(each for each in FIGURES if each.id == "verifiers")

    lines = lines_in(figure, [(1, {"reward_by_verifier": {f"v{n:02}": 1.0 for n in range(20)}})], [])

    assert [curve.title for curve, _ in lines] == [f"v{n:02}" for n in range(12)]


def test_a_held_out_reward_that_is_the_accuracy_is_drawn_once() -> None:
    """A reward with steps in between moves long before anything is solved."""
    reward = next(each for each in FIGURES if each.held_out)
    same, other = ([{"step": 0, "accuracy": 0.0, "reward": value}] for value in (0.0, 0.175))

    assert [curve.title for curve, _ in lines_in(reward, [], same)] == ["held out"]
    assert [(curve.title, points) for curve, points in lines_in(reward, [], other)][1:] == [
        ("held-out reward", [(0.0, 0.175)])
    ]


def test_points_are_the_finite_numbers() -> None:
    given: list[Any] = [1, None, float("nan"), "7", True, 2.5]

    assert points_of(enumerate({"loss": value} for value in given), "loss") == [(0, 1.0), (5, 2.5)]


def test_every_number_of_a_step_is_a_curve_and_stands_once_in_a_figure() -> None:
    names = [curve.name for curve in CURVES]
    written = {field.name for kind in (StepMetrics, StepRecord) for field in dataclasses.fields(kind)}
    other = {"step", "lease_ids", "lag_counts", "token_lag_counts", "pass_costs", "reused_lease_ids"}

    assert set(names) == (written | ADDED) - other
    assert len(set(names)) == len(names)
    assert sum(len(curves_in(figure.id)) for figure in FIGURES) == len(CURVES)
    assert all(curves_in(figure.id) for figure in FIGURES)


def test_a_metric_is_called_as_in_metrics_jsonl() -> None:
    """With its unit behind it; one number has one name."""
    assert [curve.name for curve in CURVES if curve.gauge and not curve.gauge.startswith(curve.name)] == []


def test_a_curve_that_stands_alone_says_its_unit() -> None:
    (entropy,) = curves_in("entropy")

    assert words_of(entropy) == "entropy, nats a token"
    assert (group_of("entropy"), group_of("microbatches")) == ("entropy", "volume")
