"""Each of the 25 kinds: responses that follow it, responses that do not, and the edges between."""

from collections.abc import Mapping

import pytest
from pydantic import JsonValue

from reward_service.verifier.submission import Submission
from reward_service.verifiers.ifeval.checking import IfevalArguments, ifeval

ENGLISH = "the river runs past the old mill, and the children play on its green banks until the sun goes down."
FRENCH = "La rivière coule devant le vieux moulin, et les enfants jouent sur ses rives jusqu'au coucher du soleil."
GERMAN = "Der Fluss fließt an der alten Mühle vorbei, und die Kinder spielen am Ufer, bis die Sonne untergeht."
HINDI = "नदी पुरानी चक्की के पास से बहती है और बच्चे सूरज डूबने तक उसके किनारे खेलते हैं।"
CHINESE = "河水流过古老的磨坊，孩子们在绿色的岸边玩耍，直到太阳下山。"


def follows(instruction_id: str, response: str, kwargs: Mapping[str, JsonValue]) -> bool:
    row = {"instruction_id_list": [instruction_id], "kwargs": [dict(kwargs)], "strip_thinking": False}
    return bool(ifeval(Submission(completion=response), IfevalArguments.model_validate(row)).reward)


@pytest.mark.parametrize(
    ("keywords", "response", "followed"),
    [
        (["river"], "A River runs.", True),
        (["river", "mill"], "The mill stands at the river.", True),
        (["river", "mill"], "The river runs.", False),
        (["mill"], "A million people.", False),
        (["mill"], "the wind*mill* and the _mill_", True),
        (["C++"], "I write C++.", True),
        (["C++"], "I write C.", False),
        (["a.c"], "abc", False),
        (["climate change"], "a climate\nchange", True),
        (["太阳"], CHINESE, True),
        (["नद"], HINDI, False),
        (["नदी"], HINDI, True),
    ],
)
def test_keywords_existence(keywords: list[str], response: str, followed: bool) -> None:
    assert follows("keywords:existence", response, {"keywords": [*keywords]}) is followed


@pytest.mark.parametrize(
    ("relation", "frequency", "response", "followed"),
    [
        ("at least", 2, "War, war never changes.", True),
        ("at least", 2, "War moves forward.", False),
        ("at least", 0, "Peace.", True),
        ("less than", 2, "War moves forward, warily.", True),
        ("less than", 2, "war war", False),
        ("less than", 1, "Peace.", True),
    ],
)
def test_keywords_frequency(relation: str, frequency: int, response: str, followed: bool) -> None:
    kwargs: dict[str, JsonValue] = {"keyword": "war", "frequency": frequency, "relation": relation}
    assert follows("keywords:frequency", response, kwargs) is followed


@pytest.mark.parametrize(
    ("response", "followed"),
    [
        ("A stone.", True),
        ("A ROCK.", False),
        ("Rocket science and bedrock.", True),
        ("_rock_", False),
        ("punk-rock", False),
        ("A bed of sand.", True),
        ("Do not feed  the\nbirds!", False),
        ("   ", False),
    ],
)
def test_keywords_forbidden_words(response: str, followed: bool) -> None:
    kwargs: dict[str, JsonValue] = {"forbidden_words": ["rock", "feed the birds"]}
    assert follows("keywords:forbidden_words", response, kwargs) is followed


@pytest.mark.parametrize(
    ("letter", "relation", "frequency", "response", "followed"),
    [
        ("q", "at least", 2, "Quick quiz", True),
        ("Q", "at least", 2, "quick quiz", True),
        ("q", "at least", 3, "Quick quiz", False),
        ("e", "less than", 1, "A story in a bold form", True),
        ("e", "less than", 1, "One", False),
        ("#", "at least", 2, "#one #two", True),
        ("!", "at least", 2, "one!", False),
    ],
)
def test_keywords_letter_frequency(letter: str, relation: str, frequency: int, response: str, followed: bool) -> None:
    kwargs: dict[str, JsonValue] = {"letter": letter, "let_frequency": frequency, "let_relation": relation}
    assert follows("keywords:letter_frequency", response, kwargs) is followed


