"""Win rates by a judge: a real reward service whose language model is scripted."""

from pathlib import Path

import pytest

from learner.evaluation.judging import ComparisonOpponent, check_judge, judged, opponents_of
from learner.evaluation.results import EvaluationReport, NotComparable, result_of, table
from tests.learner.evaluation.judged_pairs import judging, longer_wins, tasks
from tests.reward_service.judges.scripted_judge import JudgeRequest
from tests.reward_service.scripted_api import Answer, Refusal

AGAINST = Path("b.json")


async def test_win_and_tie_rates_are_means_over_tasks() -> None:
    ours = tasks({0: ("aaa", "a"), 1: ("a",), 2: ("bb",), 7: ("a",)})
    theirs = {
        0: ComparisonOpponent("p", ("bb",)),
        1: ComparisonOpponent("q", ("bb",)),
        2: ComparisonOpponent("r", ("cc",)),
    }
    async with judging() as (config, api):
        found = await judged(ours, theirs, config=config, against=AGAINST)
    # Task 0: won and lost; 1: lost; 2: tied.
    assert (found.tasks, found.pairs, found.failed) == (3, 4, 0)
    assert found.win_rate == pytest.approx((0.5 + 0 + 0.5) / 3)
    assert found.tie_rate == pytest.approx(1 / 3)
    assert found.low < found.win_rate < found.high
    assert found.tie_low < found.tie_rate < found.tie_high
    assert [version.startswith("3+m+") for version in found.versions] == [True]
    assert len(api.bodies) == 8, "both orders of each pair"


async def test_samples_meet_the_opponents_in_turn() -> None:
    async with judging() as (config, api):
        opponents = {0: ComparisonOpponent("the prompt", ("x", "y"))}
        await judged(tasks({0: ("a", "b", "c")}), opponents, config=config, against=AGAINST)
    asked = [JudgeRequest.model_validate(body) for body in api.bodies]
    shown = {frozenset((one.text(1), one.text(2))) for one in asked}
    assert shown == {frozenset("ax"), frozenset("by"), frozenset("cx")}
    assert {one.text(0) for one in asked} == {"the prompt"}


async def test_pairs_without_a_verdict_are_counted_and_in_no_number() -> None:
    def script(number: int, asked: JudgeRequest) -> Answer:
        return Refusal(400, "too long") if "endless" in asked.user else longer_wins(number, asked)

    theirs = {0: ComparisonOpponent("?", ("a",)), 1: ComparisonOpponent("?", ("b",))}
    async with judging(script) as (config, _):
        found = await judged(tasks({0: ("endless",), 1: ("bb",)}), theirs, config=config, against=AGAINST)
    assert (found.tasks, found.pairs, found.failed, found.win_rate) == (1, 1, 1, 1.0)


async def test_a_judge_that_judges_nothing_is_told_with_its_reason() -> None:
    async with judging(lambda number, asked: Refusal(401, "no key")) as (config, _):
        with pytest.raises(NotComparable, match=r"'pairs' could judge none of 1 pairs: .*no key"):
            await judged(tasks({0: ("a",)}), {0: ComparisonOpponent("?", ("b",))}, config=config, against=AGAINST)


async def test_without_a_common_task_there_is_nothing_to_judge() -> None:
    async with judging() as (config, api):
        with pytest.raises(NotComparable, match=r"b\.json has no prompt in common"):
            await judged(tasks({0: ("a",)}), {}, config=config, against=AGAINST)
    assert api.bodies == []


async def test_a_judge_is_looked_at_before_the_work() -> None:
    async with judging() as (config, _):
        await check_judge(config)
    async with judging(verifier="exact_match") as (config, _):
        with pytest.raises(
            NotComparable, match=r"'exact_match' takes no argument `baseline` at .*pairwise ones are: pairs"
        ):
            await check_judge(config)
    async with judging(verifier="nobody", kind="score") as (config, _):
        with pytest.raises(NotComparable, match=r"'nobody' is none of its verifiers at .*pairwise ones are: none"):
            await check_judge(config)


async def test_a_wrong_token_is_told_before_the_work() -> None:
    async with judging() as (config, _):
        with pytest.raises(NotComparable, match=r"no reward service answers: .*401"):
            await check_judge(config.model_copy(update={"token": None}))


def test_the_rates_are_in_the_file_and_in_the_table() -> None:
    ours = tasks({0: ("aaa",)})
    result = result_of(ours, version=0, failed=0, sampled_by=(0, 0), success=1.0, ks=(1,))
    report = EvaluationReport.model_validate(
        {
            "model": "m", "checkpoint": None, "environment": "e", "temperature": 1.0, "success_reward": 1.0,
            "result": result, "comparison": None, "tasks": ours,
            "judged": {
                "against": "b.jsonl", "verifier": "pairs", "versions": ["1+m"], "tasks": 20, "pairs": 38, "failed": 2,
                "win_rate": 0.625, "low": 0.4, "high": 0.8, "tie_rate": 0.1, "tie_low": 0.05, "tie_high": 0.3,
            },
        }
    )  # fmt: skip
    assert EvaluationReport.model_validate_json(report.model_dump_json()) == report
    lines = table(report, path=Path("a.json")).splitlines()
    assert "  preferred    62.5% (40.0% to 80.0%) by pairs on 20 tasks against b.jsonl" in lines
    assert "  tied         10.0% (5.0% to 30.0%) of 38 pairs, 2 more got no verdict" in lines


def test_an_earlier_evaluation_is_an_opponent_on_its_tasks() -> None:
    theirs = EvaluationReport.model_validate(
        {
            "model": "m", "checkpoint": None, "environment": "e", "temperature": 1.0, "success_reward": 1.0,
            "result": result_of(tasks({1: ("x",)}), version=0, failed=0, sampled_by=(0, 0), success=1.0, ks=(1,)),
            "comparison": None, "tasks": tasks({1: ("x", "y"), 2: ("z",)}),
        }
    )  # fmt: skip
    assert opponents_of(tasks({0: ("a",), 1: ("b",)}), theirs) == {1: ComparisonOpponent("task 1", ("x", "y"))}
