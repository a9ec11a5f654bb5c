"""An engine that dies at its first request, by arguments that no check can judge: the run ends with why, after two."""

from pathlib import Path

import pytest

from tests.e2e.processes import Launcher
from tests.e2e.run_files import write_run_file

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

HEADS = '{"hf_overrides": {"head_dim": 16}}'


def test_the_second_death_of_the_same_ends_the_run_with_the_engine_s_own_sentence(
    launcher: Launcher, model: Path, tmp_path: Path
) -> None:
    run_file = write_run_file(tmp_path, model=model)

    up = launcher("headway", "up", str(run_file.path), "--generator.engine.extra", HEADS)

    assert up.wait(timeout_s=800) == 1, up.text()
    text = up.text()
    assert text.count("generator has ended with code 70; started again") == 1, text
    assert "Unsupported CPU attention configuration: head_dim=16" in text.strip().splitlines()[-1], text
    assert "the run can go on" not in text
