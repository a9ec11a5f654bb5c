"""Thoughts of a completion in the tags that verifiers, judges and actions know: <think>…</think>.

Reasoning models mark what they think in their own ways. Where the marks are special tokens, a text without these would
hold thought and answer in one, with the marks' names between them ("analysis … assistantfinal …").

    [THINK]…[/THINK]                                   Magistral
    <seed:think>…</seed:think>                         Seed-OSS
    <mm:think>…</mm:think>                             MiniMax-M3
    <|START_THINKING|>…<|END_THINKING|>                Command A
    <|channel>thought\\n…<channel|>                     Gemma 4
    <|channel|>analysis<|message|>…<|end|>             gpt-oss; `final` and `commentary` are said
"""

import re
from collections.abc import Collection
from itertools import zip_longest

OPENED, CLOSED = "<think>", "</think>"
_PAIRS = (
    ("[THINK]", "[/THINK]", ""),
    ("<seed:think>", "</seed:think>", ""),
    ("<mm:think>", "</mm:think>", ""),
    ("<|START_THINKING|>", "<|END_THINKING|>", ""),
    ("<|channel>", "<channel|>", "thought\n"),
)
"""Beginning and end of a thought, and a name that stands behind the beginning."""
_HARMONY = ("<|channel|>", "<|message|>")
OPENINGS = (OPENED, *(opening for opening, _, _ in _PAIRS), "<|channel|>")
CLOSINGS = (CLOSED, *(closing for _, closing, _ in _PAIRS))
"""Ends of thoughts, but for those that are a message of their own."""
_HEADER = re.compile(r"(?:<\|start\|>[^<]*)?<\|channel\|>(?P<channel>\w*)[^<]*(?:<\|constrain\|>[^<]*)?<\|message\|>")
_HEADER_BEGUN = re.compile(
    r"(?:<\|start\|>[^<]*(?:<\|channel\|>[^<]*(?:<\|constrain\|>[^<]*)?)?|<\|channel\|>[^<]*(?:<\|constrain\|>[^<]*)?)\Z"
)
_REST_OF_HEADERS = re.compile(r"<\|(?:channel|message|start|constrain)\|>")
_ENDS_OF_MESSAGE = re.compile(r"<\|(?:end|return|call)\|>")
MARKS = (
    *(OPENED, CLOSED),
    *(mark for pair in _PAIRS for mark in pair[:2]),
    *(*_HARMONY, "<|start|>", "<|constrain|>", "<|end|>", "<|return|>", "<|call|>"),
)
"""Texts of all tokens that say what is thought."""


def marks_of(tokens: Collection[str]) -> frozenset[str]:
    """The marks among a vocabulary's tokens; none, where it has none of its own beside <think> and </think>."""
    is_harmony = all(mark in tokens for mark in _HARMONY)
    return frozenset(
        mark
        for mark in MARKS
        if mark in tokens and (is_harmony or mark in (OPENED, CLOSED) or any(mark in pair[:2] for pair in _PAIRS))
    )


def in_tags(text: str, marks: Collection[str]) -> str:
    """The text, whose marks are these, with its thoughts in tags. A thought that does not end is open; a mark at the
    end that may go on is left out: what is returned for more of the text begins with this.
    """
    if all(mark in marks for mark in _HARMONY):
        return _of_messages(text)
    for opening, closing, name in _PAIRS:
        if opening in marks:
            text = _begun(text, opening, name).replace(opening + name, OPENED).replace(opening, OPENED)
            text = text.replace(closing, CLOSED)
    return text


def _begun(text: str, opening: str, name: str) -> str:
    """Without an opening at the end, behind which its name may still come."""
    before, mark, behind = text.rpartition(opening)
    return before if mark and behind != name and name.startswith(behind) else text


def _of_messages(text: str) -> str:
    """A text of messages in channels. The header of the first one may be the prompt's, and what it heads a thought."""
    text = _HEADER_BEGUN.sub("", text)
    headers = list(_HEADER.finditer(text))
    before = text[: headers[0].start()] if headers else text
    said = [_ENDS_OF_MESSAGE.sub(CLOSED if headers else "", before)]
    for header, following in zip_longest(headers, headers[1:]):
        content = text[header.end() : following.start() if following else len(text)]
        if header["channel"] == "analysis":
            is_over = following is not None or _ENDS_OF_MESSAGE.search(content) is not None
            said.append(f"{OPENED}{_ENDS_OF_MESSAGE.sub('', content)}{CLOSED if is_over else ''}")
        else:
            said.append(_ENDS_OF_MESSAGE.sub("", content))
    return _REST_OF_HEADERS.sub("", "".join(said))
