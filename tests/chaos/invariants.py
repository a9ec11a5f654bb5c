"""Invariants of every run, under any fault. Pure functions: a history in, complaints out.

"The history of the final weights": the batches by rising version, as the journal has them. A batch that a learner took
and lost would be taken again at its version; so a version that is there twice is a complaint.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from tests.chaos.history import AcceptedGroup, SystemHistory, TrainedBatch

_REPLAY_TOLERANCE = 1e-6
_PROBE_TOLERANCE = 1e-3
_KL_TOLERANCE = 1e-4
"""In float32 numerics alone make 1e-11; weights that are not the learner's make a tenth and more."""


@dataclass(frozen=True)
class RunTerms:
    """Settings of a run. `tasks` is the size of an epoch, None if it is not to be trained exactly once;
    `max_lag_of_reused` the bound on the lag of groups that are trained again, None if it is `max_lag`.
    """

    steps: int
    groups_per_step: int
    max_lag: int
    tasks: int | None
    max_lag_of_reused: int | None = None


Complaints = Iterator[str]


def batches_are_whole(history: SystemHistory, terms: RunTerms) -> Complaints:
    """Each version has one batch of the right size, whose groups are in the journal before it."""
    versions = [batch.version for batch in history.batches]
    if versions != list(range(terms.steps)):
        twice = sorted(version for version, count in Counter(versions).items() if count > 1)
        missing = sorted(set(range(terms.steps)) - set(versions))
        yield f"batches of versions 0 to {terms.steps - 1} expected; missing {missing}, twice {twice}, or out of order"
    for batch in history.batches:
        if len(batch.lease_ids) != terms.groups_per_step:
            yield f"the batch of version {batch.version} has {len(batch.lease_ids)} groups"
        for lease_id in batch.lease_ids:
            if history.group_of(lease_id, before=batch.at) is None:
                yield f"the batch of version {batch.version} takes lease {lease_id}, whose group was never journaled"
        for lease_id in batch.reused:
            if not any(lease_id in before.lease_ids for before in history.batches if before.version < batch.version):
                yield f"the batch of version {batch.version} trains lease {lease_id} again, which none before it has"


def nothing_is_trained_twice(history: SystemHistory, terms: RunTerms) -> Complaints:
    """No lease is in two batches, or in a batch and filtered or dead-lettered."""
    trained = Counter(lease_id for batch in history.batches for lease_id in batch.lease_ids)
    for lease_id, count in trained.items():
        if count > 1:
            yield f"lease {lease_id} is in {count} batches"
    for lease_id in trained.keys() & {one.lease_id for one in history.filtered}:
        yield f"lease {lease_id} is trained and filtered"
    for lease_id in trained.keys() & history.dead_lettered:
        yield f"lease {lease_id} is trained and dead-lettered"


def every_task_is_trained_once(history: SystemHistory, terms: RunTerms) -> Complaints:
    """Each task of the epoch is in one batch; only a filtered or dead-lettered lease may leave its task out."""
    if terms.tasks is None:
        return
    members = [group for _, group in _trained(history)]
    counts = Counter(group.task_index for group in members)
    excused = len({one.lease_id for one in history.filtered} | history.dead_lettered)
    missing = sorted(set(range(terms.tasks)) - counts.keys())
    twice = sorted(task for task, count in counts.items() if count > 1)
    if len(missing) > excused or len(twice) > excused:
        yield f"of {terms.tasks} tasks {missing} were never trained and {twice} more than once ({excused} excused)"


def no_token_exceeds_the_bound(history: SystemHistory, terms: RunTerms) -> Complaints:
    """Every trained token was sampled under a policy of this history, at most max_lag versions back; at most
    max_lag_of_reused, if its group was trained before.

    A version that a former life published and that was then lost names another policy than the history's.
    """
    lasts: dict[int, int] = {}
    again = terms.max_lag if terms.max_lag_of_reused is None else terms.max_lag_of_reused
    bounded = [(*pair, terms.max_lag) for pair in _trained(history)]
    bounded += [(*pair, again) for pair in _trained(history, again=True)]
    for batch, group, bound in bounded:
        for version in {stamp.version for stamp in group.stamps}:
            if not 0 <= batch.version - version.number <= bound:
                yield f"version {batch.version} trains a token of {version} (lease {group.key.lease_id})"
            if version.incarnation not in lasts:
                lasts[version.incarnation] = _last_version_kept(history, version.incarnation)
            last = lasts[version.incarnation]
            if version.number > last:
                yield f"lease {group.key.lease_id} has a token of {version}; of that life {last} steps were kept"


