"""Reports of benchmarks, printed and written."""

from pathlib import Path


def print_and_write(report: str, output: Path | None) -> None:
    """Prints the report, and writes it to the file if one is named."""
    print(report)
    if output is not None:
        output.write_text(report, encoding="utf-8")
