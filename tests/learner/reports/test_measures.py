"""The learner's metrics as a scrape sees them."""

from prometheus_client import generate_latest

from learner.ledger import ATTEMPT_OUTCOMES, LEASE_STATES, Ledger
from learner.reports.measures import Measures
from services.metrics import Metrics
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
