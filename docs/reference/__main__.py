"""Writes the reference pages that are made from the code: `python -m docs.reference`.

Importing vLLM takes the most of its time; `python -m docs.reference settings` writes the pages of settings alone.
"""

import sys
from pathlib import Path

from docs.reference.settings_pages import MODELS, settings_page

FOLDER = Path(__file__).parent


def main(what: str) -> None:
    """Writes all pages, or with "settings" those alone."""
    for process in MODELS:
        (FOLDER / f"{process}.md").write_text(settings_page(process), encoding="utf-8")
    if what != "settings":
        from docs.reference.http_page import http_page
        from docs.reference.metrics_page import metrics_page
        from docs.reference.processes import described

        processes = described()
        (FOLDER / "http.md").write_text(http_page(processes), encoding="utf-8")
        (FOLDER / "metrics.md").write_text(metrics_page(processes), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "all")
