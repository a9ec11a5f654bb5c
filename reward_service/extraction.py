"""Where the answer stands in a completion."""

import re

_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_BOX_OR_BRACE = re.compile(r"\\f?box(?:ed)?\s*\{|\\.|[{}]", re.DOTALL)


def strip_thinking(completion: str) -> str:
    """The text after the last `</think>`; of a thought that never ends, nothing.

    The opening tag is often part of the prompt, so the closing one alone is enough.
    """
    return completion.rpartition("</think>")[2].partition("<think>")[0].strip()


def last_tagged(text: str) -> str | None:
    """The stripped content of the last `<answer>..</answer>`."""
    found = _TAG.findall(text)
    return str(found[-1]).strip() if found else None


def boxed(text: str) -> tuple[str, ...]:
    r"""The stripped contents of all `\boxed{..}` that close and are not empty, in the order in which they open.

    One pass: a completion of boxes that never close must not take quadratic time.
    """
    found: list[tuple[int, str]] = []
    opened: list[tuple[bool, int]] = []
    for match in _BOX_OR_BRACE.finditer(text):
        token = match.group()
        if token == "}" and opened:
            is_box, start = opened.pop()
            if is_box:
                found.append((start, text[start : match.start()].strip()))
        elif token.endswith("{") and token != r"\{":
            opened.append((token != "{", match.end()))
    return tuple(content for _, content in sorted(found) if content)


def last_boxed(text: str) -> str | None:
    r"""The stripped content of the last `\boxed{..}`."""
    found = boxed(text)
    return found[-1] if found else None