def every_trained_token_is_proven(history: SystemHistory, terms: RunTerms) -> Complaints:
    """Before a batch is taken, the journal says that whoever sampled its tokens served the versions that they bear."""
    for batch, group in _trained(history):
        for stamp in history.unproven(group.stamps, before=batch.at):
            yield f"version {batch.version} trains a token of {stamp.version} (lease {group.key.lease_id}), unproven"


def _last_version_kept(history: SystemHistory, incarnation: int) -> int:
    """The newest version of a life that later lives went on from: at their first own batch at the latest."""
    begins = min((life.at for life in history.lives if life.incarnation > incarnation), default=math.inf)
    firsts = [batch.version for batch in history.batches if batch.at >= begins]
    return min(firsts) if firsts else max((batch.version + 1 for batch in history.batches), default=0)


def no_acknowledged_group_is_lost(history: SystemHistory, terms: RunTerms) -> Complaints:
    """Acknowledged: by then its lease was settled, or a group of it that can still be trained was in the journal.

    Or its own tokens were too old, or of a version that their generator has not proven to serve. A batch may be taken
    just before the acknowledgement and journaled just after, so that one version more than the journal tells of is
    allowed for.
    """
    settled = _settled_at(history)
    for one in history.acknowledged:
        lease_id, version = one.key.lease_id, history.version_at(one.journaled)
        if lease_id in history.dead_lettered or settled.get(lease_id, math.inf) < one.journaled:
            continue
        if history.unproven(one.stamps, before=one.journaled):
            continue
        newest = history.group_of(lease_id, before=one.journaled)
        kept = newest is not None and version - newest.oldest <= terms.max_lag
        if not kept and version + 1 - one.oldest <= terms.max_lag:
            yield f"{one.key} was acknowledged at journal record {one.journaled} and is not journaled before it"


def _settled_at(history: SystemHistory) -> dict[int, int]:
    """Place in the journal at which each lease is trained or filtered."""
    trained = {lease_id: batch.at for batch in history.batches for lease_id in batch.lease_ids}
    return {one.lease_id: one.at for one in history.filtered} | trained


def no_journaled_group_is_wasted(history: SystemHistory, terms: RunTerms) -> Complaints:
    """A group gives way to another of its lease only when it is too old for the batch after next."""
    newest: dict[int, AcceptedGroup] = {}
    for group in history.groups:
        before = newest.get(group.key.lease_id)
        newest[group.key.lease_id] = group
        if before is None or before.key == group.key:
            continue  # a new segment of the journal begins with a copy of what the old one held
        if history.version_at(group.at) - before.oldest < terms.max_lag:
            yield f"{before.key} was replaced by {group.key} while it was still young enough"
    kept = {one.lease_id for one in history.filtered} | history.dead_lettered
    trained = kept | {lease_id for batch in history.batches for lease_id in batch.lease_ids}
    for lease_id, group in newest.items():
        if lease_id not in trained and terms.steps - group.oldest < terms.max_lag and terms.tasks is not None:
            yield f"{group.key} is journaled, young enough, and in no batch at the end of the epoch"


def steps_are_told_once(history: SystemHistory, terms: RunTerms) -> Complaints:
    """metrics.jsonl has each step once as trained, or else as replayed: its line may be lost with its learner."""
    trained = Counter(step.step for step in history.steps if not step.replayed)
    replayed = {step.step for step in history.steps if step.replayed}
    twice = sorted(step for step, count in trained.items() if count > 1)
    missing = sorted(set(range(1, terms.steps + 1)) - trained.keys() - replayed)
    if twice or missing:
        yield f"metrics.jsonl tells of steps {twice} more than once, and not of {missing}"


