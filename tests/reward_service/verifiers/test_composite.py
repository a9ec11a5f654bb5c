"""A reward made of others' rewards: weights, gates, combinations, and what becomes of a part that fails."""

from collections.abc import Awaitable, Callable

import httpx
import pytest
from pydantic import JsonValue

from protocol.rewards import ScoreItem, ScoreRequest, ScoreResult
from reward_service.requests.scoring import Scorer
from tests.reward_service.sample_verifiers import raise_error

OpenScorer = Callable[..., Awaitable[Scorer]]
Json = dict[str, JsonValue]


def right(**more: JsonValue) -> Json:
    """A part that gives 1."""
    return {"verifier": "exact_match", "arguments": {"answer": "yes"}, **more}


def wrong(**more: JsonValue) -> Json:
    """A part that gives 0."""
    return {"verifier": "exact_match", "arguments": {"answer": "no"}, **more}


async def judge(scorer: Scorer, parts: list[Json], **more: JsonValue) -> ScoreResult:
    arguments: Json = {"parts": [*parts], **more}
    item = ScoreItem(id="a", verifier="composite", completion="yes", arguments=arguments)
    (result,) = (await scorer.score(ScoreRequest(items=(item,)))).results
    return result


def error_of(result: ScoreResult) -> tuple[str, str]:
    assert result.reward is None, "a failed score has no reward, not one of 0"
    assert result.error is not None
    return result.error.kind, result.error.message


@pytest.mark.parametrize(
    ("combine", "reward"), [("sum", 2.5), ("mean", 2.5 / 3.5), ("min", 0.0), ("max", 2.0), ("product", 0.0)]
)
async def test_the_weighted_rewards_are_combined(open_scorer: OpenScorer, combine: str, reward: float) -> None:
    parts = [right(name="a", weight=2.0), right(name="b", weight=0.5), wrong(name="c")]
    result = await judge(await open_scorer(), parts, combine=combine)
    assert result.reward == pytest.approx(reward)
    assert result.components == {"a": 1.0, "b": 1.0, "c": 0.0}


async def test_the_components_of_a_part_are_kept_under_its_name_and_its_version_in_the_whole(
    open_scorer: OpenScorer,
) -> None:
    part: Json = {"verifier": "contains_async", "arguments": {"word": "y"}, "weight": 0.0}
    result = await judge(await open_scorer(), [part, right()])
    assert result.reward == 1.0
    assert result.components == {"contains_async": 1.0, "contains_async.length": 3.0, "exact_match": 1.0}
    assert result.verifier_version == "1(contains_async 7, exact_match 1)"


async def test_what_the_parts_say_of_their_rewards_is_said_by_their_names(open_scorer: OpenScorer) -> None:
    parts: list[Json] = [
        {"verifier": "numeric", "arguments": {"answer": 5}, "name": "number"},
        right(),
        {"verifier": "numeric", "arguments": {"answer": 6}, "name": "other"},
    ]
    result = await judge(await open_scorer(), parts)
    assert result.explanation == "number: no number was found\nother: no number was found"


async def test_a_closed_gate_decides_and_an_open_one_changes_nothing(open_scorer: OpenScorer) -> None:
    scorer = await open_scorer()
    gate: Json = {"at_least": 1.0, "otherwise": -1.0}
    closed = await judge(scorer, [right(name="a"), wrong(name="b", gate=gate)])
    assert (closed.reward, closed.components) == (-1.0, {"a": 1.0, "b": 0.0})
    opened = await judge(scorer, [wrong(name="a"), right(name="b", gate=gate, weight=0.0)])
    assert opened.reward == 0.0


