"""The verifier as a whole: the dataset's rows as arguments, strict and loose, rewards and components."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import JsonValue

from reward_service.verifier.submission import Score, Submission, UserError, validate_arguments
from reward_service.verifiers.ifeval.checking import IfevalArguments, ifeval

ALL_KINDS: dict[str, dict[str, JsonValue]] = {
    "keywords:existence": {"keywords": ["a b", "c++"]},
    "keywords:frequency": {"keyword": "a", "frequency": 3, "relation": "at least"},
    "keywords:forbidden_words": {"forbidden_words": ["x", "("]},
    "keywords:letter_frequency": {"letter": "a", "let_frequency": 3, "let_relation": "less than"},
    "language:response_language": {"language": "en"},
    "length_constraints:number_sentences": {"num_sentences": 3, "relation": "less than"},
    "length_constraints:number_paragraphs": {"num_paragraphs": 2},
    "length_constraints:number_words": {"num_words": 3, "relation": "at least"},
    "length_constraints:nth_paragraph_first_word": {"num_paragraphs": 2, "nth_paragraph": 1, "first_word": "a"},
    "detectable_content:number_placeholders": {"num_placeholders": 2},
    "detectable_content:postscript": {"postscript_marker": "P.S."},
    "detectable_format:number_bullet_lists": {"num_bullets": 2},
    "detectable_format:constrained_response": {},
    "detectable_format:number_highlighted_sections": {"num_highlights": 2},
    "detectable_format:multiple_sections": {"section_spliter": "Section", "num_sections": 2},
    "detectable_format:json_format": {},
    "detectable_format:title": {},
    "combination:two_responses": {},
    "combination:repeat_prompt": {"prompt_to_repeat": "Write."},
    "startend:end_checker": {"end_phrase": "Bye."},
    "startend:quotation": {},
    "change_case:capital_word_frequency": {"capital_frequency": 2, "capital_relation": "at least"},
    "change_case:english_capital": {},
    "change_case:english_lowercase": {},
    "punctuation:no_comma": {},
}


def judged(completion: str, row: dict[str, JsonValue]) -> Score:
    return ifeval(Submission(completion=completion), IfevalArguments.model_validate(row))


def all_kinds(**more: JsonValue) -> dict[str, JsonValue]:
    return {"instruction_id_list": [*ALL_KINDS], "kwargs": [*ALL_KINDS.values()], **more}


def test_a_row_of_the_dataset_is_taken_unchanged() -> None:
    nothing = dict.fromkeys(name for kwargs in ALL_KINDS.values() for name in kwargs)
    row: dict[str, JsonValue] = {
        "key": 1000,
        "prompt": "Write 3 words without commas, and highlight 1.",
        "instruction_id_list": ["punctuation:no_comma", "length_constraints:number_words"],
        "kwargs": [dict(nothing), {**nothing, "num_words": 3.0, "relation": "at least"}],
    }
    assert judged("One two three", row).reward == 1.0


@pytest.mark.parametrize("kwargs", [None, [None, None], [None, {}], [{"num_words": None}, None]])
def test_kwargs_that_are_null_are_as_if_left_out(kwargs: JsonValue) -> None:
    row: dict[str, JsonValue] = {
        "instruction_id_list": ["punctuation:no_comma", "change_case:english_lowercase"],
        "kwargs": kwargs,
    }
    assert judged("there is no comma in this sentence of small letters", row).reward == 1.0


def test_the_reward_is_the_share_that_is_followed_or_whether_all_are() -> None:
    row: dict[str, JsonValue] = {
        "instruction_id_list": ["punctuation:no_comma", "startend:quotation"],
        "kwargs": [{}, {}],
    }
    score = judged('"One, two"', row)
    assert (score.reward, score.components) == (
        0.5,
        {"fraction": 0.5, "all": 0.0, "punctuation:no_comma": 0.0, "startend:quotation": 1.0},
    )
    assert judged('"One, two"', {**row, "reward": "all"}).reward == 0.0
    assert judged('"One two"', {**row, "reward": "all"}).reward == 1.0


def test_a_kind_that_a_row_names_twice_has_two_components() -> None:
    row: dict[str, JsonValue] = {
        "instruction_id_list": ["keywords:frequency", "keywords:frequency"],
        "kwargs": [
            {"keyword": "fake", "frequency": 2, "relation": "at least"},
            {"keyword": "fake", "frequency": 2, "relation": "less than"},
        ],
    }
    components = judged("fake fake", row).components
    assert (components["keywords:frequency"], components["keywords:frequency#2"]) == (1.0, 0.0)


@pytest.mark.parametrize(
    ("completion", "strict", "loose"),
    [
        ('"Quoted."', 1.0, 1.0),
        ('Sure:\n"Quoted."', 0.0, 1.0),
        ('"Quoted."\nAnything else?', 0.0, 1.0),
        ('Sure:\n"Quoted."\nAnything else?', 0.0, 1.0),
        ('**"Quoted."**', 0.0, 1.0),
        ('Sure:\n**"Quoted."**', 0.0, 1.0),
        ('**"Quoted."**\nBye', 0.0, 1.0),
        ('Sure:\n**"Quoted."**\nBye', 0.0, 1.0),
        ('Sure:\nHere:\n"Quoted."', 0.0, 0.0),
        ("***", 0.0, 0.0),
    ],
)
def test_loose_forgives_a_first_line_a_last_line_and_asterisks(completion: str, strict: float, loose: float) -> None:
    row: dict[str, JsonValue] = {"instruction_id_list": ["startend:quotation"], "kwargs": [{}]}
    assert judged(completion, row).reward == strict
    assert judged(completion, {**row, "strictness": "loose"}).reward == loose


def test_thoughts_are_not_judged_unless_the_arguments_say_so() -> None:
    row: dict[str, JsonValue] = {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}
    assert judged("<think>well, well</think>Yes", row).reward == 1.0
    assert judged("<think>well, well</think>Yes", {**row, "strip_thinking": False}).reward == 0.0


@pytest.mark.parametrize("completion", ["", "  \n", "<think>no end"])
def test_a_blank_response_follows_nothing(completion: str) -> None:
    assert judged(completion, all_kinds()).reward == 0.0


def test_each_call_gives_one_answer_on_a_text_of_two_languages() -> None:
    row: dict[str, JsonValue] = {"instruction_id_list": ["language:response_language"], "kwargs": [{"language": "en"}]}
    rewards = {judged("the house is big et la maison est petite", row).reward for _ in range(20)}
    assert len(rewards) == 1


@pytest.mark.parametrize(
    ("instruction_ids", "kwargs", "message"),
    [
        (["keywords:existance"], [{}], "keywords:existance"),
        (["keywords:existence"], [{}], "keywords Field required"),
        (["keywords:existence"], [{"keywords": None}], "keywords Field required"),
        (["keywords:existence"], [{"keywords": []}], "keywords"),
        (["keywords:frequency"], [{"keyword": "a", "frequency": 1, "relation": "around"}], "relation"),
        (["keywords:letter_frequency"], [{"letter": "ab", "let_frequency": 1, "let_relation": "at least"}], "letter"),
        (["length_constraints:number_paragraphs"], [{"num_paragraphs": -1}], "num_paragraphs"),
        (["length_constraints:number_paragraphs"], [{"num_paragraphs": 2.5}], "num_paragraphs"),
        (["punctuation:no_comma"], [{"language": "en"}], "language"),
        (["punctuation:no_comma"], [], "1 entries and kwargs 0"),
        ([], [], "instruction_id_list"),
    ],
)
def test_arguments_that_do_not_fit_are_the_callers_error(
    instruction_ids: list[str], kwargs: list[JsonValue], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        validate_arguments(
            model=IfevalArguments, arguments={"instruction_id_list": [*instruction_ids], "kwargs": kwargs}
        )


@settings(deadline=None, max_examples=60)
@given(st.text(alphabet=st.one_of(st.characters(), st.sampled_from("*-.#<>[]\"'\n \ufeff{}PSa,"))))
def test_any_text_gets_a_score(completion: str) -> None:
    score = judged(completion, all_kinds(strictness="loose"))
    assert 0.0 <= score.reward <= 1.0
    assert set(score.components) == {"fraction", "all", *ALL_KINDS}


@pytest.mark.parametrize("text", ["<<" * (1 << 19), "[a" * (1 << 19), "*a" * (1 << 19), "P.S. " * 200_000])
def test_a_mebibyte_of_one_token_is_judged_in_time_that_grows_with_its_length(text: str) -> None:
    """A rule that reads the rest of the text at each token would take hours, and run into the timeout of the tests."""
    assert judged(text, all_kinds()).reward < 1.0


@pytest.mark.parametrize("filler", ["a", " ", "\n", '"', "```"])
@pytest.mark.parametrize("opening", ["", "```", "[", "*", "P.S."])
def test_a_rule_reads_what_follows_its_opening_once(opening: str, filler: str) -> None:
    text = opening + filler * ((1 << 19) // len(filler))
    kinds = [kind for kind in ALL_KINDS if kind.startswith("detectable") or kind.startswith("startend")]
    row: dict[str, JsonValue] = {"instruction_id_list": [*kinds], "kwargs": [ALL_KINDS[kind] for kind in kinds]}
    assert judged(text, {**row, "strip_thinking": False}).reward < 1.0
