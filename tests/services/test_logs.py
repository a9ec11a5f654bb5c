"""Log lines for people and for machines."""

import io
import json
import logging
import os
from collections.abc import Iterator

import pytest

from services.logs import SaidBefore, configure_logging


@pytest.fixture(autouse=True)
def root_as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def test_a_line_has_the_time_the_process_and_the_message() -> None:
    stream = io.StringIO()
    configure_logging("learner", stream=stream)
    logging.getLogger("x").info("step %d", 12)
    logging.getLogger("x").debug("not said")
    logging.getLogger("x").warning("careful")
    first, second = stream.getvalue().splitlines()
    assert first[2::3][:2] == "::"
    assert first[8:] == " learner        step 12"
    assert second[8:] == " learner        WARNING careful"


def test_json_has_one_object_a_record_with_its_traceback() -> None:
    stream = io.StringIO()
    configure_logging("env-service", level="debug", format="json", stream=stream)
    logging.getLogger("x").error("bad", exc_info=ValueError("why"))
    record = json.loads(stream.getvalue())
    assert (record["process"], record["level"], record["message"]) == ("env-service", "error", "bad")
    assert "ValueError: why" in record["traceback"]


def test_a_record_that_cannot_be_formatted_raises_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    stream = io.StringIO()
    configure_logging("env-service", stream=stream)
    for _ in range(2):
        logging.getLogger("x").warning("reward", 0.5)
        logging.getLogger("x").warning("reward %d", "much", extra={"same": "reward"})
    logging.getLogger("x").warning("well")
    assert [line[8:] for line in stream.getvalue().splitlines()] == [" env-service    WARNING well"]
    assert "not all arguments converted" in capsys.readouterr().err


def test_chatter_of_libraries_is_left_out() -> None:
    stream = io.StringIO()
    configure_logging("learner", level="debug", stream=stream)
    logging.getLogger("uvicorn.error").info("started")
    assert stream.getvalue() == ""


def test_a_reader_that_stops_does_not_stop_the_process_and_finds_what_is_missing() -> None:
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb") as screen, os.fdopen(writer, "w") as stream:
        configure_logging("learner", stream=stream)
        for step in range(10_000):
            logging.getLogger("x").info("step %05d %s", step, "x" * 80)
        seen = bytearray()
        while b"lines are missing here" not in seen:
            seen += screen.readline()
    lines = seen.decode().splitlines()
    steps = [int(line.split()[3]) for line in lines[:-1]]
    assert steps == list(range(len(steps))), "what is read is in order and whole"
    assert lines[-1] == f"[{10_000 - len(steps)} lines are missing here: nobody read them]"


def test_lines_come_at_once_and_in_order_to_one_who_reads() -> None:
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb") as screen, os.fdopen(writer, "w") as stream:
        configure_logging("learner", stream=stream)
        for word in ("one", "two"):
            logging.getLogger("x").info(word)
            assert screen.readline().decode().split()[-1] == word


def test_a_long_record_is_written_whole() -> None:
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb") as screen, os.fdopen(writer, "w") as stream:
        configure_logging("learner", stream=stream)
        logging.getLogger("x").info("y" * 200_000)
        assert screen.readline().decode().count("y") == 200_000


def said(records: list[logging.LogRecord], *, seconds: list[float]) -> list[str]:
    """Messages let through of records that come at these seconds."""
    times = iter(seconds)
    before = SaidBefore(every_s=30.0, clock=lambda: next(times))
    return [record.getMessage() for record in records if before.filter(record)]


def record(text: str, *, level: int = logging.WARNING, error: Exception | None = None) -> logging.LogRecord:
    information = None if error is None else (type(error), error, error.__traceback__)
    return logging.LogRecord("x", level, __file__, 1, text, (), information)


def test_equal_warnings_are_said_once_and_counted_from_time_to_time() -> None:
    records = [*(record("it is slow") for _ in range(300)), record("it is gone"), record("it is slow")]
    seconds = [*(index / 100 for index in range(300)), 3.0, 40.0]
    assert said(records, seconds=seconds) == ["it is slow", "it is gone", "it is slow (300 times more in 40 s)"]


def test_equal_lines_that_are_no_warnings_are_all_said() -> None:
    assert said([record("step", level=logging.INFO)] * 3, seconds=[]) == ["step"] * 3


def test_an_error_raised_at_one_place_is_the_same_for_whatever_task_it_is_raised() -> None:
    def raised(text: str) -> Exception:
        try:
            raise ValueError(text)
        except ValueError as error:
            return error

    errors = [raised(str(number)) for number in range(5)]
    same = [record("task raised", error=error) for error in errors]
    for number, one in enumerate(same):
        one.msg, one.args = "task %s raised", (number,)
    assert said(same, seconds=[0.0] * 5) == ["task 0 raised"]


def test_a_name_makes_records_equal() -> None:
    first, second = record("verifier x: at item 1"), record("verifier x: at item 2")
    first.same = second.same = ("x", "line 3")
    assert said([first, second], seconds=[0.0, 1.0]) == ["verifier x: at item 1"]


def test_a_terminal_gets_no_controls_from_a_logged_text() -> None:
    ours, terminal = os.openpty()
    with open(terminal, "w", encoding="utf-8") as stream:
        configure_logging("learner", stream=stream)
        logging.getLogger("here").info("a sampled text: \x1b[2J\x9b2J")
        shown = os.read(ours, 1000)
    os.close(ours)

    assert b"a sampled text: ?[2J?2J" in shown
