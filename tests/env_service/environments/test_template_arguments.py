"""Arguments of a chat template besides the conversation, compared with transformers' rendering with the same."""

from pathlib import Path

import pytest
from pydantic import JsonValue

from env_service.app import hello_of, tokenization_of
from env_service.config import EnvServiceConfig
from env_service.environments import catalog
from env_service.environments.bridges import Bridges
from env_service.environments.imported import EnvironmentFault
from env_service.environments.interface import ChatMessage
from env_service.environments.tokenization import ChatTemplate, ChatTemplateError, TemplateArguments, Tokenization
from protocol.messages import Hello
from services.model_folder import fingerprint_directory
from services.process import WrongSettings
from tests.env_service.chat_models import PREFILLED, TEMPLATES, make_model, model_with

EMPTY = {"thinking_switched": "<think>\n\n</think>\n\n", "thinking_kept_empty": "<think>\n\n</think>\n"}
"""Text that these templates put before an answer without thinking."""
OFF: TemplateArguments = {"enable_thinking": False}


@pytest.mark.parametrize("told", [{}, OFF, {"enable_thinking": True}])
@pytest.mark.parametrize("name", EMPTY)
def test_a_conversation_is_rendered_with_what_the_template_is_told(
    name: str, told: TemplateArguments, tmp_path: Path
) -> None:
    from transformers import PreTrainedTokenizerFast

    folder = model_with(name, tmp_path)
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    messages = (ChatMessage("user", "a"), ChatMessage("assistant", "b"), ChatMessage("user", "c"))
    plain = [{"role": each.role, "content": each.content} for each in messages]

    text, ids = Tokenization(folder, arguments=told).encode(messages)

    assert text == theirs.apply_chat_template(plain, tokenize=False, add_generation_prompt=True, **told)
    assert Tokenization(folder).with_arguments(told).encode(messages) == (text, ids)
    assert text.endswith(f"<|im_start|>assistant\n{EMPTY[name] if told == OFF else ''}")


@pytest.mark.parametrize("name", EMPTY)
def test_a_bridge_ends_with_the_empty_thinking_that_the_template_writes(name: str, tmp_path: Path) -> None:
    tokenization = Tokenization(model_with(name, tmp_path))
    bridges = Bridges(tokenization)
    said = (ChatMessage("user", "no"),)

    with_thinking = bridges.bridge(said)
    without = bridges.with_arguments(OFF).bridge(said)

    assert bridges.with_arguments(OFF) is bridges.with_arguments({"enable_thinking": False})
    assert bridges.with_arguments({}) is bridges
    assert bridges.bridge(said) == with_thinking
    assert without.closer == with_thinking.closer
    assert tokenization.decode([without.rest], special=True) == [
        tokenization.decode([with_thinking.rest], special=True)[0] + EMPTY[name]
    ]


@pytest.mark.parametrize("told", [{}, OFF])
@pytest.mark.parametrize("name", TEMPLATES)
def test_only_what_a_template_takes_for_the_policys_words_is_a_part_of_them(
    name: str, told: TemplateArguments, tmp_path: Path
) -> None:
    tokenization = Tokenization(model_with(name, tmp_path)).with_arguments(told)

    assert tokenization.prefilled == PREFILLED.get(name, "")


def test_what_is_put_before_an_answer_depends_on_what_the_template_is_told(tmp_path: Path) -> None:
    text = """{% for message in messages %}{{ '<s>' + message.role + message.content }}{% endfor %}
    {%- if add_generation_prompt %}{{ '<s>assistant' + ('' if enable_thinking else '<think></think>') }}{% endif %}"""
    tokenization = Tokenization(make_model(tmp_path, text, ends=["<s>"]))

    assert tokenization.prefilled == "<think></think>"
    assert tokenization.with_arguments({"enable_thinking": True}).prefilled == ""
    assert tokenization.prefilled == "<think></think>"


def test_later_arguments_go_before_earlier_ones(tmp_path: Path) -> None:
    tokenization = Tokenization(model_with("thinking_switched", tmp_path), arguments=OFF)

    assert tokenization.with_arguments({"enable_thinking": True}).arguments == {"enable_thinking": True}
    assert tokenization.with_arguments(OFF) is tokenization
    assert tokenization.arguments == OFF


def test_an_argument_that_a_template_does_not_read_is_refused_by_name(tmp_path: Path) -> None:
    template = Tokenization(model_with("thinking_switched", tmp_path)).template

    template.check_arguments({"enable_thinking": True})
    with pytest.raises(ChatTemplateError, match=r"does not read enable_thinkin; it reads enable_thinking$"):
        template.check_arguments({"enable_thinkin": True})
    with pytest.raises(ChatTemplateError, match="messages is what the conversation itself says"):
        template.check_arguments({"messages": []})


def test_a_run_and_an_environment_tell_the_template_what_it_reads(tmp_path: Path) -> None:
    model = model_with("thinking_switched", tmp_path)
    entry = {"source": "arithmetic", "name": "sums"}

    def config(*, run: TemplateArguments = OFF, environment: TemplateArguments = OFF) -> EnvServiceConfig:
        entries = [{**entry, "chat_template_kwargs": environment}]
        return EnvServiceConfig.model_validate(
            {"model": model, "run": {"chat_template_kwargs": run}, "environments": entries}
        )

    tokenization = tokenization_of(config())
    environments = catalog.build(config().environments)
    catalog.check_templates(environments, tokenization)
    assert tokenization.arguments == environments["sums"].template_arguments == OFF
    with pytest.raises(WrongSettings, match=r"\[run\] chat_template_kwargs: .*does not read thinking"):
        tokenization_of(config(run={"thinking": False}))
    with pytest.raises(EnvironmentFault, match=r"environment sums: chat_template_kwargs: .*does not read thinking"):
        catalog.check_templates(catalog.build(config(environment={"thinking": True}).environments), tokenization)


def test_the_learner_is_told_what_the_template_is_told(tmp_path: Path) -> None:
    model = model_with("thinking_switched", tmp_path)

    def hello(run: TemplateArguments, *environments: TemplateArguments) -> Hello:
        entries = [
            {"source": "arithmetic", "name": f"sums{number}", "chat_template_kwargs": told}
            for number, told in enumerate(environments)
        ]
        config = EnvServiceConfig.model_validate(
            {"model": model, "run": {"chat_template_kwargs": run}, "environments": entries}
        )
        return hello_of(config, catalog.build(config.environments), port=1)

    known = [fingerprint_directory(model, None, told).chat_template for told in ({}, OFF)]
    assert [hello(told, {}).chat_template for told in ({}, OFF)] == known
    assert [info.chat_template for info in hello({}, {}, OFF).environments] == ["", known[1]]


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_templates_read_is_known(name: str, tmp_path: Path) -> None:
    reads = Tokenization(model_with(name, tmp_path)).template.reads

    assert not reads & {"loop", "namespace", "range", "raise_exception", "message", "ns"}


@pytest.mark.parametrize(
    ("expression", "value"), [("7 // n", 0), ("range(n)|length", 10**9), ("n()", "x"), ("'%d' % n", "x"), ("n.x.y", {})]
)
def test_a_value_that_a_template_cannot_take_is_its_refusal(expression: str, value: JsonValue) -> None:
    template = ChatTemplate(f"{{{{ {expression} }}}}", special_tokens={})

    with pytest.raises(ChatTemplateError, match="refuses the messages"):
        template.render((ChatMessage("user", "a"),), arguments={"n": value})
