"""The commands that the docs show are run, up to where processes would be started. A new one needs a place here."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from headway import checking, evaluation_command, releases_command, serve_command, starting
from headway import command as umbrella
from headway.doctor import before
from headway.own_options import usage
from headway.supervisor import ProcessCommand
from services.config import made_with
from services.config.sources import ConfigError
from tests.docs.test_blocks import FENCE, PAGES, ROOT
from tests.headway.mistakes.small_model import small_model

COMMANDS_OF = ("headway", "learner", "env-service", "make", "python")
ELSEWHERE: Mapping[str, str] = {
    "curl": "tests/docs/test_rewards.py sends these bodies",
    "learner replay": "tests/e2e/test_learners_come_and_go.py replays a run, tests/learner/test_what_if.py with --set",
    "generator": "it serves until a signal; tests/e2e/test_releases.py starts one for users",
    "env-service play": "it asks a person; tests/env_service/test_workbench.py answers",
    "env-service try": "it wants a generator; tests/env_service/test_workbench.py has one",
    "env-service tasks": "tests/env_service/task_sets/test_mining.py makes tasks of a small repository",
    "env-service host": "it serves until a signal; tests/env_service/hosting starts it",
    "headway relay": "it serves until a signal; tests/headway/test_relay.py has its routes",
    "reward-service": "it serves until a signal; tests/e2e/test_serve.py starts it beside the example",
    "env-service harness install": "it fetches packages: make harnesses",
    "env-service runtime": "it fetches packages; tests/env_service/runtimes/test_building.py builds images",
    "python -m simulation": "tests/simulation runs it",
    "python -m tests.mutants": "tests/mutants reads its entries; a run takes an hour",
    "docker": "containers: tests/deploy",
    "helm": "a Kubernetes cluster; tests/deploy renders the chart",
    "export": "of a shell's own: variables",
    "key=tml": "tests/deploy/test_chart_values.py makes a key so",
    "printf": "tests/deploy/test_chart_values.py makes a file of keys so",
    "kind": "a Kubernetes cluster",
    "kubectl": "a Kubernetes cluster",
    "pip": "tests/requirements",
    "uv": "a virtual environment of another package",
    "openenv/bin/python": "a virtual environment of another package",
    "verifiers/bin/python": "a virtual environment of another package",
    "until torchrun": "several machines",
    **dict.fromkeys(
        ("cp ", "put() {", "}", "tokens=", "for each in", "rm -r new-keys"), "tests/docs/test_key_steps.py"
    ),
}
"""Commands that are not run here, by their beginning, and who runs them or why nobody does."""
PROSE = ("─", "◀", "▼", "held-out accuracy", "FAULT")
"""Blocks with one of these hold no commands."""
COMPLAINTS = {
    "export": "is no folder; expected that of a run",
    "releases": "holds no releases",
    "rollback": "holds no releases",
    "promote": "holds no releases",
    "feedback": "is missing: a run with learner.release.enabled",
}
"""Commands that want what only a run leaves: their options are read before that is said."""


def shown() -> Iterator[tuple[str, str]]:
    """Place and text of each command, without the remark behind it."""
    for page in [*PAGES, ROOT / "CONTRIBUTING.md"]:
        text = page.read_text(encoding="utf-8")
        for found in re.finditer(FENCE.pattern.replace(r"(\w+)", r"(\w*)"), text, FENCE.flags):
            if found[2] or any(word in found[3] for word in PROSE):
                continue
            line = text[: found.start()].count("\n") + 1
            body = re.sub(r"-d '\{.*?\}'", "-d BODY", found[3].replace("\\\n", " "), flags=re.DOTALL)
            for command in re.sub(r"\n {20,}[^\n]*", "", body).splitlines():  # a remark that goes on
                yield f"{page.relative_to(ROOT)}:{line}", re.split(r"\s{2,}[#;\w]|\s+# ", command.strip())[0].strip()


EVERY = list(shown())
HERE = [one for one in EVERY if one[1].removeprefix(".venv/bin/").split()[0] in COMMANDS_OF]
OURS = [one for one in HERE if not one[1].startswith(tuple(ELSEWHERE))]


def of(*programs: str) -> list[tuple[str, str]]:
    return [one for one in OURS if one[1].removeprefix(".venv/bin/").split()[0] in programs]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with what the commands name, where nothing is started."""
    for name in ("models/addition", "models/new", "models/qwen", "FOLDER"):
        small_model(tmp_path / name)
    sizes = tmp_path / "models/qwen/config.json"
    sizes.write_text(json.dumps({**json.loads(sizes.read_text()), "intermediate_size": 16}))
    # A copy, without runs: one under way in this checkout holds its folder.
    shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("runs"))
    for name in ("run.toml", "RUN.toml"):
        (tmp_path / name).write_text((ROOT / "examples/own_task/run.toml").read_text())
    for name in ("own_reward.py", "sums.jsonl"):
        (tmp_path / name).symlink_to(ROOT / "examples/own_task" / name)
    for name in ("sums/runs/sums", "sums/runs/other"):
        (tmp_path / name).mkdir(parents=True)
        made_with.write(tmp_path / name, {"steps": 1})
    (tmp_path / "answers.jsonl").write_text('{"prompt": "27+82=", "completion": "109"}\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    monkeypatch.setattr(umbrella, "Supervisor", Started)
    monkeypatch.setattr(serve_command, "Supervisor", Started)
    monkeypatch.setattr(starting, "examined_apart", lambda configs: None)
    monkeypatch.setattr(checking, "check_port", lambda what, host, port: before.good(what, host))
    monkeypatch.setattr(evaluation_command, "to_be_started", list)
    monkeypatch.setattr(releases_command, "_asked", lambda *_: None)
    Started.commands.clear()
    return tmp_path


class Started:
    """In the place of the processes' supervisor: it notes what it would start."""

    commands: list[tuple[str, ...]] = []  # noqa: RUF012 - one for all: nothing hands the supervisor out
    was_stopped = False

    def __init__(self, commands: list[ProcessCommand], **_: object) -> None:
        self.commands.extend(command.arguments for command in commands)

    def run(self) -> int:
        return 0


def test_every_command_is_run_here_or_said_to_be_run_elsewhere() -> None:
    strange = [(place, text) for place, text in EVERY if (place, text) not in OURS]
    assert [one for one in strange if not one[1].startswith(tuple(ELSEWHERE))] == []
    assert [start for start in ELSEWHERE if not any(text.startswith(start) for _, text in strange)] == []
    assert len(OURS) > 30


def test_a_body_that_is_sent_says_that_it_is_json() -> None:
    """A service without a token refuses any other (`services/http/local_callers.py`)."""
    sent = [one for one in EVERY if one[1].startswith("curl") and " -d " in one[1]]
    assert len(sent) > 4
    assert [one for one in sent if "-H 'Content-Type: application/json'" not in one[1]] == []


@pytest.mark.parametrize(("place", "text"), of("make"))
def test_make_has_the_target(place: str, text: str) -> None:
    """It is not tried with -n: make runs recipes that name $(MAKE) all the same."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for word in shlex.split(text)[1:]:
        name, given, _ = word.partition("=")
        known = rf"\$[({{]{name}[)}}]" if given else rf"^{name}:"
        assert re.search(known, makefile, re.MULTILINE), f"{place}: make knows no {name}"


@pytest.mark.parametrize(("place", "text"), of("headway"))
def test_headway_takes_the_command(place: str, text: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = shlex.split(text.removeprefix(".venv/bin/").replace(" ...", "").replace("NAME", "east"))[1:]
    if "init" not in words and any(word.startswith("sums/") for word in words):
        (here / "sums/run.toml").write_text((here / "run.toml").read_text())
        for name in ("own_reward.py", "sums.jsonl"):
            (here / "sums" / name).symlink_to(here / name)
    elif words[0] == "init":
        (here / "sums").rename(here / "earlier")
    if words[0] in COMPLAINTS:
        with pytest.raises(ConfigError, match=COMPLAINTS[words[0]]):
            umbrella._run(words)
        return
    code = umbrella._run(words)
    assert code in ((0, 1) if words[0] in ("doctor", "diff") else (0,)), capsys.readouterr()
    if words[0] in ("up", "eval"):
        assert Started.commands
    assert all(word.partition("=")[0] in usage(words[0]) for word in words if re.match(r"--[a-z-]+$", word))


@pytest.mark.parametrize(("place", "text"), of("env-service"))
def test_env_service_takes_the_command(place: str, text: str, here: Path) -> None:
    program = Path(sys.executable).with_name("env-service")
    ended = subprocess.run([program, *shlex.split(text)[1:]], cwd=here, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout
