"""Random settings: drawn alike for a seed, and none crashes the check."""

from pathlib import Path

import pytest

from benchmarks.random_settings import SettingsTrial, complaints, draw, table, trials_of
from tests.headway.mistakes.small_model import small_model


def test_a_seed_draws_the_same_settings_of_several_processes_and_no_places() -> None:
    drawn = {seed: draw(seed, most=16) for seed in range(40)}
    assert drawn == {seed: draw(seed, most=16) for seed in range(40)}
    flags = {flag for settings in drawn.values() for flag, _ in settings}
    assert {flag.partition(".")[0] for flag in flags} == {
        "--learner", "--generator", "--reward-service", "--env-service"
    }  # fmt: skip
    assert not [flag for flag in flags if "model" in flag.split(".") or flag.endswith("-file")]


@pytest.mark.parametrize("seeds", [range(1, 4), pytest.param(range(4, 120), marks=pytest.mark.whole)])
def test_whatever_is_drawn_the_check_names_what_it_refuses_and_lets_the_rest_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seeds: range
) -> None:
    small_model(tmp_path / "models" / "addition", positions=8192)
    monkeypatch.chdir(tmp_path)
    for trial in trials_of(seeds, most=30, folder=tmp_path):
        assert complaints(trial.settings, folder=tmp_path) == []


def test_the_table_tells_runs_that_did_not_come_to_their_end() -> None:
    settings = (("--learner.max-lag", "2"),)
    text = table([SettingsTrial(1, settings, 3, 0), SettingsTrial(2, settings, 1, 1), SettingsTrial(3, (), 0, None)])
    assert "| runs that came to their end | 1 |" in text
    assert "| 2 | `--learner.max-lag 2` | **1** |" in text
    assert "| 3 | `` | **not within its time** |" in text
