import pytest

from reward_service.verifier.submission import DataError, Submission
from reward_service.verifiers.arguments import MathArguments
from reward_service.verifiers.mathematics.math_answer import math_answer


def reward(answer: str, completion: str) -> float:
    return math_answer(Submission(completion=completion), MathArguments(answer=answer)).reward


@pytest.mark.parametrize(
    ("answer", "completion"),
    [
        (r"\frac{1}{2}", r"Halving one gives \boxed{\frac{1}{2}}."),
        (r"\frac{1}{2}", r"The probability is $\boxed{0.5}$"),
        ("0.5", r"\[ \boxed{\dfrac12} \]"),
        ("1/2", r"\boxed{\frac{2}{4}}"),
        (r"$\frac{3}{4}$", "**Answer: 3/4**"),
        (r"\boxed{7}", "There are 3 boys and 4 girls, so 3 + 4 = 7 children. The answer is 7."),
        ("42", "<think>maybe 41? \\boxed{41}</think>The answer is \\boxed{42}."),
        ("42", "it may be 41</think>\n\n42"),
        ("1234", r"The total is \boxed{1,234}"),
        ("3000", r"\boxed{3{,}000}"),
        (r"2\sqrt{3}+1", r"x = \boxed{1 + 2\sqrt{3}}"),
        ("x^2+2x+1", r"\boxed{(x+1)^2}"),
        ("x=5", r"Dividing by 3 we get \boxed{5}"),
        ("5", r"\boxed{x = 5}"),
        (r"(3, \frac{\pi}{2})", r"In polar form: $\boxed{\left( 3, \frac{\pi}{2} \right)}$"),
        ("(1, 2)", r"\boxed{(1,2)}"),
        (r"\{1, 2\}", r"\boxed{2, 1}"),
        ("1, 2", r"The roots are \boxed{1} and \boxed{2}."),
        ("[0,1)", r"\boxed{[0, 1)}"),
        ("-3", "so the limit is $-3$."),
        (r"\frac{3\pi}{4}", r"\boxed{\frac{3 \pi}{4}}"),
        (r"10^{5}", r"\boxed{100000}"),
        ("7", r"First I got \boxed{5}, but I forgot a term: \boxed{7}"),
    ],
)
def test_a_right_answer_earns_one_in_whatever_form(answer: str, completion: str) -> None:
    assert reward(answer, completion) == 1.0


@pytest.mark.parametrize(
    ("answer", "completion"),
    [
        (r"\frac{1}{2}", r"\boxed{\frac{1}{3}}"),
        (r"2\sqrt{3}+1", r"\boxed{2}"),
        ("(1, 2)", r"\boxed{(2, 1)}"),
        ("[0,1)", r"\boxed{[0,1]}"),
        ("42", ""),
        ("42", "I do not know."),
        ("42", "<think>The answer is \\boxed{42}"),
        ("5", r"\boxed{7} since 5 is excluded"),
        ("5", r"Either \boxed{5} or \boxed{7}"),
        (r"\frac{1}{3}", r"\boxed{0.33}"),
        ("5", r"\boxed{\text{four}}"),
        ("3", r"\boxed{\neq 3}"),
        ("3", r"\boxed{< 3}"),
        ("3", r"\boxed{\leq 3}"),
        ("3", r"\boxed{\not= 3}"),
        ("3", r"\boxed{\not 3}"),
    ],
)
def test_a_wrong_or_missing_answer_earns_nothing(answer: str, completion: str) -> None:
    assert reward(answer, completion) == 0.0


@pytest.mark.parametrize(
    ("answers", "completion"),
    [
        (("5", "6"), r"\boxed{5 \text{ or } 6}"),
        (("5", "6"), r"\boxed{5, 6}"),
        (("5", "6"), r"\boxed{5; 6}"),
        (("5", "6"), r"\boxed{5 \quad 6}"),
        (("5", "6"), r"\boxed{5 (\text{or } 6)}"),
        (("5", "6"), r"\boxed{x = 5, x = 6}"),
        (("5", "6"), r"\boxed{5 = 6}"),
        (("5", "6"), r"\boxed{\{5, 6\}}"),
        (("5", "-5"), r"\boxed{\pm 5}"),
        (("5", "6"), "The answer is 5 or 6."),
        (("A", "B"), r"\boxed{(A) or (B)}"),
        (("A", "B"), r"\boxed{A. B}"),
        (("A", "B"), r"\boxed{(A)(B)}"),
        (("(1, 2)", "(2, 1)"), r"\boxed{(1, 2), (2, 1)}"),
        (("[1, 5)", "[2, 3]"), r"\boxed{[1, 5), [2, 3]}"),
        (("x > 3", "x > 5"), r"\boxed{x > 3 \text{ or } x > 5}"),
        ((r"\mathbb{R}", "(0, 1)"), r"\boxed{\mathbb{R}; (0, 1)}"),
        (("even", "odd"), r"\boxed{\text{even or odd}}"),
    ],
)
def test_a_completion_that_names_several_answers_has_none_of_them(answers: tuple[str, ...], completion: str) -> None:
    assert [reward(answer, completion) for answer in answers] == [0.0] * len(answers)


@pytest.mark.parametrize("answer", [" ", "$$"])
def test_a_right_answer_that_is_no_mathematics_is_an_error_and_not_a_zero(answer: str) -> None:
    with pytest.raises(DataError):
        reward(answer, r"\boxed{5}")


def test_whether_an_answer_was_found_is_a_component() -> None:
    found = math_answer(Submission(completion="The sum is 4."), MathArguments(answer="5"))
    missing = math_answer(Submission(completion="I give up."), MathArguments(answer="5"))
    assert (found.components["parsed"], missing.components["parsed"]) == (1.0, 0.0)
