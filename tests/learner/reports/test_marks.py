"""The marks on the curves: which events are some, where they stand after a resume, and how many there are at most."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from learner.reports.history import Entry, RunHistory
from learner.reports.marks import MARK_KINDS, CurveMark, is_marked, marks_in, near_each_other


def marks_of(lines: Sequence[Mapping[str, Any]], *, most: int = 500) -> list[CurveMark]:
    history: RunHistory[Entry] = RunHistory(dict, lambda kind, entry: entry)
    for line in lines:
        history.add(json.dumps(line).encode())
    assert history.unread == 0
    return marks_in(history.events, most=most)


def step(number: int) -> dict[str, Any]:
    return {"kind": "step", "step": number}


def event(kind: str, version: int, **more: Any) -> dict[str, Any]:
    return {"kind": kind, "version": version, **more}


GUARD: dict[str, Any] = {"kind": "guard", "step": 6, "measure": "importance_ratio_max", "value": 12.5, "limit": 10}


@pytest.mark.parametrize(
    ("line", "symbol", "text"),
    [
        (event("resume", 5, incarnation=2), "↻", "the learner was started again, from version 5"),
        (event("leave", 5, generator_id="g1"), "×", "generator g1 has gone"),
        (
            event("leave", 5, generator_id="g1", expelled="other weights"),
            "×",
            "generator g1 was expelled: other weights",
        ),
        (event("leave", 5, generator_id="g1", expelled=None), "×", "generator g1 has gone"),
        (event("join", 5, generator_id="g1", seconds=2), "+", "generator g1 has caught up with version 5"),
        (
            event("suspicion", 5, generator_id="g1", test="gap", quarantined=True),
            "!",
            "generator g1 is not believed any more (by its gap), and is expelled",
        ),
        (
            event("suspicion", 5, generator_id="g1", test="gap", quarantined=False),
            "!",
            "generator g1 is not believed any more (by its gap)",
        ),
        (
            {**GUARD, "change": "tightened", "before": 4, "after": 2},
            "▼",
            "the guard lowers the lag bound from 4 to 2: importance_ratio_max is 12.5, its limit 10",
        ),
        (
            {**GUARD, "change": "powerless", "before": 0, "after": 0},
            "▼",
            "the guard cannot lower the lag bound below 0: importance_ratio_max is 12.5, its limit 10",
        ),
        (
            {"kind": "guard", "step": 6, "change": "loosened", "before": 2, "after": 3, "measure": None},
            "▲",
            "the guard raises the lag bound from 2 to 3",
        ),
        (event("verdict", 5, state="sick", sentence="g1: hangs"), "●", "sick: g1: hangs"),
        (event("checkpoint", 5, seconds=1.25), "◆", "checkpoint, written in 1.25 s"),
        (
            event("evaluation", 5, accuracy=0.125, accuracy_low=0.0625, accuracy_high=0.25, reward=0.5),
            "○",
            "evaluation: accuracy 0.125 (0.0625 to 0.25), reward 0.5",
        ),
        ({"kind": "held_out", "step": 5, "nll": 1.5}, "○", "evaluation: nll 1.5"),
    ],
)
def test_a_mark_says_what_happened(line: Mapping[str, Any], symbol: str, text: str) -> None:
    (mark,) = marks_of([line])

    assert (mark.symbol, mark.text) == (symbol, text)


@pytest.mark.parametrize(
    "line",
    [
        event("publish", 5, members=2),
        event("load", 5, running=3),
        event("verdict", 5, state="starting", sentence="on the way"),
        event("verdict", 5, state="ending", sentence="done"),
    ],
)
def test_what_comes_with_every_step_start_or_end_is_no_mark(line: Mapping[str, Any]) -> None:
    assert marks_of([step(5), line]) == []


def test_a_mark_of_another_release_has_what_can_be_read_of_it() -> None:
    marks = marks_of(
        [
            {"kind": "guard", "step": 1, "change": "turned", "before": 4},
            event("evaluation", 1, accuracy="high"),
            event("checkpoint", 1, unix_s="noon"),
            event("verdict", 1, state="sick", sentence="x" * 900, unix_s=7.5),
        ]
    )

    assert [(mark.kind, mark.unix_s) for mark in marks] == [
        ("guard", None), ("verdict", 7.5), ("evaluation", None), ("checkpoint", None),
    ]  # fmt: skip
    assert marks[0].text == "the guard moves the lag bound from 4 to –"
    assert len(marks[1].text) == 201
    assert marks[2].text == "evaluation: without a number"


def test_a_resume_takes_the_marks_of_lost_steps_along_and_stands_where_it_cut() -> None:
    lost = [step(31), event("leave", 31, generator_id="g1"), event("checkpoint", 30, seconds=1)]
    marks = marks_of(
        [step(30), event("join", 30, generator_id="g2"), *lost, event("resume", 30), step(31), event("checkpoint", 31)]
    )

    assert [(mark.kind, mark.step) for mark in marks] == [
        ("resume", 30), ("join", 30), ("checkpoint", 30), ("checkpoint", 31),
    ]  # fmt: skip


def test_a_restart_whose_steps_a_later_one_took_back_stands_where_the_later_one_cut() -> None:
    """Its own version 50 is a later one of the present history, with which it has nothing to do."""
    steps = [step(number) for number in range(21, 60)]
    marks = marks_of([event("resume", 50), event("resume", 20), *steps, event("resume", 55)])

    assert [(mark.step, mark.text[-2:]) for mark in marks] == [(20, "50"), (20, "20"), (55, "55")]


def test_of_very_many_of_a_kind_neighbours_are_one_and_rare_ones_stay() -> None:
    checkpoints = [event("checkpoint", number, seconds=1) for number in range(1, 10_001)]
    marks = marks_of([*checkpoints[:5000], event("leave", 5000, generator_id="g1"), *checkpoints[5000:]], most=4)

    assert [(mark.kind, mark.step) for mark in marks] == [
        ("leave", 5000), ("checkpoint", 1), ("checkpoint", 2501), ("checkpoint", 5001), ("checkpoint", 7501),
    ]  # fmt: skip
    assert marks[1].text == "checkpoint, written in 1 s; 2499 more up to step 2500"


def test_each_kind_is_there_once_and_no_other_is_marked() -> None:
    kinds = [one.kind for one in MARK_KINDS]

    assert len(kinds) == len(set(kinds))
    assert all(map(is_marked, kinds))
    assert not is_marked("publish")


def test_marks_near_each_other_are_one_line_where_the_most_important_one_is() -> None:
    marks = [
        CurveMark("leave", step, "×", "") for step in (9, 40)
    ] + [CurveMark("checkpoint", step, "◆", "") for step in (5, 10, 14, 15, 25)]  # fmt: skip

    groups = near_each_other(marks, lambda step: 2.0 * step, apart=20)

    assert [(x, [mark.step for mark in group]) for x, group in groups] == [
        (18.0, [9, 5, 10, 14]), (30.0, [15]), (50.0, [25]), (80.0, [40]),
    ]  # fmt: skip