@pytest.mark.parametrize(
    ("language", "response", "followed"),
    [
        ("en", ENGLISH, True),
        ("fr", FRENCH, True),
        ("de", GERMAN, True),
        ("hi", HINDI, True),
        ("zh", CHINESE, True),
        ("zh-cn", CHINESE, True),
        ("zh-tw", CHINESE, False),
        ("en", FRENCH, False),
        ("de", ENGLISH, False),
        ("en", "12345 67890", False),
        ("en", "!?", False),
        ("en", ENGLISH * 200 + FRENCH * 200, False),
    ],
)
def test_language_response_language(language: str, response: str, followed: bool) -> None:
    assert follows("language:response_language", response, {"language": language}) is followed


@pytest.mark.parametrize(
    ("relation", "bound", "response", "followed"),
    [
        ("at least", 2, "It rains. I stay.", True),
        ("at least", 3, "It rains. I stay.", False),
        ("less than", 3, "It rains. I stay.", True),
        ("less than", 2, "It rains. I stay.", False),
        ("less than", 2, "Mr. Smith of the U.S. went home at 3.14", True),
        ("less than", 1, "no end", False),
    ],
)
def test_length_constraints_number_sentences(relation: str, bound: int, response: str, followed: bool) -> None:
    kwargs: dict[str, JsonValue] = {"num_sentences": bound, "relation": relation}
    assert follows("length_constraints:number_sentences", response, kwargs) is followed


@pytest.mark.parametrize(
    ("count", "response", "followed"),
    [
        (2, "One.\n***\nTwo.", True),
        (2, "One.\n\n***\n\nTwo.\n***", True),
        (2, "***\nOne.\n***\nTwo.", True),
        (1, "Only one.", True),
        (2, "Only one.", False),
        (3, "One.\n***\nTwo.", False),
        (2, "One.\n***\n***\nTwo.", False),
        (2, "One *** two", True),
        (1, "***Bold and italic***", True),
        (1, "One.\n******\nTwo.", True),
    ],
)
def test_length_constraints_number_paragraphs(count: int, response: str, followed: bool) -> None:
    assert follows("length_constraints:number_paragraphs", response, {"num_paragraphs": count}) is followed


@pytest.mark.parametrize(
    ("relation", "bound", "response", "followed"),
    [
        ("at least", 3, "One, two, three!", True),
        ("at least", 4, "One, two, three!", False),
        ("less than", 4, "One, two, three!", True),
        ("less than", 3, "One, two, three!", False),
        ("at least", 4, "Don't be well-known", True),
        ("less than", 2, "- * !", True),
        ("at least", 17, HINDI, True),
        ("at least", 18, HINDI, False),
    ],
)
def test_length_constraints_number_words(relation: str, bound: int, response: str, followed: bool) -> None:
    kwargs: dict[str, JsonValue] = {"num_words": bound, "relation": relation}
    assert follows("length_constraints:number_words", response, kwargs) is followed


@pytest.mark.parametrize(
    ("nth", "word", "response", "followed"),
    [
        (1, "weekend", "Weekend plans.\n\nNone.", True),
        (2, "weekend", 'Plans.\n\n"Weekend, they say', True),
        (2, "weekend", "Weekend plans.\n\nNone.", False),
        (1, "week", "Weekend plans.\n\nNone.", False),
        (1, "weekend", "Weekend plans.\n\nNone.\n\nMore.", False),
        (1, "weekend", "Weekend plans.\nNone.", False),
        (2, "weekend", "\n\nPlans.\n\n\n\nWeekend.\n\n", True),
        (2, "don't", "Plans.\n\nDon't go.", True),
        (2, "don", "Plans.\n\nDon't go.", False),
        (1, "as ever", "As  ever.\n\nPlans.", False),
        (1, "as ever", "As ever, plans.\n\nNone.", True),
        (3, "weekend", "Weekend.\n\nWeekend.", False),
    ],
)
def test_length_constraints_nth_paragraph_first_word(nth: int, word: str, response: str, followed: bool) -> None:
    kwargs: dict[str, JsonValue] = {"num_paragraphs": 2, "nth_paragraph": nth, "first_word": word}
    assert follows("length_constraints:nth_paragraph_first_word", response, kwargs) is followed


@pytest.mark.parametrize(
    ("response", "followed"),
    [
        ("Dear [name], come to [address].", True),
        ("[one] [two] [three]", True),
        ("Dear [name].", False),
        ("[] [ ]", False),
        ("[[name] and [address]]", True),
        ("[name\n] [address\n]", False),
    ],
)
def test_detectable_content_number_placeholders(response: str, followed: bool) -> None:
    assert follows("detectable_content:number_placeholders", response, {"num_placeholders": 2}) is followed


