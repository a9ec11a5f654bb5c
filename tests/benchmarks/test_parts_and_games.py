"""The benchmark of parts and games: each side is one that the learner would take, and a sum's parts are its own."""

import json
from pathlib import Path

import pytest

from benchmarks.parts_and_games import NIM, SIDES, PlayedRun, table, write_sums
from learner.config import LearnerConfig
from services.config.models import load_config

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", SIDES)
def test_the_learner_takes_the_options_of_every_side(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    side = SIDES[name]
    config = write_sums(tmp_path) if side.kind == "parts" else NIM
    words = [word for key, value in side.options.items() for word in (f"--{key}", str(value))]
    loaded = load_config(LearnerConfig, process="learner", argv=["--config", str(config), *words], environ={})
    assert loaded.algo.type == side.options["algo"]
    assert loaded.groups_per_step * loaded.rollouts.group_size == (256 if side.kind == "parts" else 64)


def test_what_is_trained_on_has_the_parts_and_what_is_held_out_the_right_sum_alone(tmp_path: Path) -> None:
    write_sums(tmp_path)
    trained, held_out = (
        json.loads((tmp_path / f"{name}.jsonl").read_text().splitlines()[0]) for name in ("train", "held_out")
    )
    answer = sum(map(int, trained["prompt"].strip("=").split("+")))
    correct, first = trained["arguments"]["parts"]
    assert correct["arguments"] == {"answer": f"{answer:03d}"}
    assert first["arguments"]["patterns"][0]["pattern"] == f"{answer // 100}.*"
    assert held_out["verifier"] == "exact_match"


def test_each_run_is_in_the_table_of_its_kind() -> None:
    runs = [
        PlayedRun(side, seed, "2 cores (x), load 1.0 at the end; commit a", 0.1, 0.5 + seed / 10, 0.4, 0.7, 2, 9.0)
        for side in SIDES
        for seed in (0, 1)
    ]
    sums, _, games = table(runs).partition("## Nim")
    assert "- gdpo: 0.550 in the mean of 2, deviation 0.071" in sums
    assert "| rae | 1 | 0.100 | **0.600** | 0.400 to 0.700 | 2 | 9 |" in games
    assert "rae" not in sums.partition("## Addition")[2]
