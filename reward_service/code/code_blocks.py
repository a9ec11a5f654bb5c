"""Where the code stands in a completion."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

_FENCE = re.compile(r"^[ \t]{0,12}(`{3,}|~{3,})[ \t]*([^`\s]*)[^`\n]*$")
_NAMES: Mapping[str, frozenset[str]] = {
    "python": frozenset({"python", "py", "python3", "py3"}),
    "javascript": frozenset({"javascript", "js", "node", "nodejs"}),
    "node": frozenset({"javascript", "js", "node", "nodejs"}),
    "bash": frozenset({"bash", "sh", "shell"}),
    "sh": frozenset({"bash", "sh", "shell"}),
}
_PYTHON_LINE = re.compile(
    r"^(?:def |class |async def |import \w|from [\w.]+ import |@\w|if __name__|print\(|for .+:|while .+:|with .+:|"
    r"[^\W\d]\w*(?:, ?\w+)*\s*(?::[^=]+)?=[^=])",
    re.MULTILINE,
)


@dataclass(frozen=True, kw_only=True)
class Block:
    """A fenced block: the first word after the fence in lower case, and the lines within."""

    label: str
    code: str


def extract_code(completion: str, *, language: str, which: Literal["last", "first", "whole"]) -> str | None:
    """The solution's code, or None if the completion holds none.

    A block without a label counts where no block has the language's. A block that is not closed ends with the text.
    """
    text = without_thinking(completion)
    if which == "whole":
        return text if text.strip() else None
    blocks = list(fenced_blocks(text))
    names = _NAMES.get(language, frozenset({language}))
    chosen = [block for block in blocks if block.label in names] or [block for block in blocks if not block.label]
    chosen = [block for block in chosen if block.code.strip()]
    if chosen:
        return chosen[-1 if which == "last" else 0].code
    return text if not blocks and _looks_like_code(text, language=language) else None


def fenced_blocks(text: str) -> Iterator[Block]:
    """All fenced blocks, in order. The closing fence has at least the opening one's length, and nothing after it."""
    opening, label, indent = "", "", 0
    lines: list[str] = []
    for line in text.splitlines():
        match = _FENCE.match(line)
        if not opening and match:
            opening, label, lines = match[1], match[2].lower().strip("{}."), []
            indent = len(line) - len(line.lstrip())
        elif opening and match and match[1].startswith(opening) and line.strip() == match[1]:
            yield Block(label=label, code="\n".join(lines) + "\n")
            opening = ""
        elif opening:
            lines.append(_outdented(line, indent))
    if opening:
        yield Block(label=label, code="\n".join(lines) + "\n")


def without_thinking(completion: str) -> str:
    """The text after the last `</think>`; of a thought that never ends, nothing. Leading spaces are code, and stay."""
    return completion.rpartition("</think>")[2].partition("<think>")[0]


def _outdented(line: str, indent: int) -> str:
    """The line of a block in a list item, without as much space as its fence has before it."""
    return line[min(indent, len(line) - len(line.lstrip())) :]


def _looks_like_code(text: str, *, language: str) -> bool:
    """True if a text without fences is a program. What the interpreter makes of it is seen when it runs."""
    if language != "python":
        return bool(text.strip())
    return _PYTHON_LINE.search(text) is not None
