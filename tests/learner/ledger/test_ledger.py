"""The rules of the ledger, one by one."""

import json
import random
from dataclasses import asdict
from typing import Literal

import pytest

from learner.ledger import (
    AttemptId,
    Batch,
    BatchShortfall,
    FailureKind,
    FailureResult,
    Grant,
    GroupVerdict,
    Ledger,
    LedgerConfig,
    LedgerSnapshot,
)

OnLag = Literal["wait", "drop", "mask"]

CONFIG = LedgerConfig(
    groups_per_step=2,
    max_lag=1,
    on_lag="wait",
    straggler_timeout_s=30.0,
    lease_timeout_s=60.0,
    infrastructure_retries=2,
    data_retries=1,
)


def make_ledger(
    *,
    groups_per_step: int = 2,
    max_lag: int = 1,
    on_lag: OnLag = "wait",
    max_drops_per_lease: int = 2,
    longest_wait_s: float = CONFIG.longest_wait_s,
    infrastructure_retries: int = CONFIG.infrastructure_retries,
) -> Ledger:
    ledger = Ledger(
        LedgerConfig(
            groups_per_step=groups_per_step,
            max_lag=max_lag,
            on_lag=on_lag,
            straggler_timeout_s=CONFIG.straggler_timeout_s,
            lease_timeout_s=CONFIG.lease_timeout_s,
            infrastructure_retries=infrastructure_retries,
            data_retries=CONFIG.data_retries,
            max_drops_per_lease=max_drops_per_lease,
            longest_wait_s=longest_wait_s,
        )
    )
    ledger.served_changed(0)
    return ledger


def granted(ledger: Ledger, *, room: int = 100, holder: str = "a", now: float = 0.0) -> list[int]:
    return [grant.lease_id for grant in ledger.grant(now=now, holder=holder, room=room)]


def finish(ledger: Ledger, *lease_ids: int, version: int, attempt: int = 0) -> list[GroupVerdict]:
    return [
        ledger.accept(lease_id=lease_id, attempt=attempt, oldest_version=version, size=10).verdict
        for lease_id in lease_ids
    ]


def take(ledger: Ledger, *, now: float = 0.0) -> Batch:
    batch = ledger.take(now=now)
    assert isinstance(batch, Batch), batch
    return batch


def wait(ledger: Ledger, *, now: float = 0.0) -> BatchShortfall:
    waiting = ledger.take(now=now)
    assert isinstance(waiting, BatchShortfall), waiting
    return waiting


def step(ledger: Ledger, *, now: float = 0.0, served: bool = True) -> Batch:
    batch = take(ledger, now=now)
    ledger.trained(batch.version + 1)
    if served:
        ledger.served_changed(batch.version + 1)
    return batch


def revived(ledger: Ledger) -> Ledger:
    form = json.loads(json.dumps(asdict(ledger.snapshot())))
    return Ledger.restore(ledger.config, LedgerSnapshot(**form))


# Granting


def test_nothing_is_granted_while_no_generator_serves() -> None:
    ledger = Ledger(CONFIG)
    assert granted(ledger) == []
    ledger.served_changed(0)
    assert granted(ledger, room=1) == [0]
    ledger.served_changed(None)
    assert granted(ledger) == []


def test_a_grant_names_its_task_version_and_deadline() -> None:
    ledger = make_ledger()
    (grant,) = ledger.grant(now=5.0, holder="a", room=1)
    assert grant == Grant(lease_id=0, attempt=0, holder="a", version=0, deadline=65.0)
    assert grant.task_index == 0


def test_grants_stop_at_the_served_version_plus_the_lag_plus_one_times_the_groups_of_a_step() -> None:
    ledger = make_ledger(groups_per_step=2, max_lag=1)
    assert granted(ledger) == [0, 1, 2, 3]
    finish(ledger, 0, 1, version=0)
    take(ledger)
    assert granted(ledger) == [], "a taken batch counts as consumed before its step ends"
    ledger.trained(1)
    assert granted(ledger) == [], "the served version counts, not the learner's"
    ledger.served_changed(1)
    assert granted(ledger) == [4, 5]


def test_a_version_that_the_learner_has_not_made_cannot_be_served() -> None:
    ledger = make_ledger()
    with pytest.raises(ValueError, match="cannot serve policy version 3"):
        ledger.served_changed(3)


def test_leases_are_granted_again_before_new_tasks_and_keep_their_id() -> None:
    ledger = make_ledger()
    assert granted(ledger, room=2, holder="a") == [0, 1]
    ledger.holder_gone("a")
    grants = ledger.grant(now=0.0, holder="b", room=3)
    assert [(grant.lease_id, grant.attempt) for grant in grants] == [(0, 1), (1, 1), (2, 0)]


# Heartbeats and deadlines


def test_a_heartbeat_extends_the_deadline_of_what_it_reports_only() -> None:
    ledger = make_ledger()
    granted(ledger, room=2)
    ledger.heartbeat(now=50.0, holder="a", running={(0, 0): None})
    assert [ended.lease_id for ended in ledger.expire(now=60.0)] == [1]
    assert [ended.lease_id for ended in ledger.expire(now=109.0)] == []
    assert [ended.lease_id for ended in ledger.expire(now=110.0)] == [0]
    assert ledger.books().expired == 2


