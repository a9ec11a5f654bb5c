"""A reward for each completion of an agent, in order or by id, becomes the turn's own."""

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import aiohttp
import numpy as np
import pytest

from env_service.agents import program
from env_service.agents.program import AgentOptions, AgentProgram
from env_service.agents.registry import AgentLimits
from env_service.agents.results import checked_result
from env_service.environments.interface import AgentClient, AgentResult, Task, Verification
from env_service.environments.rules import Rules
from env_service.rollouts.conversation import Nonsense
from tests.env_service.agents.raw_calls import said_to
from tests.env_service.agents.served import MakeAgentBench, Saying
from tests.env_service.peers import lease
from tests.env_service.rollouts.test_conversation import counted

PROGRAM = Path(__file__).parent / "sample_program.py"


async def three_calls(client: AgentClient) -> Sequence[str]:
    """Asks each API once, and goes on; the ids of the answers."""
    go: Any = {"role": "user", "content": "go"}
    history = [go, {"role": "assistant", "content": "one"}, {"role": "user", "content": "more"}]
    asked: list[tuple[str, dict[str, Any]]] = [
        ("chat/completions", {"messages": [go]}),
        ("responses", {"input": history}),
        ("messages", {"max_tokens": 20, "messages": [{"role": "user", "content": "else"}]}),
    ]
    return [(await said_to(client, route, json.dumps(body)))[1]["id"] for route, body in asked]


@pytest.mark.parametrize("how", ["in_order", "by_id", "some", "posted", "zeros"])
async def test_each_completion_has_its_own_reward(agents: MakeAgentBench, chat_model: Path, how: str) -> None:
    wanted = {"some": [0.0, 0.5, 0.0], "zeros": [0.0, 0.0, 0.0]}.get(how, [0.25, -0.5, 2.0])

    async def run(task: Task, client: AgentClient) -> AgentResult | float:
        ids = await three_calls(client)
        by_id = dict(zip(ids, wanted, strict=True))
        match how:
            case "by_id":
                return AgentResult(1.0, rewards=by_id)
            case "some":
                numbers: Any = {ids[1]: np.float32(0.5)}
                return AgentResult(1.0, rewards=numbers)
            case "posted":
                headers = {"Authorization": f"Bearer {client.key}"}
                async with aiohttp.ClientSession(headers=headers) as http:
                    body = {"reward": 1.0, "rewards": wanted}
                    async with http.post(f"{client.anthropic_url}/reward", json=body) as answer:
                        assert answer.status == 200
                return 0.0
        return AgentResult(1.0, rewards=wanted)

    made = await agents(Saying(chat_model, lambda _: "one"), run=run)
    (trajectory,) = (await made.finished(lease(environment="agent", group_size=1))).group.trajectories
    assert [turn.reward for turn in trajectory.turns] == wanted
    assert trajectory.reward.reward == 1.0 + sum(wanted)


async def test_without_them_turns_have_no_rewards(agents: MakeAgentBench, chat_model: Path) -> None:
    async def run(task: Task, client: AgentClient) -> float:
        await three_calls(client)
        return 1.0

    made = await agents(Saying(chat_model, lambda _: "one"), run=run)
    (trajectory,) = (await made.finished(lease(environment="agent", group_size=1))).group.trajectories
    assert [turn.reward for turn in trajectory.turns] == [None] * 3


@pytest.mark.parametrize(
    ("rewards", "said"),
    [
        ([1.0], "gives 1 rewards to its 3 completions"),
        ({"chatcmpl-x": 1.0}, "rewards completion 'chatcmpl-x', which is none of its 3"),
        ([1.0, float("nan"), 0.0], "nan as its reward of completion 1"),
        ([1.0, "much", 0.0], "'much' as its reward of completion 1"),
        (3.0, "float as its rewards"),
    ],
)
async def test_rewards_that_fit_no_completions_are_nonsense(
    agents: MakeAgentBench, chat_model: Path, rewards: Any, said: str
) -> None:
    async def run(task: Task, client: AgentClient) -> AgentResult:
        await three_calls(client)
        return AgentResult(rewards=rewards)

    made = await agents(Saying(chat_model, lambda _: "one"), run=run)
    assert said in (await made.failed(lease(environment="agent", group_size=1))).reason


@pytest.mark.parametrize("given", [AgentResult(1.0, stop="\ud83d"), AgentResult(1.0, metrics={"\ud83d": 1.0})])
def test_a_result_with_half_a_character_is_nonsense(given: AgentResult) -> None:
    with pytest.raises(Nonsense, match=r"gives '\\ud83d' as its stop or a metric's name"):
        checked_result(given)


@pytest.mark.parametrize(("what", "said"), [("prints_rewards", None), ("prints_bad_rewards", "is no reward: rewards")])
async def test_a_program_prints_them_as_its_last_line(
    agents: MakeAgentBench, chat_model: Path, what: str, said: str | None
) -> None:
    options = AgentOptions(command=(sys.executable, str(PROGRAM), what))
    made = await agents(Saying(chat_model, lambda _: "one"), start=lambda: AgentProgram(options))
    if said is not None:
        assert said in (await made.failed(lease(environment="agent", group_size=1))).reason
        return
    (trajectory,) = (await made.finished(lease(environment="agent", group_size=1))).group.trajectories
    assert [turn.reward for turn in trajectory.turns] == [0.5]
    assert (trajectory.reward.reward, trajectory.stop_reason) == (1.5, "solved")


