"""Control groups that a service finds for itself, outside of containers and inside."""

from pathlib import Path

import pytest

from services.isolation.cgroups import memory_here, own_groups


def _process(folder: Path, *, cgroup: str, mountinfo: str) -> Path:
    (folder / "cgroup").write_text(cgroup)
    (folder / "mountinfo").write_text(mountinfo)
    return folder


def _mount(controller: str, *, root: str = "/") -> str:
    kind, place = ("cgroup2", "") if controller == "" else ("cgroup", f"/{controller}")
    return f"31 23 0:26 {root} /sys/fs/cgroup{place} ro,nosuid - {kind} cgroup rw,{controller}\n"


def test_a_process_on_a_host_is_found_below_the_root_of_the_tree(tmp_path: Path) -> None:
    process = _process(tmp_path, cgroup="4:memory:/user/one\n0::/unit\n", mountinfo=_mount("memory") + _mount(""))

    assert own_groups(process) == {"memory": Path("/sys/fs/cgroup/memory/user/one"), "": Path("/sys/fs/cgroup/unit")}


def test_in_a_container_the_own_group_is_the_root_that_is_mounted(tmp_path: Path) -> None:
    process = _process(tmp_path, cgroup="4:memory:/docker/ab\n", mountinfo=_mount("memory", root="/docker/ab"))

    assert own_groups(process) == {"memory": Path("/sys/fs/cgroup/memory")}


def test_a_group_below_that_root_is_found_below_the_mount(tmp_path: Path) -> None:
    process = _process(tmp_path, cgroup="4:memory:/docker/ab/in/it\n", mountinfo=_mount("memory", root="/docker/ab"))

    assert own_groups(process) == {"memory": Path("/sys/fs/cgroup/memory/in/it")}


@pytest.mark.parametrize("path", ["/docker/abc", "/other", "/../../host"])
def test_a_group_outside_of_what_is_mounted_is_none_of_ours(tmp_path: Path, path: str) -> None:
    process = _process(tmp_path, cgroup=f"4:memory:{path}\n", mountinfo=_mount("memory", root="/docker/ab"))

    assert own_groups(process) == {}


@pytest.mark.parametrize(("controller", "file"), [("memory", "memory.limit_in_bytes"), ("", "memory.max")])
def test_the_memory_here_is_the_least_that_the_machine_and_the_group_allow(
    tmp_path: Path, controller: str, file: str
) -> None:
    place = tmp_path / "groups"
    (place / "one").mkdir(parents=True)
    kind = "cgroup2" if controller == "" else "cgroup"
    mountinfo = f"31 23 0:26 / {place} ro,nosuid - {kind} cgroup rw,{controller}\n"
    process = _process(tmp_path, cgroup=f"4:{controller}:/one\n", mountinfo=mountinfo)
    whole = memory_here(process)
    for text, most in ((str(123 << 20), 123 << 20), ("max", whole), (str(1 << 62), whole)):
        (place / "one" / file).write_text(f"{text}\n")
        assert memory_here(process) == most
