import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from reward_service.verifier.submission import Score, Submission
from reward_service.verifiers.numeric import NumericArguments, numeric


def judged(completion: str, answer: object, **arguments: object) -> Score:
    # As it comes over the wire.
    made = NumericArguments.model_validate(json.loads(json.dumps({"answer": answer, **arguments})))
    return numeric(Submission(completion=completion), made)


@pytest.mark.parametrize(
    ("answer", "completion"),
    [
        (42, "42"),
        (42, "The answer is 42."),
        (18, "She sells 9 eggs at $2 each, so she makes 9 * 2 = $18 every day.\n#### 18"),
        (70000, "The profit is $70,000."),
        (1234567.5, "1,234,567.5"),
        (12000, r"\boxed{12{,}000}"),
        (12000, r"\boxed{12\,000}"),
        (12000, "12\u202f000 people"),
        (0.1, "0.1"),
        (0.5, ".5"),
        (-3, "so the limit is −3"),
        (-5, "-$5"),
        (-5, "$-5"),
        (0.5, r"\boxed{\frac{1}{2}}"),
        ("1/2", "0.5"),
        ("1/2", "The probability is 1/2."),
        (3.5, "3 1/2 cups"),
        (3.5, r"\boxed{3\frac{1}{2}}"),
        (-0.75, r"\boxed{-\frac{3}{4}}"),
        (6.02e23, r"6.02 \times 10^{23}"),
        (6.02e23, "6.02 × 10²³"),
        (6.02e23, "6.02e23"),
        ("1.6e-19", "1.6 x 10^-19"),
        (5, r"\boxed{5 \text{ cm}^2}"),
        (9.8, "about 9.8 m/s^2"),
        (25, "25%"),
        (0.25, "25%"),
        ("25%", "0.25"),
        ("25%", "25"),
        ("25 percent", "The answer is 25 %."),
        (7, "<answer>3 + 4 = 7</answer>"),
        (7, r"First \boxed{5}, then \boxed{7}"),
        (7, "<think>The answer is 5</think> 7"),
        (7, "The answer is 5. Wait. The answer is 7, since I had dropped 2."),
        (7, "It is not 5. The final answer is: **7**"),
        (3, "x_2 = 3"),
        ([7, "-7"], "-7"),
        (10, "3-10"),
        (10, "The answer is 5? No, 10."),
        (5, r"The area is $5 \text{ m}^{2}$"),
        (42_000_000, r"\boxed{42 \text{ million}}"),
        (42, "42 million"),
        ("42 million", "$42M"),
        (5000, "5k"),
        (0.5, "<answer>0.5 (1/2)</answer>"),
        (42, "<answer>42 of the 50 pupils</answer>"),
    ],
)
def test_the_right_number_earns_one_in_whatever_form(answer: object, completion: str) -> None:
    assert judged(completion, answer) == Score(reward=1.0, components={"parsed": 1.0})


@pytest.mark.parametrize(
    ("answer", "completion"),
    [
        (42, "43"),
        (42, "-42"),
        (42, "42.5"),
        (42, "4.2"),
        (42, "420"),
        (1000000, "1000001"),
        (0.5, "0.05"),
        (0.5, r"\frac{1}{3}"),
        (1234, "1.234"),
        (25, "0.25%"),
        (0.25, "0.25%"),
        ("0.25%", "0.25"),
        (6.02e23, "6.02e22"),
        (3.5, "3 1/3"),
        (2, "5 of 7"),
        (5, "<answer>6</answer> though 5 was close"),
        (5, "The answer is 6, not 5."),
        ([7, -7], "6"),
        (0, "1e-300"),
        (5, "The answer is 5? No, 10."),
        ("42 million", "42 thousand"),
    ],
)
def test_another_number_earns_nothing(answer: object, completion: str) -> None:
    assert judged(completion, answer) == Score(reward=0.0, components={"parsed": 1.0})


@pytest.mark.parametrize(
    "completion",
    [
        "",
        "<think>5</think>",
        "I do not know.",
        "H2O",
        "<answer>five</answer> 5",
        r"\boxed{5 or 6}",
        r"\boxed{5, 6}",
        r"\boxed{5,6}",
        "The answer is 5 or 6.",
        "1/0",
        r"\boxed{5 6}",
        "<answer>5 6 7 8</answer>",
        "<answer>5\n6</answer>",
        "#### 5 6",
        r"\boxed{5 - 1}",
        r"\boxed{5+1}",
        r"\boxed{5 \times 2}",
        r"\boxed{5 \pm 1}",
        r"\boxed{5:6}",
        r"\boxed{5–7}",
        "The answer is 5 to 7.",
        "The answer is 5 6 7.",
        "The answer is 5, 6 and 7.",
        r"\boxed{\sqrt{5}}",
        r"\boxed{5\sqrt{2}}",
        r"\boxed{5\pi}",
        "so the area is 5π",
        r"\boxed{\log 5}",
        r"\boxed{f(5)}",
        r"\boxed{x^{5}}",
        r"\boxed{a_{5}}",
        r"\boxed{\frac{\pi}{5}}",
        r"\boxed{x > 5}",
        r"\boxed{x >= 5}",
        r"\boxed{x != 5}",
        r"\boxed{\geq 5}",
    ],
)
def test_no_number_or_several_in_a_box_are_no_answer(completion: str) -> None:
    assert judged(completion, 5) == Score(reward=0.0, components={"parsed": 0.0})


