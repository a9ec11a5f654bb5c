"""Thoughts of a completion between <think> and </think>, whatever marks its model has for them."""

from itertools import pairwise
from pathlib import Path

import pytest

from env_service.environments.tokenization import Tokenization
from services.thinking import without_thought
from tests.env_service.chat_models import make_model, model_with

HARMONY = "<|channel|>analysis<|message|>3 or 4?<|end|><|start|>assistant<|channel|>final<|message|>It is 3."
PREAMBLE = "<|channel|>commentary<|message|>I look.<|end|>"
GEMMA = "<|channel>thought\n3 or 4?<channel|>It is 3."
OWN = {
    "magistral": "[THINK]{{ messages[0].content }}[/THINK]",
    "seed": "<seed:think>{{ messages[0].content }}</seed:think>",
    "minimax": "<mm:think>{{ messages[0].content }}</mm:think>",
    "command": "<|START_THINKING|>{{ messages[0].content }}<|END_THINKING|>",
    "tags that are special": "<think>{{ messages[0].content }}</think>",
}
WRITTEN = {
    "magistral": "[THINK]3 or 4?[/THINK]It is 3.",
    "seed": "<seed:think>3 or 4?</seed:think>It is 3.",
    "minimax": "<mm:think>3 or 4?</mm:think>It is 3.",
    "command": "<|START_THINKING|>3 or 4?<|END_THINKING|>It is 3.",
    "tags that are special": "<think>3 or 4?</think>It is 3.",
    "channels": f"{HARMONY}<|return|>",
    "results_within_calls": f"{GEMMA}<turn|>",
    "chatml": "<think>3 or 4?</think>It is 3.<|im_end|>",
}
"""The same thought and answer, as models write them that have these templates or marks."""


@pytest.fixture(scope="module", params=WRITTEN)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenization, list[int]]:
    folder, name = tmp_path_factory.mktemp("model"), request.param
    model = make_model(folder, OWN[name], ends=["</s>"], more=MARKS[name]) if name in OWN else model_with(name, folder)
    tokenization = Tokenization(model)
    return tokenization, tokenization.encode_after("", WRITTEN[name])


MARKS = {
    "magistral": ["[THINK]", "[/THINK]"],
    "seed": ["<seed:think>", "</seed:think>"],
    "minimax": ["<mm:think>", "</mm:think>"],
    "command": ["<|START_THINKING|>", "<|END_THINKING|>"],
    "tags that are special": ["<think>", "</think>"],
}


def test_thought_and_answer_come_apart(case: tuple[Tokenization, list[int]]) -> None:
    tokenization, ids = case
    said = tokenization.said(ids)
    assert said == "<think>3 or 4?</think>It is 3."
    assert without_thought(said) == "It is 3."
    (whole,) = tokenization.decode([ids], special=True)
    assert without_thought(tokenization.in_tags(whole)).startswith("It is 3.")


def test_what_is_told_of_more_tokens_begins_with_what_was_told_of_fewer(case: tuple[Tokenization, list[int]]) -> None:
    tokenization, ids = case
    said = [tokenization.said(ids[:count]) for count in range(len(ids) + 1)]
    assert all(later.startswith(earlier) for earlier, later in pairwise(said)), said
    in_thought = [each for each in said if "</think>" not in each] if tokenization.has_own_marks else []
    assert all(without_thought(each) == "" for each in in_thought), "a thought is no answer"


@pytest.mark.parametrize(
    ("template", "text", "said"),
    [
        ("channels", "<|channel|>final<|message|>It is 3.<|return|>", "It is 3."),
        ("channels", "<|channel|>analysis<|message|>3 or", "<think>3 or"),
        ("channels", f"{PREAMBLE}<|start|>assistant{HARMONY}", "I look.<think>3 or 4?</think>It is 3."),
        ("channels", "3 or 4?<|end|><|start|>assistant<|channel|>final<|message|>It is 3.", "3 or 4?</think>It is 3."),
        ("channels", "It is 3.<|return|>", "It is 3."),
        ("channels", "It <|message|>is<|start|> 3.<|return|>", "It is 3."),
        ("results_within_calls", "It is 3.<turn|>", "It is 3."),
        ("results_within_calls", "3 or 4?<channel|>It is 3.<turn|>", "3 or 4?</think>It is 3."),
        ("chatml", "<|channel|>analysis<|message|>It is 3.", "<|channel|>analysis<|message|>It is 3."),
        ("chatml", "[THINK]It is 3.", "[THINK]It is 3."),
    ],
)  # fmt: skip
def test_only_a_models_own_marks_are_marks(template: str, text: str, said: str, tmp_path: Path) -> None:
    tokenization = Tokenization(model_with(template, tmp_path))
    assert tokenization.said(tokenization.encode_after("", text)) == said