def test_a_heartbeat_learns_which_attempts_are_not_wanted_any_more() -> None:
    ledger = make_ledger()
    granted(ledger, room=3)
    finish(ledger, 0, version=0)
    reported = {(0, 0): 0, (1, 0): 0, (1, 7): 0, (2, 0): 0, (99, 0): 0}
    assert ledger.heartbeat(now=1.0, holder="a", running=reported) == (
        AttemptId(0, 0),
        AttemptId(1, 7),
        AttemptId(99, 0),
    )
    assert ledger.heartbeat(now=1.0, holder="b", running={(2, 0): 0}) == (AttemptId(2, 0),)


def test_a_heartbeat_raises_the_version_of_a_running_group_and_never_lowers_it() -> None:
    ledger = make_ledger(groups_per_step=1, max_lag=1)
    assert granted(ledger) == [0, 1]
    finish(ledger, 1, version=0)
    step(ledger)
    assert granted(ledger) == [2]
    finish(ledger, 2, version=1)
    assert [straggler.lease_id for straggler in wait(ledger).stragglers] == [0]
    ledger.heartbeat(now=1.0, holder="a", running={(0, 0): 0})
    assert [straggler.version for straggler in wait(ledger).stragglers] == [0]
    ledger.heartbeat(now=1.0, holder="a", running={(0, 0): 1})
    ledger.heartbeat(now=1.0, holder="a", running={(0, 0): 0})
    assert take(ledger).lease_ids == (2,)


# Accepting


def test_an_accepted_group_that_comes_again_is_a_duplicate_wherever_its_lease_is_by_then() -> None:
    ledger = make_ledger()
    granted(ledger)
    assert finish(ledger, 0, 1, 0, version=0) == [GroupVerdict.ACCEPTED, GroupVerdict.ACCEPTED, GroupVerdict.DUPLICATE]
    take(ledger)
    assert finish(ledger, 0, version=0) == [GroupVerdict.DUPLICATE]
    ledger.trained(1)
    assert finish(ledger, 0, version=0) == [GroupVerdict.DUPLICATE]
    assert ledger.books().attempts == 4


def test_attempts_that_were_never_granted_are_unknown() -> None:
    ledger = make_ledger()
    granted(ledger, room=1)
    assert finish(ledger, 1, -1, version=0) == [GroupVerdict.UNKNOWN, GroupVerdict.UNKNOWN]
    assert finish(ledger, 0, version=0, attempt=1) == [GroupVerdict.UNKNOWN]


def test_asking_for_a_verdict_changes_nothing() -> None:
    ledger = make_ledger()
    granted(ledger)
    before = (ledger.books(), ledger.snapshot())
    assert ledger.would_accept(lease_id=0, attempt=0, oldest_version=0) is GroupVerdict.ACCEPTED
    assert ledger.would_accept(lease_id=0, attempt=0, oldest_version=-5) is GroupVerdict.STALE
    assert (ledger.books(), ledger.snapshot()) == before


def test_the_first_admissible_attempt_wins_and_the_newer_one_is_cancelled() -> None:
    ledger = make_ledger()
    granted(ledger, room=1, holder="a")
    ledger.expire(now=60.0)
    granted(ledger, room=1, holder="b", now=60.0)
    answer = ledger.accept(lease_id=0, attempt=0, oldest_version=0, size=10)
    assert answer.verdict is GroupVerdict.ACCEPTED
    assert [(ended.lease_id, ended.attempt, ended.holder) for ended in answer.cancelled] == [(0, 1, "b")]
    assert finish(ledger, 0, version=0, attempt=1) == [GroupVerdict.DUPLICATE]
    books = ledger.books()
    assert (books.accepted, books.dropped, books.expired) == (1, 1, 0)


def test_an_attempt_that_expired_is_accepted_while_its_lease_waits_to_be_granted_again() -> None:
    ledger = make_ledger()
    granted(ledger, room=1)
    ledger.holder_gone("a")
    assert finish(ledger, 0, version=0) == [GroupVerdict.ACCEPTED]
    assert granted(ledger, room=1) == [1]


def test_a_group_that_arrives_during_a_step_is_judged_by_the_version_that_the_step_makes() -> None:
    ledger = make_ledger(groups_per_step=1, max_lag=0)
    granted(ledger, holder="a")
    ledger.holder_gone("a")
    granted(ledger, holder="b")
    finish(ledger, 0, version=0, attempt=1)
    take(ledger)
    ledger.served_changed(0)
    assert granted(ledger) == []
    ledger.trained(1)
    ledger.served_changed(1)
    assert granted(ledger) == [1]
    assert finish(ledger, 1, version=0) == [GroupVerdict.STALE]


def test_a_stale_group_is_dropped_and_its_lease_granted_again() -> None:
    ledger = make_ledger()
    granted(ledger, room=1)
    assert finish(ledger, 0, version=-2) == [GroupVerdict.STALE]
    assert ledger.books().dropped == 1
    assert [(grant.lease_id, grant.attempt) for grant in ledger.grant(now=0.0, holder="a", room=1)] == [(0, 1)]


