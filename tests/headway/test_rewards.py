"""Verifiers from Python: in a notebook, and as reward functions of TRL and verl."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, SecretStr

from headway.certificates import Authority
from headway.rewards import NoReward, RewardServer, for_trl, for_verl, serving
from protocol.rewards import ScoreItem
from reward_service.config import RewardServiceConfig
from reward_service.verifier import Submission
from reward_service.verifier.submission import UserError, inspect_function
from services.config.models import HttpConfig


class AnswerArguments(BaseModel):
    answer: int


def close(submission: Submission, arguments: AnswerArguments) -> float:
    """Less the further away."""
    return 1 - abs(int(submission.completion) - arguments.answer) / 10


def longest(completions: list[str], prompts: list[str], answer: list[int], **columns: list[object]) -> list[float]:
    """A reward function as TRL's are."""
    return [
        float(len(text) + len(prompt) + given) for text, prompt, given in zip(completions, prompts, answer, strict=True)
    ]


async def not_mine(completions: list[str]) -> list[float | None]:
    return [None for _ in completions]


def logs(completions: list[str], log_metric: Callable[[str, float], None], **columns: Any) -> list[float]:
    log_metric("letters", float(len(completions[0])))
    columns["log_extra"]("first", [completions[0][0]])
    return [float(len(completions[0]))]


def best(completions: list[str], **columns: Any) -> list[float]:
    return [float(len(one) == max(map(len, completions))) for one in completions]


def wants_more(completions: list[str], level: list[int]) -> list[float]:
    return [float(one) for one in level]


@pytest.fixture(scope="module")
def server() -> Iterator[RewardServer]:
    functions: dict[str, Callable[..., object]] = {
        "close": close,
        "longest": longest,
        "not_mine": not_mine,
        "wants_more": wants_more,
        "logs": logs,
        "best": best,
    }
    with serving(functions) as running:
        yield running


def _item(verifier: str, completion: str, **arguments: int) -> ScoreItem:
    return ScoreItem(id="1", verifier=verifier, completion=completion, prompt="ab", arguments=dict(arguments))


async def test_a_service_and_its_client_work_while_an_event_loop_runs(server: RewardServer) -> None:
    (ours,) = server.score([_item("close", "41", answer=42)])
    (included,) = server.score([_item("exact_match", "42", answer="42")])  # type: ignore[arg-type]

    assert (ours.reward, included.reward) == (0.9, 1.0)


def test_a_service_with_a_token_and_certificates_answers_its_own_client(tmp_path: Path) -> None:
    authority = Authority.new()
    authority.write(tmp_path)
    authority.issue(tmp_path, "reward-service", hosts=())
    http = HttpConfig(
        port=0,
        token=SecretStr("a-token-of-this-test"),
        tls_cert_file=tmp_path / "reward-service.pem",
        tls_key_file=tmp_path / "reward-service.key",
        tls_ca_file=tmp_path / "ca.pem",
        tls_client_ca_file=tmp_path / "ca.pem",
    )
    with serving({"close": close}, config=RewardServiceConfig(sandbox="off", http=http)) as guarded:
        (score,) = guarded.score([_item("close", "41", answer=42)])
    assert score.reward == 0.9


def test_a_reward_function_of_trl_is_a_verifier(server: RewardServer) -> None:
    (scored,) = server.score([_item("longest", "abc", answer=5, other=1)])

    assert scored.reward == 10.0


def test_what_such_a_function_logs_goes_into_its_score(server: RewardServer) -> None:
    (scored,) = server.score([_item("logs", "abc", answer=5)])

    assert (scored.reward, scored.components) == (3.0, {"letters": 3.0})
    assert scored.explanation == "first: a"


def test_such_a_function_is_called_once_with_all_of_a_group(server: RewardServer) -> None:
    group = {"group": "g", "group_size": 3}
    items = [_item("logs", text).model_copy(update={"id": text, **group}) for text in ("a", "bb", "ccc")]

    refused = server.score(items)
    compared = server.score([item.model_copy(update={"verifier": "best"}) for item in items])

    assert [one.reward for one in compared] == [0.0, 0.0, 1.0]
    assert all(one.error is not None and "for 3 completions" in one.error.message for one in refused)


@pytest.mark.parametrize("name", ["completion_ids", "trainer_state"])
def test_a_function_of_trl_that_needs_what_only_a_trainer_has_is_refused(name: str) -> None:
    made: dict[str, Callable[..., object]] = {}
    exec(f"def reward(completions, {name}, **columns): return [1.0]", made)
    with pytest.raises(UserError, match=f"takes {name}, which a reward service does not have"):
        inspect_function(function=made["reward"], path="mine:reward")


@pytest.mark.parametrize(("verifier", "word"), [("not_mine", "does not judge"), ("wants_more", "level")])
def test_what_such_a_function_does_not_judge_has_an_error_and_no_reward(
    server: RewardServer, verifier: str, word: str
) -> None:
    (scored,) = server.score([_item(verifier, "abc")])

    assert scored.reward is None
    assert scored.error is not None
    assert word in scored.error.message


def test_a_verifier_is_a_reward_function_of_trl(server: RewardServer) -> None:
    reward = for_trl("close", urls=[server.url])

    assert reward(["41", "no number"], prompts=["a", "b"], answer=[42, 42]) == [0.9, None]
    conversations = [[{"role": "assistant", "content": "40"}]]
    assert reward(conversations, prompts=[[{"role": "user", "content": "a"}]], answer=[42]) == [0.8]
    assert reward.__name__ == "close"


def test_a_service_is_started_where_none_is_named_and_a_wrong_argument_is_said() -> None:
    assert for_trl("numeric")(["4", "5"], answer=["4", "4"]) == [1.0, 0.0]
    with pytest.raises(NoReward, match="colour"):
        for_trl("numeric", arguments={"colour": "red"})(["4"], answer=["4"])


def test_a_verifier_is_a_reward_function_of_verl(server: RewardServer) -> None:
    compute_score = for_verl("close", urls=[server.url])

    assert compute_score("sums", "41", 42, {"index": 0}) == 0.9
    assert compute_score(data_source="sums", solution_str="40", ground_truth={"answer": 42}) == 0.8
    with pytest.raises(NoReward, match="close of a completion of sums"):
        compute_score("sums", "no number", 42)
