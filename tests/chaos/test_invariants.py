"""Each invariant holds of a good history, and complains of one that breaks it, and of nothing else."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from protocol.versions import PolicyVersion
from tests.chaos.history import Acknowledged, Batch, Filtered, Group, History, Life, Publish, Step
from tests.chaos.invariants import CHECKS, Books, Terms, books_balance, complaints
from tests.chaos.lease_tap import AttemptKey

TERMS = Terms(steps=3, groups_per_step=2, max_lag=1, tasks=6)


def group(at: int, lease_id: int, *versions: str, attempt: int = 0, task: int | None = None) -> Group:
    stamps = frozenset(map(PolicyVersion.parse, versions))
    key = AttemptKey(incarnation=1, lease_id=lease_id, attempt=attempt)
    return Group(at=at, key=key, task_index=lease_id if task is None else task, versions=stamps)


def batch(at: int, version: int, *lease_ids: int) -> Batch:
    return Batch(at=at, version=version, lease_ids=lease_ids)


def acknowledged(group: Group, *, journaled: int) -> Acknowledged:
    return Acknowledged(key=group.key, journaled=journaled, versions=group.versions)


def good() -> History:
    """Two lives; the second goes on at version 1, which it trains again; groups of lease 4 come in two attempts."""
    groups = (
        group(0, 0, "1.0"), group(1, 1, "1.0"), group(3, 2, "1.0", "1.1"), group(4, 3, "1.1"),
        group(6, 4, "1.1"), group(7, 5, "2.1", "2.2"),
    )  # fmt: skip
    return History(
        groups=groups,
        batches=(batch(2, 0, 0, 1), batch(5, 1, 2, 3), batch(8, 2, 4, 5)),
        filtered=(),
        lives=(Life(incarnation=1, at=0), Life(incarnation=2, at=6)),
        acknowledged=tuple(acknowledged(one, journaled=one.at + 1) for one in groups),
        steps=(step(1), step(2), step(2, replayed=True), step(3)),
        publishes=(Publish(version=0, probe_gap=1e-5), Publish(version=3, probe_gap=9e-4)),
        dead_lettered=frozenset(),
    )


def step(number: int, *, replayed: bool = False, loss: float | None = None) -> Step:
    return Step(step=number, replayed=replayed, loss=number / 7 if loss is None else loss, grad_norm=0.5)


def with_batch(history: History, index: int, changed: Batch) -> History:
    batches = tuple(changed if place == index else one for place, one in enumerate(history.batches))
    return replace(history, batches=batches)


def test_a_good_history_has_no_complaints() -> None:
    assert complaints(good(), TERMS) == []


BAD: dict[str, tuple[str, Callable[[History], History]]] = {
    "a batch is missing": ("batches_are_whole", lambda good: replace(good, batches=good.batches[:2], filtered=(Filtered(9, 4), Filtered(10, 5)))),
    "a version is there twice": ("batches_are_whole", lambda good: with_batch(replace(good, groups=(*good.groups[:5], group(7, 5, "2.1"))), 2, batch(8, 1, 4, 5))),
    "a batch is too small": ("batches_are_whole", lambda good: replace(with_batch(good, 2, batch(8, 2, 4)), filtered=(Filtered(9, 5),))),
    "a group was never journaled": ("batches_are_whole", lambda good: replace(good, groups=good.groups[:-1], acknowledged=(), filtered=(Filtered(9, 6),))),
    "a lease is in two batches": ("nothing_is_trained_twice", lambda good: replace(with_batch(good, 1, batch(5, 1, 2, 1)), filtered=(Filtered(9, 3),))),
    "a lease is trained and filtered": ("nothing_is_trained_twice", lambda good: replace(good, filtered=(Filtered(9, 2),))),
    "a lease is trained and dead-lettered": ("nothing_is_trained_twice", lambda good: replace(good, dead_lettered=frozenset({2}))),
    "a task is trained twice": ("every_task_is_trained_once", lambda good: replace(good, groups=(*good.groups[:5], group(7, 5, "2.2", task=4)))),
    "a token is too old": ("no_token_exceeds_the_bound", lambda good: replace(good, groups=(*good.groups[:5], group(7, 5, "1.0", "2.2")))),
    "a token is from the future": ("no_token_exceeds_the_bound", lambda good: replace(good, groups=(*good.groups[:5], group(7, 5, "2.3")))),
    "a token is of a version that was lost": ("no_token_exceeds_the_bound", lambda good: replace(good, lives=(Life(1, 0), Life(2, 3)), groups=(*good.groups[:5], group(7, 5, "1.2")))),
    "an acknowledged group is not journaled": ("no_acknowledged_group_is_lost", lambda good: replace(good, acknowledged=(acknowledged(good.groups[4], journaled=6),))),
    "a journaled group gave way to another": ("no_journaled_group_is_wasted", lambda good: replace(good, groups=(*good.groups[:4], group(4, 4, "1.1"), group(5, 4, "1.1", attempt=1), good.groups[5]))),
    "a journaled group is left at the end": ("no_journaled_group_is_wasted", lambda good: replace(good, groups=(*good.groups, group(9, 6, "2.3")))),
    "a step is told of twice": ("steps_are_told_once", lambda good: replace(good, steps=(*good.steps, step(3)))),
    "a step is not told of": ("steps_are_told_once", lambda good: replace(good, steps=good.steps[:-1])),
    "a replayed loss differs": ("replays_agree", lambda good: replace(good, steps=(*good.steps, step(3, replayed=True, loss=3 / 7 + 2e-6)))),
    "a loss is not a number": ("replays_agree", lambda good: replace(good, steps=(*good.steps, step(3, replayed=True, loss=float("nan"))))),
    "a probe differs": ("publishes_prove_themselves", lambda good: replace(good, publishes=(Publish(2, 2e-3),))),
    "a probe is not a number": ("publishes_prove_themselves", lambda good: replace(good, publishes=(Publish(2, float("nan")),))),
    "the journal has a hole": ("the_journal_is_whole", lambda good: replace(good, damages=("segment-1.log: 9 bytes",))),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_bad_history_is_complained_of_by_the_check_that_is_for_it(name: str) -> None:
    check, spoil = BAD[name]
    found = {text.partition(":")[0] for text in complaints(spoil(good()), TERMS)}
    assert found == {check}


def test_every_check_has_a_history_that_it_complains_of() -> None:
    assert {check for check, _ in BAD.values()} == set(CHECKS)


def test_an_acknowledged_group_that_was_too_old_is_not_lost() -> None:
    late = acknowledged(group(0, 9, "1.0"), journaled=6)
    assert complaints(replace(good(), acknowledged=(late,)), TERMS) == []


def test_a_copy_of_a_group_in_a_new_segment_is_no_second_attempt() -> None:
    history = good()
    copies = tuple(sorted((*history.groups, replace(history.groups[0], at=1)), key=lambda one: one.at))
    assert complaints(replace(history, groups=copies), TERMS) == []


BOOKS = Books(
    leases=6, trained=6, filtered=0, dead_lettered=0, outstanding=0,
    attempts=9, accepted=6, failed=1, expired=1, dropped=1, running=0,
)  # fmt: skip


def test_good_books_balance() -> None:
    assert books_balance(BOOKS, good(), TERMS) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"leases": 7}, "leases do not add up"),
        ({"attempts": 8}, "attempts do not add up"),
        ({"trained": 5, "outstanding": 1}, "5 leases are trained by the books, 6 by the files"),
        ({"filtered": 1, "leases": 7}, "1 leases are filtered by the books, 0 by the files"),
        ({"dead_lettered": 1, "leases": 7}, "1 leases are dead-lettered by the books, 0 by the files"),
    ],
)
def test_bad_books_are_complained_of(change: dict[str, int], said: str) -> None:
    found = books_balance(replace(BOOKS, **change), good(), TERMS)
    assert len(found) == 1
    assert said in found[0]
