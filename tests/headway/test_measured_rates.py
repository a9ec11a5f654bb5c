"""Rates of a recorded run, as `headway plan --calibrate` takes them."""

import json
from pathlib import Path
from typing import Any

import pytest

from headway.measured_rates import measured_rates
from headway.planner import DEVICES, Plan, engine_times, publish_seconds, train_seconds
from services.config import made_with
from services.config.sources import ConfigError
from tests.headway.test_planner import SMALL


def step(number: int, *, train_s: float = 0.9, tokens: int = 1000) -> dict[str, Any]:
    return {"kind": "step", "step": number, "train_s": train_s, "copy_s": 0.1, "sampled_tokens": tokens, "wait_s": 0.0}


def load(
    running: float, *, token_s: float, sequence_s: float, busy: float = 1.0, generators: int = 2
) -> dict[str, Any]:
    """As generators of these times would give it, which have so many sequences while they work."""
    rate = generators * busy * running / (token_s + sequence_s * running)
    return {
        "kind": "load", "version": 1, "generators": generators, "running": generators * busy * running, "limit": 128,
        "tokens_per_s": rate, "busy": busy,
    }  # fmt: skip


def write(folder: Path, *lines: dict[str, Any], ranks: int = 2) -> Path:
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "made_with.json").write_text(json.dumps({"settings": {"ranks": ranks}}))
    return folder


PUBLISHES = [{"kind": "publish", "version": n, "members": 2, "total_s": 2.0, "pause_s": 0.5} for n in range(1, 9)]


def test_rates_come_out_as_they_went_in(tmp_path: Path) -> None:
    loads = [
        load(running, token_s=0.008, sequence_s=0.0005, busy=busy) for running, busy in ((4, 0.4), (20, 0.9), (60, 1))
    ]
    run = write(tmp_path / "run", *map(step, range(1, 9)), *PUBLISHES, *loads)

    found = measured_rates(run)

    assert found.token_s == pytest.approx(0.008)
    assert found.sequence_s == pytest.approx(0.0005)
    assert found.train_s == pytest.approx(2 * 0.9 / 1000), "of one of the two ranks"
    assert found.step_s == pytest.approx(0.1), "the copy, which ranks do not share"
    assert (found.publish_s, found.pause_s) == (2.0, 0.5)
    plan = Plan(shape=SMALL, device=DEVICES["H100"], devices=4, lengths=(100,), groups=2, group_size=5, measured=found)
    assert engine_times(plan, 1, 64) == (found.token_s, found.sequence_s)
    assert train_seconds(plan, 4) == pytest.approx(1000 * 0.0018 / 4 + 0.1)
    assert publish_seconds(plan) == (2.0, 0.5)


def test_the_ranks_that_torchrun_started_count_and_not_the_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    run = write(tmp_path / "run", *map(step, range(1, 9)))
    (run / "made_with.json").unlink()
    made_with.write(run, {"ranks": 1})
    assert measured_rates(run).train_s == pytest.approx(8 * 0.9 / 1000)


def test_of_a_run_that_always_had_as_many_sequences_their_time_is_shared_out_evenly(tmp_path: Path) -> None:
    loads = [load(30 + number / 10, token_s=0.0, sequence_s=0.001) for number in range(4)]

    found = measured_rates(write(tmp_path / "run", step(1), *loads))

    assert found.token_s == 0.0
    assert found.sequence_s == pytest.approx(0.001)
    assert found.publish_s is None


def test_of_a_run_that_had_one_sequence_at_a_time_none_of_the_time_is_the_sequences(tmp_path: Path) -> None:
    """Sixty-four at once would be planned to take sixty-four times as long otherwise."""
    loads = [load(1.0, token_s=0.008, sequence_s=0.0005, busy=busy) for busy in (0.5, 0.75, 1.0)]

    found = measured_rates(write(tmp_path / "run", step(1), *loads))

    assert found.token_s == pytest.approx(0.0085)
    assert found.sequence_s == 0.0
    plan = Plan(shape=SMALL, device=DEVICES["H100"], devices=4, lengths=(100,), measured=found)
    step_s, added_s = engine_times(plan, 1, 64)
    assert step_s + 64 * added_s == pytest.approx(0.0085)


def test_records_that_lack_a_number_are_left_out(tmp_path: Path) -> None:
    without_copy = {key: value for key, value in step(1, train_s=7.0).items() if key != "copy_s"}
    without_pause = {"kind": "publish", "version": 1, "members": 2, "total_s": 9.0}

    found = measured_rates(write(tmp_path / "run", without_copy, step(2), without_pause, PUBLISHES[1], ranks=1))

    assert found.train_s == pytest.approx(0.0009)
    assert (found.publish_s, found.pause_s) == (2.0, 0.5)


def test_a_run_of_an_earlier_release_tells_of_training_alone(tmp_path: Path) -> None:
    found = measured_rates(write(tmp_path / "run", step(1), ranks=1))

    assert (found.token_s, found.sequence_s) == (None, None)
    assert found.train_s == pytest.approx(0.0009)
    with pytest.raises(ConfigError, match="holds no step that sampled tokens"):
        measured_rates(write(tmp_path / "none", *PUBLISHES))
