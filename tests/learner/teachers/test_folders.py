"""A teacher in a folder has the learner's tokenizer, or says that it need not."""

import json
from pathlib import Path

import pytest

from learner.teachers.config import TeacherConfig
from learner.teachers.teachers import TeacherFailed, check_tokenizers


def folder(path: Path, tokenizer: str | None) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"vocab_size": 3}), encoding="utf-8")
    if tokenizer is not None:
        (path / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
    return path


def test_the_same_tokenizer_is_let_through_and_another_is_refused_by_name(tmp_path: Path) -> None:
    model, same, other = (
        folder(tmp_path / name, text) for name, text in (("model", "{}"), ("same", "{}"), ("other", "{ }"))
    )
    check_tokenizers([TeacherConfig(name="t", path=same)], model=model)
    with pytest.raises(TeacherFailed, match=r"teacher t in .*other has a tokenizer .* same_tokenizer = false"):
        check_tokenizers([TeacherConfig(name="s", path=same), TeacherConfig(name="t", path=other)], model=model)
    check_tokenizers([TeacherConfig(name="t", path=other, same_tokenizer=False)], model=model)


def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    model, bare = folder(tmp_path / "model", "{}"), folder(tmp_path / "bare", None)
    with pytest.raises(FileNotFoundError, match="bare has no tokenizer"):
        check_tokenizers([TeacherConfig(name="t", path=bare)], model=model)


def test_teachers_behind_urls_are_left_to_their_answers(tmp_path: Path) -> None:
    check_tokenizers([TeacherConfig(name="t", urls=("http://127.0.0.1:1",))], model=tmp_path / "nowhere")
