import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from reward_service.verifier.submission import Score, Submission
from reward_service.verifiers.multiple_choice import MultipleChoiceArguments, multiple_choice

CITIES = ("London", "Paris", "Rome", "Berlin")


def judged(completion: str, *, answer: str = "B", **arguments: object) -> Score:
    made = MultipleChoiceArguments.model_validate({"answer": answer, **arguments})
    return multiple_choice(Submission(completion=completion), made)


@pytest.mark.parametrize(
    "completion",
    [
        "B",
        "b",
        "(B)",
        "B.",
        "**B**",
        "B) Paris",
        "B. Paris",
        "B: 42",
        r"\boxed{B}",
        r"\boxed{\text{(B)}}",
        r"\boxed{\textbf{(B)}\ 12}",
        r"$\boxed{\mathrm{B}}$",
        r"\boxed{(b)}",
        "<answer>B</answer>",
        "<answer> Option B </answer>",
        r"<answer>\boxed{B}</answer>",
        "The answer is (B).",
        "The answer is B",
        "The correct answer is **B**.",
        "So the answer is B because Paris is the capital.",
        "Answer: B",
        "**Answer:** (B) Paris",
        "Final answer: B) Paris",
        "The correct option is B.",
        "The best choice is B, as the others are too small.",
        "Therefore, option (B) is correct.",
        "B is the correct answer, not A.",
        "I choose B.",
        "Option B",
        "Choice: (B)",
        "So B is the answer.",
        "The best option would be (B)",
        "**Answer: B**\n\nExplanation: A is wrong because it is too small. C is close.",
        "I would go with option B.",
        "A is tempting, but it ignores friction. The answer is B.",
        "The answer is A. Wait, friction matters.\nThe answer is B.",
        "The answer is A.\n\nB",
        "<think>The answer is A.</think>The answer is B.",
        "A triangle has three sides, so the answer is B.",
        "Let me check each.\nA) 3 is too small.\nB) 4 fits.\nC) 5 is too large.\n\nThe answer is B",
        r"First \boxed{A}, but corrected: \boxed{B}",
        r"The answer is \(B\).",
        r"The answer is \[B\]",
        "Final answer - B",
        "A is wrong, C is wrong, D is wrong.\n\nSo it must be B.",
    ],
)
def test_the_right_letter_earns_one_in_whatever_form(completion: str) -> None:
    assert judged(completion) == Score(reward=1.0, components={"parsed": 1.0})


@pytest.mark.parametrize(
    "completion",
    [
        "A",
        "(C)",
        r"\boxed{\text{(D)}}",
        "The answer is C.",
        "The answer is B.\nOn second thought, the answer is C.",
        "<think>The answer is B.</think>The answer is A.",
        "<think>The answer is B.",
        r"\boxed{B} is wrong, so \boxed{C}",
        "<answer>A</answer> B",
        "The answer is not B.",
        "The answer is B? No, C.",
    ],
)
def test_another_letter_earns_nothing(completion: str) -> None:
    assert judged(completion).reward == 0.0


@pytest.mark.parametrize(
    "completion",
    [
        "The answer is B or C.",
        "The answer is A and B.",
        "Answer: A, B",
        "Answer: B/C",
        r"\boxed{A \text{ or } B}",
        "<answer>(B) or (D)</answer>",
        "<answer>B; A</answer>",
        "<answer>B. A.</answer>",
        "<answer>B) A) C)</answer>",
        "<answer>(B)(A)</answer>",
        "<answer>(B) (A) (C)</answer>",
        "<answer>B - or A</answer>",
        "<answer>B, or perhaps C</answer>",
    ],
)
def test_several_letters_are_no_answer(completion: str) -> None:
    assert judged(completion) == Score(reward=0.0, components={"parsed": 0.0})
    assert judged(completion, answer="A").reward == 0.0
    assert judged(completion, answer="C").reward == 0.0


@pytest.mark.parametrize(
    "completion",
    [
        "",
        "A triangle has three sides.",
        "The answer is a triangle.",
        "The answer is A triangle with three sides.",
        "The solution is a mixture of both.",
        "I think that a better option exists.",
        "A good answer is hard to give.",
        "I cannot decide.",
        "The choice between A and B is hard.",
        "Which option is correct?",
        "I",
        "An apple",
        "Answer: all of them",
        r"\boxed{12}",
    ],
)
def test_english_words_are_no_letters(completion: str) -> None:
    for answer in "ABCD":
        assert judged(completion, answer=answer, choices=4) == Score(reward=0.0, components={"parsed": 0.0})


@pytest.mark.parametrize(
    "completion",
    [
        "Paris",
        "The answer is Paris.",
        "<answer>paris</answer>",
        r"\boxed{\text{Paris}}",
        "B Paris",
        "Answer: **Paris**",
    ],
)
def test_with_options_the_text_of_one_is_an_answer(completion: str) -> None:
    assert judged(completion, options=list(CITIES)).reward == 1.0
    assert judged(completion, answer="A", options=list(CITIES)).reward == 0.0


@pytest.mark.parametrize("completion", ["Madrid", "The answer is in France.", "<answer>London</answer>"])
def test_with_options_another_text_is_none(completion: str) -> None:
    assert judged(completion, options=list(CITIES)).reward == 0.0


@pytest.mark.parametrize("completion", ["B) London", r"\boxed{\text{(B) Rome}}", "The answer is B: Berlin"])
def test_a_letter_with_the_text_of_another_option_is_no_answer(completion: str) -> None:
    assert judged(completion, options=list(CITIES)) == Score(reward=0.0, components={"parsed": 0.0})


