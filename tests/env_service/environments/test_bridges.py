"""Bridges: the text that templates write between the policy's words and its next turn."""

from pathlib import Path

import pytest

from env_service.environments.bridges import Bridges, RoleNotCarried
from env_service.environments.interface import ChatMessage
from env_service.environments.tokenization import ChatTemplateError, Tokenization
from tests.env_service.chat_models import TEMPLATES, WITHOUT_TOOL_ROLE, ends_of, make_model, model_with, text_of

KEEPING = ("chatml", "default_system", "tools_in_system", "separators", "middle_token", "generation_blocks")
"""Templates that write a whole conversation as it was sampled and shown."""


WITHOUT_SPLIT_TOOLS = {
    "alternating_with_tools": "Conversation roles must alternate",
    "channels": "Message has tool role, but there was no previous assistant message with a tool call",
    "results_within_calls": "it loses a message of role tool",
}
"""Templates that carry tool messages behind calls, but no conversation whose calls are in what the policy said."""


def said(text: str, role: str = "user") -> ChatMessage:
    return ChatMessage(role, text, name="look" if role == "tool" else "")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_template_has_a_bridge_for_what_users_say(name: str, tmp_path: Path) -> None:
    tokenization = Tokenization(model_with(name, tmp_path))
    bridge = Bridges(tokenization).bridge((said("seven is\ntoo low"),))

    closer, rest = tokenization.decode([bridge.closer, bridge.rest], special=True)
    assert "seven is\ntoo low" in rest
    assert closer in {*ends_of(name), "<|end|>", ""}
    assert "ZQMARK" not in closer + rest


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_role_that_a_template_refuses_or_loses_is_named(name: str, tmp_path: Path) -> None:
    bridges = Bridges(Tokenization(model_with(name, tmp_path)))
    reason = WITHOUT_TOOL_ROLE.get(name)

    if reason is None:
        bridges.check_roles(("user", "tool"))
        return
    with pytest.raises(RoleNotCarried, match="cannot carry role tool") as raised:
        bridges.check_roles(("user", "tool"))
    assert reason in str(raised.value)


@pytest.mark.parametrize("name", [name for name in TEMPLATES if name not in WITHOUT_TOOL_ROLE])
def test_a_template_that_cannot_render_a_split_history_with_tools_is_refused(name: str, tmp_path: Path) -> None:
    bridges = Bridges(Tokenization(model_with(name, tmp_path)))
    reason = WITHOUT_SPLIT_TOOLS.get(name)

    bridges.check_roles(("tool",), history="append")
    if reason is None:
        bridges.check_roles(("tool", "user"), history="split")
        return
    with pytest.raises(RoleNotCarried, match=r"cannot carry role tool with history = split: .*; set append$") as raised:
        bridges.check_roles(("tool",), history="split")
    assert reason in str(raised.value)


@pytest.mark.parametrize("ends", [["<turn|>", "<|tool_response>"], ["<turn|>"]])
def test_a_result_that_is_written_within_the_policys_turn_stands_behind_its_call(
    ends: list[str], tmp_path: Path
) -> None:
    tokenization = Tokenization(make_model(tmp_path, text_of("results_within_calls"), ends=ends))
    bridge = Bridges(tokenization).bridge((said("sunny", "tool"),))
    result, special = 'response:look{value:<|"|>sunny<|"|>}<tool_response|>', tokenization.special_tokens

    def after(*names: str, ended: bool) -> str:
        ids = [70, *(special[name] for name in names)]
        return tokenization.decode([bridge.after(ids, ended=ended)], special=True)[0]

    if len(ends) > 1:
        assert after("<tool_call|>", "<|tool_response>", ended=True) == result
        assert after("<tool_call|>", "<turn|>", ended=True) == f"<|tool_response>{result}"
        assert after("<tool_call|>", ended=False) == f"<|tool_response>{result}"
    else:
        assert after("<tool_call|>", ended=True) == f"<|tool_response>{result}"
        assert after(ended=False) == f"<tool_call|><|tool_response>{result}"


def test_a_template_that_refuses_a_system_message_is_named(tmp_path: Path) -> None:
    bridges = Bridges(Tokenization(model_with("model_is_the_assistant", tmp_path)))

    with pytest.raises(RoleNotCarried, match=r"cannot carry role system: .*System role not supported"):
        bridges.check_roles(("system", "user"))


@pytest.mark.parametrize("name", KEEPING)
def test_where_a_template_keeps_history_the_bridge_is_what_it_would_write(name: str, tmp_path: Path) -> None:
    tokenization = Tokenization(model_with(name, tmp_path))
    bridges = Bridges(tokenization)
    messages = [said("2+3?")]
    tokens = tokenization.encode(tuple(messages))[1]

    for turn in range(3):
        answer = f"it is {turn}, I think"
        sampled = tokenization.encode_after("", answer + ends_of(name)[0])
        messages += [ChatMessage("assistant", answer), said(f"no, not {turn}\n")]
        tokens += [*sampled, *bridges.bridge((messages[-1],)).after(sampled, ended=True)]

        assert tokenization.decode([tokens], special=True) == [tokenization.render(tuple(messages))]


def test_a_turn_that_ended_itself_keeps_its_end_and_one_that_was_cut_off_gets_the_templates(tmp_path: Path) -> None:
    tokenization = Tokenization(model_with("chatml", tmp_path))
    bridge = Bridges(tokenization).bridge((said("no"),))
    end = tokenization.special_tokens["<|im_end|>"]

    assert bridge.after([70, end], ended=True) == bridge.rest
    assert bridge.after([70, 71], ended=False) == (end, *bridge.rest)


def test_where_the_next_header_ends_a_turn_it_stands_once(tmp_path: Path) -> None:
    tokenization = Tokenization(model_with("headers_end_turns", tmp_path))
    user, observation = (tokenization.special_tokens[name] for name in ("<|user|>", "<|observation|>"))
    bridge = Bridges(tokenization).bridge((said("no"),))

    assert bridge.closer == ()
    assert bridge.after([70, user], ended=True) == bridge.rest[1:]
    assert bridge.after([70], ended=False)[0] == user
    assert bridge.fits([70, user], ended=True)
    assert not bridge.fits([70, observation], ended=True)


def test_harmony_gets_a_tools_result_behind_the_call(tmp_path: Path) -> None:
    tokenization = Tokenization(model_with("channels", tmp_path))
    bridge = Bridges(tokenization).bridge((said("sunny", "tool"),))

    closer, rest = tokenization.decode([bridge.closer, bridge.rest], special=True)
    assert closer == "<|call|>"
    assert rest.startswith("<|start|>functions.look to=assistant")
    assert rest.endswith('"sunny"<|end|><|start|>assistant')


def test_a_template_that_drops_the_policys_text_is_refused(tmp_path: Path) -> None:
    template = "{% for m in messages %}{% if m.role == 'user' %}<|user|>{{ m.content }}{% endif %}{% endfor %}"
    bridges = Bridges(Tokenization(make_model(tmp_path, template, ends=["</s>"])))

    with pytest.raises(ChatTemplateError, match="drops the content"):
        bridges.bridge((said("no"),))
