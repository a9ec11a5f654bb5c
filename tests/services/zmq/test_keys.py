"""Files of keys and other secrets: what is taken, what is refused, and that a refusal gives nothing away."""

import os
from pathlib import Path

import pytest

from services.secret_files import SecretFileError, read_secret, write_public, write_secret
from services.zmq.keys import AuthorizedKeys, CurveKeys, read_authorized, read_public_key


def test_a_pair_is_read_back_from_its_secret_key(tmp_path: Path) -> None:
    keys = CurveKeys.new()
    write_secret(tmp_path / "key", keys.secret)
    assert CurveKeys.read(tmp_path / "key") == keys


def test_a_secret_key_is_not_shown() -> None:
    keys = CurveKeys.new()
    assert keys.secret not in repr(keys)


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o620, 0o602])
def test_a_secret_that_others_can_use_is_refused_with_the_remedy(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "token"
    write_secret(path, "hidden")
    path.chmod(mode)
    with pytest.raises(SecretFileError, match=f"mode {mode:04o} lets others use it: chmod 600") as caught:
        read_secret(path)
    assert "hidden" not in str(caught.value)


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o700])
def test_a_secret_of_its_owner_alone_is_taken(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "token"
    write_secret(path, "hidden")
    path.chmod(mode)
    assert read_secret(path) == "hidden"


def test_a_written_secret_never_has_another_mode(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("old")
    path.chmod(0o666)
    before = os.umask(0)
    try:
        write_secret(path, "new")
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_secret(path) == "new"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "expected one word on one line, got none"),
        (b"\n", "got none"),
        (b"hidden hidden", "got more"),
        (b"hidden\nhidden\n", "got more"),
        (b"hidden" * 1000, "got more"),
        ("gehéim".encode(), "expected ASCII text"),
    ],
)
def test_a_file_that_holds_no_secret_is_refused(tmp_path: Path, content: bytes, complaint: str) -> None:
    path = tmp_path / "token"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(SecretFileError, match=complaint) as caught:
        read_secret(path)
    assert "hidden" not in str(caught.value)


@pytest.mark.parametrize("text", ["x" * 39, "x" * 41, "x" * 39 + "~", "x" * 39 + '"'])
def test_what_is_no_key_is_refused(tmp_path: Path, text: str) -> None:
    write_public(tmp_path / "key.pub", text)
    with pytest.raises(SecretFileError, match="is no CURVE key: expected 40 characters of Z85"):
        read_public_key(tmp_path / "key.pub")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    for read in (CurveKeys.read, read_public_key, read_authorized):
        with pytest.raises(SecretFileError, match=r"cannot read .*/nothing: No such file"):
            read(tmp_path / "nothing")


def test_a_list_of_keys_has_names_and_comments(tmp_path: Path) -> None:
    path, marked = tmp_path / "authorized_keys", "#" * 40
    one, two = CurveKeys.new().public, CurveKeys.new().public
    path.write_text(f"# those of the second floor\n\n{one} env-0\n  {two}\n#\n{marked} a key, for all its looks\n")
    assert read_authorized(path) == {one: "env-0", two: f"{two[:8]}...", marked: "a key, for all its looks"}
    path.write_text(f"{one}\nnonsense here\n")
    with pytest.raises(SecretFileError, match="authorized_keys, line 2, is no CURVE key"):
        read_authorized(path)


def test_keys_are_looked_up_in_what_the_list_holds_now(tmp_path: Path) -> None:
    one, two = CurveKeys.new().public, CurveKeys.new().public
    write_public(tmp_path / "one.pub", one)
    authorized = AuthorizedKeys(tmp_path)
    assert (authorized.name_of(one), authorized.name_of(two), authorized.name_of("")) == ("one", None, None)
    (tmp_path / "one.pub").rename(tmp_path / "one.revoked")
    write_public(tmp_path / "two.pub", two)
    assert (authorized.name_of(one), authorized.name_of(two)) == (None, "two")