def test_a_group_of_a_version_that_the_learner_has_not_made_is_not_admitted() -> None:
    ledger = make_ledger()
    granted(ledger, room=1)
    assert finish(ledger, 0, version=1) == [GroupVerdict.STALE]


def test_an_old_attempt_that_is_too_old_changes_nothing() -> None:
    ledger = make_ledger()
    granted(ledger, room=1, holder="a")
    ledger.holder_gone("a")
    granted(ledger, room=1, holder="b")
    assert finish(ledger, 0, version=-2, attempt=0) == [GroupVerdict.LATE]
    assert finish(ledger, 0, version=0, attempt=1) == [GroupVerdict.ACCEPTED]


# Filtering


def test_a_filtered_group_gives_its_place_back() -> None:
    ledger = make_ledger(groups_per_step=1, max_lag=1)
    assert granted(ledger) == [0, 1]
    finish(ledger, 0, version=0)
    assert granted(ledger) == []
    ledger.filter(lease_id=0)
    assert granted(ledger) == [2]
    ledger.filter(lease_id=1, attempt=0)
    assert granted(ledger) == [3]
    assert finish(ledger, 0, 1, version=0) == [GroupVerdict.DUPLICATE, GroupVerdict.DUPLICATE]
    assert ledger.books().filtered == 2


def test_filtering_what_has_no_group_is_refused() -> None:
    ledger = make_ledger()
    granted(ledger, room=1)
    refused: tuple[tuple[int, int | None], ...] = ((0, None), (0, 1), (5, 0), (5, None))
    for lease_id, attempt in refused:
        with pytest.raises(ValueError, match="no group that could be filtered"):
            ledger.filter(lease_id=lease_id, attempt=attempt)
    ledger.filter(lease_id=0, attempt=0)
    with pytest.raises(ValueError, match="no group that could be filtered"):
        ledger.filter(lease_id=0, attempt=0)


# Failing


def fail(ledger: Ledger, lease_id: int, *, attempt: int, kind: FailureKind, now: float = 0.0) -> FailureResult:
    return ledger.fail(now=now, lease_id=lease_id, attempt=attempt, kind=kind, reason="HTTP 503")


def test_an_infrastructure_failure_is_retried_after_a_pause_that_doubles_and_then_given_up() -> None:
    ledger = make_ledger()
    granted(ledger, room=1)
    assert fail(ledger, 0, attempt=0, kind="infrastructure", now=10.0) is FailureResult.RETRIED
    assert granted(ledger, room=1, now=10.9) == [1], "new tasks do not wait for the pause"
    assert granted(ledger, room=1, now=11.0) == [0]
    assert fail(ledger, 0, attempt=1, kind="infrastructure", now=20.0) is FailureResult.RETRIED
    assert granted(ledger, room=1, now=21.9) == [2]
    assert granted(ledger, room=1, now=22.0) == [0]
    assert fail(ledger, 0, attempt=2, kind="infrastructure", now=30.0) is FailureResult.DEAD_LETTERED
    assert ledger.books().dead_lettered == 1
    assert ledger.commonest_reasons(1) == (("infrastructure: HTTP 503", 1),)


def test_a_reason_counts_once_for_each_lease_that_was_given_up_for_it_and_not_for_what_was_tried_again() -> None:
    ledger = make_ledger()
    granted(ledger, room=3)
    for lease_id in (0, 1, 2):
        assert fail(ledger, lease_id, attempt=0, kind="infrastructure") is FailureResult.RETRIED
    assert ledger.commonest_reasons(1) == ()
    granted(ledger, room=3, now=100.0)
    for attempt, reason in enumerate(("a slow host", "no such file"), start=1):
        ledger.fail(now=100.0, lease_id=0, attempt=attempt, kind="data", reason=reason)
        granted(ledger, room=1, now=100.0)
    assert ledger.books().dead_lettered == 1
    assert ledger.commonest_reasons(2) == (("data: no such file", 1),)


def test_a_data_failure_is_retried_at_once_and_little() -> None:
    ledger = make_ledger()
    granted(ledger, room=1)
    assert fail(ledger, 0, attempt=0, kind="data") is FailureResult.RETRIED
    assert granted(ledger, room=1) == [0]
    assert fail(ledger, 0, attempt=1, kind="data") is FailureResult.DEAD_LETTERED
    assert granted(ledger) == [1, 2, 3, 4], "a dead letter gives its place back"


def test_the_failure_of_an_attempt_that_does_not_run_is_ignored() -> None:
    ledger = make_ledger()
    granted(ledger, room=2)
    finish(ledger, 0, version=0)
    ledger.holder_gone("a")
    for lease_id in (0, 1, 77):
        assert fail(ledger, lease_id, attempt=0, kind="data") is FailureResult.IGNORED
    assert ledger.books().failed == 0


