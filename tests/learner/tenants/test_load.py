"""Series of tenants for Prometheus: few, whoever comes, and counters that never fall."""

from prometheus_client import generate_latest

from learner.tenants.load import NO_LOAD, OTHERS, TenantLoad, TenantMetrics, TenantSeries, TenantUse
from services.http.metrics import Metrics


class Used:
    """Tenants by name, with a clock that moves at each look."""

    def __init__(self, *names: str) -> None:
        self.tenants = dict.fromkeys(names, TenantUse())
        self.now = 0.0

    def clock(self) -> float:
        self.now += 1.0
        return self.now

    def use(self, name: str, **what: float) -> None:
        before = self.tenants[name]
        self.tenants[name] = TenantUse(**{**before.__dict__, **what})

    def series(self, most: int) -> TenantSeries:
        return TenantSeries(lambda: self.tenants, most=most, clock=self.clock)


def test_a_few_tenants_have_a_series_each_from_the_start() -> None:
    used = Used("a", "b")
    series = used.series(2)

    assert series.totals(0) == {"a": 0.0, "b": 0.0}
    used.use("a", rows=3, queued=5)
    assert series.totals(0) == {"a": 3.0, "b": 0.0}
    assert series.present(lambda use: use.queued, sum) == {"a": 5, "b": 0}


def test_of_many_tenants_the_active_ones_have_series_and_the_rest_share_one() -> None:
    used = Used(*(f"t{number}" for number in range(500)))
    series = used.series(2)
    for name, rows in (("t7", 1), ("t8", 2), ("t9", 4), ("t10", 8)):
        used.use(name, rows=rows, queued=1, waits_s=float(rows))
        series.totals(0)

    assert series.totals(0) == {OTHERS: 12.0, "t7": 1.0, "t8": 2.0}
    assert series.present(lambda use: use.queued, sum) == {OTHERS: 2, "t7": 1, "t8": 1}
    assert series.present(lambda use: use.waits_s, max) == {OTHERS: 8.0, "t7": 1.0, "t8": 2.0}


def test_a_tenant_that_is_still_for_long_gives_its_series_away_and_no_counter_falls() -> None:
    used = Used("a", "b", "c")
    series = used.series(1)
    used.use("a", rows=5)
    used.use("b", rows=1)
    assert series.totals(0) == {"a": 5.0, OTHERS: 1.0}

    used.now += 4000.0
    used.use("b", rows=3)
    assert series.totals(0) == {"b": 2.0, OTHERS: 1.0}
    used.use("a", rows=6)
    used.use("b", rows=4)
    assert series.totals(0) == {"b": 3.0, OTHERS: 2.0}


def test_hundreds_of_tenants_do_not_make_thousands_of_series() -> None:
    everyone = {f"t{number}": TenantUse(rows=1, queued=1, completions=1) for number in range(600)}
    metrics = Metrics("learner")
    TenantMetrics(metrics, read=lambda: TenantLoad(everyone, models=1, resident=1, rounds=1, passes=1))

    shown = [line for line in generate_latest(metrics.registry).decode().splitlines() if "_tenant_" in line]
    series = [line for line in shown if not line.startswith("#")]
    assert len(series) == 7 * 33 + 4
    assert sum(float(line.split()[-1]) for line in series if "queued_operations{" in line) == 600


def test_names_and_kinds_are_those_that_dashboards_know() -> None:
    metrics = Metrics("learner")
    TenantMetrics(metrics, read=lambda: NO_LOAD)
    text = generate_latest(metrics.registry).decode()

    assert "# TYPE headway_learner_tenant_queued_operations gauge" in text
    assert "# TYPE headway_learner_tenant_refused_calls_total counter" in text
    assert "headway_learner_tenant_rounds_total 0.0" in text
