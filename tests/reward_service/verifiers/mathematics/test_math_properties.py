"""`math` on texts that nobody foresaw."""

import contextlib
import sys
from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st

from reward_service.verifier.submission import DataError, Submission
from reward_service.verifiers.arguments import MathArguments
from reward_service.verifiers.mathematics.answers import Number, OverLimits, Scalar, Unreadable
from reward_service.verifiers.mathematics.equality import same_answer
from reward_service.verifiers.mathematics.final_answer import final_answers
from reward_service.verifiers.mathematics.latex import to_latex
from reward_service.verifiers.mathematics.math_answer import math_answer
from reward_service.verifiers.mathematics.quantities import QuantityRules
from reward_service.verifiers.mathematics.reading import read
from reward_service.verifiers.mathematics.tokens import tokenise

COMMANDS = (
    r"\frac \sqrt \boxed \text \pm \le \infty \cup \in \setminus \log \sin \pi \{ \} \left( \right) \begin{pmatrix} "
    r"\end{pmatrix} \$ \%"
)
MARKS = r"{ } ( ) [ ] , ; : = < > + - * / ^ _ ! % $ | & \\ . ° x y e i A B 0 1 2 3 10 0.5 1,234 cm and or"
PIECES = [*COMMANDS.split(), *MARKS.split(), " "]
formulas = st.lists(st.sampled_from(PIECES), max_size=14).map("".join)
numbers = st.integers(-(10**6), 10**6)


def judged(answer: str, completion: str) -> float | None:
    try:
        return math_answer(Submission(completion=completion), MathArguments(answer=answer)).reward
    except DataError:
        return None


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=60) | formulas, formulas)
def test_reading_and_comparing_end_in_an_answer_or_in_an_error_of_ours(one: str, other: str) -> None:
    with contextlib.suppress(Unreadable, OverLimits):
        for ours in read(one):
            for theirs in read(other, lenient=True):
                with contextlib.suppress(Unreadable):
                    same_answer(ours, theirs, QuantityRules(convert_units=True))


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=60) | formulas)
def test_any_completion_is_judged(completion: str) -> None:
    assert judged("5", completion) in (0.0, 1.0)
    assert judged("5", rf"\boxed{{{completion}}}") in (0.0, 1.0)


@settings(max_examples=40, deadline=None)
@given(formulas)
def test_any_right_answer_is_judged_or_an_error_of_the_data(answer: str) -> None:
    if answer:
        assert judged(answer, r"\boxed{5}") in (0.0, 1.0, None)


@settings(deadline=None)
@given(numbers, numbers.filter(bool))
def test_a_number_equals_itself_in_every_notation_and_its_neighbour_in_none(above: int, below: int) -> None:
    value = Fraction(above, below)
    forms = [rf"\frac{{{above}}}{{{below}}}", f"{above}/({below})", rf"{3 * above} \div ({3 * below})", f"{value}"]
    if below == 1:
        forms += [f"{above:,}", f"{above}.0", rf"{above} \text{{ cm}}"]
    gold = Scalar(Number(value))
    neighbour = Scalar(Number(value + Fraction(1, 10**6)))
    for form in forms:
        readings = read(form)
        assert any(same_answer(gold, reading, QuantityRules()) for reading in readings), form
        assert not any(same_answer(neighbour, reading, QuantityRules()) for reading in readings), form


def steps(text: str) -> int:
    """Number of calls that reading a hostile completion takes."""
    count = 0

    def counting(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(counting)
    try:
        for guess in final_answers(text)[0]:
            tokenise(to_latex(guess))
    finally:
        sys.setprofile(None)
    return count


def test_work_grows_no_faster_than_a_hostile_text() -> None:
    for hostile in (
        "$",
        r"\(",
        "answer is ",
        r"\boxed{",
        "<answer>",
        "#### ",
        "1,",
        "{",
        "-",
        "1 000 ",
        r"\text{",
        "(1",
    ):
        small, large = steps(hostile * 200), steps(hostile * 800)
        assert large <= 5 * small + 200, (hostile, small, large)