def test_of_more_reasons_than_are_kept_the_commonest_stays() -> None:
    ledger = make_ledger()
    for number in range(1000):
        (lease_id,) = granted(ledger, room=1)
        often = number % 3 == 0
        for attempt in range(2):
            reason = "no such file" if often else f"{number}.{attempt}: " + "x" * 2000
            ledger.fail(now=0.0, lease_id=lease_id, attempt=attempt, kind="data", reason=reason)
            granted(ledger, room=1 - attempt)
    ((reason, count),) = ledger.commonest_reasons(1)
    assert reason == "data: no such file"
    assert 300 <= count <= 334
    kept = ledger.snapshot().reasons
    assert len(kept) <= 64
    assert max(map(len, kept)) == 500


# Taking


def test_a_batch_waits_for_enough_groups() -> None:
    ledger = make_ledger()
    granted(ledger)
    finish(ledger, 3, version=0)
    assert wait(ledger) == BatchShortfall(have=1, need=2)


def test_a_batch_takes_the_oldest_leases_and_not_the_first_completed() -> None:
    ledger = make_ledger()
    granted(ledger)
    finish(ledger, 3, 1, 2, 0, version=0)
    assert take(ledger).lease_ids == (0, 1)


def test_groups_of_old_versions_come_before_old_leases_so_that_none_falls_due_without_a_place() -> None:
    ledger = make_ledger(groups_per_step=2, max_lag=2)
    assert granted(ledger) == [0, 1, 2, 3, 4, 5]
    ledger.filter(lease_id=0, attempt=0)
    fail(ledger, 1, attempt=0, kind="data")
    finish(ledger, 2, 3, version=0)
    step(ledger)
    assert granted(ledger, room=1) == [1]
    finish(ledger, 1, version=1, attempt=1)
    finish(ledger, 4, 5, version=0)
    batch = step(ledger)
    assert (batch.lease_ids, batch.lags) == ((4, 5), (1, 1))


def test_more_groups_than_a_batch_never_fall_due_at_once() -> None:
    """At version 1 nothing is due, but a step without one of 3, 4 and 5 would leave three groups for two places."""
    ledger = make_ledger(groups_per_step=2, max_lag=2)
    granted(ledger)
    finish(ledger, 0, 1, version=0)
    step(ledger)
    assert granted(ledger) == [6, 7]
    finish(ledger, 2, version=0)
    finish(ledger, 6, 7, version=1)
    assert [straggler.lease_id for straggler in wait(ledger).stragglers] == [3, 4, 5]
    finish(ledger, 5, version=0)
    assert take(ledger).lease_ids == (2, 5)


def straggling(*, on_lag: OnLag = "wait", max_drops_per_lease: int = 2) -> Ledger:
    """Lease 0 of version 0 runs on at version 1 with max_lag 1, so the step that is ready would make it too old."""
    ledger = make_ledger(groups_per_step=1, max_lag=1, on_lag=on_lag, max_drops_per_lease=max_drops_per_lease)
    granted(ledger)
    finish(ledger, 1, version=0)
    step(ledger)
    granted(ledger)
    finish(ledger, 2, version=1)
    return ledger


def test_a_step_waits_for_a_straggler_and_then_takes_it_first() -> None:
    ledger = straggling()
    waiting = wait(ledger, now=100.0)
    assert (waiting.have, waiting.need, waiting.since) == (1, 1, 100.0)
    (straggler,) = waiting.stragglers
    assert (straggler.lease_id, straggler.attempt, straggler.holder, straggler.version) == (0, 0, "a", 0)
    finish(ledger, 0, version=0)
    batch = take(ledger, now=129.0)
    assert (batch.version, batch.lease_ids, batch.lags, batch.dropped) == (1, (0,), (1,), ())


def test_a_straggler_is_dropped_when_patience_ends_and_its_lease_granted_again() -> None:
    ledger = straggling()
    wait(ledger, now=100.0)
    assert wait(ledger, now=129.9).since == 100.0
    batch = take(ledger, now=130.0)
    assert batch.lease_ids == (2,)
    assert [(ended.lease_id, ended.attempt, ended.holder, ended.size) for ended in batch.dropped] == [(0, 0, "a", None)]
    ledger.trained(2)
    ledger.served_changed(2)
    assert granted(ledger, room=1) == [0]


def test_on_lag_drop_does_not_wait() -> None:
    ledger = straggling(on_lag="drop")
    assert [ended.lease_id for ended in take(ledger).dropped] == [0]


def test_on_lag_mask_goes_on_without_a_straggler_and_keeps_it_for_what_can_still_be_trained_of_it() -> None:
    ledger = straggling(on_lag="mask")
    assert (take(ledger).lease_ids, ledger.books().running) == ((2,), 1)
    ledger.trained(2)
    assert ledger.oldest_with_a_place(0) == 1, "the newest version is 2, and max_lag 1"
    assert finish(ledger, 0, version=0) == [GroupVerdict.STALE], "as it came, it would be too old"


