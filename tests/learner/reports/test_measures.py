"""The learner's metrics as a scrape sees them."""

from prometheus_client import generate_latest

from learner.ledger import ATTEMPT_OUTCOMES, LEASE_STATES, Ledger
from learner.reports.status import Measures
from learner.training.guard import GuardChange, Reading
from services.http.metrics import Metrics
from tests.learner.samples import LEDGER


def test_the_books_are_shown_as_they_are_when_somebody_looks_and_they_balance() -> None:
    metrics, ledger = Metrics("learner"), Ledger(LEDGER)
    Measures(metrics).books(ledger.books)
    ledger.served_changed(0)
    ledger.grant(now=0.0, holder="a", room=3)
    ledger.accept(lease_id=0, attempt=0, oldest_version=0, size=1)
    shown = generate_latest(metrics.registry).decode()
    assert 'headway_learner_leases{state="buffered"} 1.0' in shown
    assert 'headway_learner_leases{state="running"} 2.0' in shown
    assert 'headway_learner_attempts{outcome="accepted"} 1.0' in shown


def test_the_bound_in_use_and_what_the_guard_did_are_shown() -> None:
    metrics, ledger = Metrics("learner"), Ledger(LEDGER)
    measures = Measures(metrics)
    measures.lag_bound(lambda: ledger.max_lag)
    ledger.bound_lag(0)
    reading = Reading(measure="behavior_kl", value=1.5, limit=1.0, beyond=True, well_within=False)
    measures.guard(GuardChange(kind="tightened", before=1, after=0, configured=1, steps=3, reading=reading))
    measures.guard(GuardChange(kind="loosened", before=0, after=1, configured=1, steps=20))
    shown = generate_latest(metrics.registry).decode()
    assert "headway_learner_lag_bound 0.0" in shown
    assert 'headway_learner_guard_changes_total{change="tightened",measure="behavior_kl"} 1.0' in shown
    assert 'headway_learner_guard_changes_total{change="loosened",measure="none"} 1.0' in shown


def test_the_level_is_shown_as_it_is_when_somebody_looks() -> None:
    metrics, levels = Metrics("learner"), [None, 2]
    Measures(metrics).level(lambda: levels.pop(0))
    shown = [generate_latest(metrics.registry).decode() for _ in range(2)]
    assert "headway_learner_curriculum_level 0.0" in shown[0], "no levels are one"
    assert "headway_learner_curriculum_level 2.0" in shown[1]


def test_the_exported_states_and_outcomes_are_all_there_are() -> None:
    ledger = Ledger(LEDGER)
    ledger.served_changed(0)
    ledger.grant(now=0.0, holder="a", room=3)
    ledger.fail(now=0.0, lease_id=0, attempt=0, kind="data", reason="r")
    ledger.filter(lease_id=1, attempt=0)
    ledger.expire(now=1e9)
    books = ledger.books()
    assert sum(getattr(books, state) for state in LEASE_STATES) == books.leases
    assert sum(getattr(books, outcome) for outcome in ATTEMPT_OUTCOMES) == books.attempts
