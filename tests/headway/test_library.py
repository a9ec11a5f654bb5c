"""`headway.train` and `headway.evaluate`: they start what the command line starts, and return what it leaves."""

import asyncio
import io
import json
import shlex
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import headway
from headway.own_options import split_options
from headway.run_configs import load_agreeing
from learner.config import LearnerConfig
from learner.evaluation.results import EvaluationReport
from services.config.sources import ConfigError

RUN = """
[run]
name = "sums"
directory = "DIRECTORY"
[learner]
model = "model"
"""
COMMAND = """#!/bin/sh
printf '%s\\n' "$@" > "$(dirname "$0")/words"
echo "as it was told"
. "$(dirname "$0")/rest"
"""


class Stand:
    """A `headway` beside the interpreter that notes its words and then does what `then` says."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        (folder / "headway").write_text(COMMAND)
        (folder / "headway").chmod(0o755)
        self.then("exit 0")
        monkeypatch.setattr(sys, "executable", str(folder / "python"))
        (folder / "model").mkdir()
        for name in ("config.json", "tokenizer.json"):
            (folder / "model" / name).write_text("{}")
        self.run = folder / "run.toml"
        self.run.write_text(RUN.replace("DIRECTORY", str(folder / "runs")))

    def then(self, script: str) -> None:
        (self.folder / "rest").write_text(f"{script}\n")

    def words(self) -> list[str]:
        return (self.folder / "words").read_text().splitlines()


@pytest.fixture
def stand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stand:
    return Stand(tmp_path, monkeypatch)


def test_train_starts_what_headway_up_would_with_the_same_settings(
    stand: Stand, capfd: pytest.CaptureFixture[str]
) -> None:
    given: dict[str, Any] = {
        "steps": 30, "rollouts": {"group_size": 6, "stop_token_ids": [5, 7]}, "time_limit_s": None,
        "training": {"gradient_checkpointing": True},
    }  # fmt: skip
    run = headway.train(stand.run, learner=given, run={"name": "other"}, resume=True)

    up, path, *words = stand.words()
    assert (up, path, words[-1]) == ("up", str(stand.run), "--resume")
    config = load_agreeing(stand.run, split_options(words[:-1]))["learner"]
    assert isinstance(config, LearnerConfig)
    assert (config.steps, config.rollouts.group_size, config.rollouts.stop_token_ids) == (30, 6, (5, 7))
    assert (config.time_limit_s, config.training.gradient_checkpointing) == (None, True)
    assert run.folder == config.run.folder == stand.folder / "runs" / "other"
    assert capfd.readouterr().out == "as it was told\n"


def test_a_setting_that_is_a_table_is_given_as_one(stand: Stand) -> None:
    told = {"enable_thinking": False, "tools": ["a_b"], "depth": {"most": 2}}
    with stand.run.open("a") as file:
        file.write('[generator]\nmodel = "model"\n')
    headway.train(stand.run, run={"chat_template_kwargs": told}, generator={"engine": {"extra": {"enable_dbo": True}}})
    words = stand.words()[2:]
    assert words[:2] == ["--run.chat-template-kwargs", json.dumps(told)]
    config = load_agreeing(stand.run, split_options(words[:2]))["learner"]
    assert config.run.chat_template_kwargs == told
    assert words[2:] == ["--generator.engine.extra", '{"enable_dbo": true}']


def test_a_run_gives_its_files(stand: Stand) -> None:
    folder = stand.folder / "runs" / "sums"
    stand.then(f"mkdir -p {shlex.quote(str(folder))}")
    run = headway.train(stand.run, quiet=True)
    (folder / "summary.json").write_text('{"accuracy_after": 0.5}')
    (folder / "metrics.jsonl").write_text('{"kind": "step"}\n{"kind": "publish"}\n{"kind": "st')
    assert (run.summary["accuracy_after"], len(run.metrics()), len(run.metrics("step"))) == (0.5, 2, 1)
    assert (run.samples(), run.model) == ([], folder / "model")


def test_evaluate_returns_what_the_evaluation_s_file_holds(stand: Stand) -> None:
    given = json.dumps({"result": {"accuracy": 0.25}})
    stand.then(f"""while [ "$1" != --output ]; do shift; done; printf %s '{given}' > "$2" """)

    found = headway.evaluate(stand.run, model="trained", tasks=20, samples=4, quiet=True, learner={"max_lag": 3})

    assert found["result"]["accuracy"] == 0.25
    assert "result" in EvaluationReport.model_fields, "where the tutorial looks"
    words = stand.words()
    output = words.index("--output")
    assert words[:output] == ["eval", str(stand.run), "--model", "trained", "--tasks", "20", "--samples", "4"]
    assert words[output + 2 :] == ["--learner.max-lag", "3"]


def test_what_is_wrong_is_said_before_anything_is_started_and_what_fails_with_its_last_lines(stand: Stand) -> None:
    with pytest.raises(ConfigError, match=r"--learner\.stepps"):
        headway.train(stand.run, learner={"stepps": 3})
    with pytest.raises(TypeError, match="unknown settings lerner; expected some of run, learner"):
        headway.train(stand.run, lerner={"steps": 3})
    assert not (stand.folder / "words").exists()

    stand.then("echo no more memory >&2; exit 3")
    with pytest.raises(headway.RunFailed, match=r"(?s)headway up ended with code 3:.*no more memory"):
        headway.train(stand.run, quiet=True)


async def test_an_event_loop_that_runs_already_as_in_a_notebook_is_not_in_the_way(stand: Stand) -> None:
    assert asyncio.get_running_loop().is_running()
    assert headway.train(stand.run, quiet=True).folder == stand.folder / "runs" / "sums"
    assert stand.words()[0] == "up"


class ImpatientScreen(io.StringIO):
    """Ctrl-C comes when `begin` is shown, and again when the first one is answered."""

    def write(self, text: str) -> int:
        super().write(text)
        if text in ("begin\n", "interrupt 1\n"):
            raise KeyboardInterrupt
        return len(text)


@pytest.fixture(params=["in a terminal", "in the background"])
def interrupts(request: pytest.FixtureRequest) -> Iterator[None]:
    """A shell that starts something in the background has it ignore SIGINT, and with it whatever that starts."""
    if request.param == "in a terminal":
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interrupts")
@pytest.mark.timeout(60)
def test_a_second_interrupt_is_passed_on_too_and_nothing_is_left_running(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand.then("""
n=0
trap 'n=$((n+1)); echo "interrupt $n"; [ $n = 2 ] && exit 130' INT
echo begin
while :; do sleep 0.05; done
""")
    screen = ImpatientScreen()
    monkeypatch.setattr(sys, "stdout", screen)

    with pytest.raises(KeyboardInterrupt):
        headway.train(stand.run)

    assert screen.getvalue().endswith("begin\ninterrupt 1\ninterrupt 2\n")


def test_a_letter_that_the_output_lacks_ends_no_training(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    stand.then("printf 'f\\303\\274r\\n'")
    shown = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, encoding="ascii"))

    headway.train(stand.run)
    sys.stdout.flush()

    assert shown.getvalue().endswith(b"f\\xfcr\n")