def test_a_group_that_comes_late_takes_the_place_of_none_that_is_there_already() -> None:
    """At version 2 a batch of 1 group with max_lag 2 has one place for each of the versions 0, 1 and 2."""
    ledger = make_ledger(groups_per_step=1, max_lag=2, on_lag="mask")
    granted(ledger)
    for done in range(2):
        finish(ledger, done, version=done)
        step(ledger)
    granted(ledger)
    finish(ledger, 3, version=0)
    assert ledger.oldest_with_a_place(0) == 1
    finish(ledger, 4, version=1)
    assert ledger.oldest_with_a_place(0) == ledger.oldest_with_a_place(1) == 2
    wait_for_it = make_ledger(groups_per_step=1, max_lag=2)
    assert wait_for_it.oldest_with_a_place(0) == 0


@pytest.mark.parametrize("seed", range(40))
def test_with_on_lag_mask_nothing_that_runs_is_dropped_and_nothing_that_came_in_grows_too_old(seed: int) -> None:
    """Rollouts take from a moment to many steps; the last token of each is of the version that is served when it ends.

    The ledger itself asserts that no group of a batch lags beyond the bound.
    """
    draws = random.Random(seed)
    per_step, max_lag = draws.randint(1, 4), draws.randint(0, 4)
    ledger = make_ledger(groups_per_step=per_step, max_lag=max_lag, on_lag="mask")
    running: dict[int, tuple[int, int]] = {}  # lease: the version at its grant, the moment at which it ends
    masked = trained = 0
    for moment in range(600):
        for grant in ledger.grant(now=0.0, holder="a", room=draws.randint(0, 3)):
            long = draws.random() < 0.3
            running[grant.lease_id] = (grant.version, moment + draws.randint(40, 90) if long else moment + 1)
        for lease_id in [lease_id for lease_id, (_, ends) in running.items() if ends <= moment]:
            oldest, _ = running.pop(lease_id)
            kept = ledger.oldest_with_a_place(oldest)
            masked += kept > oldest
            assert finish(ledger, lease_id, version=kept) == [GroupVerdict.ACCEPTED]
        if isinstance(batch := ledger.take(now=0.0), Batch):
            assert batch.dropped == ()
            trained += len(batch.lease_ids)
            ledger.trained(batch.version + 1)
            ledger.served_changed(batch.version + 1)
    assert trained > 20
    assert masked > 0 or max_lag == 0
    ledger.books().check()


def test_a_lease_that_was_dropped_often_enough_is_waited_for_without_end() -> None:
    modes: tuple[OnLag, ...] = ("wait", "drop", "mask")
    for on_lag in modes:
        ledger = straggling(on_lag=on_lag, max_drops_per_lease=0)
        wait(ledger, now=0.0)
        assert [straggler.lease_id for straggler in wait(ledger, now=1e9).stragglers] == [0]
        ledger.holder_gone("a")
        assert take(ledger, now=1e9).lease_ids == (2,)


def test_finished_groups_that_come_back_beyond_the_places_are_given_up_and_reported() -> None:
    ledger = make_ledger(groups_per_step=1, max_lag=0)
    assert granted(ledger, holder="a") == [0]
    fail(ledger, 0, attempt=0, kind="infrastructure", now=0.0)
    assert granted(ledger, holder="b") == [1]
    finish(ledger, 0, 1, version=0)
    batch = take(ledger)
    assert batch.lease_ids == (0,)
    assert [(ended.lease_id, ended.holder, ended.size) for ended in batch.dropped] == [(1, None, 10)]


def test_a_second_batch_before_the_end_of_the_step_is_a_bug_of_the_caller() -> None:
    ledger = make_ledger()
    granted(ledger)
    finish(ledger, 0, 1, 2, 3, version=0)
    take(ledger)
    with pytest.raises(AssertionError):
        ledger.take(now=0.0)
    with pytest.raises(AssertionError):
        ledger.trained(2)
    ledger.trained(1)
    with pytest.raises(AssertionError):
        ledger.trained(2)


# Restarting


def test_after_a_restart_everything_unfinished_is_granted_again_with_the_next_attempt() -> None:
    ledger = make_ledger()
    granted(ledger)
    finish(ledger, 0, 1, 2, version=0)
    take(ledger)
    second = revived(ledger)
    second.books().check()
    assert (second.version, second.served, second.books().outstanding, second.books().trained) == (0, None, 4, 0)
    second.served_changed(0)
    grants = second.grant(now=0.0, holder="a", room=9)
    assert [(grant.lease_id, grant.attempt) for grant in grants] == [(0, 1), (1, 1), (2, 1), (3, 1)]


def test_logged_batches_are_consumed_again_and_trained_in_their_order() -> None:
    ledger = make_ledger(groups_per_step=1, max_lag=1)
    granted(ledger)
    second = revived(ledger)
    second.replay((3,))
    second.replay((1,))
    second.served_changed(1)
    assert second.next_version == 2
    assert granted(second) == [0], "places are counted from the version that the replay leads to"
    second.trained(1)
    second.trained(2)
    second.served_changed(2)
    assert granted(second) == [2], "a lease below the logged ones is granted, not lost"
    second.books().check()
    assert second.books().trained == 2
    assert finish(second, 3, version=0) == [GroupVerdict.DUPLICATE]


