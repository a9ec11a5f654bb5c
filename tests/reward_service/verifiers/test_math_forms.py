r"""Forms of answers that people write, in which a reward was once silently wrong. All labels are by the mathematics."""

import pytest

from reward_service.verifier.submission import Submission
from reward_service.verifiers.arguments import MathArguments
from reward_service.verifiers.mathematics.math_answer import math_answer


def reward(answer: str, completion: str) -> float:
    return math_answer(Submission(completion=completion), MathArguments(answer=answer)).reward


@pytest.mark.parametrize(
    ("answer", "completion"),
    [
        ("70,000", "70,000,000"),
        ("70,000", "0, 70"),
        ("1,000,000", "1,000"),
        ("2, 2, 3", "2, 3"),
        ("(1,200)", "1200"),
        ("12:30", "6:15"),
        ("12:00", "1:00"),
        ("11:21", "22:42"),
        ("12:30", "2:5"),
        ("2", r"So we get $ \frac{1}{2} $."),
        (r"\boxed{1} and \boxed{2}", r"\boxed{2}"),
        ("7", r"Either \boxed{5} or \boxed{7}"),
        ("x", "X"),
        ("R", "r"),
        ("C", "(c)"),
        (r"\pi R^2", r"\pi r^2"),
        ("x-y", "y-x"),
        ("-x", "x"),
        ("x^2+y^2=25", "25"),
        (r"x \equiv 3 \pmod 7", r"x \equiv 3 \pmod 5"),
        ("17", r"17 \bmod 5"),
        ("3.5", "3, 5"),
        ("3,5", "3.5"),
        ("2x", "x**2"),
        ("5", r"\boxed{5 \text{ is wrong}}"),
        ("5", "The answer is not 5."),
        ("5", "It is not $5$."),
    ],
)
def test_what_only_looks_like_the_right_answer_earns_nothing(answer: str, completion: str) -> None:
    assert reward(answer, completion) == 0.0


@pytest.mark.parametrize(
    ("answer", "completion"),
    [
        ("70,000", "70000"),
        ("32349", r"32,\! 349"),
        ("12000", "12 000"),
        ("(1,200)", "(1, 200)"),
        ("(1200, 3)", "(1,200, 3)"),
        ("1000.5", "1000,5"),
        ("0.25", "0{,}25"),
        ("2, 3, 2", "2, 2, 3"),
        (r"\{2, 3\}", "2, 3"),
        ("12:30", "12:30 pm"),
        ("7:32", "14:64"),
        ("3:2", "6:4"),
        (r"\frac{1}{2}", r"So we get $ \frac{1}{2} $."),
        (r"\boxed{1} and \boxed{2}", r"\boxed{1,2}"),
        ("1,2", r"\boxed{1} and \boxed{2}"),
        ("2", r"$17 \bmod 5 = 2$"),
        ("2", "17 mod 5"),
        (r"x \equiv 3 \pmod 7", r"x \equiv 10 \pmod{7}"),
        ("x^{2/3}", r"\sqrt[3]{x^2}"),
        ("x^{2/3}", r"\sqrt[3]{x}^2"),
        ("x < 1", "-x > -1"),
        ("x-y", "-y+x"),
        ("|AB|=1", "1"),
        ("1", "|AB|=1"),
        ("V_1:V_2=11:21", "11:21"),
        (r"\frac{NO}{BO}=\frac{1}{2}", r"\frac{1}{2}"),
        ("f(2)=7", "7"),
        ("0<f(x)<1", "(0,1)"),
        ("p=5,q=2;p=7,q=2", "(5,2),(7,2)"),
        ("x^2", "x**2"),
        ("n(n+1)/2", r"\sum_{i=1}^{n} i = \frac{n(n+1)}{2}"),
        (r"$\lfloor xn\rfloor$, where $x = 2$", r"$\lfloor xn\rfloor$, where $x = 2$"),
    ],
)
def test_a_right_answer_in_another_form_earns_one(answer: str, completion: str) -> None:
    assert reward(answer, completion) == 1.0


@pytest.mark.parametrize(
    ("answer", "completion"),
    [
        ("34", "The largest $n$ is 34."),
        ("34", "Final Answer: The largest $n$ is 34."),
        ("42", "The answer is that the value of $x$ is $42$."),
        ("10", "The answer is as follows: the maximum of $x^2+1$ on $[0,3]$ is $10$."),
        ("99", "结论：Haley总共有99颗弹珠。"),
        ("13/28", "计划的比例为13/28"),
        ("2/5", r"答案：每份应该是 (\frac{2}{5}) 吨。"),
        ("220", "Réponse: Janeth aura encore 220 $ à payer d'ici 12 mois."),
        ("0.5", "so x is .5."),
        ("42", "So the answer is $x=42$, where $y=3$."),
        ("4", "The answer is 4, not 5."),
        ("12", "Answer: twelve"),
        (r"\emptyset", "There is no solution\n\nno solution"),
        ("B", "So the point is $B$."),
        ("12", "The answer is 12 because there are 3 rows of 4."),
    ],
)
def test_the_value_is_found_in_the_sentence_that_says_it(answer: str, completion: str) -> None:
    assert reward(answer, completion) == 1.0


@pytest.mark.parametrize(
    ("answer", "completion"), [("2", "The largest $n$ is 34."), ("6", "It costs $5 and $6 more: $11")]
)
def test_another_value_of_the_sentence_is_not_the_answer(answer: str, completion: str) -> None:
    assert reward(answer, completion) == 0.0
