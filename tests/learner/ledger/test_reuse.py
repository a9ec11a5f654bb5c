"""Groups that are trained again: within the bound, as often as allowed, by a draw that a resumed learner repeats."""

import json
from collections import Counter
from dataclasses import asdict, replace

import pytest

from learner.leases.worth import worth_of
from learner.ledger import Batch, Ledger, LedgerConfig, LedgerSnapshot, ReusableGroup, ReusePriority
from learner.ledger.reuse import ReusableGroups
from tests.learner.samples import LEDGER, group, trajectory

CONFIG = replace(LEDGER, max_lag=4, reused_per_step=1)


def filled(config: LedgerConfig, **worths: float) -> ReusableGroups:
    """Groups of versions 0, 1, 2 ... at version 4, by their worths."""
    found = ReusableGroups(config)
    groups = {number: ReusableGroup(version=number, worth=worth) for number, worth in enumerate(worths.values())}
    found.restore(groups, reuses=0, version=4)
    return found


def step(ledger: Ledger) -> Batch:
    """Grants and accepts all that may be, takes a batch and trains it."""
    version = ledger.version
    for grant in ledger.grant(now=0.0, holder="e", room=CONFIG.groups_per_step):
        ledger.accept(
            lease_id=grant.lease_id, attempt=grant.attempt, oldest_version=version, size=1, worth=grant.lease_id % 2
        )
    batch = ledger.take(now=0.0)
    assert isinstance(batch, Batch)
    ledger.trained(version + 1)
    ledger.served_changed(version + 1)
    return batch


def begun(config: LedgerConfig = CONFIG) -> Ledger:
    ledger = Ledger(config)
    ledger.served_changed(0)
    return ledger


def test_a_step_trains_new_groups_and_behind_them_some_that_were_trained_before() -> None:
    ledger = begun()
    first, second = step(ledger), step(ledger)
    assert (first.reused, first.reused_lags) == ((), ())
    assert second.lease_ids == (2, 3)
    assert second.reused[0] in (0, 1)
    assert second.reused_lags == (1,)


def test_first_uses_and_reuses_are_counted_apart_and_the_books_balance() -> None:
    ledger = begun()
    for _ in range(6):
        step(ledger)
    books = ledger.books()
    books.check()
    assert (books.trained, books.reused) == (12, 5)
    assert Ledger(CONFIG).books().reused == 0


@pytest.mark.parametrize("most", [1, 2])
def test_no_group_is_used_more_often_than_allowed_nor_beyond_the_bound(most: int) -> None:
    ledger = begun(replace(CONFIG, max_reuses=most, reused_per_step=2, max_lag=2))
    batches = [step(ledger) for _ in range(12)]
    uses = Counter(lease_id for batch in batches for lease_id in batch.reused)
    assert max(uses.values()) == most
    assert all(1 <= lag <= 2 for batch in batches for lag in batch.reused_lags)
    for at, batch in enumerate(batches):
        before = {lease_id for each in batches[:at] for lease_id in each.lease_ids}
        assert set(batch.reused) <= before


def test_a_bound_that_is_lowered_holds_for_groups_that_are_trained_again() -> None:
    ledger = begun(replace(CONFIG, reused_per_step=9, max_reuses=9))
    for _ in range(4):
        step(ledger)
    ledger.bound_lag(1)
    assert set(step(ledger).reused_lags) == {1}
    ledger.bound_lag(3)
    assert set(step(ledger).reused_lags) == {1, 2, 3}, "what was too old under the lower bound is there still"


def test_groups_that_are_trained_again_can_have_a_bound_of_their_own_until_the_guard_lowers_the_other() -> None:
    ledger = begun(replace(CONFIG, max_lag=1, max_lag_of_reused=3, reused_per_step=9, max_reuses=9))
    batches = [step(ledger) for _ in range(6)]
    assert set(batches[-1].reused_lags) == {1, 2, 3}
    assert all(lag <= 1 for batch in batches for lag in batch.lags)
    assert len(ledger.reusable) == 3 * CONFIG.groups_per_step
    ledger.bound_lag(0)
    assert step(ledger).reused == (), "old data is what made the guard lower the bound"
    ledger.bound_lag(1)
    assert set(step(ledger).reused_lags) == {1, 2, 3}


