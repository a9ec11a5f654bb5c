"""The page of Prometheus metrics, and of the curves that are drawn."""

from collections.abc import Mapping

from docs.reference.processes import Described
from docs.reference.tables import table
from learner.reports.history import CURVES, FIGURES, curves_in

_HEAD = """\
# Metrics

The metrics that each process shows at `GET /metrics`, in the format of Prometheus. Names are made as
`headway_<process>_<what>_<unit>`. This page is made from the code by `python -m docs.reference`.

Each process also shows `headway_build_info`, which is always 1, with the labels `process`, `version` (of the release),
`python` and `run`, and the client library's `process_*`: resident and virtual memory, CPU seconds, open files and their
limit, start time.

Counters with labels whose values are known are there from the start, at 0. Histograms have the series `_bucket`, `_sum`
and `_count`; those of values that may be negative have no `_sum`, and two counters hold it. Alerts and dashboards over
these metrics are in `deploy/prometheus/rules.yml` and `deploy/grafana/dashboards/`."""
_CURVES = """\
## Curves

The numbers of the steps that are drawn, by their names in `metrics.jsonl` ([what each means](../run-files.md)): on the
run's page, in `headway report` and in `curves.png`. Figures without a measured value are left out. Those of the
figures with a star are on the page alone, under *More numbers*."""


def metrics_page(processes: Mapping[str, Described]) -> str:
    """The page, as Markdown."""
    lines = [_HEAD]
    for name, process in processes.items():
        rows = (
            (f"`{one.name}`", one.kind, ", ".join(f"`{label}`" for label in one.labels), one.documentation)
            for one in sorted(process.metrics, key=lambda metric: metric.name)
        )
        lines += ["", f"## {name}", "", *table(("metric", "kind", "labels", "what it tells"), rows)]
    return "\n".join([*lines, "", _CURVES, "", *_curves()]) + "\n"


def _curves() -> list[str]:
    metric = {curve.name: f"`headway_learner_{curve.gauge}`" for curve in CURVES if curve.gauge}
    return table(
        ("in metrics.jsonl", "title", "figure", "metric"),
        (
            (
                f"`{curve.name}`",
                curve.title,
                figure.heading if figure.drawn else f"{figure.heading} \\*",
                metric.get(curve.name, ""),
            )
            for figure in FIGURES
            for curve in curves_in(figure.id)
        ),
    )
