"""Ctrl-C at `headway up`, at two moments, and a model whose head is its own."""

import signal
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from tests.chaos.faults import is_engine
from tests.e2e.processes import Launched, Launcher, marked, until
from tests.e2e.run_files import write_run_file

pytestmark = pytest.mark.e2e


def interrupt(up: Launched, *, mark: str) -> None:
    """Sends SIGINT; then all must go by themselves, in good order: `headway up` kills what takes too long."""
    up.send(signal.SIGINT)
    assert up.wait() == 0, up.text()
    until(lambda: not marked(mark), what="all processes to be gone")
    assert "Traceback" not in up.text()
    assert "is killed" not in up.text()


def test_ctrl_c_while_the_generator_starts_ends_all(
    launcher: Launcher, untied_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    run_file = write_run_file(tmp_path_factory.mktemp("run"), model=untied_model)
    up = launcher("headway", "up", str(run_file.path))
    until(lambda: "generator      listening at" in up.text(), what="the generator", during=[up])
    until(lambda: engine_processes(launcher.mark), what="the engine's process", during=[up])
    interrupt(up, mark=launcher.mark)


def test_an_untied_model_agrees_at_every_publish_and_ctrl_c_in_training_ends_all(
    launcher: Launcher, untied_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    run_file = write_run_file(tmp_path_factory.mktemp("run"), model=untied_model)
    up = launcher("headway", "up", str(run_file.path), "--learner.steps", "100000")
    run = run_file.run()
    until(lambda: len(run.metrics("publish")) >= 8, what="eight publishes", during=[up])
    interrupt(up, mark=launcher.mark)
    assert run.summary()["steps"] == run.steps()[-1]
    assert (run.path / "curves.png").stat().st_size > 0
    assert AutoModelForCausalLM.from_pretrained(run.path / "model").num_parameters() > 0
    assert "held-out" in up.text() or "reward" in up.text().rpartition("the trained model is in")[2]
    published = run.metrics("publish")
    assert len({line["version"] for line in published}) >= 8
    assert all(line["probe_gap"] < 1e-3 for line in published)
    assert run.steps() == list(range(1, len(run.steps()) + 1))


def engine_processes(mark: str) -> list[int]:
    return [pid for pid in marked(mark) if is_engine(pid)]
