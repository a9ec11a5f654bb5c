"""The result of a what-if that ended early, or that has numbers which are none."""

import json
import math
from pathlib import Path

from learner.page.what_if_results import MAX_LISTED, listed, result_of
from learner.page.what_if_runs import FOLDER, WhatIfRunner
from learner.reports.what_if_numbers import size_of_change
from tests.learner.page.made_run import step_line, write_lines
from tests.learner.page.untrained_run import what_if_of


def run_in(folder: Path) -> Path:
    folder.mkdir()
    write_lines(folder, [step_line(step) for step in range(1, 5)])
    return folder


def test_one_that_ended_in_the_middle_says_in_which_phase_and_what_its_own_settings_gave_otherwise(
    tmp_path: Path,
) -> None:
    run = run_in(tmp_path / "one")
    other = "step 3 is the first that differs: its loss was 0.1, and is 0.2 now"
    made = what_if_of(run, "what-if-1", phase="what-if", trained=2, unlike=other, pulls=(0.0, 0.0))
    found = result_of(run, made)
    assert (found["phase"], found["trained"], found["steps"], found["unlike"]) == ("what-if", 2, [1, 2], other)
    assert (found["first_apart"], found["group_count"], found["changed_count"]) == (None, 2, 0)


def test_one_that_ended_before_its_own_turn_has_trained_no_step_and_has_no_groups(tmp_path: Path) -> None:
    run = run_in(tmp_path / "one")
    found = result_of(run, what_if_of(run, "what-if-1", phase="run", trained=3))
    assert (found["phase"], found["trained"], found["steps"], found["group_count"]) == ("run", 0, [], 0)


def test_a_step_of_which_the_run_has_no_numbers_was_trained_all_the_same(tmp_path: Path) -> None:
    run = tmp_path / "one"
    run.mkdir()
    (run / "metrics.jsonl").touch()
    found = result_of(run, what_if_of(run, "what-if-1", phase="done", trained=4))
    assert (found["trained"], found["steps"]) == (4, [])


def test_pulls_that_are_no_numbers_come_first_and_reach_the_page_as_none(tmp_path: Path) -> None:
    run = run_in(tmp_path / "one")
    pulls = (1.0, math.nan, 3.0, math.inf, 0.0, 2.0, math.nan)
    found = result_of(run, what_if_of(run, "what-if-1", phase="done", trained=4, pulls=pulls))
    assert [(each["lease_id"], each["pull_change"], each["pull"]) for each in found["groups"]] == [
        (1, None, None), (3, None, None), (6, None, None), (2, 3.0, 3.0), (5, 2.0, 2.0), (0, 1.0, 1.0),
    ]  # fmt: skip
    assert found["changed_count"] == 6
    json.dumps(found, allow_nan=False)


def test_a_change_that_is_no_number_is_greater_than_all_others() -> None:
    assert [size_of_change(each) for each in (2.5, math.nan, math.inf, -math.inf)] == [2.5, *[math.inf] * 3]


def test_one_that_is_older_than_those_that_are_listed_is_listed_by_its_name(tmp_path: Path) -> None:
    (tmp_path / FOLDER).mkdir()
    for number in range(1, MAX_LISTED + 3):
        (tmp_path / FOLDER / f"what-if-{number}.log").touch()
    names = [f"what-if-{number}" for number in range(MAX_LISTED + 2, 2, -1)]
    runner = WhatIfRunner(tmp_path)
    assert [each["name"] for each in listed(runner)] == names
    assert [each["name"] for each in listed(runner, also="what-if-1")] == [*names, "what-if-1"]
    assert [each["name"] for each in listed(runner, also=names[7])] == names
    assert [each["name"] for each in listed(runner, also="../one")] == names