def test_a_log_that_does_not_follow_the_checkpoint_is_refused() -> None:
    ledger = make_ledger(groups_per_step=1)
    granted(ledger)
    finish(ledger, 0, version=0)
    step(ledger)
    second = revived(ledger)
    for batch in ((0,), (1, 1)):
        with pytest.raises(ValueError, match="the logged batch"):
            second.replay(batch)


def test_logged_decisions_are_replayed_once() -> None:
    ledger = make_ledger()
    granted(ledger)
    ledger.filter(lease_id=0, attempt=0)
    second = revived(ledger)
    second.replay_filtered([0, 2, 5])
    second.replay_dead_lettered([5, 6])
    books = second.books()
    books.check()
    assert (books.leases, books.filtered, books.dead_lettered, books.pending) == (7, 3, 1, 3)


def test_a_journaled_group_is_readmitted_within_the_bound() -> None:
    ledger = make_ledger(groups_per_step=1, max_lag=1)
    granted(ledger)
    second = revived(ledger)
    second.replay((0,))
    second.replay((1,))
    assert second.readmit(lease_id=2, oldest_version=0, size=1).verdict is GroupVerdict.LATE
    assert second.readmit(lease_id=2, oldest_version=1, size=1).verdict is GroupVerdict.ACCEPTED
    assert second.readmit(lease_id=2, oldest_version=1, size=1).verdict is GroupVerdict.DUPLICATE
    second.trained(1)
    second.trained(2)
    assert take(second).lease_ids == (2,)
    second.books().check()


def test_a_group_of_a_former_life_replaces_the_attempt_that_runs_for_it_now() -> None:
    ledger = make_ledger()
    granted(ledger)
    second = revived(ledger)
    second.served_changed(0)
    granted(second, room=1, holder="b")
    answer = second.readmit(lease_id=0, oldest_version=0, size=1)
    assert answer.verdict is GroupVerdict.ACCEPTED
    assert [(ended.attempt, ended.holder) for ended in answer.cancelled] == [(1, "b")]
    second.books().check()


def test_reasons_and_drops_survive_a_restart() -> None:
    ledger = make_ledger(max_drops_per_lease=1)
    granted(ledger)
    fail(ledger, 0, attempt=0, kind="data")
    fail(ledger, 1, attempt=0, kind="data")
    granted(ledger)
    assert fail(ledger, 1, attempt=1, kind="data") is FailureResult.DEAD_LETTERED
    second = revived(ledger)
    second.served_changed(0)
    granted(second)
    assert fail(second, 0, attempt=2, kind="data") is FailureResult.DEAD_LETTERED
    assert second.commonest_reasons(5) == (("data: HTTP 503", 2),)


def test_a_lease_whose_attempts_expire_again_and_again_is_given_up_with_the_reason() -> None:
    ledger = make_ledger()
    for attempt in range(3):
        assert granted(ledger)[0] == 0
        ended = {one.lease_id: one for one in ledger.expire(now=1e6 * (attempt + 1))}
        assert (ended[0].given_up is None) == (attempt < 2)
    reason = "3 attempts ended with the silence or the end of their env_service"
    assert ended[0].given_up == reason
    assert ledger.commonest_reasons(1)[0][0] == f"infrastructure: {reason}"
    ledger.books().check()


def test_no_attempt_expires_for_the_time_in_which_the_learner_itself_stood_still() -> None:
    ledger = make_ledger()
    granted(ledger)
    ledger.stood_still(1000.0)
    assert ledger.expire(now=ledger.config.lease_timeout_s + 999.0) == ()
    assert ledger.expire(now=ledger.config.lease_timeout_s + 1000.0) != ()


# A bound that moves


def test_a_lower_bound_drops_what_the_next_batch_would_not_admit_running_or_finished() -> None:
    """At version 1 leases 1 and 2 lag by 1, lease 3 by 0."""
    ledger = make_ledger(groups_per_step=1, max_lag=2)
    assert granted(ledger) == [0, 1, 2]
    finish(ledger, 0, version=0)
    step(ledger)
    assert granted(ledger) == [3]
    finish(ledger, 1, version=0)
    ended = {one.lease_id: (one.attempt, one.holder, one.size) for one in ledger.bound_lag(0)}
    assert ended == {1: (0, None, 10), 2: (0, "a", None)}
    assert (ledger.max_lag, granted(ledger)) == (0, [])
    finish(ledger, 3, version=1)
    batch = step(ledger)
    assert (batch.lease_ids, batch.lags) == ((3,), (0,))
    assert granted(ledger) == [1], "it was granted again, at the pace of the bound"


def test_a_lower_bound_drops_the_newest_running_groups_that_it_leaves_no_place_for() -> None:
    """Groups of version 0 can be trained at versions 0 and 1 now, one at each; four of them run."""
    ledger = make_ledger(groups_per_step=1, max_lag=3)
    assert granted(ledger) == [0, 1, 2, 3]
    assert [ended.lease_id for ended in ledger.bound_lag(1)] == [2, 3]
    assert granted(ledger) == []
    finish(ledger, 1, version=0)
    finish(ledger, 0, version=0)
    assert [step(ledger).lease_ids for _ in range(2)] == [(0,), (1,)]


