from dataclasses import replace
from pathlib import Path

from learner.leases.lease_times import LeaseDiary, LeaseTimes
from tests.learner.envs import learner
from tests.learner.samples import INCARNATION, LEDGER, group


class TwoClocks:
    """A monotonic clock and one on the wall, set by hand."""

    def __init__(self) -> None:
        self.at, self.ahead = 0.0, 1000.0
        self.diary = LeaseDiary(clock=lambda: self.at, wall=lambda: self.at + self.ahead)


def test_times_are_as_far_apart_as_the_monotonic_clock_says() -> None:
    clocks = TwoClocks()
    clocks.diary.granted(0, incarnation=INCARNATION, attempt=0)
    clocks.at, clocks.ahead = 4.0, 500.0  # somebody sets the clock on the wall back
    clocks.diary.accepted(group(0))
    clocks.at = 10.0

    assert clocks.diary.taken([0]) == (
        LeaseTimes(granted_unix_s=500.0, accepted_unix_s=504.0, taken_unix_s=510.0),
    )  # fmt: skip


def test_the_time_of_another_attempt_s_grant_is_nobody_s() -> None:
    clocks = TwoClocks()
    clocks.diary.granted(0, incarnation=INCARNATION, attempt=0)
    clocks.diary.granted(0, incarnation=INCARNATION, attempt=1)
    clocks.diary.accepted(group(0, attempt=0))
    clocks.diary.granted(1, incarnation=INCARNATION + 1, attempt=0)
    clocks.diary.accepted(group(1))

    assert [each.granted_unix_s for each in clocks.diary.taken([0, 1])] == [None, None]


def test_nothing_is_kept_of_what_was_taken_or_forgotten() -> None:
    clocks = TwoClocks()
    for lease_id in range(3):
        clocks.diary.granted(lease_id, incarnation=INCARNATION, attempt=0)
    clocks.diary.accepted(group(1))
    clocks.diary.accepted(group(2))
    clocks.diary.forget(0)
    clocks.diary.forget(1)
    clocks.diary.taken([2])

    assert clocks.diary.taken([0, 1, 2]) == (
        LeaseTimes(granted_unix_s=None, accepted_unix_s=None, taken_unix_s=1000.0),
    ) * 3  # fmt: skip


async def test_a_batch_tells_when_its_groups_were_granted_accepted_and_taken(tmp_path: Path) -> None:
    config = replace(LEDGER, groups_per_step=1, max_lag=2)
    async with learner(tmp_path, ledger_config=config) as ours, ours.env("e") as env:
        await env.enter()
        await env.leases(2)
        await env.finish(group(0))
        batch = await ours.intake.take()

    (times,) = batch.times
    assert times.granted_unix_s is not None
    assert times.accepted_unix_s is not None
    assert times.granted_unix_s <= times.accepted_unix_s <= times.taken_unix_s
