"""The verifiers of instructions and shapes as the service runs them: in worker processes, or in its own."""

from collections.abc import Awaitable, Callable

import pytest
from pydantic import JsonValue

from protocol.rewards import ScoreItem, ScoreRequest, ScoreResult
from reward_service.requests.scoring import Scorer
from reward_service.verifier.config import WorkerConfig

OpenScorer = Callable[..., Awaitable[Scorer]]
Arguments = dict[str, JsonValue]

NO_COMMA: Arguments = {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}
ENGLISH: Arguments = {"instruction_id_list": ["language:response_language"], "kwargs": [{"language": "en"}]}
# Two to the length of the text steps: it never ends.
WITHOUT_END = r"^(\w+\s?)*$"
WORDS = "a" * 60 + "!"


async def score(scorer: Scorer, *items: tuple[str, str, Arguments]) -> list[ScoreResult]:
    given = tuple(
        ScoreItem(id=str(index), verifier=verifier, completion=completion, arguments=arguments)
        for index, (verifier, completion, arguments) in enumerate(items)
    )
    response = await scorer.score(ScoreRequest(items=given, deadline_s=120.0))
    return list(response.results)


def kinds(results: list[ScoreResult]) -> list[str | None]:
    return [None if result.error is None else result.error.kind for result in results]


async def test_all_are_offered_and_judge(open_scorer: OpenScorer) -> None:
    results = await score(
        await open_scorer(workers=WorkerConfig(count=1, compute_timeout_s=60.0)),
        ("format", "<think>a</think><answer>b</answer>", {}),
        ("ifeval", "No comma here", NO_COMMA),
        ("ifeval", "The river runs past the old mill and the children play on its green banks.", ENGLISH),
        ("json_schema", '{"a": 1}', {"schema": {"required": ["a"]}}),
        ("length", "one two three", {"minimum": 3}),
        ("overlong", "one two three", {"maximum": 4, "buffer": 2}),
        ("regex", "42", {"patterns": [{"pattern": r"\d+"}]}),
        ("repetition", "a b a b", {"n": 1}),
        ("similarity", "a b", {"metric": "jaccard", "references": ["b c"]}),
    )
    assert kinds(results) == [None] * 9
    expected = [1.0, 1.0, 1.0, 1.0, 1.0, -0.5, 1.0, -0.5, 1 / 3]
    assert [result.reward for result in results] == pytest.approx(expected)


async def test_what_the_caller_got_wrong_is_an_error_of_the_item(open_scorer: OpenScorer) -> None:
    results = await score(
        await open_scorer(workers=WorkerConfig(count=1, compute_timeout_s=60.0)),
        ("format", "x", {"tags": []}),
        ("ifeval", "x", {"instruction_id_list": ["punctuation:no_dot"], "kwargs": [{}]}),
        ("json_schema", "{}", {"schema": {"type": "tuple"}}),
        ("length", "x", {"unit": "tokens"}),
        ("overlong", "x", {}),
        ("regex", "x", {"patterns": [{"pattern": "("}]}),
        ("repetition", "x", {"n": 0}),
        ("similarity", "x", {"metric": "bleu", "references": []}),
    )
    assert kinds(results) == ["user"] * 8


@pytest.mark.parametrize(
    ("verifier", "hostile", "harmless", "completion"),
    [
        ("regex", {"patterns": [{"pattern": WITHOUT_END}]}, {"patterns": [{"pattern": "a"}]}, WORDS),
        ("json_schema", {"schema": {"pattern": WITHOUT_END}}, {"schema": {"pattern": "a"}}, f'"{WORDS}"'),
    ],
)
async def test_a_pattern_without_end_is_stopped_and_the_next_item_is_judged(
    open_scorer: OpenScorer, verifier: str, hostile: Arguments, harmless: Arguments, completion: str
) -> None:
    scorer = await open_scorer(workers=WorkerConfig(count=1, compute_timeout_s=2.0))
    stopped, judged = await score(scorer, (verifier, completion, hostile), (verifier, completion, harmless))
    assert kinds([stopped, judged]) == ["infrastructure", None]
    assert (stopped.reward, judged.reward) == (None, 1.0)
    assert stopped.error is not None
    assert "deadline" in stopped.error.message


async def test_a_mebibyte_is_judged_within_the_deadline(open_scorer: OpenScorer) -> None:
    completion = "The river runs past. " * ((1 << 20) // 21)
    results = await score(
        await open_scorer(workers=WorkerConfig(count=1, compute_timeout_s=110.0)),
        ("format", completion, {}),
        ("ifeval", completion, ENGLISH),
        ("json_schema", completion, {"schema": True}),
        ("length", completion, {"maximum": 10}),
        ("overlong", completion, {"maximum": 10, "buffer": 2}),
        ("regex", completion, {"patterns": [{"pattern": "past"}]}),
        ("repetition", completion, {}),
        ("similarity", completion, {"metric": "edit", "references": ["The river runs past. " * 10]}),
    )
    assert kinds(results) == [None] * 8
