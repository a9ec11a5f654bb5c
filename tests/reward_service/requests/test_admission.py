"""Admission of requests: which are taken, which turned away, and when those are to come again."""

from collections.abc import Callable

import pytest

from reward_service.requests.admission import Admission, Arrivals, Room, ScoringPace
from reward_service.verifier.lanes import make_metrics
from services.http.metrics import Metrics
from services.http.refusals import RequestRefused


def admission(
    *,
    items: int = 10,
    bytes: int = 1000,
    verifier_share: float = 0.5,
    is_shared: Callable[[str], bool] = lambda _: True,
) -> Admission:
    metrics = make_metrics(Metrics("reward-service"))
    return Admission(
        room=Room(items=items, bytes=bytes, verifier_share=verifier_share),
        pending=metrics.pending_items,
        waiting=metrics.waiting_items,
        label=lambda verifier: verifier,
        is_shared=is_shared,
    )


def refusal(taken: Admission, *verifiers: str, body_bytes: int = 0) -> tuple[int, str]:
    """Status and message of the refusal of items of these verifiers."""
    with (
        pytest.raises(RequestRefused) as refused,
        taken.held(body_bytes=body_bytes, items=1),
        taken.admitted(verifiers),
    ):
        pass
    if refused.value.status_code == 429:
        assert refused.value.headers is not None
        assert int(refused.value.headers["Retry-After"]) >= 1
    return refused.value.status_code, refused.value.problem.message


def test_places_are_free_again_when_a_request_is_answered() -> None:
    taken = admission()
    with taken.admitted(["a"] * 5 + ["b"] * 5):
        assert taken.items == 10
        assert refusal(taken, "a")[0] == 429
    assert taken.items == 0
    with taken.admitted(["a"] * 5):
        pass


def test_one_verifier_leaves_room_for_others() -> None:
    taken = admission()
    with taken.admitted(["slow"] * 5):
        status, message = refusal(taken, "slow")
        assert status == 429
        assert "the verifier slow" in message
        with taken.admitted(["quick"] * 5):
            assert taken.items == 10


def test_more_than_is_ever_taken_is_refused_for_good() -> None:
    taken = admission()
    assert refusal(taken, *["a"] * 6) == (413, "6 items for the verifier a in one request: send at most 5")
    assert refusal(taken, *"abcdefghijk")[0] == 413


def test_bytes_are_bounded_and_a_request_larger_than_all_of_them_is_taken_alone() -> None:
    taken = admission()
    with taken.held(body_bytes=1500, items=1), taken.admitted(["a"]):
        assert "1500 bytes are here, of at most 1000" in refusal(taken, "a", body_bytes=1)[1]
    with taken.held(body_bytes=600, items=1):
        assert refusal(taken, "a", body_bytes=401)[0] == 429
        with taken.held(body_bytes=400, items=1):
            pass


async def test_a_draining_service_takes_nothing() -> None:
    taken = admission()
    assert await taken.drain(timeout_s=1.0)
    assert refusal(taken, "a")[0] == 503


def test_the_pace_is_that_of_the_time_with_work() -> None:
    now = 0.0
    pace = ScoringPace(clock=lambda: now)
    assert pace.seconds_for(1000) == 1.0, "nothing is known yet"
    for _ in range(4):
        now += 1000.0  # nothing to do
        pace.began()
        now += 0.5
        pace.ended(5, left=0)
    assert pace.seconds_for(100) == pytest.approx(10.0)
    assert pace.seconds_for(1) == 1.0
    assert pace.seconds_for(100_000) == 60.0


def test_what_is_on_its_way_counts_as_items_of_the_size_that_is_usual() -> None:
    taken = admission(items=10, bytes=100_000)
    with taken.arriving(body_bytes=5000), taken.arriving(body_bytes=5000):
        pass  # nothing is known of the size of items yet
    with taken.held(body_bytes=400, items=4):
        pass
    with taken.arriving(body_bytes=500), taken.arriving(body_bytes=500):
        with pytest.raises(RequestRefused, match="10 items are here, of at most 10"):
            taken.check(body_bytes=1)
        assert taken.items == 0
    taken.check(body_bytes=1)


def test_what_comes_slowly_or_is_large_holds_nobody_up() -> None:
    now = 0.0
    arrivals = Arrivals(clock=lambda: now)
    with arrivals.counted(1 << 30):
        assert arrivals.bytes == 64 << 10
        now = 0.06
        with arrivals.counted(1000):
            now = 0.12
            assert arrivals.bytes == 1000
            now = 0.2
            assert arrivals.bytes == 0
        with arrivals.counted(500):
            assert arrivals.bytes == 500
    assert arrivals.bytes == 0


def test_a_verifier_that_judges_at_once_may_take_all_places() -> None:
    taken = admission(items=10, is_shared=lambda verifier: verifier != "quick")
    with taken.admitted(["quick"] * 10):
        assert refusal(taken, "quick")[0] == 429
    assert refusal(taken, *["slow"] * 6)[0] == 413
