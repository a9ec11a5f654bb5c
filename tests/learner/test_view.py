from pathlib import Path

import pytest

from learner.view import _named, serve_runs
from services.config.sources import ConfigError


def test_runs_that_are_namesakes_are_told_apart_by_the_folder_around_them(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("monday/run", "tuesday/run", "monday/other")]

    assert _named(folders) == list(zip(["monday/run", "tuesday/run", "other"], folders, strict=True))


@pytest.mark.parametrize("token", [None, " \n"])
def test_a_page_that_others_can_reach_wants_a_token(tmp_path: Path, token: str | None) -> None:
    file = None if token is None else tmp_path / "token"
    if file is not None:
        file.write_text(token or "")
    with pytest.raises(ConfigError, match=r"host 0\.0\.0\.0, and there is no token: give --token-file FILE"):
        serve_runs([tmp_path], host="0.0.0.0", port="0", token_file=None if file is None else str(file))


def test_a_token_that_is_too_short_is_said_without_showing_it(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("s3cr")
    with pytest.raises(ConfigError, match=r"view: host 0\.0\.0\.0 .* the token has 4 characters") as caught:
        serve_runs([tmp_path], host="0.0.0.0", port="0", token_file=str(tmp_path / "token"))
    assert "s3cr" not in str(caught.value)
    with pytest.raises(ConfigError, match=r"view: --port: got '70000': expected less than"):
        serve_runs([tmp_path], host="127.0.0.1", port="70000", token_file=None)


def test_a_token_file_of_other_bytes_is_said(tmp_path: Path) -> None:
    (tmp_path / "token").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="token: expected a line of text, got other bytes"):
        serve_runs([tmp_path], host="127.0.0.1", port="0", token_file=str(tmp_path / "token"))
