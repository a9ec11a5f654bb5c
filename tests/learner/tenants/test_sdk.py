"""The unmodified SDK against a server in a process of its own."""

from pathlib import Path

import numpy as np
import pytest

from tests.learner.tenants.server_process import killed_again_and_again, run_program, serving

MODEL = "tiny/bigram"
NEEDS_A_MODEL = {"ppo", "cispo", "dro", "gspo", "ppo thresholds", "custom loss in the server"}
"""Features that the trainer of these tests, a bigram model in numpy, does not have."""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[object]]:
    with serving(tmp_path_factory.mktemp("undisturbed")) as server:
        history: dict[str, list[object]] = run_program("history.py", server, MODEL, 25)
    return history


def test_the_sdk_finds_every_feature_that_does_not_depend_on_the_trainer(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        found = run_program("features.py", server, MODEL)
    assert {name: answer for name, answer in found.items() if answer != "yes" and name not in NEEDS_A_MODEL} == {}
    assert len(found) == 29


def test_a_client_whose_answers_are_lost_has_nothing_done_twice(
    tmp_path: Path, undisturbed: dict[str, list[object]]
) -> None:
    with serving(tmp_path, "--faults", 0.3) as server:
        assert_equal(run_program("history.py", server, MODEL, 25), undisturbed)


@pytest.mark.parametrize("seed", [1, 2])
def test_a_client_does_not_notice_that_the_server_was_killed(
    tmp_path: Path, undisturbed: dict[str, list[object]], seed: int
) -> None:
    with serving(tmp_path) as server, killed_again_and_again(server, kills=4, seed=seed) as killed:
        history = run_program("history.py", server, MODEL, 25)
    assert killed
    assert_equal(history, undisturbed)


def assert_equal(history: dict[str, list[object]], undisturbed: dict[str, list[object]]) -> None:
    assert history["counts"] == undisturbed["counts"]
    assert {name: history[name] for name in ("greedy", "sampled", "paths")} == {
        name: undisturbed[name] for name in ("greedy", "sampled", "paths")
    }
    np.testing.assert_allclose(
        np.array(history["losses"], float), np.array(undisturbed["losses"], float), rtol=0, atol=1e-6
    )
