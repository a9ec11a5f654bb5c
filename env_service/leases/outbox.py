"""Outcomes of leases, kept and sent again until the learner has them in its books."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from env_service.rollouts.outcomes import Outcome
from protocol.codec import MessageTooLarge, ProtocolError, decode, encode
from protocol.lease_keys import LeaseKey, key_of
from protocol.messages import FailedLease, FinishedLease, RunningLease
from protocol.model import PolicyVersion
from protocol.trajectories import TrajectoryGroup

logger = logging.getLogger(__name__)

_SLOWEST = 8
"""An unacknowledged outcome is sent again ever more rarely, at last this many times the first interval apart."""


@dataclass
class _Entry:
    outcome: Outcome
    due: float
    interval_s: float
    sent: bool = False


class Outbox:
    """Outcomes by lease and attempt. `clock` is in seconds; `resend_s` is the first interval between two sendings."""

    def __init__(self, *, resend_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._resend_s = resend_s
        self._clock = clock
        self._entries: dict[LeaseKey, _Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: LeaseKey) -> bool:
        return key in self._entries

    def add(self, outcome: Outcome) -> None:
        """Keep an outcome; it is due at once."""
        self._entries[key_of(outcome)] = _Entry(outcome, due=self._clock(), interval_s=self._resend_s)

    def acknowledge(self, key: LeaseKey) -> bool:
        """Forget an outcome; False if it was acknowledged already, as happens after a resend."""
        return self._entries.pop(key, None) is not None

    def replace_unreadable(self) -> tuple[FailedLease, ...]:
        """Put failed leases, which are returned, in the place of groups that were sent and that no learner can read:
        they would be sent for ever. A refusal does not name its message, so each is read here as the learner does. A
        group that is only too large is sent without its texts, if that helps.
        """
        failed = []
        for entry in list(self._entries.values()):
            if not entry.sent or not isinstance(entry.outcome, FinishedLease):
                continue
            group = entry.outcome.group
            if (error := _fault_of(group)) is None:
                continue
            textless = _without_texts(group)
            if isinstance(error, MessageTooLarge) and group.purpose == "train" and _fault_of(textless) is None:
                logger.warning("the group of lease %d is sent without its texts: %s", group.lease_id, error)
                self.add(FinishedLease(group=textless))
            else:
                failed.append(_as_failed(group, error))
                self.add(failed[-1])
        return tuple(failed)

    def clear(self) -> None:
        """Forget everything: nobody is left who wants it."""
        self._entries.clear()

    def held(self) -> tuple[RunningLease, ...]:
        """The outcomes, as a heartbeat speaks of them: an attempt is alive until its group, or its failure, is
        acknowledged; the learner would take it for lost, and charge that in place of what has failed.
        """
        return tuple(_as_running(entry.outcome) for entry in self._entries.values())

    def make_due(self, key: LeaseKey | None = None) -> None:
        """Have one outcome, or all of them, sent again at the next opportunity, as after a new Welcome."""
        for entry in self._entries.values() if key is None else [self._entries[key]]:
            entry.due, entry.interval_s = self._clock(), self._resend_s

    def take_due(self) -> list[tuple[Outcome, bool]]:
        """The outcomes to send now, and whether each was sent before; each is due again after its interval."""
        now = self._clock()
        due = [entry for entry in self._entries.values() if entry.due <= now]
        taken = [(entry.outcome, entry.sent) for entry in due]
        for entry in due:
            entry.sent = True
            entry.due = now + entry.interval_s
            entry.interval_s = min(2 * entry.interval_s, _SLOWEST * self._resend_s)
        return taken


def _fault_of(group: TrajectoryGroup) -> ProtocolError | None:
    """Reason for which no learner can read a group; None if one can."""
    try:
        decode(encode(FinishedLease(group=group)))
    except ProtocolError as error:
        return error
    return None


def _without_texts(group: TrajectoryGroup) -> TrajectoryGroup:
    """The group without what its trajectories hold for people alone: they are trained by their tokens."""
    trajectories = tuple(
        each.model_copy(update={"completion_text": "", "reward": each.reward.model_copy(update={"explanation": ""})})
        for each in group.trajectories
    )
    return group.model_copy(update={"trajectories": trajectories})


def _as_failed(group: TrajectoryGroup, error: ProtocolError) -> FailedLease:
    return FailedLease(
        incarnation=group.incarnation,
        lease_id=group.lease_id,
        attempt=group.attempt,
        purpose=group.purpose,
        data_fault=True,
        reason=f"environment {group.environment}: its group cannot be sent ({error.reason}): {error}"[:4096],
    )


def _as_running(outcome: Outcome) -> RunningLease:
    key = key_of(outcome)
    return RunningLease(
        incarnation=key.incarnation,
        lease_id=key.lease_id,
        attempt=key.attempt,
        purpose=key.purpose,
        oldest_version=_oldest_version(outcome.group) if isinstance(outcome, FinishedLease) else None,
        waits_for="learner",
    )


def _oldest_version(group: TrajectoryGroup) -> str | None:
    spans = (span for trajectory in group.trajectories for span in trajectory.version_spans)
    oldest = min((PolicyVersion.parse(span.version) for span in spans), key=lambda v: v.number, default=None)
    return None if oldest is None else str(oldest)