def test_a_running_group_that_may_not_be_dropped_any_more_is_waited_for_under_a_lower_bound_too() -> None:
    ledger = make_ledger(groups_per_step=1, max_lag=1, max_drops_per_lease=0)
    granted(ledger)
    assert ledger.bound_lag(0) == ()
    finish(ledger, 1, version=0)
    assert [straggler.lease_id for straggler in wait(ledger, now=1e9).stragglers] == [0]
    finish(ledger, 0, version=0)
    batch = take(ledger, now=1e9)
    assert (batch.lease_ids, [ended.lease_id for ended in batch.dropped]) == ((0,), [1])


def test_with_the_bound_at_0_nothing_is_granted_until_the_present_version_is_served() -> None:
    ledger = make_ledger(groups_per_step=1, max_lag=2)
    granted(ledger, room=1)
    finish(ledger, 0, version=0)
    take(ledger)
    ledger.trained(1)
    ledger.bound_lag(0)
    assert granted(ledger) == []
    ledger.served_changed(1)
    assert granted(ledger) == [1]


def test_a_bound_that_rises_again_gives_the_places_back() -> None:
    ledger = make_ledger(groups_per_step=2, max_lag=2)
    ledger.bound_lag(0)
    assert granted(ledger) == [0, 1]
    assert ledger.bound_lag(1) == ()
    assert granted(ledger) == [2, 3]


def test_what_a_former_life_runs_is_adopted_under_the_bound_in_use() -> None:
    """At version 1, with the bound at 0, a group of version 0 is too old, and one yet to begin will be of version 1."""
    ledger = make_ledger(groups_per_step=1, max_lag=2)
    ledger.replay((0,))
    ledger.trained(1)
    ledger.bound_lag(0)
    assert ledger.adopt(now=0.0, lease_id=1, holder="a", version=0) is None
    assert ledger.adopt(now=0.0, lease_id=2, holder="a", version=None) is not None
    ledger.readmit(lease_id=3, oldest_version=1, size=10)
    (straggler,) = wait(ledger).stragglers
    assert (straggler.lease_id, straggler.version) == (2, 1)


@pytest.mark.parametrize("max_lag", [-1, 3])
def test_no_bound_is_above_the_configured_one(max_lag: int) -> None:
    ledger = make_ledger(max_lag=2)
    with pytest.raises(ValueError, match=f"cannot be bounded by {max_lag}.*max_lag is 2"):
        ledger.bound_lag(max_lag)
    assert ledger.max_lag == 2


# Attempts that take too long


def lively(ledger: Ledger, *, until: float, excused: bool = False) -> None:
    """Lease 0 is spoken of in every heartbeat, and never ends."""
    now = 0.0
    while now < until:
        now += 20.0
        ledger.heartbeat(now=now, holder="a", running={(0, 0): 0}, excused={(0, 0)} if excused else ())
        ledger.expire(now=now)


def test_an_attempt_that_is_alive_for_ever_counts_as_a_failure_of_its_data() -> None:
    ledger = make_ledger()
    assert granted(ledger, room=1) == [0]
    lively(ledger, until=1500.0)
    (ended,) = ledger.overdue(now=1500.0)
    assert (ended.lease_id, ended.holder, ended.data_fault, ended.given_up) == (0, "a", True, None)
    ledger.grant(now=1500.0, holder="b", room=1)
    (given_up,) = ledger.overdue(now=3000.0)
    assert given_up.given_up == ("not finished within 1500 s, though env_service b says that it is at work")
    books = ledger.books()
    books.check()
    assert (books.dead_lettered, books.failed, books.running) == (1, 2, 0)


def test_with_no_lag_at_all_a_step_does_not_wait_for_ever_for_one_group() -> None:
    ledger = make_ledger(max_lag=0)
    assert granted(ledger) == [0, 1]
    finish(ledger, 1, version=0)
    lively(ledger, until=1500.0)
    assert wait(ledger, now=1500.0).have == 1
    ledger.overdue(now=1500.0)
    (again,) = ledger.grant(now=1500.0, holder="b", room=5)
    assert again.lease_id == 0
    ledger.overdue(now=3000.0)
    assert granted(ledger, now=3000.0) == [2]
    finish(ledger, 2, version=0)
    assert step(ledger, now=3000.0).lease_ids == (1, 2)


def test_a_lease_that_is_always_waited_for_stops_a_step_for_a_limited_time_only() -> None:
    ledger = make_ledger(max_drops_per_lease=0)
    assert granted(ledger) == [0, 1, 2, 3]
    finish(ledger, 1, 2, version=0)
    step(ledger)
    granted(ledger, holder="b")
    finish(ledger, 3, 4, version=0)
    lively(ledger, until=1500.0)
    assert [straggler.lease_id for straggler in wait(ledger, now=1499.0).stragglers] == [0]
    assert [ended.lease_id for ended in ledger.overdue(now=1500.0) if ended.holder == "a"] == [0]
    assert step(ledger, now=1500.0).lease_ids == (3, 4)


