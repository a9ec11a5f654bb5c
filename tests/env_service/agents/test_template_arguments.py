"""`chat_template_kwargs` of agents' requests: what is shown is what transformers renders with them, on all routes."""

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from env_service.agents.messages import AgentMessage
from env_service.environments.interface import AgentClient, Task
from env_service.environments.tokenization import TemplateArguments
from tests.env_service.agents.raw_calls import GO, answers, said_to
from tests.env_service.agents.served import MakeAgentBench, Saying, agent_benches
from tests.env_service.agents.test_exactness import check_recorded, session_of, told
from tests.env_service.chat_models import model_with
from tests.env_service.peers import lease

EMPTY = {"thinking_switched": "<think>\n\n</think>\n\n", "thinking_kept_empty": "<think>\n\n</think>\n"}
TOLD: Sequence[TemplateArguments] = ({}, {"enable_thinking": False}, {"enable_thinking": True})
OFF: dict[str, object] = {"chat_template_kwargs": {"enable_thinking": False}}
DEEP: dict[str, object] = {"chat_template_kwargs": {"enable_thinking": json.loads("[" * 600 + "]" * 600)}}
ROUTES: Mapping[str, dict[str, Any]] = {
    "chat/completions": {"messages": GO},
    "responses": {"input": "go"},
    "messages": {"messages": GO, "max_tokens": 8},
}

NO_THINKING: Mapping[str, dict[str, object]] = {
    "chat/completions": {"reasoning_effort": "none"},
    "responses": {"reasoning": {"effort": "none"}},
    "messages": {"thinking": {"type": "disabled"}},
}


def asked_on(route: str, **fields: object) -> tuple[str, str]:
    return route, json.dumps({"model": "m", **ROUTES[route], **fields})


@pytest.mark.parametrize("name", EMPTY)
async def test_each_request_is_shown_what_the_template_writes_when_it_is_told_that(name: str, tmp_path: Path) -> None:
    chance = random.Random(name)
    session, engine, tokenization = session_of(tmp_path, name, chance)
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    conversations: list[tuple[TemplateArguments, list[AgentMessage]]] = [({}, [AgentMessage("user", "go")])]

    for _ in range(24):
        before, history = chance.choice(conversations)
        arguments = before if chance.random() < 0.7 else chance.choice(TOLD)
        answering = await told(session, history, (), arguments)
        assert answering is not None
        assert answering.reply is not None
        (text,) = tokenization.decode([answering.prompt], special=True)
        plain = [{"role": each.role, "content": each.text} for each in history]
        whole = theirs.apply_chat_template(plain, tokenize=False, add_generation_prompt=True, **arguments)
        assert text == whole if answering.branch.parent is None else text.endswith(ending(whole))
        assert arguments == before or len(history) == 1 or answering.branch.parent is None
        conversations.append((arguments, [*history, answering.reply, AgentMessage("user", "and?")]))

    assert session.recorded.continued > 3
    assert session.recorded.rewritten > 0
    check_recorded(session, engine)


def ending(text: str) -> str:
    """The text behind the user's last words."""
    return text[text.rindex("and?") :]


async def test_what_is_said_again_of_the_same_is_one_conversation(tmp_path: Path) -> None:
    session, _, _ = session_of(tmp_path, "thinking_switched", random.Random(1))
    language = session.speaker.language.with_arguments({"enable_thinking": False})
    session.speaker = replace(session.speaker, language=language)
    first = await told(session, [AgentMessage("user", "go")], (), {})
    assert first is not None
    assert first.reply is not None

    history = [AgentMessage("user", "go"), first.reply, AgentMessage("user", "and?")]
    second = await told(session, history, (), {"enable_thinking": False})

    assert second is not None
    assert second.branch.parent is first.branch


@pytest.mark.parametrize("route", ROUTES)
async def test_each_route_tells_the_template(tmp_path: Path, route: str) -> None:
    policy = Saying(model_with("thinking_switched", tmp_path), lambda _: "one")

    async def asks(task: Task, client: AgentClient) -> float:
        told: tuple[dict[str, object], ...] = ({}, OFF, {"chat_template_kwargs": {}})
        for fields in told:
            status, said = await said_to(client, *asked_on(route, **fields))
            assert status == 200, said
        if route == "messages":
            counted = {"model": "m", "messages": GO}
            sizes = [
                (await said_to(client, "messages/count_tokens", json.dumps({**counted, **fields})))[1]["input_tokens"]
                for fields in ({}, OFF)
            ]
            assert sizes[0] < sizes[1]
        return 1.0

    async with agent_benches(tmp_path) as agents:
        made = await agents(policy, run=asks)
        await made.finished(lease(environment="agent", group_size=1))

    assert [prompt.endswith(EMPTY["thinking_switched"]) for prompt in policy.prompts] == [False, True, False]


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("name", ["thinking_switched", "chatml", "thinking_prefilled"])
async def test_a_request_that_wants_no_thinking_has_none_or_is_refused(tmp_path: Path, route: str, name: str) -> None:
    policy, found = Saying(model_with(name, tmp_path), lambda _: "one"), []
    field = next(iter(NO_THINKING[route]))

    async def asks(task: Task, client: AgentClient) -> float:
        for fields in (
            NO_THINKING[route],
            {**NO_THINKING[route], "chat_template_kwargs": {"enable_thinking": True}},
            {},
        ):
            found.append(await said_to(client, *asked_on(route, **fields)))
        return 1.0

    async with agent_benches(tmp_path) as agents:
        made = await agents(policy, run=asks)
        await made.finished(lease(environment="agent", group_size=1))

    (status, said), (contrary, why), (plain, _) = found
    assert (contrary, plain) == (400, 200)
    assert status == (400 if name == "thinking_prefilled" else 200), said
    if name == "thinking_switched":
        assert [prompt.endswith(EMPTY[name]) for prompt in policy.prompts] == [True, False]
        assert "chat_template_kwargs sets enable_thinking" in why["error"]["message"]
    if status == 400:
        assert said["error"]["message"].startswith(f"{field}: the chat template has no switch")


@pytest.mark.parametrize("route", ROUTES)
async def test_what_the_template_does_not_read_is_a_400(agents: MakeAgentBench, chat_model: Path, route: str) -> None:
    wrong: tuple[dict[str, object], ...] = (
        {"chat_template_kwargs": "x"},
        {"chat_template_kwargs": {"messages": []}},
        OFF,
        DEEP,
    )
    said = await answers(agents, chat_model, [asked_on(route, **fields) for fields in wrong])

    assert [status for status, _ in said] == [400] * len(wrong)
    assert all("chat_template_kwargs: " in answer["error"]["message"] for _, answer in said)
