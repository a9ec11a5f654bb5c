import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from learner.tenants.checkpoints import CheckpointFacts, CheckpointPath, TenantCheckpoints, checkpoint_path
from learner.tenants.tensor_files import TensorsDamaged, folder_facts, read_tensor_file, write_tensor_folder
from learner.training.client_operations import AdapterShape

ADAPTER = {"layer.lora_A.weight": np.ones((2, 3), np.float32)}


def facts(name: str = "one", owner: str = "a", **more: object) -> CheckpointFacts:
    given = {
        "path": checkpoint_path("s:train:0", "weights", name),
        "run_id": "s:train:0",
        "name": name,
        "kind": "training",
        "owner": owner,
        "base_model": "tiny",
        "shape": AdapterShape(rank=2),
        "seq_id": 3,
        "version": 1,
        "created_at": 1.0,
    }
    return CheckpointFacts.model_validate({**given, **more})


def saved(folder: Path, each: CheckpointFacts, value: float = 1.0) -> TenantCheckpoints:
    checkpoints = TenantCheckpoints(folder, clock=lambda: 100.0)
    checkpoints.save(each, adapter=ADAPTER, config={"r": 2}, state={"x": np.full(2, value)})
    return checkpoints


@pytest.mark.parametrize(
    "path", ["tinker://run/weights", "tinker://run/other/x", "run/weights/x", "tinker://run/weights/x/y", ""]
)
def test_what_is_no_path_is_none(path: str) -> None:
    assert CheckpointPath.parse(path) is None


def test_a_checkpoint_is_there_after_a_start(tmp_path: Path) -> None:
    one = facts()
    saved(tmp_path, one)
    again = TenantCheckpoints(tmp_path)
    found = again.find(one.path, reader="a")
    assert found is not None
    assert found.shape == AdapterShape(rank=2)
    assert found.size_bytes == ADAPTER["layer.lora_A.weight"].nbytes + 16
    np.testing.assert_array_equal(again.state(one.path)["x"], [1.0, 1.0])
    assert [path.name for path in again.adapter_files(one.path)] == ["adapter_config.json", "adapter_model.safetensors"]


def test_a_checkpoint_is_its_owners_until_it_is_published(tmp_path: Path) -> None:
    one = facts()
    checkpoints = saved(tmp_path, one)
    assert checkpoints.find(one.path, reader="b") is None
    checkpoints.change(one, public=True)
    assert TenantCheckpoints(tmp_path).find(one.path, reader="b") is not None
    assert checkpoints.of("b") == []


def test_a_damaged_file_is_never_loaded(tmp_path: Path) -> None:
    one = facts()
    checkpoints = saved(tmp_path, one)
    path = checkpoints.folder(one.path) / "state.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(TensorsDamaged, match="does not match its checksum"):
        checkpoints.state(one.path)


def test_it_goes_when_its_time_has_come(tmp_path: Path) -> None:
    one = facts(expires_at=99.0)
    checkpoints = saved(tmp_path, one)
    assert checkpoints.find(one.path, reader="a") is None
    assert checkpoints.expire() == 1
    assert checkpoints.adapter_files(one.path) == []
    two = facts("two")
    checkpoints = saved(tmp_path, two)
    checkpoints.expire_in(two, 5)
    changed = checkpoints.find(two.path, reader="a")
    assert changed is not None
    assert changed.expires_at == 105.0


def test_a_deleted_one_is_remembered_so_that_a_replay_does_not_bring_it_back(tmp_path: Path) -> None:
    one = facts()
    checkpoints = saved(tmp_path, one)
    checkpoints.delete(one)
    former = TenantCheckpoints(tmp_path).former(one.path)
    assert former is not None
    assert former.deleted
    assert checkpoints.find(one.path, reader="a") is None


def test_one_that_takes_the_place_of_an_old_one_meanwhile_does_not_go_in_its_stead(tmp_path: Path) -> None:
    """The trainer's thread saves while a sweep goes through what is old: here, when it has been listed."""
    one = facts(expires_at=99.0)
    checkpoints = saved(tmp_path, one)

    class SavedMeanwhile(dict[str, CheckpointFacts]):
        def values(self) -> Any:
            yield from list(super().values())
            checkpoints.save(facts(seq_id=4), adapter=ADAPTER, config={}, state=None)

    checkpoints._facts = SavedMeanwhile(checkpoints._facts)
    assert checkpoints.expire() == 0
    there = checkpoints.find(one.path, reader="a")
    assert there is not None
    assert (there.seq_id, there.expires_at) == (4, None)
    assert checkpoints.adapter_files(one.path)


