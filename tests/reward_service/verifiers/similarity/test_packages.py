"""The metrics against what the field's packages give: sacrebleu 2.6.0 and rouge-score 0.1.2."""

import pytest

from reward_service.verifier.submission import Submission
from reward_service.verifiers.arguments import Metric, SimilarityArguments
from reward_service.verifiers.similarity import similarity


def value(metric: Metric, text: str, reference: str) -> float:
    arguments = SimilarityArguments(metric=metric, references=(reference,), case=True)
    return similarity(Submission(completion=text), arguments).reward


@pytest.mark.parametrize(
    ("text", "reference", "expected"),
    [
        ("the cat sat on the mat", "the cat is on the mat", 0.645779),
        ("The cat sat.", "the cat sat", 0.807972),
        ("hello", "help", 0.448893),
        ("", "a word", 0.0),
        ("我喜欢吃苹果。", "我喜欢吃香蕉。", 0.310714),
        ("今天天气很好", "今天的天气很好", 0.375403),
        ("naïve café – déjà vu", "naive cafe - deja vu", 0.256494),
        ("👍🏽 great", "👍 great", 0.589179),
        ("one two", "one two three four five six seven eight", 0.140527),
    ],
)
def test_chrf_is_that_of_sacrebleu(text: str, reference: str, expected: float) -> None:
    assert value("chrf", text, reference) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("text", "reference", "expected"),
    [
        ("the cat sat on the mat", "the cat is on the mat", 0.485492),
        ("The cat sat.", "the cat sat", 0.451801),
        ("hello", "help", 0.0),
        ("", "a word", 0.0),
        ("a b c d e f g", "a b c d x f g", 0.591546),
        ("naïve café – déjà vu", "naive cafe - deja vu", 0.240281),
        ("one two", "one two three four five six seven eight", 0.049787),
        ("3 . 14 is pi", "pi is 3 . 14", 0.562341),
    ],
)
def test_bleu_is_that_of_sacrebleu_with_add_one_smoothing(text: str, reference: str, expected: float) -> None:
    assert value("bleu", text, reference) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("text", "reference", "expected"),
    [
        ("the cat sat on the mat", "the cat is on the mat", 0.833333),
        ("hello", "help", 0.0),
        ("", "a word", 0.0),
        ("a b c d e f g", "a b c d x f g", 0.857143),
        ("one two", "one two three four five six seven eight", 0.4),
    ],
)
def test_rouge_l_is_that_of_rouge_score_for_plain_words(text: str, reference: str, expected: float) -> None:
    assert value("rouge_l", text, reference) == pytest.approx(expected, abs=1e-6)


def test_chinese_is_compared_by_characters_as_it_has_no_spaces() -> None:
    # 6 of 6 and of 7 characters in order: P = 1, R = 6/7
    assert value("rouge_l", "今天天气很好", "今天的天气很好") == pytest.approx(12 / 13)
    # sacrebleu, tokenize="zh", add-k smoothing
    assert value("bleu", "我喜欢吃苹果。", "我喜欢吃香蕉。") == pytest.approx(0.534522, abs=1e-6)
