"""Cores of a process, by its affinity and the quota of its container."""

from pathlib import Path

import pytest

from services.cores import cores, has_whole_machine, usable_cores


def test_cores_are_bounded_by_the_quota_of_the_container(tmp_path: Path) -> None:
    all_of_them = cores(cgroups=tmp_path / "none")
    quota = tmp_path / "cpu.max"
    quota.write_text("max 100000\n")
    assert cores(cgroups=tmp_path) == all_of_them
    quota.write_text("100000 100000\n")
    assert cores(cgroups=tmp_path) == 1
    quota.write_text("20000 100000\n")
    assert cores(cgroups=tmp_path) == 1


QUOTAS = [
    ({}, 4),
    ({"cpu.max": "max 100000\n"}, 4),
    ({"cpu.max": "150000 100000\n"}, 1.5),
    ({"cpu.max": "900000 100000\n"}, 4),
    ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 4),
    ({"cpu/cpu.cfs_quota_us": "25000\n", "cpu/cpu.cfs_period_us": "50000\n"}, 0.5),
]


@pytest.mark.parametrize(("files", "usable"), QUOTAS)
def test_usable_cores_are_those_of_the_affinity_and_the_quota_and_not_the_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], usable: float
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2, 3})
    (tmp_path / "cpu").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert usable_cores(cgroups=tmp_path) == usable
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    assert not has_whole_machine(cgroups=tmp_path)
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    assert has_whole_machine(cgroups=tmp_path) is (usable == 4)