def replays_agree(history: SystemHistory, terms: RunTerms) -> Complaints:
    """A batch that is trained again has the loss and the gradient that it had."""
    first: dict[int, tuple[float, float]] = {}
    for step in history.steps:
        loss, grad_norm = first.setdefault(step.step, (step.loss, step.grad_norm))
        scale = max(1.0, abs(grad_norm))
        gap = max(abs(step.loss - loss), abs(step.grad_norm - grad_norm) / scale)
        if not gap <= _REPLAY_TOLERANCE:
            before, after = f"loss {loss!r}, gradient {grad_norm!r}", f"{step.loss!r}, {step.grad_norm!r}"
            yield f"step {step.step} had {before}; replayed, {after}"


def publishes_prove_themselves(history: SystemHistory, terms: RunTerms) -> Complaints:
    """Every generator that took a version computes the learner's logprobs with it."""
    for publish in history.publishes:
        if not publish.probe_gap < _PROBE_TOLERANCE:
            yield f"a generator's logprobs of version {publish.version} differ by {publish.probe_gap:.3g} nats"


def what_is_trained_is_sampled_alike(history: SystemHistory, terms: RunTerms) -> Complaints:
    """Tokens that a generator sampled with the learner's own weights have the learner's logprobs."""
    for step in history.steps:
        if step.mismatch_kl is not None and not abs(step.mismatch_kl) < _KL_TOLERANCE:
            yield f"tokens of step {step.step} were sampled {step.mismatch_kl:.3g} nats (KL) from what was trained"


def the_journal_is_whole(history: SystemHistory, terms: RunTerms) -> Complaints:
    """No byte of it is unreadable, once the last learner has opened it."""
    yield from history.damages


CHECKS: Mapping[str, Callable[[SystemHistory, RunTerms], Complaints]] = {
    check.__name__: check
    for check in (
        batches_are_whole, nothing_is_trained_twice, every_task_is_trained_once, no_token_exceeds_the_bound,
        every_trained_token_is_proven, no_acknowledged_group_is_lost, no_journaled_group_is_wasted,
        steps_are_told_once, replays_agree, publishes_prove_themselves, what_is_trained_is_sampled_alike,
        the_journal_is_whole,
    )
}  # fmt: skip


def complaints(history: SystemHistory, terms: RunTerms) -> list[str]:
    """All of all checks, each with its check's name."""
    return [f"{name}: {text}" for name, check in CHECKS.items() for text in check(history, terms)]


@dataclass(frozen=True)
class KeptBooks:
    """The counts that a learner keeps of leases and attempts, when it held `version`."""

    version: int
    leases: int
    trained: int
    filtered: int
    dead_lettered: int
    outstanding: int
    attempts: int
    accepted: int
    failed: int
    expired: int
    dropped: int
    running: int


def books_balance(books: KeptBooks, history: SystemHistory, terms: RunTerms) -> list[str]:
    """The two sums of the architecture, and what journal and files say of the same counts."""
    found = []
    if books.leases != books.trained + books.filtered + books.dead_lettered + books.outstanding:
        found.append(f"leases do not add up: {books}")
    if books.attempts != books.accepted + books.failed + books.expired + books.dropped + books.running:
        found.append(f"attempts do not add up: {books}")
    in_batches = sum(len(batch.lease_ids) for batch in history.batches if batch.version < books.version)
    for name, counted, seen in (
        ("trained", books.trained, in_batches),
        ("filtered", books.filtered, len({one.lease_id for one in history.filtered})),
        ("dead-lettered", books.dead_lettered, len(history.dead_lettered)),
    ):
        if counted != seen and (books.version == terms.steps or name == "trained"):
            found.append(f"{counted} leases are {name} by the books, {seen} by the files")
    return found


def _trained(history: SystemHistory, *, again: bool = False) -> Iterator[tuple[TrainedBatch, AcceptedGroup]]:
    """Each batch with its groups, those that it trains for the first time or `again`."""
    for batch in history.batches:
        for lease_id in batch.reused if again else batch.lease_ids:
            group = history.group_of(lease_id, before=batch.at)
            if group is not None:
                yield batch, group
