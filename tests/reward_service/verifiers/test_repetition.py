import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import JsonValue

from reward_service.verifier.submission import Score, Submission, UserError, validate_arguments
from reward_service.verifiers.lengths import RepetitionArguments, longest_run, repeated_fraction, repetition


def judged(completion: str, **arguments: JsonValue) -> Score:
    return repetition(Submission(completion=completion), RepetitionArguments.model_validate(arguments))


@pytest.mark.parametrize(
    ("text", "n", "fraction"),
    [
        ("a b c d", 1, 0.0),
        # a, b, a, b: two of four are new
        ("a b a b", 1, 0.5),
        # ab, ba, ab: two of three are new
        ("a b a b", 2, 1 / 3),
        ("a b a b", 3, 0.0),
        # abc, bca, cab, abc
        ("a b c a b c", 3, 0.25),
        ("a a a a a", 4, 0.5),
        ("a b", 3, 0.0),
        ("", 1, 0.0),
    ],
)
def test_the_share_of_ngrams_that_occurred_before(text: str, n: int, fraction: float) -> None:
    assert repeated_fraction(text.split(), n=n) == pytest.approx(fraction)


@pytest.mark.parametrize(
    ("text", "period", "run"),
    [
        ("a b c d", 4, 0),
        ("a b b c", 4, 2),
        ("a b b b c", 4, 3),
        ("x a b a b a b y", 1, 0),
        ("x a b a b a b y", 2, 6),
        ("a b a", 2, 0),
        ("a b a b a", 2, 5),
        ("", 2, 0),
    ],
)
def test_the_longest_run_of_one_phrase(text: str, period: int, run: int) -> None:
    assert longest_run(text.split(), period=period) == run


def test_the_punishment_is_the_share_times_the_scale() -> None:
    assert judged("The cat sat").reward == 0.0
    assert judged("a b a b", n=1, scale=2.0).reward == -1.0
    assert judged("A b a B", n=1).components == {"repeated": 0.5, "longest_run": 0.0}


def test_what_is_allowed_is_not_punished_and_the_rest_reaches_the_same_end() -> None:
    assert judged("a b a b", n=1, allowed=0.5).reward == 0.0
    assert judged("a b a b", n=1, allowed=0.25).reward == pytest.approx(-1 / 3)


def test_a_run_that_is_too_long_gets_the_whole_punishment() -> None:
    text = "one two three four five six no no no"
    assert judged(text, n=2, longest_run=3).reward == pytest.approx(-1 / 8)
    assert judged(text, n=2, longest_run=2).reward == -1.0


def test_characters_are_units_of_languages_without_spaces() -> None:
    assert judged("好好好好", n=1, unit="characters").components == {"repeated": 0.75, "longest_run": 4.0}


@pytest.mark.parametrize(
    "arguments", [{"n": 0}, {"n": 33}, {"allowed": 1.0}, {"scale": 0}, {"unit": "tokens"}, {"longest_run": 0}]
)
def test_arguments_that_do_not_fit_are_the_callers_error(arguments: dict[str, JsonValue]) -> None:
    with pytest.raises(UserError):
        validate_arguments(model=RepetitionArguments, arguments=arguments)


@settings(deadline=None)
@given(st.text(alphabet="ab "), st.integers(1, 8))
def test_the_share_equals_its_definition(text: str, n: int) -> None:
    ngrams = [tuple(text[index : index + n]) for index in range(len(text) - n + 1)]
    assert repeated_fraction(text, n=n) == (1 - len(set(ngrams)) / len(ngrams) if ngrams else 0.0)


@settings(deadline=None)
@given(st.text(), st.sampled_from(["words", "characters"]), st.integers(1, 32))
def test_any_text_gets_a_reward_from_minus_one_to_zero(completion: str, unit: str, n: int) -> None:
    assert -1.0 <= judged(completion, unit=unit, n=n).reward <= 0.0


@pytest.mark.parametrize("text", ["a" * (1 << 20), "ab" * (1 << 19)])
def test_a_mebibyte_of_one_phrase_is_judged(text: str) -> None:
    assert judged(text, unit="characters", n=32).components["longest_run"] == 1 << 20
