"""Each invariant holds of a good history, and complains of one that breaks it, and of nothing else."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from protocol.model import PolicyVersion
from tests.chaos.history import (
    AcceptedGroup,
    Acknowledged,
    Filtered,
    LearnerLife,
    Publish,
    ServedProof,
    Stamp,
    StepLine,
    SystemHistory,
    TrainedBatch,
)
from tests.chaos.invariants import CHECKS, KeptBooks, RunTerms, books_balance, complaints
from tests.chaos.lease_tap import AttemptKey

TERMS = RunTerms(steps=3, groups_per_step=2, max_lag=1, tasks=6)


def group(at: int, lease_id: int, *versions: str, attempt: int = 0, task: int | None = None) -> AcceptedGroup:
    stamps = frozenset(map(stamped, versions))
    key = AttemptKey(incarnation=1, lease_id=lease_id, attempt=attempt)
    return AcceptedGroup(at=at, key=key, task_index=lease_id if task is None else task, stamps=stamps)


def stamped(version: str) -> Stamp:
    return Stamp("a", PolicyVersion.parse(version))


def batch(at: int, version: int, *lease_ids: int) -> TrainedBatch:
    return TrainedBatch(at=at, version=version, lease_ids=lease_ids)


def acknowledged(group: AcceptedGroup, *, journaled: int) -> Acknowledged:
    return Acknowledged(key=group.key, journaled=journaled, stamps=group.stamps)


def good() -> SystemHistory:
    """Two lives; the second goes on at version 1, which it trains again; groups of lease 4 come in two attempts."""
    groups = (
        group(0, 0, "1.0"), group(1, 1, "1.0"), group(3, 2, "1.0", "1.1"), group(4, 3, "1.1"),
        group(6, 4, "1.1"), group(7, 5, "2.1", "2.2"),
    )  # fmt: skip
    return SystemHistory(
        groups=groups,
        batches=(batch(2, 0, 0, 1), batch(5, 1, 2, 3), batch(8, 2, 4, 5)),
        filtered=(),
        lives=(LearnerLife(incarnation=1, at=0), LearnerLife(incarnation=2, at=6)),
        acknowledged=tuple(acknowledged(one, journaled=one.at + 1) for one in groups),
        steps=(step(1), step(2), step(2, replayed=True), step(3)),
        publishes=(Publish(version=0, probe_gap=1e-5), Publish(version=3, probe_gap=9e-4)),
        dead_lettered=frozenset(),
        proofs=tuple(
            ServedProof(at=-1, stamp=stamped(version)) for version in ("1.0", "1.1", "1.2", "2.1", "2.2", "2.3")
        ),
    )


def step(number: int, *, replayed: bool = False, loss: float | None = None, kl: float | None = 1e-11) -> StepLine:
    loss = number / 7 if loss is None else loss
    return StepLine(step=number, replayed=replayed, loss=loss, grad_norm=0.5, mismatch_kl=kl)


def with_batch(history: SystemHistory, index: int, changed: TrainedBatch) -> SystemHistory:
    batches = tuple(changed if place == index else one for place, one in enumerate(history.batches))
    return replace(history, batches=batches)


def test_a_good_history_has_no_complaints() -> None:
    assert complaints(good(), TERMS) == []


Spoil = Callable[[SystemHistory], SystemHistory]
BAD: dict[str, tuple[str, Spoil]] = {}


def bad(check: str) -> Callable[[Spoil], Spoil]:
    """Registers what `check` must complain of."""

    def register(spoil: Spoil) -> Spoil:
        BAD[spoil.__name__] = (check, spoil)
        return spoil

    return register


def last_group(history: SystemHistory, changed: AcceptedGroup) -> SystemHistory:
    return replace(history, groups=(*history.groups[:5], changed))


def filtered(history: SystemHistory, *lease_ids: int) -> SystemHistory:
    return replace(history, filtered=tuple(Filtered(at=9, lease_id=lease_id) for lease_id in lease_ids))


@bad("batches_are_whole")
def a_batch_is_missing(good: SystemHistory) -> SystemHistory:
    return filtered(replace(good, batches=good.batches[:2]), 4, 5)


@bad("batches_are_whole")
def a_version_is_there_twice(good: SystemHistory) -> SystemHistory:
    return with_batch(last_group(good, group(7, 5, "2.1")), 2, batch(8, 1, 4, 5))


@bad("batches_are_whole")
def a_batch_is_too_small(good: SystemHistory) -> SystemHistory:
    return filtered(with_batch(good, 2, batch(8, 2, 4)), 5)


@bad("batches_are_whole")
def a_group_was_never_journaled(good: SystemHistory) -> SystemHistory:
    return filtered(replace(good, groups=good.groups[:-1], acknowledged=()), 6)


@bad("nothing_is_trained_twice")
def a_lease_is_in_two_batches(good: SystemHistory) -> SystemHistory:
    return filtered(with_batch(good, 1, batch(5, 1, 2, 1)), 3)


@bad("nothing_is_trained_twice")
def a_lease_is_trained_and_filtered(good: SystemHistory) -> SystemHistory:
    return filtered(good, 2)


@bad("nothing_is_trained_twice")
def a_lease_is_trained_and_dead_lettered(good: SystemHistory) -> SystemHistory:
    return replace(good, dead_lettered=frozenset({2}))


@bad("every_task_is_trained_once")
def a_task_is_trained_twice(good: SystemHistory) -> SystemHistory:
    return last_group(good, group(7, 5, "2.2", task=4))


@bad("no_token_exceeds_the_bound")
def a_token_is_too_old(good: SystemHistory) -> SystemHistory:
    return last_group(good, group(7, 5, "1.0", "2.2"))


@bad("no_token_exceeds_the_bound")
def a_token_that_is_trained_again_is_too_old(good: SystemHistory) -> SystemHistory:
    return replace(good, batches=(*good.batches[:-1], replace(good.batches[-1], reused=(0,))))


def test_what_is_trained_again_can_have_a_bound_of_its_own() -> None:
    history = a_token_that_is_trained_again_is_too_old(good())
    assert complaints(history, replace(TERMS, max_lag_of_reused=2)) == []


@bad("no_token_exceeds_the_bound")
def a_token_is_from_the_future(good: SystemHistory) -> SystemHistory:
    return last_group(good, group(7, 5, "2.3"))


@bad("no_token_exceeds_the_bound")
def a_token_is_of_a_version_that_was_lost(good: SystemHistory) -> SystemHistory:
    return last_group(replace(good, lives=(LearnerLife(1, 0), LearnerLife(2, 3))), group(7, 5, "1.2"))


@bad("every_trained_token_is_proven")
def a_token_is_of_a_version_that_its_generator_never_proved(good: SystemHistory) -> SystemHistory:
    return replace(good, proofs=tuple(proof for proof in good.proofs if proof.stamp != stamped("2.2")))


@bad("every_trained_token_is_proven")
def a_token_is_proven_after_its_batch(good: SystemHistory) -> SystemHistory:
    return replace(good, proofs=(*good.proofs[1:], replace(good.proofs[0], at=2)), acknowledged=())


@bad("no_acknowledged_group_is_lost")
def an_acknowledged_group_is_not_journaled(good: SystemHistory) -> SystemHistory:
    return replace(good, acknowledged=(acknowledged(group(6, 4, "2.2"), journaled=6),))


@bad("no_acknowledged_group_is_lost")
def only_an_older_attempt_is_journaled_which_is_too_old(good: SystemHistory) -> SystemHistory:
    groups = (*good.groups[:4], group(5, 4, "1.0"), *good.groups[4:])
    return replace(good, groups=groups, acknowledged=(acknowledged(group(6, 4, "2.2", attempt=1), journaled=6),))


@bad("no_journaled_group_is_wasted")
def a_journaled_group_gave_way_to_another(good: SystemHistory) -> SystemHistory:
    both = group(4, 4, "1.1"), group(5, 4, "1.1", attempt=1)
    return replace(good, groups=(*good.groups[:4], *both, good.groups[5]))


@bad("no_journaled_group_is_wasted")
def a_journaled_group_is_left_at_the_end(good: SystemHistory) -> SystemHistory:
    return replace(good, groups=(*good.groups, group(9, 6, "2.3")))


@bad("steps_are_told_once")
def a_step_is_told_of_twice(good: SystemHistory) -> SystemHistory:
    return replace(good, steps=(*good.steps, step(3)))


@bad("steps_are_told_once")
def a_step_is_not_told_of(good: SystemHistory) -> SystemHistory:
    return replace(good, steps=good.steps[:-1])


@bad("replays_agree")
def a_replayed_loss_differs(good: SystemHistory) -> SystemHistory:
    return replace(good, steps=(*good.steps, step(3, replayed=True, loss=3 / 7 + 2e-6)))


@bad("replays_agree")
def a_replayed_loss_is_not_a_number(good: SystemHistory) -> SystemHistory:
    return replace(good, steps=(*good.steps, step(3, replayed=True, loss=float("nan"))))


@bad("publishes_prove_themselves")
def a_probe_differs(good: SystemHistory) -> SystemHistory:
    return replace(good, publishes=(Publish(version=2, probe_gap=2e-3),))


@bad("publishes_prove_themselves")
def a_probe_is_not_a_number(good: SystemHistory) -> SystemHistory:
    return replace(good, publishes=(Publish(version=2, probe_gap=float("nan")),))


@bad("what_is_trained_is_sampled_alike")
def tokens_of_the_same_weights_have_other_logprobs(good: SystemHistory) -> SystemHistory:
    return replace(good, steps=(*good.steps[:-1], step(3, kl=0.1)))


@bad("what_is_trained_is_sampled_alike")
def a_mismatch_is_not_a_number(good: SystemHistory) -> SystemHistory:
    return replace(good, steps=(*good.steps[:-1], step(3, kl=float("nan"))))


@bad("the_journal_is_whole")
def the_journal_has_a_hole(good: SystemHistory) -> SystemHistory:
    return replace(good, damages=("segment-1.log: 9 bytes",))


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


def test_an_acknowledged_group_of_unproven_tokens_is_not_lost() -> None:
    refused = acknowledged(group(0, 9, "2.4"), journaled=8)
    assert complaints(replace(good(), acknowledged=(refused,)), TERMS) == []


def test_a_copy_of_a_group_in_a_new_segment_is_no_second_attempt() -> None:
    history = good()
    copies = tuple(sorted((*history.groups, replace(history.groups[0], at=1)), key=lambda one: one.at))
    assert complaints(replace(history, groups=copies), TERMS) == []


BOOKS = KeptBooks(
    version=3, leases=6, trained=6, filtered=0, dead_lettered=0, outstanding=0,
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
