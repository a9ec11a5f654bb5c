"""Limits that an engine leaves away: by answers of real engines, and by what the kernel says in a container."""

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from env_service.runtimes.config import RuntimeLimits
from env_service.runtimes.engine_api import EngineInfo
from env_service.runtimes.engine_limits import limits_fault, limits_trial

LIMITS = RuntimeLimits(memory_mib=128, processes=24)
INFOS: Mapping[str, Mapping[str, object]] = json.loads(Path(__file__).with_name("engine_infos.json").read_text())
"""Of the answers to `/info` of Debian 12's engines, Docker 20.10.24 and Podman 4.3.1, what tells of limits."""

VERSION_2 = {
    "memory.max": "134217728\n", "memory.swap.max": "0\n", "pids.max": "40\n", "cpu.max": "150000 100000\n"
}  # fmt: skip
VERSION_1 = {
    "memory/memory.limit_in_bytes": "134217728\n", "memory/memory.memsw.limit_in_bytes": "134217728\n",
    "pids/pids.max": "40\n", "cpu/cpu.cfs_quota_us": "150000\n", "cpu/cpu.cfs_period_us": "100000\n",
}  # fmt: skip


def fault(name: str, **changed: object) -> str:
    info = EngineInfo.model_validate({**INFOS[name], **changed})
    return limits_fault(info, is_podman=name.startswith("Podman"))


def tried(folder: Path, files: Mapping[str, str], *, swap: int = 1024, without: str = "") -> list[str]:
    """Lines that the trial prints where a container sees such files."""
    for name, text in files.items():
        if name != without:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(text)
    meminfo = folder / "meminfo"
    meminfo.write_text(f"MemTotal: 1 kB\nSwapTotal:       {swap} kB\n")
    script = limits_trial(LIMITS, processes=40, cpus=1.5, cgroups=str(folder), meminfo=str(meminfo))
    ended = subprocess.run(["/bin/sh", "-c", script], capture_output=True, text=True, check=True, timeout=20)
    assert ended.stderr == ""
    return ended.stdout.splitlines()


@pytest.mark.parametrize("name", [name for name in INFOS if not name.endswith("ordinary user, cgroups 1")])
def test_an_engine_that_root_runs_is_taken(name: str) -> None:
    assert fault(name) == ""


@pytest.mark.parametrize("name", ["Docker, ordinary user, cgroups 1", "Podman, ordinary user, cgroups 1"])
def test_an_engine_of_an_ordinary_user_on_cgroups_of_version_1_is_refused_whatever_it_says_of_limits(name: str) -> None:
    for says in (True, False):
        told = fault(name, MemoryLimit=says, PidsLimit=says, CpuCfsQuota=says, CgroupDriver="cgroupfs")
        assert "it ignores the limits of containers" in told
        assert "boot that machine with systemd.unified_cgroup_hierarchy=1" in told


def test_an_engine_without_a_cgroup_driver_or_a_controller_is_refused_by_name() -> None:
    of_oneself = "Docker, ordinary user, cgroups 1"
    assert "its cgroup driver is 'none'" in fault(of_oneself, CgroupVersion="2")
    lacks = fault(of_oneself, CgroupVersion="2", CgroupDriver="systemd", MemoryLimit=True, PidsLimit=True)
    assert lacks.startswith("it cannot limit CPU of a container; ")
    assert "Delegate=cpu memory pids" in lacks
    lacks = fault("Docker, root, cgroups 2", MemoryLimit=False, PidsLimit=False)
    assert lacks.startswith("it cannot limit memory, processes of a container; ")
    assert "Delegate" not in lacks


@pytest.mark.parametrize("files", [VERSION_1, VERSION_2])
def test_limits_that_are_there_are_seen_with_either_version(tmp_path: Path, files: Mapping[str, str]) -> None:
    assert tried(tmp_path, files) == []


def test_limits_that_are_not_there_are_named(tmp_path: Path) -> None:
    # As the container of an ordinary user's Podman sees them, which was asked for limits.
    of_the_machine = {
        "memory/memory.limit_in_bytes": "9223372036854771712\n", "memory/memory.memsw.limit_in_bytes": "max\n",
        "cpu/cpu.cfs_quota_us": "-1\n",
    }  # fmt: skip
    assert tried(tmp_path, {**VERSION_1, **of_the_machine}, without="pids/pids.max") == [
        "its memory is not limited to 134217728 bytes (the kernel says 9223372036854771712)",
        "its memory with swap is not limited to 134217728 bytes (the kernel says max)",
        "its processes are not limited to 40 (the kernel says nothing)",
        "its CPU is not limited to 1.5 s a second (the kernel says -1)",
    ]


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("memory.max", "134221824", "its memory is not limited to 134217728 bytes (the kernel says 134221824)"),
        ("memory.max", "max", "its memory is not limited to 134217728 bytes (the kernel says max)"),
        ("memory.swap.max", "max", "its swap is not limited to 0 bytes (the kernel says max)"),
        ("memory.max", f"{1 << 70}", f"its memory is not limited to 134217728 bytes (the kernel says {1 << 70})"),
        ("memory.max", "200000000", "its memory is not limited to 134217728 bytes (the kernel says 200000000)"),
        ("pids.max", "41", "its processes are not limited to 40 (the kernel says 41)"),
        ("cpu.max", "max 100000", "its CPU is not limited to 1.5 s a second (the kernel says max)"),
        ("cpu.max", "160000 100000", "its CPU is not limited to 1.5 s a second (the kernel says 160000)"),
    ],
)
def test_each_limit_that_is_too_high_is_named(tmp_path: Path, name: str, value: str, said: str) -> None:
    assert tried(tmp_path, {**VERSION_2, name: f"{value}\n"}) == [said]


def test_a_container_that_sees_no_cgroups_at_all_has_no_limits(tmp_path: Path) -> None:
    assert [line.partition(" limited")[0] for line in tried(tmp_path, {}, swap=0)] == [
        "its memory is not", "its processes are not", "its CPU is not"
    ]  # fmt: skip


@pytest.mark.parametrize("files", [VERSION_1, VERSION_2])
def test_a_kernel_that_counts_no_swap_is_enough_where_there_is_none(tmp_path: Path, files: Mapping[str, str]) -> None:
    without = next(name for name in files if "sw" in name)
    assert tried(tmp_path, files, without=without, swap=0) == []
    (tmp_path / without).unlink(missing_ok=True)
    assert tried(tmp_path, files, without=without, swap=1) == [
        "its swap is not limited to 0 bytes (the kernel says nothing)"
    ]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("memory.max", "134217727"),
        ("memory.max", "99999999"),
        ("memory.max", "0"),
        ("pids.max", "39"),
        ("cpu.max", "99000 100000"),
        ("cpu.max", "151000 100000"),  # which systemd rounds up to
    ],
)
def test_a_limit_that_is_lower_is_taken(tmp_path: Path, name: str, value: str) -> None:
    assert tried(tmp_path, {**VERSION_2, name: f"{value}\n"}) == []
