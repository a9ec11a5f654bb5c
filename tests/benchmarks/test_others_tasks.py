"""The table of others' task sets counts what was read, and says how the rest ended, without a word of the sets."""

import json
from pathlib import Path

import pytest

from benchmarks.others_tasks import main, outcome_of, read_records


def written(folder: Path, *, toml: str = "", **files: str) -> Path:
    usual = {"instruction.md": "Do it.", "environment/Dockerfile": "FROM x\n", "tests/test.sh": "true"}
    for path, text in {**usual, "task.toml": toml, **files}.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    return folder


def test_each_task_is_read_once_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written(tmp_path / "set/good", **{"solution/solve.sh": "true"})
    written(tmp_path / "set/plain")
    written(tmp_path / "set/many", toml="[[steps]]\nname = 'a'\n")
    words = [str(tmp_path / "set"), "--source", "they/set@0123456789abcdef", "--records", str(tmp_path / "records")]

    assert main(words) == 0
    assert main(words) == 0

    told = capsys.readouterr().out
    assert "| `they/set` at 0123456789 | 3 | 2 | 1 | 0 | 0 |" in told
    assert "| `they/set` at 0123456789 | 1 | refused: several steps |" in told
    assert str(tmp_path) not in told
    lines = [json.loads(line) for line in (tmp_path / "records").read_text().splitlines()]
    assert sorted(line["task"] for line in lines) == ["good", "good", "many", "plain"], "the first may be run later"
    assert len(list(read_records(tmp_path / "records"))) == 3


def test_a_set_in_the_first_form_is_counted_as_such_and_an_empty_folder_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "old/a").mkdir(parents=True)
    (tmp_path / "old/a/task.yaml").write_text("instruction: x")
    (tmp_path / "none").mkdir()

    assert main([str(tmp_path / "old"), "--records", str(tmp_path / "records")]) == 0
    assert "| `old` | 1 | refused: Terminal-Bench's first form |" in capsys.readouterr().out
    assert main([str(tmp_path / "none"), "--records", str(tmp_path / "records")]) == 2


@pytest.mark.parametrize(
    ("fault", "outcome"),
    [
        ("", "solved, and not without"),
        ("its tests give 1 before anything is done", "rewarded before anything is done"),
        ("its tests give 0 after its solution\ncurl: (6) Could not resolve host: x", "fetches while it runs"),
        ("its tests give 0 after its solution\n/bin/sh: 1: jq: not found", "a program that the image lacks"),
        ("its tests give 0\nNo such file or directory: '/tests/data/1'", "a file of its tests that the set lacks"),
        ("its tests give 0 after its solution\nERROR: file or directory not found: /app/x", "0 after its solution"),
        ("its tests give 0 after its solution\n2 failed", "0 after its solution"),
        ("Dockerfile:2: RUN false: ends with 1 in image py: no output", "its computer cannot be made"),
    ],
)
def test_how_a_task_ended_is_a_phrase(fault: str, outcome: str) -> None:
    assert outcome_of(fault) == outcome
