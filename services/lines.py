"""Lines of a text as compilers, editors and `grep -n` count them.

`str.splitlines` ends a line at ten characters, among them form feeds and U+2028, which stand within lines of source
code and within strings of JSON.
"""


def lines_of(text: str) -> list[str]:
    r"""The lines between ends of line, which are \n, \r\n and \r; without an empty one behind the last."""
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    return lines if lines[-1] else lines[:-1]