@pytest.mark.parametrize(
    ("marker", "response", "followed"),
    [
        ("P.S.", "Dear all.\n\nP.S. Bring cake.", True),
        ("P.S.", "Dear all.\n\n**p. s.** Bring cake.", True),
        ("P.P.S", "Dear all.\n\nP.P.S. Bring cake.", True),
        ("P.S.", "Dear all. Bring cake.", False),
        ("P.S.", "Dear all.\n\nP.P.S. Bring cake.", False),
        ("P.S.", "P.S. Bring cake.", False),
        ("P.S.", "Dear all.\n\nP.S.", False),
        ("P.S.", "Dear all, read Ps.S. again", False),
        ("Note:", "Dear all.\nNOTE: Bring cake.", True),
    ],
)
def test_detectable_content_postscript(marker: str, response: str, followed: bool) -> None:
    assert follows("detectable_content:postscript", response, {"postscript_marker": marker}) is followed


@pytest.mark.parametrize(
    ("response", "followed"),
    [
        ("* one\n* two", True),
        ("Points:\n- one\n  - one and a half", True),
        ("+ one\n\t* two\n\n---\n- - -\n* * *", True),
        ("* one", False),
        ("* one\n* two\n* three", False),
        ("*one* is emphasis\n* two", False),
        ("* one\n-5 degrees", False),
        ("* one\n* \n* two", True),
        ("1. one\n2. two", False),
    ],
)
def test_detectable_format_number_bullet_lists(response: str, followed: bool) -> None:
    assert follows("detectable_format:number_bullet_lists", response, {"num_bullets": 2}) is followed


@pytest.mark.parametrize(
    ("response", "followed"),
    [
        ("My answer is yes.", True),
        ("I have thought about it. My answer is maybe.", True),
        ("My answer is no. My answer is no.", True),
        ("Yes.", False),
        ("My answer is yes", False),
        ("My answer is yes. My answer is no.", False),
        ("my answer is yes.", False),
    ],
)
def test_detectable_format_constrained_response(response: str, followed: bool) -> None:
    assert follows("detectable_format:constrained_response", response, {}) is followed


@pytest.mark.parametrize(
    ("response", "followed"),
    [
        ("*one* and *two*", True),
        ("**one**\n***two***", True),
        ("* an item with *one* and *two words*", True),
        ("*one*", False),
        ("***one***", False),
        ("2 * 3 * 4 * 5", False),
        ("** ** and * *", False),
        ("*one\ntwo* *three*", False),
        ("* one\n* two", False),
    ],
)
def test_detectable_format_number_highlighted_sections(response: str, followed: bool) -> None:
    assert follows("detectable_format:number_highlighted_sections", response, {"num_highlights": 2}) is followed


@pytest.mark.parametrize(
    ("response", "followed"),
    [
        ("Section 1\nfirst\nSection 2\nsecond", True),
        ("**Section 1:** first\n\n### Section 2\nsecond\nSection 3", True),
        ("Section 1\nfirst", False),
        ("Section 1\nas in Section 2 of the law", False),
        ("Section 1\nSection 1", False),
        ("SECTION 1\nSECTION 2", False),
        ("Section one\nSection two", False),
        ("Section1\nSection2", True),
        ("Section 1st\nSection 2nd", False),
    ],
)
def test_detectable_format_multiple_sections(response: str, followed: bool) -> None:
    kwargs: dict[str, JsonValue] = {"section_spliter": "Section", "num_sections": 2}
    assert follows("detectable_format:multiple_sections", response, kwargs) is followed


@pytest.mark.parametrize(
    ("response", "followed"),
    [
        ('{"a": [1, null]}', True),
        ('```json\n{"a": 1}\n```', True),
        ("```\n[1, 2]\n```  ", True),
        ("1" * 5000, True),
        ('Here it is: {"a": 1}', False),
        ('{"a": 1} {"b": 2}', False),
        ("{'a': 1}", False),
        ('{"a": NaN}', False),
        ('```json\n{"a": 1}', False),
        ("[" * 100_000, False),
    ],
)
def test_detectable_format_json_format(response: str, followed: bool) -> None:
    assert follows("detectable_format:json_format", response, {}) is followed


@pytest.mark.parametrize(
    ("response", "followed"),
    [
        ("<<poem of joy>>\nJoy.", True),
        ("A poem: <<<joy>>>", True),
        ("<poem of joy>", False),
        ("<< >>", False),
        ("<<>>", False),
        ("<<poem\nof joy>>", False),
        ("<<" * 1000 + "poem of joy>>", True),
    ],
)
def test_detectable_format_title(response: str, followed: bool) -> None:
    assert follows("detectable_format:title", response, {}) is followed


