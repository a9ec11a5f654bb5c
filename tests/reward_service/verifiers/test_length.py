import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, JsonValue

from reward_service.verifier.submission import Score, Submission, UserError, validate_arguments
from reward_service.verifiers.lengths import LengthArguments, length


def judged(completion: str, **arguments: JsonValue) -> Score:
    return length(Submission(completion=completion), LengthArguments.model_validate(arguments))


@pytest.mark.parametrize(
    ("words", "reward"), [(0, 0.0), (7, 0.0), (8, 0.0), (9, 0.5), (10, 1.0), (15, 1.0), (20, 1.0), (21, 0.5), (22, 0.0)]
)
def test_the_reward_falls_with_the_distance_to_the_range(words: int, reward: float) -> None:
    score = judged("word " * words, minimum=10, maximum=20, penalty=0.5)
    assert score.reward == reward
    assert score.components["length"] == words


def test_by_default_one_word_outside_the_range_loses_all() -> None:
    assert [judged("w " * n, minimum=1, maximum=2).reward for n in range(4)] == [0.0, 1.0, 1.0, 0.0]


def test_a_range_without_an_end_rewards_every_longer_text() -> None:
    assert judged("w " * 1000, minimum=3).reward == 1.0
    assert judged("").reward == 1.0


def test_a_pure_punishment_goes_from_zero_to_its_floor() -> None:
    rewards = [judged("x" * n, maximum=10, unit="characters", in_range=0, penalty=0.1, floor=-1) for n in (5, 12, 99)]
    assert [score.reward for score in rewards] == pytest.approx([0.0, -0.2, -1.0])


@pytest.mark.parametrize(("unit", "count"), [("characters", 17), ("words", 4), ("whitespace", 3)])
def test_each_unit_counts_in_its_own_way(unit: str, count: int) -> None:
    assert judged("don't  stop, né?\n", unit=unit).components["length"] == count


def test_tokens_are_counted_by_the_caller() -> None:
    assert judged("x", unit="tokens", token_count=12, maximum=10, penalty=0.25).reward == 0.5


def test_thoughts_count_unless_the_arguments_say_otherwise() -> None:
    assert judged("<think>a b c</think>d", unit="whitespace").components["length"] == 3
    assert judged("<think>a b c</think>d", unit="whitespace", strip_thinking=True).components["length"] == 1


@pytest.mark.parametrize("arguments", [{"unit": "tokens"}, {"unit": "words", "token_count": 3}])
def test_a_token_count_goes_with_the_unit_tokens_only(arguments: dict[str, JsonValue]) -> None:
    with pytest.raises(UserError, match="token_count"):
        judged("text", **arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        {"minimum": -1},
        {"minimum": 3, "maximum": 2},
        {"floor": 2.0},
        {"penalty": -1},
        {"unit": "bytes"},
        {"maximum": 10**400},
    ],
)
def test_arguments_that_do_not_fit_are_the_callers_error(arguments: dict[str, JsonValue]) -> None:
    with pytest.raises(UserError):
        validate_arguments(model=LengthArguments, arguments=arguments)


@settings(deadline=None)
@given(completion=st.text(), minimum=st.integers(0, 50), extra=st.integers(0, 50), penalty=st.floats(0, 1e308))
def test_any_text_gets_a_reward_between_the_floor_and_the_top(
    completion: str, minimum: int, extra: int, penalty: float
) -> None:
    assert 0.0 <= judged(completion, minimum=minimum, maximum=minimum + extra, penalty=penalty).reward <= 1.0


def test_an_argument_that_is_misspelled_is_told_once_with_the_one_that_is_meant() -> None:
    class Strict(BaseModel, extra="forbid"):
        answer: str

    with pytest.raises(UserError) as caught:
        validate_arguments(model=Strict, arguments={"anser": "2", "volume": 3})
    assert str(caught.value) == (
        "arguments do not fit: anser is none of its arguments; did you mean answer?; volume: Extra inputs are not "
        "permitted (the verifier takes: answer)"
    )