def test_the_text_of_an_option_may_be_a_letter() -> None:
    assert judged("<answer>(B) A</answer>", options=["O", "A", "AB"]).reward == 1.0


def test_a_text_that_two_options_have_names_neither() -> None:
    assert judged("one", options=["one", "one", "two"]).components["parsed"] == 0.0


def test_a_species_is_not_option_c_unless_it_says_so() -> None:
    assert judged("C. elegans is a worm", answer="C", options=list(CITIES)).reward == 0.0
    assert judged("C. elegans", answer="C", options=["yeast", "fly", "elegans"]).reward == 1.0


def test_a_letter_beyond_the_options_is_no_answer() -> None:
    assert judged("The answer is E.", choices=4).components["parsed"] == 0.0
    assert judged("The answer is E.", answer="E", choices=5).reward == 1.0
    assert judged("K", answer="K", choices=11).reward == 1.0


@pytest.mark.parametrize(
    "arguments",
    [
        {"answer": "E", "choices": 4},
        {"answer": "C", "options": ["yes", "no"]},
        {"answer": "AB"},
        {"answer": ""},
        {"answer": "A", "options": ["yes", "no"], "choices": 3},
        {"answer": "A", "option": ["yes", "no"]},
    ],
)
def test_arguments_that_contradict_each_other_are_refused(arguments: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        MultipleChoiceArguments.model_validate(arguments)


@given(st.text() | st.text(alphabet="AB()., \n*oris{}"))
def test_any_text_is_judged(completion: str) -> None:
    assert judged(completion, options=list(CITIES)).reward in (0.0, 1.0)


@pytest.mark.parametrize(
    "hostile", ["the answer is ", "answer ", "choose ", "A is ", r"\boxed{", "<answer>", "(A", "the "]
)
def test_a_hostile_text_of_a_million_characters_is_read_at_once(hostile: str) -> None:
    judged(hostile * (1_000_000 // len(hostile)))


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("The option for $98.89 is not given.\nSo our selection is option E. #### E", "E"),
        ("By problem, the option corresponding to 12:20 is D.\nSo our selection is option D. #### D", "D"),
        (r"The value is $\boxed{15}$. The answer is (C).", "C"),
        ("It's not A because that is red, therefore I think it's B", "B"),
        ("The answer is for sure D, it can't be A or B", "D"),
        ("The answer is not A but C.", "C"),
        ("Thus, option (C).", "C"),
        ("Hence, C.", "C"),
        ("因此选 D。", "D"),
        ("答案是 B。", "B"),
        ("The answer is 12, which corresponds to option (D).", "D"),
        ("The speed is 12 m/s. This matches option D.", "D"),
        ("The answer is 12 (D).", "D"),
        ("B\n\nExplanation: London is the capital of a country.", "B"),
        ("B\n\nA) is too small. C) is too large.", "B"),
        ("(B) London\n\nIt is the capital, and has been for long.", "B"),
        ('{"answer": "B", "reason": "it is the capital"}', "B"),
        ("Ans: (B)", "B"),
        ("b)", "B"),
        ("A) is incorrect. B) is correct. C) is incorrect.", "B"),
        ("故选：B。", "B"),
        ("【答案】B【解析】因为", "B"),
        ("答案是B选项", "B"),
        ("A错误；B正确；C错误；D错误。", "B"),
        ("選択肢を比べます。\n答え：B", "B"),
        ("答えはBです。", "B"),
        ("정답은 B입니다.", "B"),
        ("정답: B", "B"),
        ("Правильный ответ — B", "B"),
        ("Jawaban yang benar adalah B.", "B"),
        ("Đáp án đúng là B.", "B"),
        ("الإجابة: B", "B"),
        ("उत्तर: B", "B"),
        ("উত্তর: B", "B"),
        ("Jibu: B", "B"),
        ("Ìdáhùn: B", "B"),
    ],
)
def test_the_option_is_found_where_people_name_it(completion: str, answer: str) -> None:
    assert multiple_choice(Submission(completion=completion), MultipleChoiceArguments(answer=answer)).reward == 1.0


@pytest.mark.parametrize(
    "completion",
    [
        "A) is incorrect. C) is incorrect.",
        "A: incorrect\nB: correct\nC: incorrect\nD: incorrect",
        "A) 3 is too small\nB) 4 fits\nC) 5 is too large",
        "A. London\nB. Paris\nC. Rome\nD. Berlin",
        "A\nB\nC\nD",
        "Answer: A is wrong",
        "12 does not match option D.",
        "A正确；B错误；C正确。",
        "A对B的影响很大",
        "答案不是A",
        "答案是A、B",
    ],
)
def test_what_is_said_of_options_is_no_choice(completion: str) -> None:
    assert [judged(completion, answer=answer).reward for answer in "ABCD"] == [0.0] * 4


def test_an_option_beside_the_text_of_another_is_none() -> None:
    assert judged("The answer is Paris (B).", options=list(CITIES)).reward == 1.0
    assert judged("The answer is Paris (A).", answer="A", options=list(CITIES)).reward == 0.0


@pytest.mark.parametrize("answer", ["A", "B"])
def test_boxes_side_by_side_name_several_options(answer: str) -> None:
    submission = Submission(completion=r"\boxed{A} or \boxed{B}")
    assert multiple_choice(submission, MultipleChoiceArguments(answer=answer)).reward == 0.0
