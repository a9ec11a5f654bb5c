"""Records of what runs and tenants have done: sums, rates and curves by hand, in bounded room."""

import itertools
import json
import math
from collections.abc import Mapping

import numpy as np
import pytest

from learner.tenants.futures import ResultFuture
from learner.tenants.run_curves import MOST_NUMBERS, RunCurve
from learner.tenants.run_records import RecentSum, RunRecords, shown_name
from learner.tenants.work import Operation, UnfitOperation
from learner.training.client_operations import AdamStep, ClientDatum, ForwardBackward


class ByHand:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


SEQ_IDS = itertools.count()


def operation(model_id: str, work: ForwardBackward | AdamStep | UnfitOperation) -> Operation:
    return Operation(model_id, next(SEQ_IDS), "x", work, ResultFuture("r", "a", "", "x"), 10)


def forward_backward(model_id: str, *, rows: int, tokens: int = 5, forward_only: bool = False) -> Operation:
    data = tuple(ClientDatum(np.zeros(tokens, np.int64), {}) for _ in range(rows))
    return operation(model_id, ForwardBackward(model_id, data, "cross_entropy", forward_only=forward_only))


def trained(records: RunRecords, model_id: str, *passes: tuple[int, Mapping[str, float]], owner: str = "a") -> None:
    """So many passes, of some rows with some numbers, and a step."""
    for rows, metrics in passes:
        records.done(owner, forward_backward(model_id, rows=rows), metrics)
    records.done(owner, operation(model_id, AdamStep(model_id)), {"grad_norm:mean": 0.5, "step:max": 9.0})


def test_a_step_has_the_loss_of_its_passes_a_row_and_the_numbers_of_the_answers() -> None:
    records = RunRecords(clock=ByHand(), wall=lambda: 7.0)
    trained(records, "m", (2, {"loss:sum": 6.0, "accuracy:mean": 1.0}), (6, {"loss:sum": 6.0, "accuracy:mean": 0.0}))
    run = records.runs["m"]

    assert run.curve.columns() == {
        "step": [1], "unix_s": [7.0], "loss": [1.5], "accuracy": [0.25], "rows": [8.0], "grad_norm": [0.5],
    }  # fmt: skip
    assert (run.rows, run.tokens, run.steps, run.operations, run.loss) == (8, 40, 1, 3, 1.0)
    assert records.of_tenant("a").tokens == 40


def test_forward_alone_is_told_apart_and_what_failed_counts_as_nothing_but_that() -> None:
    records = RunRecords(clock=ByHand(), wall=lambda: 7.0)
    records.done("a", forward_backward("m", rows=2, forward_only=True), {"loss:sum": 8.0})
    records.done("a", forward_backward("m", rows=2), {}, failure="data[0]: NaN")
    trained(records, "m", (1, {"loss:sum": float("nan"), "step:mean": 3.0}))
    run = records.runs["m"]

    assert run.curve.columns() == {
        "step": [1],
        "unix_s": [7.0],
        "forward loss": [4.0],
        "rows": [1.0],
        "grad_norm": [0.5],
    }
    assert (run.rows, run.failures, run.last_failure, run.loss) == (3, 1, "data[0]: NaN", None)


def test_of_many_runs_those_that_did_something_last_are_kept() -> None:
    records = RunRecords(most=2, clock=ByHand())
    for name in ("one", "two", "one", "three"):
        trained(records, name, (1, {"loss:sum": 1.0}))

    assert list(records.runs) == ["one", "three"]
    assert records.runs["one"].steps == 2
    assert records.of_tenant("a").steps == 4, "totals keep all"


def test_a_shown_name_leads_to_no_run() -> None:
    model_id = "session-0123456789abcdef0123456789abcdef:train:0"

    name = shown_name("alice", model_id)
    assert name.startswith("alice/")
    assert len(name) == len("alice/") + 8
    assert not any(model_id[start : start + 6] in name for start in range(len(model_id) - 6))
    assert name != shown_name("alice", model_id[:-1] + "1")


def test_what_is_recent_is_of_the_last_minute() -> None:
    clock = ByHand()
    recent = RecentSum(clock)
    recent.add(30)
    clock.now += 10
    recent.add(30)

    assert (recent.sum(), recent.per_s()) == (60, 6.0)
    clock.now += 51
    assert (recent.sum(), recent.per_s()) == (30, 0.5)
    clock.now += 1000
    assert recent.sum() == 0


def test_a_long_curve_is_thinned_to_means_and_keeps_both_ends() -> None:
    curve = RunCurve(most=8)
    for step in range(1, 101):
        curve.add(step, float(step), {"loss": float(step)})
        columns = curve.columns()
        assert len(columns["step"]) <= 9
        assert columns["step"][-1] == step, "the newest step is always there"

    columns = curve.columns()
    assert columns["step"] == [16, 32, 48, 64, 80, 96, 100]
    assert columns["loss"] == [8.5, 24.5, 40.5, 56.5, 72.5, 88.5, 98.5]
    assert columns["unix_s"] == [float(step) for step in (16, 32, 48, 64, 80, 96, 100)]


def test_a_number_that_comes_later_has_no_value_before_and_there_are_no_more_than_some() -> None:
    curve = RunCurve()
    curve.add(1, 1.0, {"loss": 2.0})
    curve.add(2, 2.0, {"loss": 1.0, "late": 3.0, "x" * 65: 1.0})
    assert curve.columns() == {"step": [1, 2], "unix_s": [1.0, 2.0], "loss": [2.0, 1.0], "late": [None, 3.0]}

    curve.add(3, 3.0, {f"n{number}": 1.0 for number in range(100)})
    assert len(curve.names) == MOST_NUMBERS


@pytest.mark.parametrize("steps", [1, 2, 3, 1000])
def test_the_room_of_a_curve_does_not_depend_on_its_steps(steps: int) -> None:
    curve = RunCurve(most=16)
    for step in range(steps):
        curve.add(step, 0.0, {"loss": 1.0})
    assert len(curve.columns()["loss"]) <= 17


def test_the_room_of_a_curve_does_not_depend_on_how_many_names_its_steps_have() -> None:
    curve, largest = RunCurve(most=2), 0
    for step in range(1000):
        curve.add(step, 0.0, {f"n{(step * 20 + number) % 5000}": 1.0 for number in range(20)} | {"x" * 65: 1.0})
        largest = max(largest, len(json.dumps(curve.state())))

    assert curve.names == tuple(f"n{number}" for number in range(MOST_NUMBERS))
    assert largest < 100 * MOST_NUMBERS


def test_the_newest_steps_have_the_mean_of_those_that_have_a_number() -> None:
    curve = RunCurve(most=2)
    for step in range(4):
        curve.add(step, float(step), {"loss": 1.0})
    curve.add(4, 4.0, {"loss": 2.0})
    curve.add(5, 5.0, {})
    curve.add(6, 6.0, {"loss": math.nan})
    newest = curve.columns()["loss"][-1]
    curve.add(7, 7.0, {"loss": 6.0})

    assert newest == 2.0
    assert curve.columns()["step"][-1] == 7
    assert curve.columns()["loss"][-1] == 2.5, "of two points (1 and 4) of four steps each"
