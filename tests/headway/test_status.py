"""`headway status`: rates, rows and JSON, from statuses as processes give them."""

import dataclasses
import json
from pathlib import Path

import pytest

from headway.doctor.asking import Condition, Patient
from headway.doctor_command import DoctorOptions, rates_between, status, status_json, status_text
from protocol.status import EventStatus, Kind, ProgressStatus
from services.config.models import HttpConfig, ProcessConfig
from tests.headway.doctor import ward


def at(kind: Kind, done: int, total: int | None = None) -> Patient:
    found = ward.status(
        kind, version="1.7", waits=(("groups: 1 of 4 are there", 3.0, False),),
        events=(EventStatus(name="step", age_s=2.0),), failures=("the disk is\nslow",),
    )  # fmt: skip
    unit = "steps" if kind == "learner" else "tokens"
    return ward.well(found.model_copy(update={"progress": ProgressStatus(unit=unit, done=done, total=total)}))


def test_a_row_tells_version_rate_time_left_waits_and_the_last_event() -> None:
    after = [at("learner", 30, 90), at("generator", 500)]
    rates = rates_between([at("learner", 20, 90), at("generator", 100)], after, seconds=2.0)

    text = status_text(after, rates)
    learner, generator = text.splitlines()[1:3]
    assert "1.7" in learner
    assert "30/90, 5/s, 0m12s left" in learner
    assert "groups: 1 of 4 are there (3 s)" in learner
    assert "step 2 s ago" in learner
    assert "500 tokens, 200/s" in generator
    assert "learner, 1 s ago: the disk is slow" in text


def test_a_process_that_started_anew_has_no_rate_and_one_that_does_not_answer_is_named() -> None:
    patients = [at("generator", 5), ward.ill("reward-service", Condition.HANGS)]
    rates = rates_between([at("generator", 100)], patients, seconds=1.0)

    assert rates == {}
    assert "does not do well" in status_text(patients, rates)


def test_json_holds_the_whole_status_and_the_rate() -> None:
    patient = dataclasses.replace(at("learner", 30, 90))
    (found,) = json.loads(status_json([patient], {patient.name: 0.5}))

    assert (found["process"], found["condition"], found["rate_per_s"]) == ("learner", "answers", 0.5)
    assert found["status"]["progress"] == {"unit": "steps", "done": 30, "total": 90}


class Addressed(ProcessConfig):
    http: HttpConfig


def test_where_nobody_answers_it_says_so_once_and_ends_with_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], unused_tcp_port: int
) -> None:
    configs = {"learner": Addressed(http=HttpConfig(port=unused_tcp_port))}

    assert status(configs, DoctorOptions()) == 1
    assert "accepts no connection" in capsys.readouterr().out
