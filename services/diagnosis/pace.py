"""The pace of training: none is told while no step ends."""

from protocol.status import Status

_SHORTEST_S = 20.0
"""A checkpoint, or another program on the same cores, may hold up a quick step so long."""
_TIMES_USUAL = 5.0


def standing_s(status: Status) -> float | None:
    """Seconds for which no step has ended, if that is far longer than a step takes; None while steps end."""
    step = next((event.age_s for event in status.events if event.name == "step"), None)
    usual_s = None if status.progress is None else status.progress.usual_s
    if step is None or usual_s is None or is_done(status):
        return None
    return step if step > max(_SHORTEST_S, _TIMES_USUAL * usual_s) else None


def is_done(status: Status) -> bool:
    """True if nothing is left to train."""
    progress = status.progress
    return status.stopping or (progress is not None and progress.total is not None and progress.done >= progress.total)
