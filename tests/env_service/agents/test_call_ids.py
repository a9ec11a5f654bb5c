"""The ids of calls: what the policy wrote stays, and so does what an agent makes of it, where the template takes it."""

from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

from env_service.environments.interface import AgentClient, Task
from env_service.environments.tokenization import Tokenization
from tests.env_service.agents.served import Saying, agent_benches
from tests.env_service.chat_models import model_with
from tests.env_service.peers import lease

LOOK = {
    "type": "function",
    "function": {"name": "look", "description": "Look.", "parameters": {"type": "object", "properties": {}}},
}
CALLS = {
    "alternating_with_tools": '[TOOL_CALLS] [{"name": "look", "arguments": {}, "id": "a1b2c3d4e"}, '
    '{"name": "look", "arguments": {}, "id": "a1b2c3d4f"}]',
    "results_with_ids": "<|tool_calls_section_begin|>"
    "<|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
    "<|tool_call_begin|>functions.look:1<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
}
"""Two calls in a turn, as models of these families write them."""
IDS = {
    "alternating_with_tools": ["a1b2c3d4e", "a1b2c3d4f"],
    "results_with_ids": ["functions.look:0", "functions.look:1"],
}
RESULTS = {
    "alternating_with_tools": '[TOOL_RESULTS] {{"content": "{0}", "call_id": "{1}"}}[/TOOL_RESULTS]',
    "results_with_ids": "<|im_system|>{2}<|im_middle|>## Return of {1}\n{0}<|im_end|>",
}


async def held(
    name: str, folder: Path, *, rename: str = "", again: bool = False, calls_as: str = ""
) -> tuple[list[str], str]:
    """The ids that an agent was told, and all that the policy was shown and said. `rename` is put before the ids that
    the agent sends back; `again`: it asks anew, with another first message, so that nothing recorded is extended.
    `calls_as` is what the policy calls, if not as its family does.
    """
    model = model_with(name, folder)
    ids: list[str] = []

    async def looks(task: Task, client: AgentClient) -> float:
        async with AsyncOpenAI(base_url=client.base_url, api_key=client.key, max_retries=0) as policy:
            messages: list[Any] = [{"role": "user", "content": "where?"}]
            answer = await policy.chat.completions.create(model="m", messages=messages, tools=[LOOK])  # type: ignore[list-item]
            calls = answer.choices[0].message.tool_calls or []
            ids.extend(call.id for call in calls)
            if again:
                messages[0]["content"] = "where now?"
            told = [{**call.model_dump(), "id": rename + call.id} for call in calls]
            messages += [{"role": "assistant", "content": "", "tool_calls": told}]
            messages += [
                {"role": "tool", "tool_call_id": each["id"], "content": f"seen {number}"}
                for number, each in enumerate(told)
            ]
            await policy.chat.completions.create(model="m", messages=messages, tools=[LOOK])  # type: ignore[list-item]
        return 1.0

    def says(prompt: str) -> str:
        return "north" if "seen" in prompt else calls_as or CALLS[name]

    async with agent_benches(model) as agents:
        made = await agents(Saying(model, says), run=looks)
        (trajectory,) = (await made.finished(lease(environment="agent", group_size=1))).group.trajectories
    (text,) = Tokenization(model).decode([trajectory.token_ids.tolist()], special=True)
    assert len(trajectory.sequence_starts) == again
    return ids, text


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("name", CALLS)
async def test_calls_keep_the_ids_that_the_policy_wrote_and_results_have_them(
    name: str, again: bool, tmp_path: Path
) -> None:
    ids, text = await held(name, tmp_path, again=again)

    assert ids == IDS[name]
    for number, call_id in enumerate(ids):
        assert RESULTS[name].format(f"seen {number}", call_id, "look") in text


async def test_ids_of_the_agents_own_stay(tmp_path: Path) -> None:
    _, text = await held("results_with_ids", tmp_path, rename="own-")

    assert "## Return of own-functions.look:0\nseen 0" in text
    assert "## Return of own-functions.look:1\nseen 1" in text


@pytest.mark.parametrize("again", [False, True])
async def test_ids_that_a_template_refuses_are_numbered_anew(again: bool, tmp_path: Path) -> None:
    _, text = await held("alternating_with_tools", tmp_path, rename="own-", again=again)

    for number in range(2):
        result = RESULTS["alternating_with_tools"].format(f"seen {number}", f"call0000{number + 1}", "")
        assert result in text


@pytest.mark.parametrize("again", [False, True])
async def test_calls_are_asked_for_as_text_where_nobody_reads_the_templates_own(again: bool, tmp_path: Path) -> None:
    call = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
    ids, text = await held("invoked_calls", tmp_path, again=again, calls_as=call)

    assert len(ids) == 1
    assert "# Tools" not in text
    assert "For each call write an object" in text
    assert "<tool_response>\nseen 0\n</tool_response>" in text
