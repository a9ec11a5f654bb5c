"""Keys that say which attempt at which lease a message is about."""

from typing import NamedTuple

from protocol.messages import FailedLease, FinishedLease, Lease, OutcomeReceipt, RunningLease
from protocol.trajectories import Purpose, TrajectoryGroup


class LeaseKey(NamedTuple):
    """Leases of training and of evaluation are numbered separately, attempts anew in each life of the learner."""

    incarnation: int
    purpose: Purpose
    lease_id: int
    attempt: int


def key_of(about: Lease | RunningLease | FinishedLease | FailedLease | OutcomeReceipt) -> LeaseKey:
    """Key of the lease and attempt that a message names."""
    named: Lease | RunningLease | FailedLease | OutcomeReceipt | TrajectoryGroup
    named = about.group if isinstance(about, FinishedLease) else about
    return LeaseKey(named.incarnation, named.purpose, named.lease_id, named.attempt)
