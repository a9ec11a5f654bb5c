import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import JsonValue

from reward_service.verifier.submission import Score, Submission, UserError, validate_arguments
from reward_service.verifiers.patterns import RegexArguments, regex


def judged(completion: str, *patterns: dict[str, JsonValue], **more: JsonValue) -> Score:
    return regex(Submission(completion=completion), RegexArguments.model_validate({"patterns": [*patterns], **more}))


@pytest.mark.parametrize(
    ("pattern", "completion", "reward"),
    [
        ({"pattern": r"\d+"}, "The answer is 42.", 1.0),
        ({"pattern": r"\d+"}, "No number.", 0.0),
        ({"pattern": r"\d+", "match": "full"}, "42", 1.0),
        ({"pattern": r"\d+", "match": "full"}, "42\n", 0.0),
        ({"pattern": r"\d+", "forbidden": True}, "No number.", 1.0),
        ({"pattern": r"\d+", "forbidden": True}, "42", 0.0),
        ({"pattern": r"\d+", "match": "full", "forbidden": True}, "42 apples", 1.0),
        ({"pattern": "yes"}, "YES", 0.0),
        ({"pattern": "yes", "flags": ["ignorecase"]}, "YES", 1.0),
        ({"pattern": "a.b"}, "a\nb", 0.0),
        ({"pattern": "a.b", "flags": ["dotall"]}, "a\nb", 1.0),
        ({"pattern": "^b$", "flags": ["multiline"]}, "a\nb", 1.0),
        ({"pattern": r"^\w+$", "flags": ["ascii"]}, "é", 0.0),
        ({"pattern": "a b # spaces", "flags": ["verbose", "ignorecase"]}, "AB", 1.0),
        ({"pattern": ""}, "", 1.0),
        ({"pattern": "[[a]"}, "a", 1.0),
    ],
)
def test_a_pattern_is_searched_or_matched_in_full_required_or_forbidden(
    pattern: dict[str, JsonValue], completion: str, reward: float
) -> None:
    assert judged(completion, pattern).reward == reward


def test_patterns_count_by_their_weights_or_must_all_be_satisfied() -> None:
    patterns: tuple[dict[str, JsonValue], ...] = (
        {"pattern": "one", "weight": 3.0},
        {"pattern": "two"},
        {"pattern": "three", "forbidden": True},
    )
    score = judged("one", *patterns)
    assert score.reward == pytest.approx(0.8)
    assert score.components == pytest.approx(
        {"fraction": 0.8, "all": 0.0, "pattern_1": 1.0, "pattern_2": 0.0, "pattern_3": 1.0}
    )
    assert judged("one", *patterns, reward="all").reward == 0.0
    assert judged("one two", *patterns, reward="all").reward == 1.0


def test_thoughts_count_unless_the_arguments_say_otherwise() -> None:
    assert judged("<think>42</think>None", {"pattern": r"\d"}).reward == 1.0
    assert judged("<think>42</think>None", {"pattern": r"\d"}, strip_thinking=True).reward == 0.0


@pytest.mark.parametrize(
    "pattern", ["(", "a{2,1}", "(?P<n>a)(?P<n>b)", "*", r"\1", "(?<=a+)b", "(" * 5000 + ")" * 5000]
)
def test_a_pattern_that_is_none_is_the_callers_error(pattern: str) -> None:
    with pytest.raises(UserError, match="regular expression"):
        judged("text", {"pattern": pattern})


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"patterns": []},
        {"patterns": ["a"]},
        {"patterns": [{"pattern": "a", "weight": 0}]},
        {"patterns": [{"pattern": "a", "weight": -1}]},
        {"patterns": [{"pattern": "a", "flags": ["i"]}]},
        {"patterns": [{"pattern": "a" * 10_001}]},
        {"patterns": [{"pattern": "a"}] * 65},
    ],
)
def test_arguments_that_do_not_fit_are_the_callers_error(arguments: dict[str, JsonValue]) -> None:
    with pytest.raises(UserError):
        validate_arguments(model=RegexArguments, arguments=arguments)


@settings(deadline=None)
@given(completion=st.text(), pattern=st.text(alphabet="ab()[]{}|^$.\\*+?0123dwsPk<>=!:#-", max_size=12))
def test_any_text_and_pattern_get_a_score_or_the_callers_error(completion: str, pattern: str) -> None:
    with contextlib.suppress(UserError):
        assert judged(completion, {"pattern": pattern}).reward in (0.0, 1.0)
