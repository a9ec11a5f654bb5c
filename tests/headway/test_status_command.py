"""`headway status`: rates, rows and JSON, from statuses as processes give them."""

import dataclasses
import json
from pathlib import Path

import pytest

from headway.doctor_options import DoctorOptions, options_of
from headway.status_command import Rates, status, status_json, status_text
from protocol.status import EventStatus, Kind, ProgressStatus, QueueStatus
from services.config.models import HttpConfig, ProcessConfig
from services.config.sources import ConfigError
from services.diagnosis.asked import AskedProcess, Condition
from tests.services.diagnosis import statuses


def at(kind: Kind, done: int, total: int | None = None) -> AskedProcess:
    found = statuses.status(
        kind, version="1.7", waits=(("groups: 1 of 4 are there", 3.0, False),),
        events=(EventStatus(name="step", age_s=2.0), EventStatus(name="publish", age_s=500.0)),
        failures=("the disk is\nslow",), problems=("the guard bounds the lag by 1",) if kind == "learner" else (),
    )  # fmt: skip
    unit = "steps" if kind == "learner" else "tokens"
    return statuses.well(found.model_copy(update={"progress": ProgressStatus(unit=unit, done=done, total=total)}))


def test_a_row_tells_version_rate_time_left_waits_and_the_last_event() -> None:
    after, rates = [at("learner", 30, 90), at("generator", 50000)], Rates()
    rates.take([at("learner", 20, 90), at("generator", 10000)], 100.0)

    text = status_text(after, rates.take(after, 102.0))
    sentence, _, _, learner, generator = text.splitlines()[:5]
    assert sentence.startswith("learner localhost:7300: the guard bounds the lag by 1; ")
    assert "1.7" in learner
    assert "30 of 90 steps, 5/s, 12s left" in learner
    assert "groups: 1 of 4 are there (3 s)" in learner
    assert "step 2 s ago, publish 8m20s ago" in learner
    assert "50,000 tokens, 20,000/s" in generator
    assert "learner: the guard bounds the lag by 1\nlearner, 1 s ago: the disk is slow\n" in text


def test_a_process_that_counts_no_progress_tells_what_it_has_at_hand() -> None:
    queues = (QueueStatus(name="running groups", depth=12, limit=16), QueueStatus(name="outbox", depth=0))

    assert "12 running groups, 0 outbox" in status_text(
        [statuses.well(statuses.status("env-service", queues=queues))], {}
    )


@pytest.mark.parametrize("columns", [80, 120])
def test_a_row_that_is_wider_than_the_terminal_goes_on_below_and_nothing_is_cut(columns: int) -> None:
    procs = [at("learner", 30, 90), at("generator", 500), at("reward-service", 3)]

    text = status_text(procs, {"learner localhost:7300": 5.0}, columns=columns)

    assert max(map(len, text.splitlines())) <= columns
    for cell in ("30 of 90 steps, 5/s, 12s left", "groups: 1 of 4 are there (3 s)", "step 2 s ago, publish 8m20s ago"):
        assert cell in text, "whatever the width"


def test_no_rate_and_no_time_left_are_told_while_no_step_ends() -> None:
    (stands,) = (at("learner", 30, 90),)
    assert stands.status is not None
    progress = ProgressStatus(unit="steps", done=30, total=90, usual_s=0.3)
    step = EventStatus(name="step", age_s=36.0)
    stands = statuses.well(stands.status.model_copy(update={"progress": progress, "events": (step,)}))

    text = status_text([stands], {"learner localhost:7300": 2.0})

    assert "30 of 90 steps, none for 36 s" in text
    assert "left" not in text
    assert "/s" not in text


def test_rates_are_of_the_last_minute_so_that_slow_steps_have_one() -> None:
    rates = Rates()
    found = [rates.take([at("learner", second // 10)], float(second)) for second in range(100)]

    assert found[0] == {}
    assert 0.08 < found[-1]["learner localhost:7300"] < 0.12
    assert rates.take([at("learner", 2)], 101.0) == {}, "it started anew"


def test_a_process_that_started_anew_has_no_rate_and_one_that_does_not_answer_is_named() -> None:
    procs = [at("generator", 5), statuses.ill("reward-service", Condition.HANGS)]
    rates = Rates()
    rates.take([at("generator", 100)], 1.0)

    assert rates.take(procs, 2.0) == {}
    assert "does not do well" in status_text(procs, {})


def test_json_holds_the_whole_status_and_the_rate() -> None:
    proc = dataclasses.replace(at("learner", 30, 90))
    (found,) = json.loads(status_json([proc], {proc.name: 0.5}))

    assert (found["process"], found["condition"], found["rate_per_s"]) == ("learner", "answers", 0.5)
    assert found["status"]["progress"] == {"unit": "steps", "done": 30, "total": 90, "usual_s": None}
    assert found["verdict"]["state"] == "sick", "it knows of a problem"


class Addressed(ProcessConfig):
    http: HttpConfig


def test_where_nobody_answers_it_says_so_once_and_ends_with_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], unused_tcp_port: int
) -> None:
    configs = {"learner": Addressed(http=HttpConfig(port=unused_tcp_port))}

    assert status(configs, DoctorOptions()) == 1
    assert "accepts no connection" in capsys.readouterr().out


@pytest.mark.parametrize("url", ["http://x:abc", "http://x:99999", "http://[::1", "http://a..b:7310", "x:7310"])
def test_an_address_that_is_none_is_refused_before_anybody_is_asked(url: str) -> None:
    with pytest.raises(ConfigError, match=r"--url: got .*expected PROCESS=http://HOST:PORT"):
        options_of(["--url", f"generator={url}"])


def test_a_terminal_gets_no_controls_from_what_a_process_says() -> None:
    said = statuses.status("learner", version="1.7", failures=("a sampled text: \x1b[2J",))

    assert "a sampled text: ?[2J" in status_text([statuses.well(said)], {})