async def test_a_post_without_a_reward_is_no_reward_of_zero(agents: MakeAgentBench, chat_model: Path) -> None:
    async def run(task: Task, client: AgentClient) -> AgentResult:
        await said_to(client, "chat/completions", json.dumps({"messages": [{"role": "user", "content": "go"}]}))
        headers = {"Authorization": f"Bearer {client.key}"}
        async with (
            aiohttp.ClientSession(headers=headers) as http,
            http.post(f"{client.anthropic_url}/reward", json={"stop": "done"}) as answer,
        ):
            assert answer.status == 200
        return await client.posted()

    made = await agents(Saying(chat_model, lambda _: "one"), run=run)
    failed = await made.failed(lease(environment="agent", group_size=1))

    assert failed.data_fault
    assert (
        "the agent ended without a reward; expected `reward`, `rewards` of completions, or a verifier" in failed.reason
    )
    assert counted(made, "environment_faults_total", environment="agent", kind="nonsense") == 1


@pytest.mark.parametrize(
    ("limits", "rules"),
    [
        (AgentLimits(idle_s=2.0, after_reward_s=0.2), Rules(max_turns=4)),
        (AgentLimits(after_reward_s=4.0), Rules(max_turns=4, conversation_timeout_s=2.0)),
    ],
)
async def test_a_posted_reward_stands_though_its_agent_does_not_end(
    agents: MakeAgentBench, chat_model: Path, limits: AgentLimits, rules: Rules
) -> None:
    async def run(task: Task, client: AgentClient) -> float:
        await said_to(client, "chat/completions", json.dumps({"messages": [{"role": "user", "content": "go"}]}))
        headers = {"Authorization": f"Bearer {client.key}"}
        async with aiohttp.ClientSession(headers=headers) as http:
            await http.post(f"{client.anthropic_url}/reward", json={"reward": 0.25, "stop": "solved"})
        await asyncio.Event().wait()
        return 1.0

    made = await agents(Saying(chat_model, lambda _: "one"), run=run, limits=limits, rules=rules)
    (trajectory,) = (await made.finished(lease(environment="agent", group_size=1))).group.trajectories

    assert (trajectory.reward.reward, trajectory.stop_reason) == (0.25, "solved")


@pytest.mark.parametrize("verifier", [None, "exact_match"])
async def test_a_program_is_ended_after_its_reward_and_judged_all_the_same(
    agents: MakeAgentBench, chat_model: Path, monkeypatch: pytest.MonkeyPatch, verifier: str | None
) -> None:
    monkeypatch.setattr(program, "_AFTER_REWARD_S", 0.2)
    command = (sys.executable, str(PROGRAM), "posts_and_hangs")
    options = AgentOptions(command=command, verifier=verifier)
    made = await agents(
        Saying(chat_model, lambda _: "one"), start=lambda: AgentProgram(options), limits=AgentLimits(idle_s=5.0)
    )
    (trajectory,) = (await made.finished(lease(environment="agent", group_size=1))).group.trajectories

    assert (trajectory.reward.verifier, trajectory.stop_reason) == (verifier or "agent", "solved")
    assert trajectory.reward.reward == 0.25 + (1.0 if verifier else 0.0)


@pytest.mark.parametrize(
    "verification",
    [
        Verification("exact_match", {"answer": "\ud83d"}),
        Verification("exact_match", cast("Any", {"answer": {1, 2}})),
        Verification(cast("Any", 7)),
        cast("Verification", "exact_match"),
    ],
)
def test_a_verification_that_cannot_be_sent_is_nonsense(verification: Verification) -> None:
    with pytest.raises(Nonsense, match=r"AgentResult\.verification is .*, expected None, or a Verification"):
        checked_result(AgentResult(1.0, verification=verification))


async def test_an_answer_that_no_verifier_takes_costs_its_own_trajectory(
    agents: MakeAgentBench, chat_model: Path
) -> None:
    answers = ["x" * ((1 << 20) + 1), "one"]

    async def run(task: Task, client: AgentClient) -> AgentResult:
        answer = answers.pop()
        await said_to(client, "chat/completions", json.dumps({"messages": [{"role": "user", "content": "go"}]}))
        return AgentResult(verification=Verification("exact_match", {"answer": "one"}), answer=answer)

    made = await agents(Saying(chat_model, lambda _: "one"), run=run)
    group = (await made.finished(lease(environment="agent"))).group

    rewards = [trajectory.reward for trajectory in group.trajectories]
    assert sorted(each.reward or 0.0 for each in rewards) == [0.0, 1.0]
    (fault,) = [each for each in rewards if each.error is not None]
    assert (fault.error_kind, "no verifier can be asked of it: completion" in (fault.error or "")) == ("data", True)
