"""Links between Markdown files of the repository lead to files and headings that exist; every page is on the site."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "benchmarks/results/*.md", "deploy/**/*.md", "tests/**/*.md")
    for path in ROOT.glob(pattern)
)

_CODE = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ +(.+?) *$", re.MULTILINE)
_FENCED = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)


def links(text: str) -> Iterator[tuple[str, str]]:
    """Path and anchor of each link to a file; those to other hosts are left out."""
    for target in _LINK.findall(_CODE.sub("`code`", text)):
        if not re.match(r"[a-z]+:", target):
            path, _, anchor = target.partition("#")
            yield path, anchor


def anchors(text: str) -> set[str]:
    """The anchors that code hosts and MkDocs make of a page's headings."""
    return {slug(heading) for heading in _HEADING.findall(_FENCED.sub("", text))}


def slug(heading: str) -> str:
    return re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading.lower()).strip())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    dead = []
    for path, anchor in links(page.read_text(encoding="utf-8")):
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target.read_text(encoding="utf-8"))):
            dead.append(f"{path}#{anchor}" if anchor else path)

    assert dead == []


def test_every_page_of_docs_stands_in_the_navigation_of_the_site() -> None:
    _, _, listed = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")
    navigation = set(re.findall(r": ([\w/-]+\.md)$", listed, flags=re.MULTILINE))
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}

    assert pages - navigation == set(), "name these pages under `nav` of mkdocs.yml"


def test_what_is_looked_for_is_found() -> None:
    text = "[a](b.md#c-d) `[x](y)` ```\n[p](q)\n``` ![i](j.png) [h](https://example.org)\n## C `d`, e!\n"

    assert list(links(text)) == [("b.md", "c-d"), ("j.png", "")]
    assert anchors(text) == {"c-d-e"}


def test_the_page_of_examples_names_each() -> None:
    page = (ROOT / "docs/examples.md").read_text(encoding="utf-8")
    folders = {path.name for path in (ROOT / "examples").iterdir() if path.is_dir() and not path.name.startswith("_")}

    assert {name for name in folders if f"`{name}`" not in page} == set()


def test_the_first_page_leads_to_every_other() -> None:
    text = (ROOT / "docs/index.md").read_text(encoding="utf-8")
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} - {"index.md"}

    assert pages - {path for path, _ in links(text)} == set()
