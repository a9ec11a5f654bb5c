"""Hooks of MkDocs: pages of the site that lie outside docs/, and links that work both there and in the repository.

A page links to other files of the repository by their path, as code hosts show it (`../benchmarks/results/chaos.md`).
On the site such a link leads to the page made of that file, or becomes plain text where there is none.
"""

import os
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
ALSO = ("CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "benchmarks/results/*.md", "benchmarks/results/*.png")
"""Files that the site shows beside docs/, under the same paths."""

_DOCS = "docs/"
_CODE_OR_LINK = re.compile(r"```.*?```|`[^`\n]*`(?!\])|(!?)\[([^\]]*)\]\(([^)\s#:]+)(#[^)\s]*)?\)", re.DOTALL)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the files of ALSO."""
    for path in sorted(path for pattern in ALSO for path in ROOT.glob(pattern)):
        name = path.relative_to(ROOT).as_posix()
        files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Replaces links between files of the repository by links between pages of the site."""
    here = page.file.src_uri

    def rewritten(link: re.Match[str]) -> str:
        bang, text, target, anchor = link[1], link[2], link[3], link[4] or ""
        if target is None:
            return link[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(in_repository(here)), target))
        if not os.path.exists(ROOT / path):
            return link[0]  # MkDocs says so
        on_site = path.removeprefix(_DOCS)
        if files.get_file_from_path(on_site) is None:
            return text
        return f"{bang}[{text}]({posixpath.relpath(on_site, posixpath.dirname(here) or '.')}{anchor})"

    return _CODE_OR_LINK.sub(rewritten, markdown)


def in_repository(name: str) -> str:
    """Path in the repository of a page of the site."""
    return _DOCS + name if (ROOT / _DOCS / name).exists() else name
