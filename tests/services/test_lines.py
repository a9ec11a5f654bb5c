"""Lines are those that compilers and editors count."""

import pytest

from services.lines import lines_of


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("", []),
        ("\n", [""]),
        ("a", ["a"]),
        ("a\nb\n", ["a", "b"]),
        ("a\r\nb\rc\n\n", ["a", "b", "c", ""]),
        ("a\x0cb\x0bc\x1cd\x85e\u2028f\u2029g", ["a\x0cb\x0bc\x1cd\x85e\u2028f\u2029g"]),
    ],
)
def test_a_line_ends_where_compilers_say(text: str, lines: list[str]) -> None:
    assert lines_of(text) == lines
