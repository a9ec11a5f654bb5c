"""Whom a step has to wait for, so that no group becomes too old.

Batches take groups by rising version (earliest deadline first). A group of version m can be trained at the learner's
versions up to m + max_lag, so if a step is taken at version v, the groups that it leaves behind with versions up to m
share the (m + max_lag - v) * groups_per_step places of the steps after it. Where they are more than the places, some
of them will become too old, and the running ones among them are the stragglers. For m = v - max_lag there are no
places: a running group that is due at this very step is always a straggler. Looking only at those is not enough: more
than a batch of groups can fall due at once, if the steps before took newer groups that happened to finish early.
"""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Remaining:
    """A group that the step leaves behind. droppable: it may still be dropped (has a meaning for running ones only)."""

    version: int
    lease_id: int
    running: bool = False
    drops: int = 0
    droppable: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Blockage:
    """stragglers: the running groups to wait for. drop: the fewest of them that must go if the step is taken now.

    must_wait: dropping is not enough, since some of them may not be dropped any more.
    """

    stragglers: tuple[int, ...]
    drop: tuple[int, ...]
    must_wait: bool


def blockage(remaining: Iterable[Remaining], *, version: int, max_lag: int, groups_per_step: int) -> Blockage:
    """What a step at `version` that leaves `remaining` behind would make too old; fields hold lease ids.

    Finished groups that no waiting can save are ignored: there can be more of them than the admission rule allows when
    an attempt comes in after its lease was given up, and they leave the buffer when they are too old.
    """
    kept: list[Remaining] = []
    stragglers: dict[int, None] = {}
    drop: list[int] = []
    must_wait = False
    for group in sorted(remaining, key=lambda g: (g.version, g.lease_id)):
        kept.append(group)
        if len(kept) <= (group.version + max_lag - version) * groups_per_step:
            continue
        running = [g for g in kept if g.running]
        victim = _victim(running) or group
        kept.remove(victim)
        if running:
            stragglers.update((g.lease_id, None) for g in running)
            drop.append(victim.lease_id)
            must_wait = must_wait or not victim.droppable
    return Blockage(stragglers=tuple(stragglers), drop=tuple(drop), must_wait=must_wait)


def _victim(running: list[Remaining]) -> Remaining | None:
    """The running group whose loss hurts least: one that may be dropped, was so least often, and began last."""
    return min(running, key=lambda g: (not g.droppable, g.drops, -g.lease_id), default=None)
