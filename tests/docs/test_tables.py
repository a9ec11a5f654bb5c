"""Tables of the documentation are whole: a head, a line below it, and as many cells in each row. One is a command's."""

import re
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import pytest

from headway.memory_table import memory_table
from tests.docs.test_links import PAGES, ROOT

_FENCED = re.compile(r"^ *```.*?^ *```", re.DOTALL | re.MULTILINE)
_BAR = re.compile(r"(?<!\\)\|")


def broken(text: str) -> Iterator[str]:
    """The first line of each table without a head, and each row with another number of cells than its head."""
    lines = _FENCED.sub("", text).split("\n")
    for in_table, group in groupby(lines, key=lambda line: line.startswith("|")):
        head, *rest = group
        if in_table and not (rest and re.fullmatch(r"[|:\- ]+", rest[0])):
            yield head
        elif in_table:
            yield from (row for row in rest if len(_BAR.findall(row)) != len(_BAR.findall(head)))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_tables_are_whole(page: Path) -> None:
    assert [*broken(page.read_text(encoding="utf-8"))] == []


def test_a_table_that_an_empty_line_divides_and_a_bar_too_many_are_found() -> None:
    head = "| a | b |\n|---|---|\n"

    assert [*broken(f"{head}| 1 | `x \\| y` |\n\n| 2 | z |\n| 3 | z |\n")] == ["| 2 | z |"]
    assert [*broken(f"{head}| 1 | `x | y` |\n")] == ["| 1 | `x | y` |"]
    assert [*broken(f"```\n| 1 |\n```\n{head}| 1 | 2 |\n")] == []


def test_the_table_of_memory_is_that_of_the_command() -> None:
    assert memory_table() in (ROOT / "docs/deploy.md").read_text(encoding="utf-8")