def test_a_tolerance_is_absolute_or_relative_and_the_larger_counts() -> None:
    assert judged("3.1", 3.14).reward == 0.0
    assert judged("3.1", 3.14, absolute_tolerance=0.05).reward == 1.0
    assert judged("3.2", 3.14, absolute_tolerance=0.05).reward == 0.0
    assert judged("101", 100, relative_tolerance=0.01).reward == 1.0
    assert judged("101.01", 100, relative_tolerance=0.01).reward == 0.0
    assert judged("-101", -100, relative_tolerance=0.01).reward == 1.0
    assert judged("0.001", 0, relative_tolerance=0.5).reward == 0.0
    assert judged("102", 100, relative_tolerance=0.01, absolute_tolerance=2).reward == 1.0


def test_the_decimal_mark_is_that_of_the_locale() -> None:
    assert judged("1.234,5 Euro", 1234.5, decimal_mark="comma").reward == 1.0
    assert judged("1.234", 1234, decimal_mark="comma").reward == 1.0
    assert judged("1,5", "1,5", decimal_mark="comma").reward == 1.0
    assert judged("1,234.5", 1234.5, decimal_mark="comma").reward == 0.0
    assert judged("1.234", 1.234).reward == 1.0


def test_what_a_percentage_is_can_be_said() -> None:
    assert [judged("25%", gold, percent="share").reward for gold in (0.25, 25)] == [1.0, 0.0]
    assert [judged("25%", gold, percent="number").reward for gold in (0.25, 25)] == [0.0, 1.0]
    assert judged("25%", "25%", percent="share").reward == 1.0


def test_the_places_are_looked_at_in_the_order_given() -> None:
    completion = r"<answer>1</answer> \boxed{2} The answer is 3. 4"
    found = [
        judged(completion, gold, extract=[place]).reward
        for gold, place in enumerate(("tag", "boxed", "stated", "last"), start=1)
    ]
    assert found == [1.0] * 4
    assert judged("only 5", 5, extract=["tag", "boxed"]).components["parsed"] == 0.0


@pytest.mark.parametrize(
    "arguments",
    [
        {"answer": "five"},
        {"answer": "1 and 2"},
        {"answer": []},
        {"answer": 1, "relative_tolerance": -1},
        {"answer": True},
        {},
    ],
)
def test_arguments_that_name_no_number_are_refused(arguments: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        NumericArguments.model_validate(arguments)


@pytest.mark.parametrize("completion", ["1e999999999", "9" * 5000, "1" + "0" * 900, "10^99999999999", "1e-999999999"])
def test_a_number_of_any_size_is_judged(completion: str) -> None:
    assert judged(completion, 5).reward == 0.0


@given(st.text() | st.text(alphabet="0123456789.,-/%$e^x{}\\ "))
def test_any_text_is_judged(completion: str) -> None:
    assert judged(completion, 5).reward in (0.0, 1.0)
    assert judged(completion, 5, decimal_mark="comma").reward in (0.0, 1.0)


@given(st.integers(-(10**12), 10**12), st.integers(0, 6))
def test_a_decimal_is_read_exactly(digits: int, places: int) -> None:
    text = f"{digits / 10**places:.{places}f}"
    assert judged(f"so it is {text}.", text).reward == 1.0
    assert judged(f"so it is {text}1", text).reward == 0.0


@pytest.mark.parametrize(
    "hostile", ["1", "1,", "1/", "-", "1 ", "$", "1,234", ".", "10^", "answer is ", "#### ", r"\frac{1}"]
)
def test_a_hostile_text_of_a_million_characters_is_read_at_once(hostile: str) -> None:
    judged(hostile * (1_000_000 // len(hostile)), 5)


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        ("结论：总共有99颗弹珠。", 99, 1.0),
        ("答案是 3.5 米", 3.5, 1.0),
        ("The answer is 1 234 567", 1234567, 1.0),
        ("There are 1 234 567", 567, 0.0),
        ("The answer is 10^6", 1_000_000, 1.0),
        ("The answer is 10^6", 10, 0.0),
        ("The answer is 2^{-3}.", 0.125, 1.0),
        ("The answer is between 3 and 5", 3, 0.0),
        ("The answer is not 5.", 5, 0.0),
        (r"\boxed{5} and \boxed{6}", 6, 0.0),
        (r"\boxed{\frac12}", 0.5, 1.0),
        (r"\boxed{3\frac12}", 3.5, 1.0),
        (r"\boxed{3\frac12}", 3, 0.0),
        (r"\boxed{\dfrac{7}2}", 3.5, 1.0),
        (r"\boxed{2^{x}}", 2, 0.0),
        (r"\boxed{2^{nd}}", 2, 1.0),
        (r"\boxed{45^\circ}", 45, 1.0),
        ("The answer is ₹12,34,567.", 1234567, 1.0),
        ("It costs ₹1,23,456.", 23456, 0.0),
        ("It is 5 or 6.", 6, 0.0),
        ("It is between 3 and 5.", 5, 0.0),
        ("12 of them, or 12", 12, 1.0),
    ],
)
def test_numbers_as_people_write_them(completion: str, answer: float, reward: float) -> None:
    assert numeric(Submission(completion=completion), NumericArguments(answer=answer)).reward == reward


def test_a_power_beyond_any_size_is_no_number() -> None:
    submission = Submission(completion="The answer is " + "9" * 900 + "^999")
    assert numeric(submission, NumericArguments(answer=1)).reward == 0.0
