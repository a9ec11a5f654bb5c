import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import JsonValue

from reward_service.verifier.submission import Score, Submission, UserError, validate_arguments
from reward_service.verifiers.arguments import SimilarityArguments
from reward_service.verifiers.similarity import similarity

METRICS = ["bleu", "rouge_l", "chrf", "jaccard", "edit"]


def judged(completion: str, *references: str, **more: JsonValue) -> Score:
    arguments = SimilarityArguments.model_validate({"references": [*references], **more})
    return similarity(Submission(completion=completion), arguments)


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("text", ["", "a", "The cat sat on the mat.", "Ünïcödé 河水 🙂", "a" * 100])
def test_a_text_is_equal_to_itself(metric: str, text: str) -> None:
    assert judged(text, text, metric=metric).reward == pytest.approx(1.0)


@pytest.mark.parametrize("metric", METRICS)
def test_texts_without_anything_in_common_have_zero(metric: str) -> None:
    assert judged("abcdef", "uvwxyz", metric=metric).reward == 0.0


def test_of_several_references_the_best_or_the_mean_counts() -> None:
    best = judged("a b", "c d", "a b", metric="jaccard")
    assert (best.reward, best.components) == (1.0, {"max": 1.0, "mean": 0.5})
    assert judged("a b", "c d", "a b", metric="jaccard", aggregate="mean").reward == 0.5


def test_case_differs_only_if_asked_for_and_space_around_never_counts() -> None:
    assert judged(" THE Cat\n", "the cat", metric="edit").reward == 1.0
    assert judged("THE cat", "the cat", metric="edit", case=True).reward == pytest.approx(4 / 7)


def test_punctuation_marks_are_words_of_their_own() -> None:
    assert judged("yes.", "yes", metric="jaccard").reward == 0.5


def test_thoughts_are_not_compared_unless_the_arguments_say_so() -> None:
    assert judged("<think>hm</think>yes", "yes", metric="edit").reward == 1.0
    assert judged("<think>hm</think>yes", "yes", metric="edit", strip_thinking=False).reward < 0.5


@pytest.mark.parametrize(
    "arguments",
    [
        {"references": ["a"]},
        {"references": [], "metric": "bleu"},
        {"references": "a", "metric": "bleu"},
        {"references": ["a"], "metric": "meteor"},
        {"references": ["a" * 100_001], "metric": "bleu"},
        {"references": ["a"], "metric": "jaccard", "n": 0},
    ],
)
def test_arguments_that_do_not_fit_are_the_callers_error(arguments: dict[str, JsonValue]) -> None:
    with pytest.raises(UserError):
        validate_arguments(model=SimilarityArguments, arguments=arguments)


@settings(deadline=None)
@given(st.text(), st.text(), st.sampled_from(METRICS))
def test_any_texts_get_a_share(completion: str, reference: str, metric: str) -> None:
    assert 0.0 <= judged(completion, reference, metric=metric).reward <= 1.0 + 1e-9


@pytest.mark.parametrize("metric", METRICS)
def test_a_mebibyte_is_compared_with_a_short_reference(metric: str) -> None:
    assert judged("ab, " * (1 << 18), "the cat sat on the mat, and ab. " * 20, metric=metric).reward < 0.5
