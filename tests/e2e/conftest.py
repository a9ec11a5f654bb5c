"""Models for the real processes, and a launcher that leaves nothing behind."""

import subprocess
import sys
import uuid
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.e2e.processes import ROOT, TAIL_CHARACTERS, Launched, kill_marked, script

LAUNCHED = pytest.StashKey[list[Launched]]()


@dataclass
class Launcher:
    """Starts console scripts, all under one mark."""

    folder: Path
    registry: list[Launched]
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)

    def __call__(self, name: str, *words: str) -> Launched:
        launched = Launched(name, [script(name), *words], folder=self.folder, mark=self.mark)
        self.registry.append(launched)
        return launched


@pytest.fixture(scope="module")
def launcher(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launcher]:
    """Everything that it started is killed at the end of the module."""
    registry: list[Launched] = []
    request.config.stash[LAUNCHED] = registry
    launch = Launcher(folder=tmp_path_factory.mktemp("output"), registry=registry)
    try:
        yield launch
    finally:
        for launched in registry:
            launched.end()
        kill_marked(launch.mark)
        request.config.stash[LAUNCHED] = []


@pytest.fixture(scope="session")
def untrained_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The addition model with random weights and tied embeddings."""
    folder = tmp_path_factory.mktemp("models") / "untrained"
    _run(sys.executable, "examples/addition/make_model.py", str(folder))
    return folder


@pytest.fixture(scope="session")
def model(untrained_model: Path) -> Path:
    """It knows the form of an answer, and some answers."""
    trained = untrained_model.with_name("trained")
    _run(
        script("learner"), "--config", "examples/addition/sft.toml", "--model", str(untrained_model),
        "--output", str(trained), "--data.path", str(untrained_model / "sft.jsonl"), "--steps", "60",
        "--run.directory", str(untrained_model.with_name("runs")),
    )  # fmt: skip
    return trained


@pytest.fixture(scope="session")
def untied_model(untrained_model: Path) -> Path:
    """Random weights, with a head of its own."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = untrained_model.with_name("untied")
    model = AutoModelForCausalLM.from_pretrained(untrained_model, tie_word_embeddings=False)
    model.lm_head.weight.data.normal_(std=0.05)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(untrained_model).save_pretrained(folder)
    return folder


def _run(*words: str) -> None:
    ended = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failure shows the last output of every process that the module has started."""
    report = yield
    if report.failed:
        for launched in item.config.stash.get(LAUNCHED, []):
            report.sections.append((f"output of {launched.name}", launched.text()[-TAIL_CHARACTERS:]))
    return report
