"""The metrics against numbers derived by hand."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reward_service.verifier.submission import DataError
from reward_service.verifiers.similarity import (
    bleu,
    chrf,
    common_subsequence,
    edit_distance,
    edit_ratio,
    jaccard,
    matches,
    rouge_l,
)

SMALL = st.text(alphabet="abc", max_size=12)


@pytest.mark.parametrize(
    ("candidate", "reference", "expected"),
    [
        # of 6, 5, 4 and 3 n-grams 5, 3, 2 and 1 match: p1 = 5/6, p2 = 4/6, p3 = 3/5, p4 = 2/4; BP = 1
        ("the cat sat on a mat", "the cat sat on the mat", (5 / 6 * 4 / 6 * 3 / 5 * 2 / 4) ** 0.25),
        # c = 4, r = 6: BP = exp(1 - 6/4); all n-grams match
        ("the cat sat on", "the cat sat on the mat", math.exp(-0.5)),
        # clipped: one of three; the rest smoothed: p2 = 1/3, p3 = 1/2, p4 = 1/1
        ("the the the", "the cat", (1 / 3 * 1 / 3 * 1 / 2 * 1) ** 0.25),
        # one word: p1 = 1, the others (0+1)/(0+1)
        ("cat", "cat", 1.0),
        ("dog", "cat", 0.0),
        ("", "", 1.0),
        ("", "cat", 0.0),
        ("cat", "", 0.0),
    ],
)
def test_bleu(candidate: str, reference: str, expected: float) -> None:
    assert bleu(candidate.split(), reference.split()) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("candidate", "reference", "expected"),
    [
        # subsequence "police the gunman": P = 3/4, R = 3/4
        ("police ended the gunman", "police killed the gunman", 3 / 4),
        # Lin 2004: "police kill the gunman" against the same reference has "police the gunman", P = R = 3/4,
        # and "the gunman kill police" has "the gunman", P = R = 1/2
        ("the gunman kill police", "police killed the gunman", 1 / 2),
        # subsequence of 2: P = 2/2, R = 2/6, F1 = 2 * 1/3 / (4/3)
        ("the mat", "the cat sat on the mat", 1 / 2),
        ("dog", "cat", 0.0),
        ("", "", 1.0),
        ("", "cat", 0.0),
    ],
)
def test_rouge_l(candidate: str, reference: str, expected: float) -> None:
    assert rouge_l(candidate.split(), reference.split()) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("candidate", "reference", "expected"),
    [
        ("abc", "abc", 1.0),
        ("a b\nc", "abc", 1.0),
        # orders 1 to 3: P = R = (2/3 + 1/2 + 0/1) / 3 = 7/18
        ("abd", "abc", 7 / 18),
        # orders 1 and 2: P = (2/2 + 1/1) / 2 = 1, R = (2/4 + 1/3) / 2 = 5/12; 5 P R / (4 P + R) = (25/12) / (53/12)
        ("ab", "abcd", 25 / 53),
        # and the other way: P = 5/12, R = 1; (25/12) / (20/12 + 1)
        ("abcd", "ab", 25 / 32),
        ("xyz", "abc", 0.0),
        ("", "", 1.0),
        ("", "abc", 0.0),
    ],
)
def test_chrf(candidate: str, reference: str, expected: float) -> None:
    assert chrf(candidate, reference) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("candidate", "reference", "n", "expected"),
    [
        ("a b c", "b c d", 1, 2 / 4),
        ("a a b", "b b a", 1, 1.0),
        # ab, bc against bc, cd
        ("a b c", "b c d", 2, 1 / 3),
        ("a", "a", 2, 1.0),
        ("a", "b", 2, 0.0),
        ("a", "a b", 2, 0.0),
        ("", "", 1, 1.0),
    ],
)
def test_jaccard(candidate: str, reference: str, n: int, expected: float) -> None:
    assert jaccard(candidate.split(), reference.split(), n=n) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("candidate", "reference", "distance", "ratio"),
    [
        ("kitten", "sitting", 3, 4 / 7),
        ("flaw", "lawn", 2, 1 / 2),
        ("abc", "", 3, 0.0),
        ("", "", 0, 1.0),
        ("ab", "ba", 2, 0.0),
    ],
)
def test_edit_distance_and_its_ratio(candidate: str, reference: str, distance: int, ratio: float) -> None:
    assert edit_distance(candidate, reference) == distance
    assert edit_ratio(candidate, reference) == pytest.approx(ratio)


def test_an_ngram_matches_at_most_as_often_as_the_reference_has_it() -> None:
    assert matches("aaab", "aab", n=1) == 3
    assert matches(["a", "b", "a", "b"], ["a", "b"], n=2) == 1


def table_subsequence(left: str, right: str) -> int:
    """By the usual table."""
    row = [0] * (len(right) + 1)
    for unit in left:
        above = row
        row = [0]
        for index, other in enumerate(right):
            row.append(above[index] + 1 if unit == other else max(above[index + 1], row[index]))
    return row[-1]


def table_distance(left: str, right: str) -> int:
    """By the usual table."""
    row = list(range(len(right) + 1))
    for count, unit in enumerate(left, start=1):
        above = row
        row = [count]
        for index, other in enumerate(right):
            row.append(min(above[index + 1] + 1, row[index] + 1, above[index] + (unit != other)))
    return row[-1]


@settings(deadline=None)
@given(SMALL, SMALL)
def test_the_rows_of_bits_agree_with_the_tables(left: str, right: str) -> None:
    assert common_subsequence(left, right) == table_subsequence(left, right)
    assert edit_distance(left, right) == table_distance(left, right)


def test_rows_longer_than_a_machine_word_agree_with_the_tables() -> None:
    left, right = "abcab" * 40, "bacba" * 37
    assert common_subsequence(left, right) == table_subsequence(left, right)
    assert edit_distance(left, right) == table_distance(left, right)


def test_texts_that_are_too_long_to_be_aligned_are_an_error_and_not_a_zero() -> None:
    left, right = "a" * (1 << 17), "b" * (1 << 16)
    with pytest.raises(DataError, match="too long"):
        common_subsequence(left, right)
    with pytest.raises(DataError, match="too long"):
        edit_distance(left, right)
