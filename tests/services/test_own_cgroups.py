"""Control groups that a service finds for itself, outside of containers and inside."""

from pathlib import Path

import pytest

from services.own_cgroups import enclosing_groups, own_groups
from tests.services.own_groups import mounted, process_in


def test_a_process_on_a_host_is_found_below_the_root_of_the_tree(tmp_path: Path) -> None:
    process = process_in(tmp_path, cgroup="4:memory:/user/one\n0::/unit\n", mountinfo=mounted("memory") + mounted(""))

    assert own_groups(process) == {"memory": Path("/sys/fs/cgroup/memory/user/one"), "": Path("/sys/fs/cgroup/unit")}


def test_in_a_container_the_own_group_is_the_root_that_is_mounted(tmp_path: Path) -> None:
    process = process_in(tmp_path, cgroup="4:memory:/docker/ab\n", mountinfo=mounted("memory", root="/docker/ab"))

    assert own_groups(process) == {"memory": Path("/sys/fs/cgroup/memory")}


def test_a_group_below_that_root_is_found_below_the_mount(tmp_path: Path) -> None:
    process = process_in(tmp_path, cgroup="4:memory:/docker/ab/in/it\n", mountinfo=mounted("memory", root="/docker/ab"))

    assert own_groups(process) == {"memory": Path("/sys/fs/cgroup/memory/in/it")}


@pytest.mark.parametrize("path", ["/docker/abc", "/other", "/../../host"])
def test_a_group_outside_of_what_is_mounted_is_none_of_ours_and_bounds_us_by_the_mounted_root(
    tmp_path: Path, path: str
) -> None:
    process = process_in(tmp_path, cgroup=f"4:memory:{path}\n", mountinfo=mounted("memory", root="/docker/ab"))

    assert own_groups(process) == {}
    assert enclosing_groups("memory", process) == [Path("/sys/fs/cgroup/memory")]


def test_a_job_is_bounded_by_all_groups_above_it_of_both_versions(tmp_path: Path) -> None:
    process = process_in(
        tmp_path, cgroup="4:cpu,cpuacct:/slurm/job/step\n0::/unit\n", mountinfo=mounted("cpu,cpuacct") + mounted("")
    )
    tree = Path("/sys/fs/cgroup/cpu,cpuacct")
    assert enclosing_groups("cpu", process) == [
        tree / "slurm/job/step", tree / "slurm/job", tree / "slurm", tree,
        Path("/sys/fs/cgroup/unit"), Path("/sys/fs/cgroup"),
    ]  # fmt: skip


def test_a_kernel_without_control_groups_bounds_nothing(tmp_path: Path) -> None:
    assert enclosing_groups("memory", tmp_path / "none") == []
