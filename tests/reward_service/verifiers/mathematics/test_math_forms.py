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
        ("7", r"\boxed{\color{red}{7}}"),
        ("7", r"\boxed{{\color{blue}7}}"),
        ("1200", r"\boxed{\textcolor{red}{1,200}}"),
        ("12", "Twelve"),
        ("-21", "minus twenty-one."),
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


@pytest.mark.parametrize(
    ("answer", "completion"),
    [
        ("9", "Therefore, there are 9 ways to seat 2 guests at 3 tables."),
        ("9", "So exactly 9 is the largest such number below 40."),
        ("9", "In all there are nine such numbers."),
        ("312", "The answer is three hundred and twelve."),
        ("-7", "The answer is minus seven."),
        ("12", "x = 12 is the only root, since x = -4 is too small."),
        ("(4, -1)", "The centre is (4, -1)."),
        ("4, -1", "The roots are 4 and -1."),
        (r"\frac{1}{20}", "The chance is 0.05 or 5%."),
        (r"\frac{5}{12}", "The probability is 5 out of 12."),
        (r"\frac{1}{4060}", "The probability of it is 1 in 4,060."),
        ("C", "The answer is C because (A) and (B) do not add up."),
        ("C", "The answer is C, it cannot be A."),
        ("C", "Therefore (C)."),
        ("C", "C) copper"),
        ("C", r"\boxed{\text{Option C}}"),
        ("ABD", r"\boxed{A, B, D}"),
        ("15", "3 x 5 = 15"),
        ("20", "She needs 20 more stamps to have 100."),
        ("4:45", "The class ends at 4:45 PM."),
        (r"\sqrt{7}", "The height is √7."),
        ("2x+5", "The remainder is 2x + 5."),
        ("24", "The number of orders is 4! = 24."),
        (r"\frac{2}{3}", "The answer is two thirds."),
        ("D", "Hence option D is correct."),
        ("D", "The right answer is option D: 14."),
        ("no", "No, there is no such graph."),
        (r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", "\\begin{bmatrix}\n 1 & 2 \\\\\n 3 & 4 \n \\end{bmatrix}"),
        ("x^2-4", r"We find \begin{align*} y &= (x-2)(x+2) \\ &= x^2-4 \end{align*}"),
        (r"\sqrt{5}", r"It is \boxed{\sqrt{5}}, numerically \boxed{2.236}"),
        (r"\sqrt{5}", r"It is \boxed{\sqrt{5}} \approx \boxed{2.236}"),
    ],
)
def test_the_value_is_found_in_a_sentence_of_more_numbers(answer: str, completion: str) -> None:
    assert reward(answer, completion) == 1.0


@pytest.mark.parametrize(
    ("answer", "completion"),
    [
        ("2", "Therefore, there are 9 ways to seat 2 guests at 3 tables."),
        ("-4", "x = 12 is the only root, since x = -4 is too small."),
        ("4", "The roots are 4 and -1."),
        ("8", "The length cannot be less than 8, so it is greater or equal to $8$."),
        ("3", "The value is 3 or 4."),
        ("2", "The value is two or three."),
        ("12", "The probability is 5 out of 12."),
        ("A", "The answer is C because (A) and (B) do not add up."),
        ("A", "The answer is A, B."),
        ("B", "A) five; B) six"),
        ("A", "(A) or (B)"),
        ("yes", "No, there is no such graph."),
        ("1", "The probability of it is 1 in 4,060."),
        ("2.236", r"It is \boxed{\sqrt{5}} \approx \boxed{2.236}"),
    ],
)
def test_of_a_sentence_of_more_numbers_another_earns_nothing(answer: str, completion: str) -> None:
    assert reward(answer, completion) == 0.0


@pytest.mark.parametrize(
    ("answer", "completion"),
    [
        ("45", r"{}_{10}C_{8}"),
        ("45", r"C_{10}^{2}"),
        ("45", "C(10, 2)"),
        ("90", "P(10, 2)"),
        ("45", r"{10 \choose 2}"),
        (r"\frac{2}{3}", "0.666..."),
        (r"\frac{4}{33}", r"0.1212\ldots"),
        (r"\frac{2}{3}", r"0.\dot{6}"),
        (r"\frac{3}{5}", r"\\frac{3}{5}"),
        ("7", "7元"),
        ("5/2", "2又1/2"),
        ("Q(3,1)", "(3, 1)"),
        ("(3, 1)", "[3, 1]"),
        ("(u, v) = (3, 1)", "(u; v) = (3; 1)"),
        (r"\begin{pmatrix} 2 & 0 \\ 1 & 5 \end{pmatrix}", "[[2, 0], [1, 5]]"),
        (r"\frac{x^4}{4} + C", r"\frac{1}{4}x^4 + c"),
        (r"x = \frac{\pi}{6} + k\pi, k \in \mathbb{Z}", r"x = \frac{\pi}{6} + n\pi, n \in \mathbb{Z}"),
        ("g(n) = 3n - 1", "g(x) = 3x - 1"),
        ("y = 3x - 1", "f(x) = 3x - 1"),
        (r"\begin{pmatrix} 4 & 0 \\ 0 & 7 \end{pmatrix}", r"\operatorname{diag}(4, 7)"),
        ("[1.5, 2]", r"\begin{pmatrix} \frac{3}{2} \\ 2 \end{pmatrix}"),
        ("72", "2^3 3^2"),
        ("15:20", "3:20 pm"),
        ("15:20", "15:20:00"),
        (r"\frac{1}{2}", r"\lVert v \rVert = \frac{1}{2}"),
    ],
)
def test_a_right_answer_in_other_notation_or_with_names_of_its_own_earns_one(answer: str, completion: str) -> None:
    assert reward(answer, rf"\boxed{{{completion}}}") == 1.0


@pytest.mark.parametrize(
    ("answer", "completion"),
    [
        ("45", r"{}_{10}C_{3}"),
        ("45", "P(10, 2)"),
        (r"\frac{2}{3}", "0.66"),
        (r"\frac{3}{5}", r"\\frac{5}{3}"),
        ("Q(3,1)", "(1, 3)"),
        ("(1, 3)", "[1, 3]"),
        (r"\begin{pmatrix} 2 & 0 \\ 1 & 5 \end{pmatrix}", "[[2, 1], [0, 5]]"),
        ("2C", "2c"),
        ("C - 4", "c - 5"),
        ("AB", "A, B, C"),
        ("A, B", "A"),
        (r"x = \frac{\pi}{6} + k\pi, k \in \mathbb{Z}", r"x = \frac{\pi}{6} + 2n\pi, n \in \mathbb{Z}"),
        ("g(n) = 3n - 1", "g(x) = 3x + 1"),
        ("g(n) = 3n - 1", "h(n) = 3n - 1"),
        (r"\sin(x) = \frac{1}{7}", r"\cos(x) = \frac{1}{7}"),
        (r"\begin{pmatrix} 4 & 0 \\ 0 & 7 \end{pmatrix}", r"\operatorname{diag}(7, 4)"),
        ("15:20", "3:20 am"),
        ("15:20", "3:20"),
        ("g(n) = 3n - a", "g(a) = 3a - a"),
        ("x + a, a \\in \\mathbb{Z}", "x + x, x \\in \\mathbb{Z}"),
    ],
)
def test_what_only_looks_like_another_name_or_notation_earns_nothing(answer: str, completion: str) -> None:
    assert reward(answer, rf"\boxed{{{completion}}}") == 0.0
