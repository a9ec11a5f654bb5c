"""The page of Prometheus metrics."""

from collections.abc import Mapping

from docs.reference.processes import Described
from docs.reference.tables import table

_HEAD = """\
# Metrics

The metrics that each process shows at `GET /metrics`, in the format of Prometheus. Names are made as
`headway_<process>_<what>_<unit>`. This page is made from the code by `python -m docs.reference`."""


def metrics_page(processes: Mapping[str, Described]) -> str:
    """The page, as Markdown."""
    lines = [_HEAD]
    for name, process in processes.items():
        rows = (
            (f"`{one.name}`", one.kind, ", ".join(f"`{label}`" for label in one.labels), one.documentation)
            for one in sorted(process.metrics, key=lambda metric: metric.name)
        )
        lines += ["", f"## {name}", "", *table(("metric", "kind", "labels", "what it tells"), rows)]
    return "\n".join(lines) + "\n"
