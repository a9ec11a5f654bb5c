"""Memory of a process, by its machine and its control groups."""

from pathlib import Path

import pytest

from services.memory import available_memory, memory_here
from tests.services.own_groups import process_in_container

MEMORY = [("memory", "memory.limit_in_bytes"), ("", "memory.max")]
TAKEN = {"memory": ("memory.usage_in_bytes", "total_inactive_file"), "": ("memory.current", "inactive_file")}


@pytest.mark.parametrize(("controller", "file"), MEMORY)
def test_the_memory_here_is_the_least_that_the_machine_and_the_groups_allow(
    tmp_path: Path, controller: str, file: str
) -> None:
    process = process_in_container(tmp_path, controller=controller)
    whole = memory_here(process=process)
    for group in (tmp_path / "groups" / "one" / "two", tmp_path / "groups" / "one"):
        for text, most in (("max", whole), (str(1 << 62), whole), (str(123 << 20), 123 << 20)):
            (group / file).write_text(f"{text}\n")
            assert memory_here(process=process) == most
        (group / file).unlink()


@pytest.mark.parametrize(("controller", "file"), MEMORY)
def test_the_memory_that_is_left_is_that_of_the_machine_or_of_the_narrowest_group(
    tmp_path: Path, controller: str, file: str
) -> None:
    process = process_in_container(tmp_path, controller=controller)
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 99999999 kB\nMemAvailable:    4194304 kB\n")
    usage, cached = TAKEN[controller]
    group = tmp_path / "groups" / "one"
    assert available_memory(meminfo=meminfo, process=process) == 4 << 30
    (group / usage).write_text(f"{700 << 20}\n")
    for text, left in (("max", 4 << 30), (str(8 << 30), 4 << 30), (str(1 << 30), 324 << 20), (str(600 << 20), 0)):
        (group / file).write_text(f"{text}\n")
        assert available_memory(meminfo=meminfo, process=process) == left
    (group / file).write_text(f"{1 << 30}\n")
    (group / "memory.stat").write_text(f"anon 5\n{cached} {100 << 20}\n")
    assert available_memory(meminfo=meminfo, process=process) == 424 << 20


def test_a_kernel_that_says_nothing_of_its_memory_is_believed_to_know_nothing(tmp_path: Path) -> None:
    assert available_memory(meminfo=tmp_path / "none", process=tmp_path / "none") is None
