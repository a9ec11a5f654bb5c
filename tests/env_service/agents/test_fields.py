"""Each field of a request is harmless, honoured, or a 400 that names it; other sampling is what the setting says."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from env_service.agents.registry import AgentLimits
from env_service.environments.interface import AgentClient, Task
from tests.env_service.agents.raw_calls import GO, answers, said_to
from tests.env_service.agents.served import AgentBench, MakeAgentBench, Saying
from tests.env_service.peers import lease

ADD: Any = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
FORM = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}

CHAT: list[tuple[str, str, dict[str, Any]]] = [
    ("400", "chat_template_kwargs", {"chat_template_kwargs": {"enable_thinking": False}}),
    ("400", "continue_final_message", {"continue_final_message": True}),
    ("400", "structured_outputs", {"structured_outputs": {"regex": "a"}}),
    ("400", "guided_json", {"guided_json": {"type": "object"}}),
    ("400", "guided_choice", {"guided_choice": ["a"]}),
    ("400", "bad_words", {"bad_words": ["a"]}),
    ("400", "min_tokens", {"min_tokens": 5}),
    ("400", "stop_token_ids", {"stop_token_ids": [2]}),
    ("400", "functions", {"functions": [{"name": "add"}]}),
    ("400", "function_call", {"function_call": {"name": "add"}}),
    ("400", "tool_choice", {"tool_choice": {"type": "function", "function": {"name": "add"}}}),
    ("400", "tool_choice", {"tool_choice": "required"}),
    ("400", "parallel_tool_calls", {"parallel_tool_calls": False}),
    ("400", "reasoning_effort", {"reasoning_effort": "low"}),
    ("400", "audio", {"audio": {"voice": "v", "format": "wav"}}),
    ("400", "moderation", {"moderation": {"model": "m"}}),
    ("400", "web_search_options", {"web_search_options": {}}),
    ("400", "verbosity", {"verbosity": "low"}),
    ("400", "top_logprobs", {"logprobs": True, "top_logprobs": 3}),
    ("400", "logprobs", {"logprobs": True, "stream": True}),
    ("400", "response_format", {"response_format": FORM}),
    ("400", "store", {"store": True}),
    ("400", "n", {"n": 2}),
    ("400", "n_probs", {"n_probs": 1}),
    ("400", "seed", {"seed": 3}),
    ("400", "temperature", {"temperature": 0.2}),
    ("400", "top_p", {"top_p": 0.9}),
    ("400", "top_k", {"top_k": 5}),
    ("400", "min_p", {"min_p": 0.1}),
    ("400", "presence_penalty", {"presence_penalty": 1.0}),
    ("400", "frequency_penalty", {"frequency_penalty": 1.0}),
    ("400", "repetition_penalty", {"repetition_penalty": 1.1}),
    ("400", "logit_bias", {"logit_bias": {"5": 10}}),
    ("harmless", "chat_template_kwargs", {"chat_template_kwargs": {}}),
    ("harmless", "user", {"user": "me"}),
    ("harmless", "metadata", {"metadata": {"a": "b"}}),
    ("harmless", "service_tier", {"service_tier": "auto"}),
    ("harmless", "prompt_cache_key", {"prompt_cache_key": "k"}),
    ("harmless", "prompt_cache_options", {"prompt_cache_options": {"mode": "explicit"}}),
    ("harmless", "reasoning_effort", {"reasoning_effort": "none"}),
    ("harmless", "safety_identifier", {"safety_identifier": "s"}),
    ("harmless", "prediction", {"prediction": {"type": "content", "content": "one"}}),
    ("harmless", "store", {"store": False}),
    ("harmless", "parallel_tool_calls", {"parallel_tool_calls": True}),
    ("harmless", "tool_choice", {"tool_choice": "auto"}),
    ("harmless", "functions", {"functions": None, "seed": None}),
    ("harmless", "response_format", {"response_format": {"type": "text"}}),
    ("harmless", "n", {"n": 1, "temperature": 1, "top_p": 1, "top_k": -1, "logit_bias": {}}),
    ("honoured", "max_tokens", {"max_tokens": 2}),
    ("honoured", "max_completion_tokens", {"max_completion_tokens": 2}),
    ("honoured", "stop", {"stop": [" two"]}),
    ("honoured", "tools", {"tools": [{"type": "function", "function": ADD}]}),
    ("honoured", "stream", {"stream": True}),
    ("honoured", "logprobs", {"logprobs": True}),
]
RESPONSES: list[tuple[str, str, dict[str, Any]]] = [
    ("400", "reasoning", {"reasoning": {"effort": "low"}}),
    ("400", "reasoning", {"reasoning": {"effort": "none", "summary": "auto"}}),
    ("400", "access_programs", {"access_programs": {}}),
    ("400", "context_management", {"context_management": []}),
    ("400", "image", {"image": {}}),
    ("400", "moderation", {"moderation": {"model": "m"}}),
    ("400", "conversation", {"conversation": "conv_1"}),
    ("400", "prompt", {"prompt": {"id": "pmpt_1"}}),
    ("400", "background", {"background": True}),
    ("400", "max_tool_calls", {"max_tool_calls": 1}),
    ("400", "previous_response_id", {"previous_response_id": "resp_1"}),
    ("400", "tool_choice", {"tool_choice": {"type": "function", "name": "add"}}),
    ("400", "tool_choice", {"tool_choice": "required"}),
    ("400", "parallel_tool_calls", {"parallel_tool_calls": False}),
    ("400", "truncation", {"truncation": "auto"}),
    ("400", "include", {"include": ["message.output_text.logprobs"]}),
    ("400", "text", {"text": {"format": {"type": "json_object"}}}),
    ("400", "text.verbosity", {"text": {"verbosity": "low"}}),
    ("400", "top_logprobs", {"top_logprobs": 3}),
    ("400", "chat_template_kwargs", {"chat_template_kwargs": {"enable_thinking": False}}),
    ("400", "min_tokens", {"min_tokens": 5}),
    ("400", "store", {"store": True}),
    ("400", "n_probs", {"n_probs": 1}),
    ("400", "seed", {"seed": 3}),
    ("400", "temperature", {"temperature": 0.2}),
    ("400", "top_p", {"top_p": 0.9}),
    ("harmless", "user", {"user": "me"}),
    ("harmless", "metadata", {"metadata": {"a": "b"}}),
    ("harmless", "service_tier", {"service_tier": "auto"}),
    ("harmless", "include", {"include": ["reasoning.encrypted_content"]}),
    ("harmless", "reasoning", {"reasoning": {"effort": None, "summary": None}}),
    ("harmless", "reasoning", {"reasoning": {"effort": "none"}}),
    ("harmless", "prompt_cache_options", {"prompt_cache_options": {"mode": "explicit"}}),
    ("harmless", "truncation", {"truncation": "disabled", "background": False, "store": False}),
    ("harmless", "text", {"text": {"format": {"type": "text"}, "verbosity": "medium"}}),
    ("harmless", "tool_choice", {"tool_choice": "auto", "parallel_tool_calls": True}),
    ("honoured", "max_output_tokens", {"max_output_tokens": 2}),
    ("honoured", "instructions", {"instructions": "Be kind."}),
    ("honoured", "tools", {"tools": [{"type": "function", **ADD}]}),
    ("honoured", "stream", {"stream": True}),
]
CASES = [("chat/completions", {"messages": GO}, *case) for case in CHAT]
CASES += [("responses", {"input": "go"}, *case) for case in RESPONSES]
SHAPING = {"temperature": 0.0, "top_p": 0.5, "seed": 7, "tool_choice": "required"}


@pytest.mark.parametrize(
    ("route", "needed", "label", "name", "fields"), CASES, ids=[f"{case[0]}-{case[2]}-{case[3]}" for case in CASES]
)
async def test_a_field_is_what_its_label_says(
    agents: MakeAgentBench, chat_model: Path, route: str, needed: dict[str, Any], label: str, name: str, fields: Any
) -> None:
    body = {"model": "m", **needed}
    (plain, _), (status, said) = await answers(
        agents, chat_model, [(route, json.dumps(body)), (route, json.dumps({**body, **fields}))]
    )

    assert plain == 200
    if label != "400":
        assert status == 200, said
        return
    error = said["error"]
    assert (status, error["param"], error["code"]) == (400, name, "unsupported_value")
    assert error["message"].startswith(f"{name}: ") or error["message"].startswith(f"{name}.format: ")
    assert error["type"] == "invalid_request_error"


CALL = {"name": "add", "arguments": "{}"}


@pytest.mark.parametrize(
    ("role", "name", "given"),
    [
        ("assistant", "function_call", CALL),
        ("assistant", "audio", {"id": "a"}),
        ("user", "tool_calls", [{"id": "1", "type": "function", "function": CALL}]),
    ],
)
async def test_a_part_of_a_message_that_would_be_lost_is_a_400(
    agents: MakeAgentBench, chat_model: Path, role: str, name: str, given: object
) -> None:
    said = [*GO, {"role": role, "content": "", name: given}, *GO]
    plain = [*GO, {"role": role, "content": "", name: None}, *GO]
    bodies = [("chat/completions", json.dumps({"model": "m", "messages": messages})) for messages in (said, plain)]
    (status, answer), (fine, _) = await answers(agents, chat_model, bodies)
    assert (status, fine) == (400, 200)
    assert answer["error"]["param"] == f"messages.1.{name}"


@pytest.mark.parametrize(("label", "name", "fields"), [case for case in CHAT if case[0] == "honoured"])
async def test_a_field_that_is_honoured_changes_what_happens(
    agents: MakeAgentBench, chat_model: Path, label: str, name: str, fields: Any
) -> None:
    said: list[str] = []

    async def asks(task: Task, client: AgentClient) -> float:
        for body in ({"messages": GO}, {"messages": GO, **fields}):
            _, answer = await said_to(client, "chat/completions", json.dumps(body))
            text = answer.get("text") or answer["choices"][0]["message"]["content"]
            said.append(text if "max" not in name else str(made.generators[0].requests[-1].sampling.max_tokens))
            said.append(str(bool(answer.get("choices") and answer["choices"][0]["logprobs"])))
        return 1.0

    made = await agents(Saying(chat_model, lambda prompt: "one two" if "add" not in prompt else "add it"), run=asks)
    await made.finished(lease(environment="agent", group_size=1))
    assert said[:2] != said[2:]


def ignored(made: AgentBench, name: str) -> float | None:
    labels = {"environment": "agent", "field": name}
    found: float | None = made.metrics.registry.get_sample_value(
        "headway_env_service_agent_fields_ignored_total", labels
    )
    return found


async def test_an_agent_that_fixes_its_sampling_can_be_run(
    agents: MakeAgentBench, chat_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    statuses = []

    async def fixes(task: Task, client: AgentClient) -> float:
        for _ in range(2):
            said = await said_to(client, "chat/completions", json.dumps({"messages": GO, **SHAPING}))
            statuses.append(said[0])
        for fields in ({"n": 2}, {"response_format": FORM}, {"temperature": "hot"}):
            said = await said_to(client, "chat/completions", json.dumps({"messages": GO, **fields}))
            statuses.append(said[0])
        return 1.0

    made = await agents(Saying(chat_model, lambda _: "one"), run=fixes, limits=AgentLimits(other_sampling="ignore"))
    with caplog.at_level(logging.WARNING):
        finished = await made.finished(lease(environment="agent", group_size=2))

    assert sorted(statuses) == [200] * 4 + [400] * 6
    assert len(finished.group.trajectories) == 2
    for request in made.generators[0].requests:
        assert request.sampling.temperature == 1.0
        assert request.sampling.top_p == 1.0
    for name in SHAPING:
        assert ignored(made, name) == 4
        assert sum(f"set {name}, which is ignored" in line for line in caplog.messages) == 1
