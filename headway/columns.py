"""Rows of text side by side."""

from collections.abc import Sequence


def in_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """The rows as lines, their cells below each other."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
