import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import JsonValue

from reward_service.verifier.submission import Submission, UserError, validate_arguments
from reward_service.verifiers.lengths import OverlongArguments, overlong


def reward(completion: str, **arguments: JsonValue) -> float:
    return overlong(Submission(completion=completion), OverlongArguments.model_validate(arguments)).reward


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (0, 0.0),
        (16384, 0.0),
        (17408, -0.25),
        (18432, -0.5),
        (20480, -1.0),
        (20481, -1.0),
        (1 << 30, -1.0),
    ],
)
def test_the_punishment_is_that_of_the_paper_with_its_lengths(tokens: int, expected: float) -> None:
    assert reward("", maximum=20480, buffer=4096, unit="tokens", token_count=tokens) == expected


def test_words_and_characters_are_counted_here() -> None:
    assert reward("a b c d e", maximum=6, buffer=2) == -0.5
    assert reward("a b c d e", maximum=10, buffer=2, unit="characters") == -0.5
    assert reward("<think>a b</think>", maximum=4, buffer=2) == -1.0


def test_without_a_buffer_the_punishment_jumps_past_the_longest_length() -> None:
    assert [reward("w " * n, maximum=3, buffer=0) for n in (2, 3, 4)] == [0.0, 0.0, -1.0]


@pytest.mark.parametrize("arguments", [{"unit": "tokens"}, {"token_count": 3}])
def test_a_token_count_goes_with_the_unit_tokens_only(arguments: dict[str, JsonValue]) -> None:
    with pytest.raises(UserError, match="token_count"):
        reward("text", maximum=4, buffer=2, **arguments)


@pytest.mark.parametrize(
    "arguments",
    [{}, {"maximum": 4}, {"maximum": 0, "buffer": 0}, {"maximum": 4, "buffer": 5}, {"maximum": 4, "buffer": -1}],
)
def test_arguments_that_do_not_fit_are_the_callers_error(arguments: dict[str, JsonValue]) -> None:
    with pytest.raises(UserError):
        validate_arguments(model=OverlongArguments, arguments=arguments)


@settings(deadline=None)
@given(st.text(), st.integers(1, 100), st.integers(0, 100))
def test_any_text_gets_a_reward_from_minus_one_to_zero(completion: str, maximum: int, buffer: int) -> None:
    assert -1.0 <= reward(completion, maximum=maximum, buffer=min(buffer, maximum), unit="characters") <= 0.0
