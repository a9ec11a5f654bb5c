"""Files and folders that the documentation names by their path are there."""

import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).parents[2]
MADE = ("runs", "models", "site", "build")
FILES = sorted(
    path
    for top in ROOT.iterdir()
    if not top.name.startswith(".") and top.name not in MADE
    for path in (top, *top.rglob("*"))
    if path.suffix != ".pyc"
)
PAGES = [path for path in FILES if path.suffix == ".md" and path.parent.name not in ("results", "reference")]
PACKAGES = ("protocol", "services", "learner", "generator", "reward_service", "env_service", "headway", "simulation")
EXAMPLES = {"mine.py", "outside.py", "reward.py", "farm.py", "shop.py", "test.py"}
"""Files of the reader's, and of tasks."""


def tails(path: PurePosixPath) -> Iterator[str]:
    """`a/b/c` is also `b/c` and `c` to a reader who knows the folder."""
    return ("/".join(path.parts[start:]) for start in range(len(path.parts)))


@pytest.fixture(scope="module")
def known() -> set[str]:
    paths = (PurePosixPath(path.relative_to(ROOT)) for path in FILES)
    return {tail for path in paths for tail in tails(path)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_files_that_a_page_names_are_there(page: Path, known: set[str]) -> None:
    text = page.read_text(encoding="utf-8")
    if page.name == "CHANGELOG.md":  # older entries name what was there then
        text = text.partition("\n## ")[2].partition("\n## ")[0]
    named = {*re.findall(r"[\w./-]+\.py\b", text), *re.findall(rf"`((?:{'|'.join(PACKAGES)})/[\w/]*)`", text)}

    assert {name for name in named if name.strip("/") not in known} - EXAMPLES == set()
