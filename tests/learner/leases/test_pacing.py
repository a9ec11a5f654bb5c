"""Pacing: more groups when the trainer waited, fewer when groups lay ready, always between one step and the bound."""

from learner.leases.pacing import Pacing, PacingRule


def pacing(*, max_lag: int = 4, rule: PacingRule = "demand") -> Pacing:
    return Pacing(groups_per_step=10, max_lag=max_lag, rule=rule)


def test_a_trainer_that_waits_is_given_more_up_to_what_the_bound_permits() -> None:
    paced = pacing()
    before = paced.room(running=0, buffered=0)
    paced.taken(waited_s=0.5, since_last_s=1.0, left_over=0)
    assert paced.room(running=0, buffered=0) == before + 1
    for _ in range(1000):
        paced.taken(waited_s=0.5, since_last_s=1.0, left_over=0)
    assert paced.room(running=0, buffered=0) == 50


def test_groups_that_lie_ready_make_it_less_but_never_less_than_a_step() -> None:
    paced = pacing()
    for _ in range(1000):
        paced.taken(waited_s=0.0, since_last_s=1.0, left_over=8)
    assert paced.room(running=0, buffered=0) == 10


def test_a_trainer_that_neither_waits_nor_leaves_groups_lying_changes_nothing() -> None:
    paced = pacing()
    before = paced.ahead
    paced.taken(waited_s=0.01, since_last_s=1.0, left_over=1)
    assert paced.ahead == before


def test_synchronous_training_has_one_step_of_groups_and_no_more() -> None:
    paced = pacing(max_lag=0)
    for _ in range(10):
        paced.taken(waited_s=1.0, since_last_s=1.0, left_over=0)
    assert paced.room(running=0, buffered=0) == 10


def test_a_lower_bound_takes_room_away_and_a_higher_one_gives_none_until_the_trainer_waits() -> None:
    paced = pacing()
    for _ in range(1000):
        paced.taken(waited_s=0.5, since_last_s=1.0, left_over=0)
    paced.bound(1)
    assert paced.room(running=0, buffered=0) == 20
    paced.bound(4)
    assert paced.room(running=0, buffered=0) == 20
    paced.taken(waited_s=0.5, since_last_s=1.0, left_over=0)
    assert paced.room(running=0, buffered=0) == 21


def test_running_and_buffered_groups_take_the_room() -> None:
    assert pacing().room(running=12, buffered=5) == 3
    assert pacing().room(running=12, buffered=15) == 0


def test_full_pacing_asks_for_what_the_bound_permits_whether_or_not_the_trainer_waits() -> None:
    paced = pacing(rule="full")
    assert paced.room(running=7, buffered=3) == 40
    paced.taken(waited_s=1.0, since_last_s=1.0, left_over=0)
    paced.taken(waited_s=0.0, since_last_s=1.0, left_over=40)
    assert paced.room(running=0, buffered=0) == 50


def test_full_pacing_follows_a_bound_that_falls_and_rises_again_at_once() -> None:
    paced = pacing(rule="full")
    paced.bound(1)
    assert paced.room(running=0, buffered=0) == 20
    paced.bound(4)
    assert paced.room(running=0, buffered=0) == 50


def test_a_batch_that_is_waited_for_asks_for_more_by_and_by_up_to_what_the_bound_permits() -> None:
    paced = pacing()
    before = paced.ahead
    for waited_s in (0.0, 9.0, 10.0, 11.0, 19.0, 20.0):
        paced.awaited(waited_s=waited_s)
    assert paced.ahead == before + 2
    paced.taken(waited_s=0.0, since_last_s=1.0, left_over=0)
    paced.awaited(waited_s=10.0)
    assert paced.ahead == before + 3
    paced.awaited(waited_s=1e6)
    assert paced.ahead == 50
