"""Looking at environments from the command line."""

import asyncio
import importlib
import io
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from env_service import workbench
from services.http.tls import TlsFiles
from tests.env_service.agents.served import Saying
from tests.env_service.chat_models import model_with
from tests.env_service.environments.sample_environments import GuessNumber, GuessOptions
from tests.env_service.peers import ScriptedCompletions, served
from tests.env_service.rollouts.test_conversation import TrajectoryWords


@pytest.fixture(autouse=True)
def importable_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "environments"))


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    model = model_with("chatml", tmp_path)
    path.write_text(
        f'[env-service]\nmodel = "{model}"\n[[env-service.environments]]\nname = "guess"\n'
        'source = "sample_environments:GuessNumber"\noptions = { highest = 0 }\n'
    )
    return path


def said(*words: str, answers: tuple[str, ...] = (), code: int = 0) -> str:
    out, answer = io.StringIO(), _answers(answers)
    assert workbench.main(words, out=out, answer=lambda _: next(answer)) == code
    return out.getvalue()


def _answers(given: tuple[str, ...]) -> Iterator[str]:
    yield from given
    raise EOFError


def test_the_built_in_ones_are_listed_and_those_of_a_file(run_file: Path) -> None:
    text = said("list", "--config", str(run_file))

    assert "nim" in text
    assert "guess           source sample_environments:GuessNumber, of this file" in text


def test_an_opening_is_shown_as_the_model_gets_it(run_file: Path) -> None:
    text = said("show", "guess", "--config", str(run_file))

    assert "<|im_start|>user\n0 to 0?<|im_end|>\n<|im_start|>assistant" in text
    assert "10000 training and 200 evaluation tasks" in text


def test_a_person_plays_one_without_a_file() -> None:
    text = said("play", "sample_environments:TwoWords", answers=("hello",))

    assert text == "to\n[reward 0] \nover: said, reward 0\n"


def test_who_leaves_in_the_middle_of_a_game_is_let_go(run_file: Path) -> None:
    assert said("play", "guess", "--config", str(run_file), answers=("five",)).endswith(
        "[reward 0, invalid] a number\n"
    )


def test_a_person_plays_all_parts_of_a_game_of_two() -> None:
    text = said("play", "nim_duel", "--task", "1", answers=("what?",))

    assert text.startswith("[first]")
    assert "over: illegal (second 1, first 0)" in text


def test_turns_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workbench, "_BENCH_S", 0.01)

    assert "turns/s" in said("bench", "sample_environments:GuessNumber", "--action", "3")


def test_what_is_opened_to_be_timed_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, closed = [], []

    class CountedGuess(GuessNumber):
        def __init__(self, options: GuessOptions) -> None:
            super().__init__(options)
            begun.append(self)

        async def close(self) -> None:
            closed.append(self)

    monkeypatch.setattr(workbench, "_BENCH_S", 0.01)
    monkeypatch.setattr(importlib.import_module("sample_environments"), "GuessNumber", CountedGuess)
    said("bench", "sample_environments:GuessNumber", "--action", "3")

    assert len(begun) > 1
    assert begun[1:] == closed, "the first is the example by which its class is looked at"


def test_a_name_that_is_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    said("show", "nimm", code=2)

    assert "Expected one of addition" in capsys.readouterr().err


async def test_one_rollout_is_told_turn_by_turn(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = TrajectoryWords(tmp_path, "seven 0")
    used: list[TlsFiles] = []
    monkeypatch.setattr(workbench, "client_tls", used.append)
    async with served(ScriptedCompletions(words).handle, "/v1/generate") as url:
        text = await asyncio.to_thread(said, "try", "guess", "--config", str(run_file), "--generator", url)

    assert used == [TlsFiles()]
    assert "— turn 1, given" in text
    assert "a number<|im_end|>" in text.replace("▏", "")
    assert "— sampled 2 tokens, trained, stop, reward 1\n0▏<|im_end|>" in text
    assert "reward 1, solved" in text


def _offer_an_agent(run_file: Path) -> None:
    agent = 'name = "mine"\nsource = "agent"\noptions = { run = "sample_agents:asks" }\n'
    run_file.write_text(f"{run_file.read_text().partition('[[')[0]}[[env-service.environments]]\n{agent}")


async def test_an_agent_is_tried_too(run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "agents"))
    _offer_an_agent(run_file)
    async with served(ScriptedCompletions(Saying(tmp_path, lambda _: "solved")).handle, "/v1/generate") as url:
        text = await asyncio.to_thread(said, "try", "mine", "--config", str(run_file), "--generator", url)

    assert "— turn 1, given" in text
    assert "reward 1, solved" in text


def test_an_agent_cannot_be_played(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said("show", "agent", code=2)

    assert "is an agent, which opens by itself" in capsys.readouterr().err


def test_a_class_beside_the_run_file_is_found_from_any_folder(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    samples = Path(__file__).parent / "environments" / "sample_environments.py"
    (tmp_path / "game_beside_a_run_file.py").write_text(samples.read_text())
    run_file.write_text(run_file.read_text().replace("sample_environments", "game_beside_a_run_file"))

    assert said("show", "guess", "--config", str(run_file)) != ""
