"""The growth benchmark under the virtual clock, at a size that takes seconds."""

import subprocess
import sys
from pathlib import Path


def test_a_small_fleet_keeps_all_promises_and_gets_its_row(tmp_path: Path) -> None:
    output = tmp_path / "fleets.md"
    command = [sys.executable, "-m", "benchmarks.fleets_virtual", "--sizes", "3x2x8", "--steps", "3"]
    subprocess.run([*command, "--output", str(output)], check=True, timeout=300)
    (row,) = [line for line in output.read_text().splitlines() if line.startswith("| 3 | 2 | 8 |")]
    assert "| 3 | all kept |" in row