def test_publishing_what_was_deleted_meanwhile_does_not_bring_it_back(tmp_path: Path) -> None:
    one = facts()
    checkpoints = saved(tmp_path, one)
    checkpoints.delete(one)
    checkpoints.change(one, public=True)
    for each in (checkpoints, TenantCheckpoints(tmp_path)):
        assert each.find(one.path, reader="a") is None


def test_files_that_a_death_left_of_a_deleted_one_go_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = facts()
    checkpoints = saved(tmp_path, one)
    monkeypatch.setattr(checkpoints, "_remove_files", lambda _: None)
    checkpoints.delete(one)
    assert checkpoints.adapter_files(one.path)
    assert TenantCheckpoints(tmp_path).adapter_files(one.path) == []


def test_a_crash_while_one_is_replaced_leaves_one_whole(tmp_path: Path) -> None:
    one = facts()
    checkpoints = saved(tmp_path, one)
    folder = checkpoints.folder(one.path)
    folder.rename(folder.with_name(f"{folder.name}.removed"))
    folder.with_name(f"{folder.name}.draft").mkdir()
    assert TenantCheckpoints(tmp_path).state(one.path)["x"].tolist() == [1.0, 1.0]
    folder.with_name(f"{folder.name}.removed").mkdir()
    assert TenantCheckpoints(tmp_path).state(one.path)["x"].tolist() == [1.0, 1.0]
    assert len(list(tmp_path.iterdir())) == 1


def test_a_folder_that_could_not_be_written_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tensor_folder(tmp_path / "x", tensors={"a": ADAPTER}, facts=1)

    def refusing(_: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("learner.tenants.tensor_files.sync_tree", refusing)
    with pytest.raises(OSError, match="No space left"):
        write_tensor_folder(tmp_path / "x", tensors={"a": ADAPTER}, facts=2)
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
    assert folder_facts(tmp_path / "x") == 1


def test_what_is_saved_while_checkpoints_are_listed_disturbs_nobody(tmp_path: Path) -> None:
    """The trainer's thread saves while the event loop lists: here, each time that the list looks at the clock."""
    checkpoints = saved(tmp_path, facts(expires_at=200.0))
    checkpoints.save(facts("two", expires_at=200.0), adapter=ADAPTER, config={}, state=None)

    def saving() -> float:
        checkpoints._facts.setdefault("three", facts("three"))
        return 100.0

    checkpoints._clock = saving
    assert [each.name for each in checkpoints.of("a")] == ["one", "two"]


def test_replacing_a_folder_replaces_all_of_it(tmp_path: Path) -> None:
    write_tensor_folder(tmp_path / "x", tensors={"a": ADAPTER, "b": ADAPTER}, facts=1)
    write_tensor_folder(tmp_path / "x", tensors={"a": ADAPTER}, facts=2, files={"c.json": b"{}"})
    assert sorted(path.name for path in (tmp_path / "x").iterdir()) == ["a.safetensors", "c.json", "facts.json"]
    assert json.loads((tmp_path / "x" / "facts.json").read_bytes())["facts"] == 2
    assert read_tensor_file(tmp_path / "x", "a").keys() == ADAPTER.keys()


def test_what_is_replaced_goes_once_the_new_one_has_its_name_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that loses power forgets names that were not synced: without the former one there would be none."""
    synced: list[list[str]] = []
    monkeypatch.setattr(
        "learner.tenants.tensor_files.sync_folder",
        lambda folder: synced.append(sorted(each.name for each in folder.iterdir())),
    )
    for value in (1.0, 2.0):
        write_tensor_folder(tmp_path / "m", tensors={"state": {"x": np.full(2, value)}}, facts={})
    assert synced == [["m"], ["m", "m.removed"]]
    assert [each.name for each in tmp_path.iterdir()] == ["m"]
    assert read_tensor_file(tmp_path / "m", "state")["x"].tolist() == [2.0, 2.0]
