"""Pauses between retries."""

from services.http.backoff import Backoff


def test_pauses_double_up_to_the_longest_however_long_a_counterpart_is_away() -> None:
    backoff = Backoff(first_s=0.5, max_s=3.0)
    assert [backoff.nominal_s(failures) for failures in (1, 2, 3, 4, 5, 10_000)] == [0.5, 1.0, 2.0, 3.0, 3.0, 3.0]
    assert all(1.5 <= backoff.pause_s(9) <= 3.0 for _ in range(20))
