import pytest

from examples.rlhf.language import LONGEST, PROMPT_LENGTH, LetterLanguage, preferences, win_rate

LANGUAGE = LetterLanguage.of_seed(3)


def test_gold_is_taste_less_the_cost_of_repeats_and_of_length() -> None:
    a, b = LANGUAGE.taste["a"], LANGUAGE.taste["b"]
    assert LANGUAGE.gold("ab") == pytest.approx(a + b)
    # four times a: 4 - 2 = 2 too many, squared 4; once b
    assert LANGUAGE.gold("aaaba") == pytest.approx(4 * a + b - 4.0)
    # sixteen different letters: 16 - 14 = 2 too many, squared 4, at 0.05
    letters = "abcdefghijklmnop"
    assert LANGUAGE.gold(letters) == pytest.approx(sum(LANGUAGE.taste[letter] for letter in letters) - 0.2)


def test_nothing_written_is_worth_nothing() -> None:
    assert LANGUAGE.gold("") == 0.0


def test_a_seed_makes_one_language_and_another_seed_another() -> None:
    assert LetterLanguage.of_seed(3) == LANGUAGE
    assert LetterLanguage.of_seed(4) != LANGUAGE


def test_what_follows_a_letter_has_probabilities() -> None:
    assert all(sum(weights) == pytest.approx(1.0) for weights in LANGUAGE.followers.values())


def test_a_person_who_never_errs_prefers_what_gold_prefers_and_one_who_always_errs_the_other() -> None:
    right = preferences(LANGUAGE, count=50, noise=0.0, seed=1)
    wrong = preferences(LANGUAGE, count=50, noise=1.0, seed=1)
    assert all(LANGUAGE.gold(pair.chosen) >= LANGUAGE.gold(pair.rejected) for pair in right)
    assert all(LANGUAGE.gold(pair.chosen) <= LANGUAGE.gold(pair.rejected) for pair in wrong)


def test_prompts_end_with_a_colon_and_continuations_are_never_empty_nor_too_long() -> None:
    for pair in preferences(LANGUAGE, count=200, noise=0.2, seed=2):
        assert len(pair.prompt) == PROMPT_LENGTH + 1
        assert pair.prompt.endswith(":")
        assert 1 <= len(pair.chosen) <= LONGEST
        assert pair.chosen != pair.rejected


def test_a_tie_is_half_a_win() -> None:
    # one win, one tie, two losses: (1 + 0.5) / 4
    assert win_rate([2.0, 1.0, 0.0, 0.0], [1.0, 1.0, 1.0, 5.0]) == 0.375
