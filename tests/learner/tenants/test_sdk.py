"""The unmodified SDK against a server in a process of its own: on a bigram model, and on a tiny transformer."""

import json
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.learner.algorithms.preset_totals import preset_total
from tests.learner.tenants.serve import TOKEN
from tests.learner.tenants.server_process import ServerProcess, killed_again_and_again, run_program, serving

BIGRAM, QWEN = "tiny/bigram", "tiny/qwen"
STEPS = 25
PRESETS = ("grpo", "dapo", "gspo", "gmpo", "sapo", "cispo", "topr", "kimi", "dppo", "vespo", "reinforce")
NEEDS_A_MODEL = {"ppo", "cispo", "dro", "gspo", "ppo thresholds", "custom loss in the server"}
"""Features that the bigram model's trainer does not have."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def bigram_history(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with serving(tmp_path_factory.mktemp("undisturbed")) as server:
        return run_program("history.py", server, BIGRAM, STEPS)


def test_the_sdk_finds_every_feature_that_does_not_depend_on_the_trainer(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        found = run_program("features.py", server, BIGRAM)
    assert {name: answer for name, answer in found.items() if answer != "yes" and name not in NEEDS_A_MODEL} == {}
    assert len(found) == 29


def test_the_page_has_the_losses_that_the_sdk_was_told(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        losses = run_program("history.py", server, BIGRAM, 6)["losses"]
        told = page_data(server, "tenants")
        (run,) = [each for each in told["runs"] if each["tenant"] == "kill"]
        assert (run["steps"], run["rank"], run["place"]) == (6, 4, "memory")
        (drawn,) = page_data(server, f"tenant_curves?run={run['name']}")["runs"]
    assert drawn["columns"]["step"] == [1, 2, 3, 4, 5, 6]
    assert drawn["columns"]["rows"] == [3] * 6, "three passes of a row"
    means = np.array(losses).reshape(6, 3).mean(axis=1)
    np.testing.assert_allclose(drawn["columns"]["loss"], means, rtol=1e-5)
    assert losses[0] > losses[-1]


def page_data(server: ServerProcess, path: str) -> Any:
    headers = {"Authorization": f"Bearer {TOKEN.get_secret_value()}"}
    with urllib.request.urlopen(urllib.request.Request(f"{server.url}/page/data/{path}", headers=headers)) as answer:
        return json.load(answer)


def test_a_client_whose_answers_are_lost_has_nothing_done_twice(tmp_path: Path, bigram_history: Any) -> None:
    with serving(tmp_path, "--faults", 0.3) as server:
        assert_equal(run_program("history.py", server, BIGRAM, STEPS), bigram_history)


@pytest.mark.parametrize("seed", [1, 2])
def test_a_client_does_not_notice_that_the_server_was_killed(tmp_path: Path, bigram_history: Any, seed: int) -> None:
    with serving(tmp_path) as server:
        assert_equal(history_with_kills(server, BIGRAM, kills=4, seed=seed), bigram_history)


def test_the_real_trainer_has_all_features_and_values_of_torch(tmp_path: Path, models: Path) -> None:
    with serving(tmp_path, "--models", models, "--model", QWEN) as server:
        found = run_program("features.py", server, QWEN)
        assert {name: answer for name, answer in found.items() if answer != "yes"} == {}
        assert len(found) == 29
        report = run_program("formulas.py", server, QWEN, *PRESETS)
    assert report["then"] < report["first"]
    sampled, trained = report["sampler and trainer"]
    np.testing.assert_allclose(sampled, trained, rtol=0, atol=1e-4)
    for name, (value, expected) in report["losses"].items():
        assert value == pytest.approx(expected, abs=1e-4), name
    assert_presets(report["presets"])
    assert report["custom"][0] == pytest.approx(report["custom"][1], rel=1e-4)


def test_the_real_trainer_goes_on_after_kills_as_if_nothing_had_been(tmp_path: Path, models: Path) -> None:
    arguments = ("--models", models, "--model", QWEN)
    with serving(tmp_path / "quiet", *arguments) as server:
        expected = run_program("history.py", server, QWEN, STEPS)
    with serving(tmp_path / "killed", *arguments) as server:
        assert_equal(history_with_kills(server, QWEN, kills=3, seed=3), expected)


def assert_presets(report: Any) -> None:
    """The values are those of the presets themselves; the model has taken one step since it sampled."""
    policy, behavior, gains = (torch.tensor(report[name]).double() for name in ("policy", "behavior", "advantages"))
    assert float((policy - behavior).abs().max()) > 0.01
    of = {"policy": policy, "behavior": behavior, "advantages": gains, "sequences": torch.zeros(len(policy)).long()}
    expected = {name: preset_total(name, **of) for name in PRESETS}
    lags = torch.ones(len(policy))
    expected["interpolated"] = preset_total("grpo", **of, lags=lags, proximal="interpolate")
    assert report["values"] == {name: pytest.approx(float(each), rel=1e-4, abs=1e-4) for name, each in expected.items()}
    lags, name, setting = report["refused"]
    assert "datum 0: lags is missing: headway:grpo wants logprobs, advantages, lags. Send spans" in lags
    assert "no algorithm is named 'grpo_9'. The setting headway takes one of grpo, dapo" in name
    assert "clip is no setting of headway: grpo here: it has none of that name" in setting


def history_with_kills(server: ServerProcess, model: str, *, kills: int, seed: int) -> Any:
    with killed_again_and_again(server, kills=kills, seed=seed) as killed:
        history = run_program("history.py", server, model, STEPS)
    assert killed
    return history


def assert_equal(history: Any, undisturbed: Any) -> None:
    for name in ("counts", "greedy", "sampled", "paths", "losses"):
        assert history[name] == undisturbed[name], name