def test_time_spent_in_waiting_for_rewards_or_without_a_generator_is_not_held_against_an_attempt() -> None:
    ledger = make_ledger()
    granted(ledger, room=1)
    lively(ledger, until=1400.0, excused=True)
    assert ledger.overdue(now=1600.0) == ()
    ledger = make_ledger()
    granted(ledger, room=1)
    ledger.served_changed(None)
    lively(ledger, until=1400.0)
    assert ledger.overdue(now=1600.0) == ()
    assert [ended.lease_id for ended in ledger.overdue(now=2900.0)] == [0]


def test_an_attempt_that_waits_for_others_for_ever_ends_as_a_failure_of_infrastructure() -> None:
    ledger = make_ledger(longest_wait_s=3600.0, infrastructure_retries=0)
    granted(ledger, room=1)
    lively(ledger, until=3600.0, excused=True)
    assert ledger.overdue(now=3600.0) == ()
    ledger.heartbeat(now=3620.0, holder="a", running={(0, 0): 0}, excused={(0, 0)})
    (ended,) = ledger.overdue(now=3620.0)
    reason = "waited for rewards, its environment's host, or a place, for more than 3600 s at env_service a"
    assert (ended.lease_id, ended.data_fault, ended.given_up) == (0, False, reason)
    assert ledger.commonest_reasons(1) == ((f"infrastructure: {reason}", 1),)
    ledger.books().check()


def test_with_on_lag_mask_a_restart_adopts_what_began_long_ago_as_of_the_oldest_version_that_is_trained() -> None:
    cases: tuple[tuple[OnLag, int | None], ...] = (("wait", None), ("mask", 0))
    for on_lag, adopted in cases:
        ledger = make_ledger(groups_per_step=1, max_lag=1, on_lag=on_lag)
        for lease_id in range(3):
            ledger.replay((lease_id,))
            ledger.trained(lease_id + 1)
        assert ledger.adopt(now=0.0, lease_id=3, holder="a", version=0) == adopted
    assert ledger.oldest_with_a_place(0) == 2
    assert finish(ledger, 3, version=2) == [GroupVerdict.ACCEPTED]


def test_a_group_that_comes_late_and_finds_no_place_is_trained_before_younger_ones() -> None:
    """At version 2 a batch of 1 group with max_lag 1 has one place up to version 1; the group has no newer token."""
    ledger = make_ledger(groups_per_step=1, max_lag=1, on_lag="mask")
    granted(ledger)
    finish(ledger, 1, version=0)
    step(ledger)
    granted(ledger)
    finish(ledger, 2, version=1)
    step(ledger)
    granted(ledger)
    finish(ledger, 3, version=1)
    assert (ledger.oldest_with_a_place(0), ledger.oldest_with_a_place(0, newest_version=1)) == (2, 1)
    finish(ledger, 0, version=1)
    batch = take(ledger)
    assert (batch.lease_ids, [ended.lease_id for ended in batch.dropped]) == ((0,), [3])


def test_a_shortfall_says_that_a_lease_is_waited_for_without_end() -> None:
    for drops in range(2):
        ledger = straggling(max_drops_per_lease=drops)
        assert wait(ledger, now=0.0).must_wait == (drops == 0)


def test_a_group_is_sure_of_its_batch_once_there_are_places_for_all_that_go_before_it() -> None:
    ledger = make_ledger(groups_per_step=3, max_lag=1)
    ledger.grant(now=0.0, holder="a", room=5)

    def comes(lease_id: int) -> tuple[int, ...]:
        ledger.accept(lease_id=lease_id, attempt=0, oldest_version=0, size=1)
        return ledger.sure()

    assert comes(3) == (), "leases 0 to 2 would go before it, and fill the batch"
    assert comes(2) == (2,)
    assert comes(0) == (2, 0), "those named before stay in front"
    ledger.recall([2])
    assert ledger.sure() == (0, 3), "with lease 1 they fill the batch, now that lease 2 is not on its way any more"
    ledger.grant(now=0.0, holder="a", room=1)
    ledger.accept(lease_id=2, attempt=1, oldest_version=0, size=1)
    batch = ledger.take(now=0.0)
    assert isinstance(batch, Batch)
    assert (batch.lease_ids, batch.lags) == ((0, 3, 2), (0, 0, 0))
    ledger.trained(1)
    ledger.served_changed(1)
    assert ledger.sure() == ()


def test_another_group_of_a_lease_that_was_sure_has_no_place_by_the_former_one() -> None:
    ledger = make_ledger(groups_per_step=2, max_lag=1)
    ledger.grant(now=0.0, holder="a", room=2)
    for lease_id in range(2):
        ledger.accept(lease_id=lease_id, attempt=0, oldest_version=0, size=1)
        assert ledger.sure() == (0, 1)[: lease_id + 1]
    ledger.recall([0])
    ledger.grant(now=0.0, holder="a", room=1)
    ledger.accept(lease_id=0, attempt=1, oldest_version=0, size=1)
    assert ledger.sure() == (1, 0)
