import json
import stat
from collections.abc import Mapping
from pathlib import Path

import pytest

from learner.tenants.keys import (
    PREFIX,
    Tenant,
    TenantKeys,
    TenantKeysError,
    first_key_path,
    hash_of,
    make_keys_file,
    new_key,
)
from services import watched_files


def keys_file(folder: Path, *keys: Mapping[str, object]) -> Path:
    path = folder / "keys.json"
    path.write_text(json.dumps({"keys": keys}))
    path.chmod(0o600)
    return path


def test_a_key_finds_its_tenant_and_no_other(tmp_path: Path) -> None:
    key = new_key()
    assert key.startswith(PREFIX)
    keys = TenantKeys.read(keys_file(tmp_path, {"name": "alice", "sha256": hash_of(key), "weight": 2}))
    tenant = keys.tenant(key)
    assert tenant is not None
    assert (tenant.name, tenant.weight) == ("alice", 2)
    assert keys.tenant(new_key()) is None


def test_the_file_holds_no_key(tmp_path: Path) -> None:
    key = new_key()
    assert key not in keys_file(tmp_path, {"name": "alice", "sha256": hash_of(key)}).read_text()


@pytest.mark.parametrize(
    "entry",
    [{"name": "a b", "sha256": "0" * 64}, {"name": "a", "sha256": "x"}, {"name": "a", "sha256": "0" * 64, "x": 1}],
)
def test_a_file_that_does_not_fit_is_refused_by_its_field(tmp_path: Path, entry: dict[str, object]) -> None:
    with pytest.raises(TenantKeysError, match=r"keys\.json is no keys file: keys\.0"):
        TenantKeys.read(keys_file(tmp_path, entry))


def test_a_file_that_others_can_read_is_refused(tmp_path: Path) -> None:
    path = keys_file(tmp_path)
    path.chmod(0o644)
    with pytest.raises(TenantKeysError, match="chmod 600"):
        TenantKeys.read(path)


def test_keys_follow_their_file_and_a_file_that_cannot_be_used_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watched_files, "LOOK_EVERY_S", 0.0)
    caplog.set_level("INFO")

    def found(*names: str) -> list[str]:
        return [name for name in names if keys.tenant(f"tml-{name}")]

    def written(**keys: str) -> None:
        keys_file(tmp_path, *({"name": name, "sha256": hash_of(key)} for name, key in keys.items()))

    written(a="tml-a", b="tml-b")
    keys = TenantKeys.read(tmp_path / "keys.json")
    before = keys.tenant("tml-a"), keys.tenant("tml-b")
    written(a="tml-a", b="tml-new", c="tml-c")
    assert found("a", "b", "new", "c") == ["a", "new", "c"]
    assert [tenant and keys.holds(tenant) for tenant in before] == [True, False]
    assert "keys.json has changed, and is in use (added: c; with a new key: b)" in caplog.text
    written(c="tml-c")
    assert (found("a", "new", "c"), [*keys.by_name]) == (["c"], ["c"])

    for _ in range(2):
        (tmp_path / "keys.json").write_text('{"keys": [')
        assert found("a", "c") == ["c"]
    assert caplog.text.count("those read before stay in force") == 1
    (tmp_path / "keys.json").unlink()
    assert found("c") == ["c"]
    assert "cannot read" in caplog.messages[-1]
    written(a="tml-a")
    assert found("a", "c") == ["a"]


def test_a_name_stands_once() -> None:
    twice = [Tenant(name="a", sha256=hash_of(key)) for key in ("x", "y")]
    with pytest.raises(TenantKeysError, match="twice"):
        TenantKeys(twice)


def test_a_file_that_is_not_there_is_made_with_one_key_for_its_owners_eyes_and_then_kept(tmp_path: Path) -> None:
    path = tmp_path / "state" / "keys.json"
    make_keys_file(path)
    key, before = first_key_path(path).read_text().strip(), path.read_bytes()
    assert [stat.S_IMODE(each.stat().st_mode) for each in (path, first_key_path(path))] == [0o600, 0o600]
    tenant = TenantKeys.read(path).tenant(key)
    assert tenant is not None
    assert key.encode() not in before
    make_keys_file(path)
    assert path.read_bytes() == before


def test_a_place_where_no_file_can_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TenantKeysError, match=r"cannot make the keys file .*keys\.json: .*; set tinker\.keys_file"):
        make_keys_file(tmp_path / "file" / "keys.json")
