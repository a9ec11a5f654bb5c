"""Durations, as people read them."""

import pytest

from services.durations import clock_text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0s"), (12, "12s"), (59.6, "1m00s"), (187, "3m07s"), (3599, "59m59s"), (7500, "2h05m"), (90000, "25h00m")],
)
def test_a_duration_has_the_two_units_that_say_most(seconds: float, text: str) -> None:
    assert clock_text(seconds) == text
