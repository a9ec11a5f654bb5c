"""Cores of a process, by its affinity and the quotas of its control groups."""

from pathlib import Path

import pytest

from services.cores import cores, has_whole_machine, usable_cores
from tests.services.own_groups import process_in_container


def test_cores_are_bounded_by_the_quota_of_the_container(tmp_path: Path) -> None:
    all_of_them = cores(process=tmp_path / "none")
    process = process_in_container(tmp_path, controller="")
    quota = tmp_path / "groups" / "one" / "cpu.max"
    quota.write_text("max 100000\n")
    assert cores(process=process) == all_of_them
    quota.write_text("100000 100000\n")
    assert cores(process=process) == 1
    quota.write_text("20000 100000\n")
    assert cores(process=process) == 1


QUOTAS = [
    ("", {}, 4),
    ("", {"cpu.max": "max 100000\n"}, 4),
    ("", {"cpu.max": "150000 100000\n"}, 1.5),
    ("", {"cpu.max": "900000 100000\n"}, 4),
    ("cpu", {"cpu.cfs_quota_us": "-1\n", "cpu.cfs_period_us": "100000\n"}, 4),
    ("cpu", {"cpu.cfs_quota_us": "25000\n", "cpu.cfs_period_us": "50000\n"}, 0.5),
]


@pytest.mark.parametrize(("controller", "files", "usable"), QUOTAS)
@pytest.mark.parametrize("group", ["one/two", "one", "."])
def test_usable_cores_are_those_of_the_affinity_and_the_quotas_and_not_the_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: str, controller: str, files: dict[str, str], usable: float
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2, 3})
    process = process_in_container(tmp_path, controller=controller)
    for name, text in files.items():
        (tmp_path / "groups" / group / name).write_text(text)
    assert usable_cores(process=process) == usable
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    assert not has_whole_machine(process=process)
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    assert has_whole_machine(process=process) is (usable == 4)
