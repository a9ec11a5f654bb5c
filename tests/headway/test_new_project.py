"""`headway init`, and the names of models that it takes."""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models

from headway import command as umbrella
from headway.new_project import make_project
from services.config.sources import ConfigError


@pytest.fixture
def talking_model(tmp_path: Path) -> Path:
    folder = tmp_path / "talker"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    Tokenizer(models.WordLevel({"<unk>": 0, "1": 1}, unk_token="<unk>")).save(str(folder / "tokenizer.json"))
    (folder / "model.safetensors").write_bytes(b"")
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    return folder


def test_a_project_with_a_tiny_model_is_good_from_any_folder(tmp_path: Path) -> None:
    project = tmp_path / "my sums"
    words = {**os.environ, "DS_ACCELERATOR": "cpu"}
    script = Path(sys.executable).with_name("headway")
    subprocess.run([script, "init", str(project)], check=True, env=words, timeout=200)

    checked = subprocess.run(
        [script, "check", str(project / "run.toml"), "--elsewhere"],
        cwd="/",
        capture_output=True,
        text=True,
        env=words,
        timeout=200,
    )

    assert checked.returncode == 0, checked.stderr
    assert {path.name for path in project.iterdir()} == {
        "README.md", "held_out.jsonl", "model", "reward.py", "run.toml", "tasks.jsonl",
    }  # fmt: skip
    assert 'name = "my-sums"' in (project / "run.toml").read_text()


def test_with_a_model_that_talks_prompts_become_messages(tmp_path: Path, talking_model: Path) -> None:
    project = tmp_path / "sums"

    assert make_project([str(project), "--model", str(talking_model)]) == 0

    text = (project / "run.toml").read_text()
    assert text.count(f'model = "{talking_model}"') == 3
    assert "chat = true" in text
    assert "numbers[-1]" in (project / "reward.py").read_text()
    assert umbrella.check(project / "run.toml", {}, elsewhere=True) == 0


def test_that_nothing_will_be_evaluated_is_noted_where_an_evaluation_is_asked_for(
    tmp_path: Path, talking_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    project = tmp_path / "sums"
    assert make_project([str(project), "--model", str(talking_model)]) == 0
    run = project / "run.toml"
    assert umbrella.check(run, {}, elsewhere=True) == 0
    assert "nothing will be evaluated" not in "".join(capsys.readouterr())

    lines = run.read_text().splitlines(keepends=True)
    run.write_text("".join(line for line in lines if not line.startswith("evaluation_file")))
    assert umbrella.check(run, {}, elsewhere=True) == 0
    assert "nothing will be evaluated, since environment sums has no held-out tasks" in "".join(capsys.readouterr())


def test_a_folder_that_is_there_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("precious")

    with pytest.raises(ConfigError, match="is there already"):
        make_project([str(tmp_path)])
    with pytest.raises(ConfigError, match="is there already"):
        make_project([str(tmp_path / "mine")])


def test_a_model_that_is_not_there_is_said_with_how_to_fetch_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))

    with pytest.raises(ConfigError, match="headway fetch Some/Model downloads it"):
        make_project([str(tmp_path / "new"), "--model", "Some/Model"])
    assert not (tmp_path / "new").exists()


def test_a_place_that_cannot_be_written_is_said(tmp_path: Path, talking_model: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot write to .*file/sums: Not a directory"):
        make_project([str(tmp_path / "file" / "sums"), "--model", str(talking_model)])


def test_a_model_whose_folder_has_quotes_in_its_name_is_written_as_toml(tmp_path: Path, talking_model: Path) -> None:
    odd = talking_model.rename(tmp_path / 'we"ird\\\\folder')
    make_project([str(tmp_path / "sums"), "--model", str(odd)])

    assert tomllib.loads((tmp_path / "sums" / "run.toml").read_text())["learner"]["model"] == str(odd)
