"""`headway eval`: the processes that it starts, and the options of each."""

import socket
from pathlib import Path

import pytest

from headway.evaluation_command import evaluation_words, missing, to_be_started
from reward_service.config import RewardServiceConfig
from services.config.models import HttpConfig
from services.config.sources import PROCESSES, ConfigError
from services.diagnosis.asked import Condition
from tests.services.diagnosis.statuses import ill, status, well

ALL = ("run", "learner", "generator", "reward-service", "env-service")
RUN = Path("run.toml")


def test_the_options_become_settings_of_the_learner() -> None:
    own = {"--tasks": ["50"], "--samples": ["8"], "--output": ["a.json"], "--against": ["b.json"]}
    words = evaluation_words(own, {"learner": ["--log.level", "debug"]}, path=RUN, tables=ALL)
    assert words == {
        "learner": [
            *("--log.level", "debug", "--evaluation.only", "true"),
            *("--evaluation.final-tasks", "50", "--evaluation.samples", "8"),
            *("--evaluation.output", "a.json", "--evaluation.against", "b.json"),
        ]
    }


def test_a_judge_is_a_setting_of_the_learner() -> None:
    words = evaluation_words({"--judge": ["pairs"], "--against": ["b.jsonl"]}, {}, path=RUN, tables=ALL)
    assert words == {
        "learner": [
            *("--evaluation.only", "true", "--evaluation.judge.verifier", "pairs", "--evaluation.against", "b.jsonl")
        ]
    }


def test_another_model_is_told_to_all_that_have_one() -> None:
    words = evaluation_words({"--model": ["m"]}, {"generator": ["--http.port", "1"]}, path=RUN, tables=ALL)
    assert words["learner"][-2:] == words["env-service"] == ["--model", "m"]
    assert words["generator"] == ["--http.port", "1", "--model", "m"]
    assert "reward-service" not in words
    only = evaluation_words({"--model": ["m"]}, {}, path=RUN, tables=("learner",))
    assert only.keys() == {"learner"}, "generators that are not in the file announce themselves"


def test_what_an_evaluation_is_asked_for_goes_before_the_settings_of_its_run() -> None:
    trained_with = {"learner": ["--model", "start", "--evaluation.final-tasks", "0"]}
    words = evaluation_words({"--model": ["m"], "--tasks": ["50"]}, trained_with, path=RUN, tables=ALL)["learner"]
    assert words.index("m") > words.index("start")
    assert words.index("50") > words.index("0")


def test_a_file_without_a_learner_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"run\.toml: no table \[learner\]"):
        evaluation_words({}, {}, path=RUN, tables=("generator",))


def test_processes_that_are_there_are_used_and_the_others_started() -> None:
    there = [ill("learner", Condition.DEAD), well(status("generator")), ill("reward-service", Condition.DEAD)]
    assert missing(PROCESSES, there) == ["learner", "reward-service", "env-service"]


def test_a_learner_that_runs_keeps_its_place() -> None:
    with pytest.raises(
        ConfigError, match=r"a learner runs at http://127\.0\.0\.1:7300, whose place an evaluation takes"
    ):
        missing(PROCESSES, [well(status("learner"))])


@pytest.mark.parametrize("condition", [Condition.HANGS, Condition.STRANGE])
def test_an_address_that_is_taken_is_named(condition: Condition) -> None:
    with pytest.raises(ConfigError, match=r"7310 is the address of \[generator\], and is taken: does not do well"):
        missing(PROCESSES, [ill("generator", condition)])


def test_where_nobody_listens_all_are_started() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = int(listener.getsockname()[1])
    assert to_be_started({"reward-service": RewardServiceConfig(http=HttpConfig(port=port))}) == ["reward-service"]
