import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import JsonValue

from reward_service.verifier.submission import Score, Submission, UserError, validate_arguments
from reward_service.verifiers.patterns import FormatArguments, well_formed

GOOD = "<think>Half of 8 is 4.</think>\n<answer>4</answer>\n"


def judged(completion: str, **arguments: JsonValue) -> Score:
    return well_formed(Submission(completion=completion), FormatArguments.model_validate(arguments))


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        (GOOD, 1.0),
        ("Well: " + GOOD, 0.0),
        (GOOD + "Done.", 0.0),
        ("<answer>4</answer><think>Half of 8 is 4.</think>", 0.0),
        ("<think>Half</think><answer>4", 0.0),
        ("<think>Half<answer>4</answer></think>", 0.0),
        ("<think></think><answer>4</answer>", 0.0),
        ("<think>Half</think><answer>3</answer><answer>4</answer>", 0.0),
        ("<think>a<think>b</think><answer>4</answer>", 0.0),
        ("</think><think>Half<answer>4</answer>", 0.0),
        ("<THINK>Half</THINK><answer>4</answer>", 0.0),
        ("<think>1 < 2 <br></think><answer>4</answer>", 1.0),
        ("4", 0.0),
        ("", 0.0),
    ],
)
def test_the_tags_stand_once_and_in_order_with_nothing_outside(completion: str, reward: float) -> None:
    assert judged(completion).reward == reward


def test_a_fraction_says_which_checks_pass() -> None:
    score = judged("<think>Half</think> so <answer> </answer>", reward="fraction")
    assert score.components == {"tag_think": 1.0, "tag_answer": 0.0, "order": 1.0, "outside": 0.0}
    assert score.reward == 0.5
    assert judged(GOOD, reward="fraction").reward == 1.0
    assert judged("", reward="fraction").reward == 0.0


def test_the_prompt_may_open_the_first_tag() -> None:
    assert judged("Half</think><answer>4</answer>", first_tag_in_prompt=True).reward == 1.0
    assert judged(GOOD, first_tag_in_prompt=True).reward == 0.0
    assert judged("Half</think><answer>4</answer>").reward == 0.0


def test_text_between_the_tags_can_be_allowed() -> None:
    assert judged("First: <think>Half</think> so <answer>4</answer>!", nothing_outside=False).reward == 1.0


def test_tags_of_ones_own_in_their_order() -> None:
    tags: list[JsonValue] = ["plan", "code", "test-1"]
    assert judged("<plan>p</plan><code>c</code><test-1>t</test-1>", tags=tags).reward == 1.0
    assert judged("<code>c</code><plan>p</plan><test-1>t</test-1>", tags=tags).reward == 0.0


@pytest.mark.parametrize(
    ("completion", "tags", "reward"),
    [
        (r"So \boxed{4}.", [], 1.0),
        (r"So \boxed{}.", [], 0.0),
        (r"So \boxed{4", [], 0.0),
        (r"<answer>\boxed{\frac{1}{2}}</answer>", ["answer"], 1.0),
        (r"<answer>4</answer>", ["answer"], 0.0),
        (r"<think>\boxed{4}</think><answer>4</answer>", ["think", "answer"], 0.0),
    ],
)
def test_a_box_stands_in_the_last_tag(completion: str, tags: list[JsonValue], reward: float) -> None:
    assert judged(completion, tags=tags, boxed=True).reward == reward


@pytest.mark.parametrize(
    "arguments", [{"tags": []}, {"tags": ["a", "a"]}, {"tags": ["<a>"]}, {"tags": [""]}, {"reward": "most"}]
)
def test_arguments_that_do_not_fit_are_the_callers_error(arguments: dict[str, JsonValue]) -> None:
    with pytest.raises(UserError):
        validate_arguments(model=FormatArguments, arguments=arguments)


@settings(deadline=None)
@given(st.lists(st.sampled_from(["<think>", "</think>", "<answer>", "</answer>", "a", " ", r"\boxed{", "}"])))
def test_any_text_gets_a_share(parts: list[str]) -> None:
    score = judged("".join(parts), boxed=True, reward="fraction")
    assert 0.0 <= score.reward <= 1.0
    assert len(score.components) == 5


@pytest.mark.parametrize("unit", ["<think>", "</think>", "<", r"\boxed{", "<think></think>"])
def test_a_mebibyte_of_tags_is_judged(unit: str) -> None:
    assert judged(unit * ((1 << 20) // len(unit)), boxed=True).reward == 0.0
