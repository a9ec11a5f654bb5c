"""The TOML and Python that the docs show: settings that there are, and code that is code."""

import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from docs.reference.settings_pages import MODELS
from services.config.models import load_config
from services.config.sources import PROCESSES, TABLES, ConfigError, read_tables

ROOT = Path(__file__).parents[2]
PAGES = sorted([*(ROOT / "docs").glob("*.md"), ROOT / "README.md"])
FENCE = re.compile(r"^([ ]*)```(\w+)[^\n]*\n(.*?)^\1```[ ]*$", re.MULTILINE | re.DOTALL)


def blocks(language: str) -> Iterator[tuple[str, str]]:
    """Place and text of each block of the language."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for found in FENCE.finditer(text):
            if found[2] == language:
                line = text[: found.start()].count("\n") + 1
                yield f"{page.relative_to(ROOT)}:{line}", textwrap.dedent(found[3])


def settings() -> list[tuple[str, str]]:
    """Blocks that hold tables of a run.toml."""
    return [(place, text) for place, text in blocks("toml") if re.search(rf"^\[+({'|'.join(TABLES)})\b", text, re.M)]


@pytest.mark.parametrize(("place", "text"), settings(), ids=[place for place, _ in settings()])
def test_settings_that_the_docs_show_are_there(place: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(text)
    shown = [name for name in PROCESSES if name in read_tables(path)] or ["learner"]
    problems = [problem for name in shown for problem in complaints(name, path)]
    assert [problem for problem in problems if re.search("unknown|no effect|: got ", problem)] == [], place


def complaints(process: str, path: Path) -> tuple[str, ...]:
    """What is said of the table of a process; what a part of a file lacks is in the rest of it."""
    try:
        load_config(MODELS[process], process=process, argv=["--config", str(path)], environ={})
    except ConfigError as error:
        return error.problems
    return ()


@pytest.mark.parametrize(("place", "text"), [*blocks("python")], ids=[place for place, _ in blocks("python")])
def test_python_that_the_docs_show_can_be_compiled(place: str, text: str) -> None:
    compile(text, place, "exec")


def test_the_docs_show_settings_and_code() -> None:
    assert len(settings()) >= 20
    assert len([*blocks("python")]) >= 10