async def test_the_error_of_a_part_is_the_whole_one_unless_the_part_is_optional(open_scorer: OpenScorer) -> None:
    scorer = await open_scorer()
    broken: Json = {"verifier": "raise_error"}
    line = raise_error.__code__.co_firstlineno + 2
    assert error_of(await judge(scorer, [right(), broken])) == (
        "data",
        "part raise_error: the verifier raised ZeroDivisionError: division by zero "
        f"(tests/reward_service/sample_verifiers.py, line {line}, in raise_error: return 1 / 0)",
    )
    result = await judge(scorer, [right(weight=0.5), {**broken, "optional": True}], combine="mean")
    assert (result.reward, result.components) == (1.0, {"exact_match": 1.0, "raise_error.failed": 1.0})
    kind, _ = error_of(await judge(scorer, [right(weight=0.0), {**broken, "optional": True}]))
    assert kind == "data", "parts that count for nothing make no reward alone"


async def test_parts_are_counted_by_their_own_verifiers(client: httpx.AsyncClient) -> None:
    parts = [right(), {"verifier": "hang_async", "optional": True}, {"verifier": "made up", "optional": True}]
    item = {"id": "a", "verifier": "composite", "completion": "yes", "arguments": {"parts": parts}, "deadline_s": 0.1}
    answer = await client.post("/v1/score", json={"items": [item]})
    assert answer.json()["results"][0]["reward"] == 1.0
    metrics = (await client.get("/metrics")).text
    assert 'headway_reward_service_score_seconds_count{verifier="composite"} 1.0' in metrics
    assert 'headway_reward_service_score_seconds_count{verifier="exact_match"} 1.0' in metrics
    assert 'headway_reward_service_errors_total{kind="infrastructure",verifier="hang_async"} 1.0' in metrics
    assert 'headway_reward_service_errors_total{kind="user",verifier="unknown"} 1.0' in metrics


async def test_parts_are_judged_beside_each_other_and_end_at_the_deadline(open_scorer: OpenScorer) -> None:
    scorer = await open_scorer()
    arguments: Json = {"parts": [{"verifier": "hang_async", "name": name} for name in ("a", "b")]}
    item = ScoreItem(id="a", verifier="composite", completion="", arguments=arguments, deadline_s=0.2)
    (result,) = (await scorer.score(ScoreRequest(items=(item,)))).results
    assert error_of(result)[0] == "infrastructure"


async def test_composites_in_composites_are_judged_three_deep_and_no_deeper(open_scorer: OpenScorer) -> None:
    scorer = await open_scorer()

    def around(part: Json) -> Json:
        return {"verifier": "composite", "arguments": {"parts": [part]}}

    two_in_one = await judge(scorer, [around(around(right()))])
    assert two_in_one.reward == 1.0
    assert two_in_one.components["composite.composite.exact_match"] == 1.0
    kind, message = error_of(await judge(scorer, [around(around(around(right())))]))
    assert kind == "user"
    assert "more than 3 deep" in message


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"parts": []}, "at least 1 item"),
        ({"parts": [right(), right()]}, "two parts are named exact_match"),
        ({"parts": [right(weight=0.0)]}, "all weights are 0"),
        ({"parts": [right(name="a", weight=-1.0), right()], "combine": "mean"}, "weights of 0 or more"),
        ({"parts": [right(optional=True, gate={"at_least": 1.0})]}, "cannot be optional"),
        ({"parts": [right(wieght=1.0)]}, "wieght"),
        ({"parts": [{"verifier": "none"}]}, "unknown verifier 'none'"),
        ({"parts": {"verifier": "exact_match"}}, "parts"),
    ],
)
async def test_arguments_that_do_not_fit_are_the_users_error(
    open_scorer: OpenScorer, arguments: Json, complaint: str
) -> None:
    scorer = await open_scorer()
    item = ScoreItem(id="a", verifier="composite", completion="yes", arguments=arguments)
    (result,) = (await scorer.score(ScoreRequest(items=(item,)))).results
    kind, message = error_of(result)
    assert kind == "user"
    assert complaint in message


async def test_a_reward_beyond_all_numbers_is_an_error(open_scorer: OpenScorer) -> None:
    kind, _ = error_of(await judge(await open_scorer(), [right(name="a", weight=1e308), right(name="b", weight=1e308)]))
    assert kind == "data"
