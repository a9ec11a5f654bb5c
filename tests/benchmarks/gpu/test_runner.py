"""The runner of `make gpu`: what fails, hangs or lacks something is named, and the rest runs."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.gpu.parts import PARTS
from benchmarks.gpu.rows import GpuRow, table
from benchmarks.gpu.runner import GpuPart, run_parts

ROOT = Path(__file__).parents[3]
MODULES = {
    "part_that_tells": "from benchmarks.gpu.rows import say\nprint('noise', end='')\nsay('speed', '3 GB/s')\n",
    "part_that_fails": "print('about to fail')\nraise RuntimeError('no kernel image')\n",
    "part_that_hangs": (
        "import subprocess, sys, time\nfrom benchmarks.gpu.rows import say\nsay('begun', 'yes')\n"
        "print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(100)']).pid, flush=True)\n"
        "time.sleep(100)\n"
    ),
}


@pytest.fixture
def part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., GpuPart]:
    """Makes a part of one of MODULES."""
    for name, text in MODULES.items():
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(tmp_path)]))

    def made(name: str, *, limit_s: float = 60, timed: bool = True) -> GpuPart:
        return GpuPart(name.removeprefix("part_that_"), "all of it", (name,), limit_s, needs=(), timed=timed)

    return made


def run(parts: list[GpuPart], tmp_path: Path, *, minutes: float = 5) -> tuple[bool, list[GpuRow]]:
    rows: list[GpuRow] = []
    well = run_parts(parts, say=rows.append, log=tmp_path / "all.log", minutes=minutes)
    return well, rows


@pytest.mark.parametrize("timed", [True, False])
def test_a_part_that_fails_shows_its_last_lines_and_the_rest_goes_on(
    part: Callable[..., GpuPart], tmp_path: Path, timed: bool
) -> None:
    names = ("part_that_fails", "part_that_tells")
    well, rows = run([part(name, timed=timed) for name in names], tmp_path)
    assert not well
    failed = [row for row in rows if row.part == "fails"]
    assert [row.state for row in failed] == ["failed"]
    assert "about to fail" in failed[0].found
    assert failed[0].found.endswith("RuntimeError: no kernel image")
    told = [row for row in rows if row.part == "tells"]
    assert [(row.what, row.state) for row in told] == [("speed", "measured"), ("all of it", "passed")]
    assert "noise" in (tmp_path / "all.log").read_text(encoding="utf-8")


def test_a_part_that_hangs_is_broken_off_with_its_children_and_keeps_its_rows(
    part: Callable[..., GpuPart], tmp_path: Path
) -> None:
    well, rows = run([part("part_that_hangs", limit_s=5)], tmp_path)
    assert not well
    assert [(row.what, row.state) for row in rows] == [("begun", "measured"), ("all of it", "broken off")]
    assert "after its limit of 5 s" in rows[1].found
    child = int(rows[1].found.rpartition(" ")[2])
    deadline = time.monotonic() + 10
    while Path(f"/proc/{child}").exists() and time.monotonic() < deadline:
        state = Path(f"/proc/{child}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0]
        if state == "Z":
            break
        time.sleep(0.05)
    else:
        assert not Path(f"/proc/{child}").exists()


def test_a_part_for_which_no_time_is_left_is_skipped_by_name(part: Callable[..., GpuPart], tmp_path: Path) -> None:
    well, rows = run([part("part_that_tells")], tmp_path, minutes=0.1)
    assert well
    assert [(row.state, row.found) for row in rows] == [("skipped", "no time is left of 0.1 minutes")]


def test_without_a_gpu_it_comes_to_its_end_with_every_part_skipped_by_name(tmp_path: Path) -> None:
    output = tmp_path / "found.jsonl"
    command = [sys.executable, "-m", "benchmarks.gpu", "--output", str(output)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    rows = [GpuRow.model_validate_json(line) for line in output.read_text(encoding="utf-8").splitlines()]
    assert sorted(row.part for row in rows) == sorted(part.name for part in PARTS), "some run beside each other"
    assert {row.state for row in rows} == {"skipped"}
    assert all(row.found.startswith("needs a CUDA device") for row in rows)
    assert output.with_suffix(".md").read_text(encoding="utf-8") == table(rows)


def test_a_table_has_a_line_for_each_row_whatever_is_in_it() -> None:
    rows = [GpuRow(part="a", what="b", found="c|d\ne"), GpuRow(part="f", what="g", found="h", state="failed")]
    assert table(rows).splitlines()[2:] == ["| a | b | c/d e |", "| f | g | **failed** h |"]