def test_memory_is_bounded_by_the_steps_of_the_bound() -> None:
    ledger = begun()
    for _ in range(50):
        step(ledger)
    assert len(ledger.reusable) <= CONFIG.max_lag * CONFIG.groups_per_step
    assert not any(ledger.may_reuse(lease_id) for lease_id in range(80))


def test_recent_takes_the_newest_and_advantage_the_worthy_more_often_than_others() -> None:
    recent = filled(replace(CONFIG, reuse_priority="recent", reused_per_step=2), a=1, b=1, c=1, d=1)
    assert recent.draw(version=4, max_lag=4) == (3, 2)
    worthy = filled(replace(CONFIG, reuse_priority="advantage"), a=0.0, b=1.0, c=3.0)
    drawn = Counter(lease_id for at in range(4, 404) for lease_id in worthy.draw(version=at, max_lag=1000))
    assert drawn[0] == 0, "its rewards are all equal"
    assert drawn[2] / 400 == pytest.approx(0.75, abs=0.07)
    uniform = filled(CONFIG, a=0.0, b=1.0, c=3.0)
    drawn = Counter(lease_id for at in range(4, 404) for lease_id in uniform.draw(version=at, max_lag=1000))
    assert all(count / 400 == pytest.approx(1 / 3, abs=0.08) for count in drawn.values())


def test_another_seed_draws_otherwise() -> None:
    def draws(seed: int) -> list[tuple[int, ...]]:
        ledger = begun(replace(CONFIG, reuse_seed=seed))
        return [step(ledger).reused for _ in range(8)]

    assert draws(1) == draws(1)
    assert draws(1) != draws(2)


@pytest.mark.parametrize("priority", ["uniform", "recent", "advantage"])
def test_a_ledger_that_is_restored_draws_as_the_one_before_it(priority: ReusePriority) -> None:
    config = replace(CONFIG, reuse_priority=priority, max_reuses=2)
    ledger = begun(config)
    for _ in range(3):
        step(ledger)
    reusable = dict(ledger.reusable)
    form = LedgerSnapshot(**json.loads(json.dumps(asdict(ledger.snapshot()))))
    logged = [step(ledger) for _ in range(2)]
    after = [step(ledger) for _ in range(3)]

    again = Ledger.restore(config, form, reusable=reusable)
    for batch in logged:
        groups = {lease_id: ReusableGroup(version=batch.version, worth=lease_id % 2) for lease_id in batch.lease_ids}
        again.replay(batch.lease_ids, groups=groups, reused=batch.reused)
    for batch in logged:
        again.trained(batch.version + 1)
    again.served_changed(again.version)
    assert [step(again) for _ in range(3)] == after
    assert again.books().reused == ledger.books().reused


def test_a_group_that_is_not_believed_is_not_trained_again() -> None:
    ledger = begun(replace(CONFIG, reused_per_step=9))
    step(ledger)
    ledger.forget_reusable([0])
    assert step(ledger).reused == (1,)


def test_where_nothing_is_reused_nothing_is_kept() -> None:
    ledger = begun(replace(CONFIG, reused_per_step=0))
    assert [step(ledger).reused for _ in range(3)] == [()] * 3
    assert not ledger.reusable


def test_the_worth_of_a_group_is_the_mean_distance_of_its_rewards_to_their_mean() -> None:
    def of(*rewards: float | None) -> float:
        return worth_of(group(0, *(trajectory(1, reward=reward) for reward in rewards)))

    assert of(1.0, 0.0, 0.0, 1.0) == 0.5
    assert of(3.0, 0.0, 0.0) == pytest.approx(4 / 3)
    assert (of(1.0, 1.0), of(1.0, None), of(None)) == (0.0, 0.0, 0.0)
