import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from reward_service.verifier.submission import Submission
from reward_service.verifiers.qa import QaArguments, normal_words, qa


def reward(completion: str, answer: object, **arguments: object) -> float:
    made = QaArguments.model_validate({"answer": answer, **arguments})
    return qa(Submission(completion=completion), made).reward


@pytest.mark.parametrize(
    ("answer", "completion"),
    [
        ("Eiffel Tower", "The Eiffel Tower."),
        ("the Beatles", "Beatles"),
        ("George Washington", "george  washington\n"),
        ("U.S.", "US"),
        ("rock 'n' roll", "Rock n Roll"),
        (["NYC", "New York City"], "New York City"),
        ("Denver Broncos", "<answer>The Denver Broncos</answer> won in 2016."),
        ("Denver Broncos", "<think>Carolina Panthers?</think>Denver Broncos"),
        ("１９９８", "1998"),
        ("北京", "北京。"),
        ("The The", "the the"),
        ("1,000", "1000"),
        ("-5", "−5"),
        ("2-1", "2–1"),
        ("e-mail", "email"),
        ("C++", "c++."),
        ("9/11", "9/11."),
        ("hepatitis A", "Hepatitis A."),
        ("1/2", "½"),
        ("2 1/2", "2½"),
        ("H2O", "H₂O"),
    ],
)
def test_strict_is_equal_after_normalisation(answer: object, completion: str) -> None:
    assert reward(completion, answer) == 1.0


@pytest.mark.parametrize(
    ("answer", "completion"),
    [
        ("Eiffel Tower", "The Eiffel Tower in Paris"),
        ("1998", "1999"),
        (["NYC", "New York City"], "New York"),
        ("Denver Broncos", "<think>Denver Broncos</think>"),
        ("Denver Broncos", ""),
        ("Denver Broncos", "<answer>Panthers</answer> Denver Broncos"),
        ("-5", "5"),
        ("5", "-5"),
        ("1.5", "15"),
        (".5", "5"),
        ("1,5", "15"),
        ("1/2", "12"),
        ("2:30", "230"),
        ("1-2", "12"),
        ("C++", "C"),
        ("C", "C#"),
        ("x<1", "x>1"),
        ("hepatitis A", "hepatitis"),
        ("hepatitis A", "hepatitis B"),
        ("102", "10²"),
        ("21/2", "2½"),
    ],
)
def test_strict_is_nothing_else(answer: object, completion: str) -> None:
    assert reward(completion, answer) == 0.0


def test_loose_contains_the_answer_word_for_word() -> None:
    assert reward("It was the Denver Broncos, I believe.", "Denver Broncos", mode="loose") == 1.0
    assert reward("It was a party.", "art", mode="loose") == 0.0
    assert reward("Broncos from Denver", "Denver Broncos", mode="loose") == 0.0
    assert reward("in 1998 or 1999", ["1997", "1999"], mode="loose") == 1.0
    assert reward("首都是北京市", "北京", mode="loose") == 1.0


def test_a_letter_at_the_end_is_no_article() -> None:
    assert reward("It was hepatitis A that he had.", "hepatitis A", mode="loose") == 1.0
    assert reward("It was hepatitis B that he had.", "hepatitis A", mode="loose") == 0.0
    assert reward("The answer is A.", "A", mode="loose") == 1.0
    assert reward("It is a cat.", "A", mode="loose") == 0.0
    assert reward("the cat", "The The", mode="loose") == 0.0


def test_loose_can_be_kept_from_rewarding_a_list_of_everything() -> None:
    everything = " ".join(map(str, range(1900, 2000)))
    assert reward(everything, "1969", mode="loose") == 1.0
    assert reward(everything, "1969", mode="loose", max_words=20) == 0.0
    assert reward("It was in 1969.", "1969", mode="loose", max_words=20) == 1.0


def test_soft_is_the_f1_of_the_words_with_the_best_alternative() -> None:
    # 2 words shared, 3 given, 2 right: precision 2/3, recall 1.
    assert reward("Denver Broncos team", "Denver Broncos", mode="soft") == pytest.approx(0.8)
    assert reward("Denver", "Denver Broncos", mode="soft") == pytest.approx(2 / 3)
    assert reward("Panthers", "Denver Broncos", mode="soft") == 0.0
    assert reward("Denver Broncos", ["Broncos", "the Denver Broncos"], mode="soft") == 1.0
    # A word counts as often as both have it.
    assert reward("no no no", "no no", mode="soft") == pytest.approx(0.8)


def test_the_answer_is_where_the_arguments_say() -> None:
    completion = "It may be Oslo.\nThe answer is Bergen, by the sea.\nI am sure of \\boxed{Stavanger}\nTromsø"
    places = {"stated": "Bergen, by the sea", "boxed": "Stavanger", "last_line": "Tromsø"}
    assert all(reward(completion, answer, extract=[place]) == 1.0 for place, answer in places.items())
    assert reward("Oslo", "Oslo", extract=["tag", "boxed"]) == 0.0
    assert reward("Oslo", "Oslo", extract=["tag", "boxed", "whole"]) == 1.0


def test_all_measures_are_components() -> None:
    components = qa(Submission(completion="Denver Broncos team"), QaArguments(answer="Denver Broncos")).components
    assert components == {"strict": 0.0, "loose": 1.0, "f1": pytest.approx(0.8), "words": 3.0}


@pytest.mark.parametrize(
    "arguments", [{"answer": ""}, {"answer": "?!"}, {"answer": []}, {"answer": "a", "mode": "exact"}]
)
def test_arguments_without_an_answer_are_refused(arguments: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        QaArguments.model_validate(arguments)


@given(st.text(), st.text(min_size=1))
def test_any_text_is_judged_between_0_and_1(completion: str, answer: str) -> None:
    if normal_words(answer):
        for mode in ("loose", "soft", "strict"):
            assert 0.0 <= reward(completion, answer, mode=mode) <= 1.0


@given(st.text(alphabet="abc the.,", min_size=1))
def test_an_answer_is_right_by_every_measure_where_it_is_the_right_one(answer: str) -> None:
    if normal_words(answer.strip()):
        assert [reward(answer, answer, mode=mode) for mode in ("loose", "soft", "strict")] == [1.0] * 3


@pytest.mark.parametrize("hostile", ["a ", ".", "<answer>", "the answer is ", "\n", "北"])
def test_a_hostile_text_of_a_million_characters_is_read_at_once(hostile: str) -> None:
    reward(hostile * (1_000_000 // len(hostile)), "Denver Broncos", mode="soft", extract=["tag", "stated", "whole"])


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("The answer is St. Louis.", "St. Louis"),
        ("The answer is U.S. Grant.", "U.S. Grant"),
        (r"\boxed{\text{Tokyo}}", "Tokyo"),
        ("答案是北京。", "北京"),
    ],
)
def test_the_stated_or_boxed_answer_is_whole_and_without_notation(completion: str, answer: str) -> None:
    arguments = QaArguments(answer=answer, extract=("boxed", "stated"))
    assert qa(Submission(completion=completion), arguments).reward == 1.0