@pytest.mark.parametrize(
    ("response", "followed"),
    [
        ("One way.\n******\nAnother way.", True),
        ("******\nOne way.******Another way.\n******", True),
        ("One way.", False),
        ("One way.\n******\nOne  WAY.", False),
        ("One.\n******\nTwo.\n******\nThree.", False),
        ("One.\n******\n******\nTwo.", False),
        ("One.\n***\nTwo.", False),
    ],
)
def test_combination_two_responses(response: str, followed: bool) -> None:
    assert follows("combination:two_responses", response, {}) is followed


@pytest.mark.parametrize(
    ("response", "followed"),
    [
        ("Write a poem.\n\nRoses are red.", True),
        ("  WRITE a\npoem. Roses are red.", True),
        ("Write a poem.", False),
        ("Write a poem. ***", False),
        ("Sure! Write a poem. Roses are red.", False),
        ("Write a song. Roses are red.", False),
    ],
)
def test_combination_repeat_prompt(response: str, followed: bool) -> None:
    assert follows("combination:repeat_prompt", response, {"prompt_to_repeat": "Write a poem. "}) is followed


@pytest.mark.parametrize(
    ("phrase", "response", "followed"),
    [
        ("Peace!", "That is all. Peace!", True),
        ("Peace!", 'He said "that is all. PEACE!" \n', True),
        ("Peace!", "Peace! That is all.", False),
        ("Peace!", "That is all. Peace", False),
        ('in "India"', 'I live in "India"', True),
        ("end", "This is a legend", False),
        ("end", "end", True),
    ],
)
def test_startend_end_checker(phrase: str, response: str, followed: bool) -> None:
    assert follows("startend:end_checker", response, {"end_phrase": phrase}) is followed


@pytest.mark.parametrize(
    ("response", "followed"),
    [
        ('"It rains."', True),
        ("\n“It rains.” ", True),
        ('"It rains.', False),
        ('It "rains."', False),
        ("'It rains.'", False),
        ('"', False),
        ('""', False),
        ('" "', False),
    ],
)
def test_startend_quotation(response: str, followed: bool) -> None:
    assert follows("startend:quotation", response, {}) is followed


@pytest.mark.parametrize(
    ("relation", "frequency", "response", "followed"),
    [
        ("at least", 2, "NASA and the U.S. agree", True),
        ("at least", 2, "NASA agrees", False),
        ("at least", 2, "I DON'T", True),
        ("less than", 2, "WELL-KNOWN people", True),
        ("less than", 2, "VERY WELL", False),
        ("less than", 1, "Nobody", True),
        ("less than", 1, "12 3", True),
    ],
)
def test_change_case_capital_word_frequency(relation: str, frequency: int, response: str, followed: bool) -> None:
    kwargs: dict[str, JsonValue] = {"capital_relation": relation, "capital_frequency": frequency}
    assert follows("change_case:capital_word_frequency", response, kwargs) is followed


@pytest.mark.parametrize(
    ("response", "followed"),
    [
        (ENGLISH.upper(), True),
        ("1) " + ENGLISH.upper() + " 42%", True),
        (ENGLISH, False),
        (ENGLISH.upper() + " x", False),
        (FRENCH.upper(), False),
        ("42", False),
    ],
)
def test_change_case_english_capital(response: str, followed: bool) -> None:
    assert follows("change_case:english_capital", response, {}) is followed


@pytest.mark.parametrize(
    ("response", "followed"),
    [
        (ENGLISH.lower(), True),
        ("1) " + ENGLISH.lower() + " 42%", True),
        (ENGLISH.upper(), False),
        (ENGLISH.lower() + " X", False),
        (FRENCH.lower(), False),
        ("42", False),
    ],
)
def test_change_case_english_lowercase(response: str, followed: bool) -> None:
    assert follows("change_case:english_lowercase", response, {}) is followed


@pytest.mark.parametrize(
    ("response", "followed"),
    [("No comma here; none.", True), ("One, two.", False), (CHINESE, False), ("نعم، لا", False), ("\n\t", False)],
)
def test_punctuation_no_comma(response: str, followed: bool) -> None:
    assert follows("punctuation:no_comma", response, {}) is followed
