"""Extraction of the code from a completion."""

import pytest

from reward_service.code.code_judge import extract_code
from services.thinking import without_thought

TWO = """First idea:

```python
def f():
    return 1
```

Better:

```Python
def f():
    return 2
```

It prints:

```text
2
```
"""


def extract(completion: str, *, language: str = "python", which: str = "last") -> str | None:
    assert which in ("last", "first", "whole")
    return extract_code(completion, language=language, which=which)  # type: ignore[arg-type]


def test_the_last_block_of_the_language_is_taken() -> None:
    assert extract(TWO) == "def f():\n    return 2\n"


def test_the_first_block_is_taken_if_asked_for() -> None:
    assert extract(TWO, which="first") == "def f():\n    return 1\n"


def test_the_whole_text_is_taken_as_it_is() -> None:
    assert extract("    return 1\n", which="whole") == "    return 1\n"


def test_thoughts_are_left_out() -> None:
    completion = "<think>\n```python\nwrong\n```\n</think>\n```python\nright = 1\n```"
    assert extract(completion) == "right = 1\n"
    assert extract("```python\nwrong\n```\n</think>x = 1") == "x = 1"
    assert extract("<think>```python\nnever = ended\n```") is None
    assert without_thought("<think>a</think>    indented") == "    indented"


@pytest.mark.parametrize(
    ("completion", "code"),
    [
        ("```\nx = 1\n```", "x = 1\n"),
        ("~~~py\nx = 1\n~~~", "x = 1\n"),
        ("````python\ns = '''\n```\n'''\n````", "s = '''\n```\n'''\n"),
        ("```python\nx = 1\n", "x = 1\n"),
        ("1. Do:\n   ```python\n   if x:\n       y\n   ```", "if x:\n    y\n"),
        ("```python title=a.py\nx = 1\n```", "x = 1\n"),
        ("```python3\r\nx = 1\r\n```\r\n", "x = 1\n"),
        ("```\nplain\n```\n```python\nx = 1\n```\n```\nplain\n```", "x = 1\n"),
        ("```python\n\n```\n```python\nx = 1\n```\n```python\n```", "x = 1\n"),
        ("def f():\n    return 1\n", "def f():\n    return 1\n"),
        ("import sys\nprint(sys.argv)", "import sys\nprint(sys.argv)"),
        ("x = 1", "x = 1"),
        ("I would use a loop. It is easy.", None),
        ("```java\nclass A {}\n```", None),
        ("", None),
        ("```", None),
        ("```python\n```", None),
    ],
)
def test_blocks_are_found_as_markdown_has_them(completion: str, code: str | None) -> None:
    assert extract(completion) == code


def test_other_languages_have_their_own_names() -> None:
    assert extract("```js\nf()\n```\n```python\nx = 1\n```", language="javascript") == "f()\n"
    assert extract("```sh\nls\n```", language="bash") == "ls\n"
    assert extract("```ruby\nputs 1\n```", language="ruby") == "puts 1\n"


def test_signs_that_end_no_line_of_python_stay_in_the_code() -> None:
    code = 'SEPARATORS = "\u2028\x85\x1c"\n\x0c\ndef f():\n    return 1\n'

    assert extract(f"```python\n{code}```") == code
    assert extract(f"```python\r\n{code.replace(chr(10), chr(13) + chr(10))}```") == code
