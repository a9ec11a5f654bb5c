"""Messages about an error that went through a file of the user's."""

import colorsys
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from services.user_code import hidden_by, in_a_sentence, in_lines, user_frames

CODE = """\
import json


def outer(text):
    return inner(text)


def inner(text):
    return json.loads(text)["reward"]
"""


@pytest.fixture
def theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "rewards_of_mine.py"
    file.write_text(CODE)
    spec = importlib.util.spec_from_file_location("rewards_of_mine", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def error_of(module: ModuleType, text: str) -> Exception:
    """As if it had been called by us: without this file's own frame."""
    with pytest.raises((KeyError, ValueError)) as raised:
        module.outer(text)
    return raised.value.with_traceback(raised.tb.tb_next)


def test_a_sentence_names_the_innermost_line_of_the_user_and_who_called_it_and_not_that_of_a_library(
    theirs: ModuleType,
) -> None:
    said = in_a_sentence(error_of(theirs, "no json"))
    assert said.startswith("JSONDecodeError: Expecting value")
    assert said.endswith(
        '(rewards_of_mine.py, line 9, in inner: return json.loads(text)["reward"]; called in outer, line 5)'
    )


def test_the_lines_are_those_of_the_user_from_the_outermost_to_the_error(theirs: ModuleType, tmp_path: Path) -> None:
    lines = in_lines(error_of(theirs, "{}")).splitlines()
    assert lines == [
        f'File "{tmp_path}/rewards_of_mine.py", line 5, in outer',
        "    return inner(text)",
        f'File "{tmp_path}/rewards_of_mine.py", line 9, in inner',
        '    return json.loads(text)["reward"]',
        "KeyError: 'reward'",
    ]


def test_an_error_of_ours_that_was_made_of_one_of_theirs_shows_theirs(theirs: ModuleType) -> None:
    ours = RuntimeError("the verifier failed")
    ours.__cause__ = error_of(theirs, "{}")
    assert in_lines(ExceptionGroup("several", [ours])).endswith("KeyError: 'reward'")
    assert [frame.lineno for frame in user_frames(ours)] == [5, 9]


def test_an_error_that_went_through_no_file_of_theirs_has_no_lines() -> None:
    alone = ValueError("empty\n  name")
    assert in_lines(alone) == ""
    assert in_a_sentence(alone) == "ValueError: empty name"


def test_a_file_that_is_no_python_is_named_with_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken_of_mine.py").write_text("x = 1\ndef f(:\n")
    with pytest.raises(SyntaxError) as raised:
        importlib.import_module("broken_of_mine")
    assert in_a_sentence(raised.value.with_traceback(None)).endswith("(broken_of_mine.py, line 2: def f(:)")
    assert "broken_of_mine" not in sys.modules


def test_a_module_of_python_that_hides_a_file_of_theirs_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    assert hidden_by(colorsys) == ""
    (tmp_path / "colorsys.py").touch()
    said = hidden_by(colorsys)
    assert said == f"it is {colorsys.__file__}, which hides colorsys.py: give yours another name"
