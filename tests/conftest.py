"""Models for the real processes, and a launcher that leaves nothing behind."""

import gc
import logging
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest
from xdist.scheduler import LoadScopeScheduling

from services.logs import UnhurriedHandler
from tests.e2e.processes import ROOT, TAIL_CHARACTERS, Launcher, kill_marked, script

if TYPE_CHECKING:
    from learner.training.ranks import CommandChannel

# The same examples each time; `make fuzz` asks for others.
hypothesis.settings.register_profile("same", derandomize=True, deadline=None)
hypothesis.settings.register_profile("fuzz", max_examples=1000, deadline=None, print_blob=True)
hypothesis.settings.load_profile("same")

LAUNCHERS = pytest.StashKey[list[Launcher]]()


_INSTALLED: dict[str, int] = {}
"""Modules that no test wrote, by name: thousands, which are looked at once."""

_MANY = 50
_SETTLED = [0]
"""So many modules were there when the collector was last told that they stay."""

# Tests in these folders share processes that take half a minute to start.
_TOGETHER = {"chaos": "system", "e2e": "system", "generator": "engine"}
_FIRST = {*_TOGETHER, "simulation"}


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Collects no garbage while tests are collected, since everything that they import stays; and, with `--reruns`,
    has each worker tell its two words about each test at once.

    They are two small messages in a row, of which the kernel holds the second one back until the first is confirmed:
    some 40 ms for each of all tests.
    """
    gc.disable()
    told = getattr(config, "failures_db", None)  # of pytest-rerunfailures
    if isinstance(to_controller := getattr(told, "sock", None), socket.socket):
        to_controller.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def pytest_collection_finish() -> None:
    """Looks for garbage again, but not among the two million objects of what was imported."""
    gc.freeze()
    gc.enable()


def pytest_runtest_logfinish() -> None:
    """Takes what a test was the first to import out of that search: DeepSpeed makes one several times an engine."""
    if len(sys.modules) > _SETTLED[0] + _MANY:
        gc.collect()
        gc.freeze()
        _SETTLED[0] = len(sys.modules)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """With `-n`, one worker takes the tests of whole systems, and others of a file stay together."""
    config.option.loadscopereorder = False
    scheduler = LoadScopeScheduling(config, log)
    scheduler._split_scope = _shared  # what its authors recommend for rules of one's own
    return scheduler


def _shared(nodeid: str) -> str:
    file = nodeid.partition("::")[0]
    return _TOGETHER.get(file.split("/")[1], file)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the longest tests first, so that no worker is left alone with one at the end."""
    items.sort(key=lambda item: item.path.relative_to(ROOT / "tests").parts[0] not in _FIRST)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> Generator[None, None, None]:
    """Says which tests were skipped for want of a tool, and at the very end, a line each, which failed.

    The summary above prints whole comparisons where it runs unattended: they push names out of a log's last lines.
    """
    yield
    reasons = Counter(
        report.longrepr[2].removeprefix("Skipped: ")
        for report in terminalreporter.stats.get("skipped", ())
        if isinstance(report.longrepr, tuple)
    )
    if reasons:
        terminalreporter.write_line(f"skipped: {'; '.join(f'{n} ({reason})' for reason, n in reasons.most_common())}")
    for outcome in ("rerun", "failed", "error"):
        for report in terminalreporter.stats.get(outcome, ()):
            terminalreporter.write_line(f"{outcome}: {report.nodeid}")


@pytest.fixture(autouse=True)
def user_code_forgotten(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Modules that a test wrote and imported, and the folders where they were found, are not there for the next."""
    searched = list(sys.path)
    yield
    sys.path[:] = searched
    temporary = str(tmp_path_factory.getbasetemp())
    new = [(name, module) for name, module in sys.modules.items() if _INSTALLED.get(name) != id(module)]
    for name, module in new:
        if str(getattr(module, "__dict__", {}).get("__file__", "")).startswith(temporary):
            del sys.modules[name]
        else:
            _INSTALLED[name] = id(module)


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """Restores the logging that a command in this process has set: its stream may be closed when the next test logs."""
    root, loggers = logging.getLogger(), logging.Logger.manager.loggerDict
    levels = {name: logger.level for name, logger in loggers.items() if isinstance(logger, logging.Logger)}
    level = root.level
    yield
    for handler in root.handlers[:]:
        if isinstance(handler, UnhurriedHandler):
            root.removeHandler(handler)
    if root.level != level:
        root.setLevel(level)
    for name, logger in loggers.items():
        # Setting a level goes through all loggers, of which vLLM and others bring a thousand.
        if isinstance(logger, logging.Logger) and logger.level != levels.get(name, logger.level):
            logger.setLevel(levels[name])


@contextmanager
def launching(
    config: pytest.Config, folder: Path, *, environment: Mapping[str, str] | None = None
) -> Iterator[Launcher]:
    """Everything that was started within it, with `environment` beside what it inherits, is killed at its end."""
    launch = Launcher(folder=folder, environment=environment or {})
    launchers = config.stash.setdefault(LAUNCHERS, [])
    launchers.append(launch)
    try:
        yield launch
    finally:
        launchers.remove(launch)
        for launched in launch.launched:
            launched.end()
        kill_marked(launch.mark)


@pytest.fixture(scope="module")
def launcher(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launcher]:
    """For processes that do not outlive a module."""
    with launching(request.config, tmp_path_factory.mktemp("output")) as launch:
        yield launch


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
        "--output", str(trained), "--data.path", str(untrained_model / "sft.jsonl"), "--steps", "120",
        "--data.held-out-share", "0", "--data.measure-every-steps", "none", "--data.stop-at-nll", "none",
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


# DeepSpeed remembers the first process group that it sees: a process has one, for as long as it lives.
@pytest.fixture(scope="session")
def commands() -> Iterator["CommandChannel"]:
    """The process group of one rank, in the tests' own process."""
    from learner.training.ranks import Ranks, close_process_group, open_process_group

    yield open_process_group(Ranks(), timeout_s=30)
    close_process_group()


def _run(*words: str) -> None:
    ended = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failure shows the last output of every process that the module has started.

    Halves of characters are escaped in what a test has logged: a worker of xdist ends the whole run at the first.
    """
    report = yield
    if report.failed:
        launchers = item.config.stash.get(LAUNCHERS, [])
        for launched in (launched for launcher in launchers for launched in launcher.launched):
            report.sections.append((f"output of {launched.name}", launched.text()[-TAIL_CHARACTERS:]))
    report.sections = [(name, text.encode(errors="backslashreplace").decode()) for name, text in report.sections]
    return report
