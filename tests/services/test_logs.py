"""Log lines for people and for machines."""

import io
import json
import logging
from collections.abc import Iterator

import pytest

from services.logs import configure_logging


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


def test_chatter_of_libraries_is_left_out() -> None:
    stream = io.StringIO()
    configure_logging("learner", level="debug", stream=stream)
    logging.getLogger("uvicorn.error").info("started")
    assert stream.getvalue() == ""
