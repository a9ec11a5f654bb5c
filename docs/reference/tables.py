"""Tables in Markdown."""

from collections.abc import Iterable


def table_row(cells: Iterable[str]) -> str:
    """A row; bars and line breaks within a cell are made harmless."""
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    """The lines of a table with a head."""
    head = list(columns)
    return [table_row(head), table_row("---" for _ in head), *map(table_row, rows)]
