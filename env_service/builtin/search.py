"""Search over a file of texts by BM25."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic import Field

from env_service.builtin.toolboxes import SearchTool, ToolArguments, ToolFault, cut, described, read_arguments
from env_service.environments.interface import Tool, ToolCall
from services.lines import lines_of

try:
    import bm25s
except ImportError as error:
    raise ImportError("bm25s is not installed: pip install 'headway[search]'") from error


@dataclass(frozen=True)
class Corpus:
    """Passages with their index."""

    passages: tuple[str, ...]
    index: Any

    def best(self, query: str, results: int) -> list[str]:
        """The passages that fit a query best, best first; none if no word of it occurs."""
        words = bm25s.tokenize([query], stopwords="en", show_progress=False, return_ids=False)
        if not words[0]:
            return []
        found, scores = self.index.retrieve(words, k=min(results, len(self.passages)), show_progress=False)
        return [self.passages[int(place)] for place, score in zip(found[0], scores[0], strict=True) if float(score) > 0]


class _Query(ToolArguments):
    query: str = Field(min_length=1, max_length=1000, description="words to look for")


class SearchToolbox:
    """Search over the corpus, which is read once for the process."""

    def __init__(self, config: SearchTool) -> None:
        """Raises ValueError for a file that is no corpus."""
        self._config = config
        self._corpus = _corpus(config.corpus)

    async def offered(self) -> Sequence[Tool]:
        return (described("search", "Finds passages that hold the words of a query.", _Query),)

    async def call(self, call: ToolCall) -> str:
        found = self._corpus.best(read_arguments(_Query, call.arguments).query, self._config.results)
        if not found:
            raise ToolFault("nothing found")
        return "\n\n".join(f"[{number}] {cut(text, self._config.characters)}" for number, text in enumerate(found, 1))

    async def close(self) -> None:
        """Nothing to do."""


@lru_cache(maxsize=8)
def _corpus(path: Path) -> Corpus:
    passages = tuple(_read(path))
    if not passages:
        raise ValueError(f"{path} holds no passage")
    index = bm25s.BM25()
    index.index(bm25s.tokenize(list(passages), stopwords="en", show_progress=False), show_progress=False)
    return Corpus(passages, index)


def _read(path: Path) -> list[str]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read the corpus {path}: {error}") from error
    if path.suffix != ".jsonl":
        return [part.strip() for part in text.split("\n\n") if part.strip()]
    return [_passage(line, f"{path}:{number}") for number, line in enumerate(lines_of(text), 1) if line.strip()]


def _passage(line: str, where: str) -> str:
    try:
        given = json.loads(line)
        title, text = given.get("title", ""), given["text"]
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(f"{where}: expected an object with text, got {line[:80]!r}") from error
    if not isinstance(title, str) or not isinstance(text, str):
        raise ValueError(f"{where}: title and text are not both strings")
    return f"{title}: {text}" if title else text
