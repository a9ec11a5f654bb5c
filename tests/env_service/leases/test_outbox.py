"""Outcomes in the outbox: due at once, ever more rarely while unacknowledged, and anew after a welcome."""

from env_service.leases.outbox import Outbox
from protocol.lease_keys import LeaseKey
from protocol.messages import FailedLease

FAILED = FailedLease(incarnation=1, lease_id=1, attempt=0, purpose="train", data_fault=False, reason="r")
KEY = LeaseKey(1, "train", 1, 0)


def _sending_times(outbox: Outbox, clock: list[float], until: int) -> list[int]:
    times = []
    for second in range(until):
        clock[0] = float(second)
        times += [second for _ in outbox.take_due()]
    return times


def test_an_unacknowledged_outcome_is_due_ever_more_rarely_but_for_ever() -> None:
    clock = [0.0]
    outbox = Outbox(resend_s=2.0, clock=lambda: clock[0])
    outbox.add(FAILED)

    assert _sending_times(outbox, clock, 64) == [0, 2, 6, 14, 30, 46, 62]


def test_an_acknowledged_outcome_is_forgotten_and_a_second_acknowledgement_is_normal() -> None:
    outbox = Outbox(resend_s=0.0, clock=lambda: 0.0)
    outbox.add(FAILED)

    assert outbox.acknowledge(KEY)
    assert not outbox.acknowledge(KEY)
    assert outbox.take_due() == []


def test_everything_is_due_again_after_a_welcome() -> None:
    outbox = Outbox(resend_s=60.0, clock=lambda: 0.0)
    outbox.add(FAILED)
    assert outbox.take_due() == [(FAILED, False)]
    assert outbox.take_due() == []

    outbox.make_due()

    assert outbox.take_due() == [(FAILED, True)]
