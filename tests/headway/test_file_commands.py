"""`headway diff`, `headway fetch`, `headway --version`, and what is said when a run has not come to its end."""

import sys
from pathlib import Path

import pytest

from headway import command as umbrella
from headway.file_commands import compare_runs, convert_data, fetch
from services.config import made_with
from services.config.sources import ConfigError


def test_two_runs_are_told_apart_by_their_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, steps in (("one", 1), ("other", 2)):
        (tmp_path / name).mkdir()
        made_with.write(tmp_path / name, {"steps": steps, "max_lag": 4})

    assert compare_runs([str(tmp_path / "one"), str(tmp_path / "other")]) == 1
    assert capsys.readouterr().out == "steps: 1 → 2\n"
    assert compare_runs([str(tmp_path / "one"), str(tmp_path / "one")]) == 0
    assert capsys.readouterr().out == "no difference\n"


def test_two_runs_are_told_apart_by_the_settings_of_the_other_processes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, dtype in (("one", '"float32"'), ("other", '"bfloat16"'), ("alone", "")):
        (tmp_path / name).mkdir()
        more = f', "beside": {{"generator.engine.dtype": {dtype}}}' if dtype else ""
        (tmp_path / name / made_with.FILE).write_text(f'{{"settings": {{"steps": 1}}{more}}}')

    assert compare_runs([str(tmp_path / "one"), str(tmp_path / "other")]) == 1
    assert capsys.readouterr().out == 'generator.engine.dtype: "float32" → "bfloat16"\n'
    assert compare_runs([str(tmp_path / "one"), str(tmp_path / "alone")]) == 0
    said = capsys.readouterr()
    assert said.out == "no difference\n"
    assert "are known of one of the two alone" in said.err


def test_a_folder_of_no_run_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no made_with\.json"):
        compare_runs([str(tmp_path), str(tmp_path)])
    with pytest.raises(ConfigError, match="needs the folders of two runs"):
        compare_runs([str(tmp_path)])


def test_a_name_that_is_none_and_a_machine_without_network_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)

    with pytest.raises(ConfigError, match="needs names on the hub"):
        fetch(["models/../x"])
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE is set"):
        fetch(["Some/Model"])


def test_the_version_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["headway", "--version"])
    with pytest.raises(SystemExit) as ended:
        umbrella.main()

    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("headway ")


def test_a_file_that_is_no_parquet_is_said(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    rows = tmp_path / "rows.parquet"
    rows.write_text("this is no Parquet at all")
    with pytest.raises(ConfigError, match=r"rows\.parquet: cannot be read: Parquet magic bytes not found"):
        convert_data([str(rows)])
