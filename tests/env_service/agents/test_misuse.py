"""Misuse by agents, and odd use: it is bounded, told in OpenAI's words, and costs nobody else a token."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from openai import AsyncOpenAI

from env_service.agents import sessions
from env_service.agents.program import AgentOptions, AgentProgram
from env_service.agents.registry import AgentLimits
from env_service.environments.interface import AgentClient, AgentResult, Task, Verification
from env_service.environments.rules import Rules
from protocol.generation import GeneratePart, GenerateRequest
from protocol.messages import FinishedLease
from protocol.trajectories import Trajectory
from tests.env_service.agents.served import AgentBench, MakeAgentBench, Saying
from tests.env_service.peers import eventually, lease

GO: list[Any] = [{"role": "user", "content": "go"}]


def policy_of(client: AgentClient, **settings: Any) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=client.base_url, api_key=client.key, **{"max_retries": 0, **settings})


async def ask(client: AgentClient, messages: list[Any] = GO, **settings: Any) -> Any:
    async with policy_of(client) as policy:
        return await policy.chat.completions.create(model="m", messages=messages, **settings)


async def only(made: AgentBench) -> Trajectory:
    (trajectory,) = (await made.finished(lease(environment="agent", group_size=1))).group.trajectories
    return trajectory


def matched(made: AgentBench, match: str) -> float | None:
    labels = {"environment": "agent", "match": match}
    found: float | None = made.metrics.registry.get_sample_value("headway_env_service_agent_requests_total", labels)
    return found


async def refused(client: AgentClient, messages: list[Any] = GO, **settings: Any) -> Any:
    with pytest.raises(openai.APIStatusError) as caught:
        await ask(client, messages, **settings)
    return caught.value


async def test_branches_share_their_beginning_and_train_each_token_once(
    agents: MakeAgentBench, chat_model: Path
) -> None:
    async def branches(task: Task, client: AgentClient) -> float:
        first = (await ask(client)).choices[0].message.content
        rest = [[*GO, {"role": "assistant", "content": first}, {"role": "user", "content": word}] for word in "abc"]
        await asyncio.gather(*(ask(client, messages) for messages in rest))
        return 1.0

    saying = Saying(chat_model, lambda prompt: prompt[-30:].partition("user\n")[2][:1] or "x")
    trajectory = await only(await agents(saying, run=branches))

    assert (len(trajectory.turns), len(trajectory.sequence_starts)) == (4, 2)
    starts = [0, *trajectory.sequence_starts]
    (shared,) = {trajectory.token_ids[start : start + 8].tobytes() for start in starts}
    assert shared
    trained = [bool(trajectory.loss_mask[turn.completion_start : turn.end].all()) for turn in trajectory.turns]
    assert all(trained)
    assert int(trajectory.loss_mask.sum()) == sum(turn.end - turn.completion_start for turn in trajectory.turns)


async def test_a_history_that_was_rewritten_begins_a_sequence_of_its_own(
    agents: MakeAgentBench, chat_model: Path
) -> None:
    async def forgets(task: Task, client: AgentClient) -> float:
        await ask(client)
        await ask(client, [*GO, {"role": "assistant", "content": "in short"}, {"role": "user", "content": "more"}])
        return 1.0

    made = await agents(Saying(chat_model, lambda _: "one"), run=forgets)
    trajectory = await only(made)

    assert (len(trajectory.turns), len(trajectory.sequence_starts)) == (2, 1)
    assert matched(made, "rewritten") == matched(made, "new") == 1.0


async def test_a_request_that_is_sent_again_gets_the_answer_of_the_first(
    agents: MakeAgentBench, chat_model: Path
) -> None:
    hold = asyncio.Event()

    async def impatient(task: Task, client: AgentClient) -> float:
        releasing = asyncio.create_task(released_when_asked_again())
        async with policy_of(client, max_retries=60, timeout=1.0) as policy:
            answer = await policy.chat.completions.create(model="m", messages=GO)
        assert answer.choices[0].message.content == "one"
        await releasing
        return 1.0

    async def released_when_asked_again() -> None:
        while not any(session.attached for session in made.sessions._sessions.values()):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        hold.set()

    made = await agents(Saying(chat_model, lambda _: "one"), run=impatient)
    made.generators[0].hold = hold
    trajectory = await only(made)

    assert len(made.generators[0].requests) == 1
    assert len(trajectory.turns) == 1
    assert (matched(made, "again") or 0) >= 1


async def test_alike_requests_that_are_sent_again_get_an_answer_each(agents: MakeAgentBench, chat_model: Path) -> None:
    hold, words = asyncio.Event(), ["one", "two", "three"]
    said: list[Any] = []

    async def impatient(task: Task, client: AgentClient) -> float:
        async with policy_of(client, max_retries=60, timeout=1.0) as policy:
            asked = [policy.chat.completions.create(model="m", messages=GO) for _ in range(3)]
            releasing = asyncio.create_task(released_when_all_are_asked_again())
            said.extend([answer.choices[0].message.content for answer in await asyncio.gather(*asked)])
        await releasing
        return 1.0

    async def released_when_all_are_asked_again() -> None:
        (session,) = made.sessions._sessions.values()
        await eventually(lambda: session.attached >= 3)
        hold.set()

    made = await agents(Saying(chat_model, lambda _: words.pop()), run=impatient)
    made.generators[0].hold = hold
    trajectory = await only(made)

    assert sorted(said) == ["one", "three", "two"]
    assert len(trajectory.turns) == 3


async def test_alike_streams_that_are_asked_for_again_at_once_are_two(agents: MakeAgentBench, chat_model: Path) -> None:
    hold, words = asyncio.Event(), ["one", "two"]
    said: list[str] = []

    async def streams(task: Task, client: AgentClient) -> float:
        body = {"model": "m", "messages": GO, "stream": True}

        async def text(http: aiohttp.ClientSession, again: int) -> str:
            headers = {"Authorization": f"Bearer {client.key}", "x-stainless-retry-count": str(again)}
            async with http.post(f"{client.base_url}/chat/completions", json=body, headers=headers) as answer:
                return (await answer.text()) if again else ""

        async with aiohttp.ClientSession() as http:
            for _ in range(2):
                await text(http, 0)
            (session,) = made.sessions._sessions.values()
            await eventually(lambda: session.under_way == 0)
            repeated = [asyncio.create_task(text(http, 1)) for _ in range(2)]
            await eventually(lambda: session.attached == 2)
            hold.set()
            said.extend(await asyncio.gather(*repeated))
        return 1.0

    made = await agents(Saying(chat_model, lambda _: words.pop()), run=streams)
    made.generators[0].hold = hold

    assert len((await only(made)).turns) == 2
    assert sorted("one" in each for each in said) == [False, True]


async def test_an_answer_that_nobody_took_is_not_trained(agents: MakeAgentBench, chat_model: Path) -> None:
    hold = asyncio.Event()

    async def leaves(task: Task, client: AgentClient) -> float:
        asked = asyncio.create_task(ask(client, [{"role": "user", "content": "slow"}]))
        await eventually(lambda: len(made.generators[0].requests) == 1)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        hold.set()
        await ask(client)
        return 1.0

    made = await agents(Saying(chat_model, lambda _: "one"), run=leaves)
    made.generators[0].hold = hold
    made.generators[0].holds = lambda request: len(made.generators[0].requests) == 1
    trajectory = await only(made)

    assert len(trajectory.turns) == 1
    assert len(made.generators[0].requests) == 2


async def test_requests_that_are_not_served_say_why(agents: MakeAgentBench, chat_model: Path) -> None:
    async def misuses(task: Task, client: AgentClient) -> float:
        for name, value in (("temperature", 0.2), ("top_p", 0.9), ("n", 2), ("presence_penalty", 1.0)):
            error = await refused(client, GO, **{name: value})
            assert (error.status_code, error.param, error.code) == (400, name, "unsupported_value")
        assert (await refused(client, response_format={"type": "json_object"})).param == "response_format"
        assert (await refused(client, [{"role": "chief", "content": "x"}])).param == "messages.0"
        picture = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
        assert "only text" in str(await refused(client, picture))
        assert (await refused(client, [*GO] * 11)).code == "too_many_messages"
        assert (await refused(client, [{"role": "user", "content": "x" * 20_000}])).status_code == 413
        await ask(client, temperature=1.0, top_p=1, user="me", stream_options=None)
        return 1.0

    limits = AgentLimits(body_bytes=10_000, messages=10)
    trajectory = await only(await agents(Saying(chat_model, lambda _: "one"), run=misuses, limits=limits))

    assert len(trajectory.turns) == 1


async def test_ten_megabytes_are_refused_before_they_are_read(agents: MakeAgentBench, chat_model: Path) -> None:
    async def sends_too_much(task: Task, client: AgentClient) -> float:
        error = await refused(client, [{"role": "user", "content": "x" * 10_000_000}])
        assert (error.status_code, error.code) == (413, "request_too_large")

        async def unannounced() -> Any:
            for _ in range(100):
                yield b" " * 100_000

        async with aiohttp.ClientSession() as http:
            headers = {"Authorization": f"Bearer {client.key}"}
            with pytest.raises((aiohttp.ClientError, AssertionError)):
                async with http.post(
                    f"{client.base_url}/chat/completions", data=unannounced(), headers=headers
                ) as said:
                    assert said.status != 413
        await ask(client)
        return 1.0

    assert len((await only(await agents(Saying(chat_model, lambda _: "one"), run=sends_too_much))).turns) == 1


async def test_a_key_opens_its_own_session_alone(agents: MakeAgentBench, chat_model: Path) -> None:
    async def snoops(task: Task, client: AgentClient) -> float:
        for key in ("", "hw-wrong", AgentBench.token, "ключ"):
            async with aiohttp.ClientSession() as http:
                headers = {"Authorization": f"Bearer {key}".encode().decode("latin-1")}
                async with http.post(f"{client.base_url}/chat/completions", json={}, headers=headers) as said:
                    assert said.status == 401
        async with aiohttp.ClientSession() as http:
            elsewhere = client.base_url.replace("/sessions/", "/sessions/0")
            async with http.post(f"{elsewhere}/chat/completions", json={}) as said:
                assert said.status == 404
        await ask(client)
        assert client.key not in repr(client)
        return 1.0

    await only(await agents(Saying(chat_model, lambda _: "one"), run=snoops))


ADD: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


@pytest.mark.parametrize(
    ("said", "faults"),
    [
        ('<tool_call>{"name": "add", "arguments": {}}</tool_call>', 0),
        ('<tool_call>{"name": "go", "arguments": {}}</tool_call>', 2),
        ('<tool_call>{"name": </tool_call>', 2),
        ("one", 0),
    ],
)
async def test_calls_that_are_none_are_counted_and_cost_their_turn(
    agents: MakeAgentBench, chat_model: Path, said: str, faults: int
) -> None:
    async def calls(task: Task, client: AgentClient) -> float:
        for word in ("go", "on"):
            answer = await ask(client, [{"role": "user", "content": word}], tools=[ADD])
            called = answer.choices[0].message.tool_calls
            assert bool(called) == ("add" in said)
            assert called or answer.choices[0].message.content == said
        await refused(client) if faults else await ask(client)
        return 1.0

    rules = Rules(invalid_penalty=0.25, max_invalid=2)
    made = await agents(Saying(chat_model, lambda _: said), run=calls, rules=rules)
    trajectory = await only(made)

    assert trajectory.reward.reward == 1.0 - 0.25 * faults
    assert trajectory.reward.components["invalid_actions"] == faults
    assert trajectory.stop_reason == ("invalid_actions" if faults else "finished")
    assert [turn.reward for turn in trajectory.turns][:2] == ([-0.25, -0.25] if faults else [None, None])


async def test_a_spent_budget_is_told_as_a_context_that_is_too_long(agents: MakeAgentBench, chat_model: Path) -> None:
    async def talks_on(task: Task, client: AgentClient) -> float:
        messages = list(GO)
        for _ in range(50):
            answer = await ask(client, messages)
            messages += [{"role": "assistant", "content": answer.choices[0].message.content}]
            messages += [{"role": "user", "content": "more"}]
        return 1.0

    made = await agents(Saying(chat_model, lambda _: "one"), run=talks_on, rules=Rules(trajectory_tokens=100))
    trajectory = await only(made)

    assert (trajectory.stop_reason, trajectory.truncated, trajectory.reward.reward) == ("token_budget", True, 0.0)
    assert len(trajectory.token_ids) <= 100
    assert len(trajectory.turns) > 1


async def test_calls_are_counted_and_bounded_at_once(agents: MakeAgentBench, chat_model: Path) -> None:
    hold = asyncio.Event()

    async def floods(task: Task, client: AgentClient) -> float:
        first = [asyncio.create_task(ask(client)) for _ in range(2)]
        await eventually(lambda: len(made.generators[0].requests) == 2)
        assert (await refused(client)).status_code == 429
        hold.set()
        await asyncio.gather(*first)
        await ask(client)
        assert (await refused(client)).code == "turn_limit"
        return 0.5

    made = await agents(
        Saying(chat_model, lambda _: "one"), run=floods, rules=Rules(max_turns=3), limits=AgentLimits(calls_at_once=2)
    )
    made.generators[0].hold = hold
    trajectory = await only(made)

    assert (len(trajectory.turns), trajectory.stop_reason, trajectory.reward.reward) == (3, "turn_limit", 0.5)


async def test_one_that_never_gives_its_reward_costs_its_own_trajectory(
    agents: MakeAgentBench, chat_model: Path
) -> None:
    started: list[int] = []

    async def silent(task: Task, client: AgentClient) -> float:
        started.append(1)
        is_first = len(started) == 1
        await ask(client)
        if is_first:
            await asyncio.Event().wait()
        return 1.0

    made = await agents(Saying(chat_model, lambda _: "one"), run=silent, limits=AgentLimits(idle_s=2.0))
    group = (await made.finished(lease(environment="agent"))).group

    (fault,) = [trajectory.reward.error for trajectory in group.trajectories if trajectory.reward.error]
    assert "made no call for 2 s, and gave no reward" in fault
    assert [trajectory.reward.reward for trajectory in group.trajectories].count(1.0) == 1
    assert len(made.sessions) == 0


async def test_an_agent_that_raises_costs_its_own_trajectory(agents: MakeAgentBench, chat_model: Path) -> None:
    started: list[int] = []

    async def raises(task: Task, client: AgentClient) -> float:
        started.append(1)
        is_second = len(started) == 2
        await ask(client)
        if is_second:
            raise ValueError("a bug of mine")
        return 1.0

    made = await agents(Saying(chat_model, lambda _: "one"), run=raises)
    group = (await made.finished(lease(environment="agent"))).group

    faults = [trajectory.reward.error for trajectory in group.trajectories if trajectory.reward.error]
    assert len(faults) == 1
    assert "ValueError: a bug of mine (" in faults[0]
    assert "test_misuse.py" in faults[0]


@pytest.mark.parametrize("returned", [float("nan"), "1.0", None])
async def test_what_is_no_reward_is_refused(agents: MakeAgentBench, chat_model: Path, returned: Any) -> None:
    async def odd(task: Task, client: AgentClient) -> float:
        await ask(client)
        return returned  # type: ignore[no-any-return]

    made = await agents(Saying(chat_model, lambda _: "one"), run=odd)

    assert "expected" in (await made.failed(lease(environment="agent", group_size=1))).reason


async def test_one_that_asks_nothing_is_at_fault(agents: MakeAgentBench, chat_model: Path) -> None:
    async def idle(task: Task, client: AgentClient) -> float:
        return 1.0

    made = await agents(Saying(chat_model, lambda _: "one"), run=idle)

    failed = await made.failed(lease(environment="agent", group_size=1))
    assert (failed.data_fault, "without an answer of the policy" in failed.reason) == (True, True)


async def test_a_verifier_judges_the_last_answer_on_top(agents: MakeAgentBench, chat_model: Path) -> None:
    async def asks(task: Task, client: AgentClient) -> AgentResult:
        await ask(client)
        return AgentResult(0.25, metrics={"tries": 1.0}, verification=Verification("exact_match", {"answer": "one"}))

    made = await agents(Saying(chat_model, lambda _: "one"), run=asks)
    trajectory = await only(made)

    assert trajectory.reward.reward == 1.25
    assert trajectory.reward.components["tries"] == 1.0
    assert all(turn.reward is None for turn in trajectory.turns)


async def test_a_generators_end_in_the_middle_fails_no_agent(agents: MakeAgentBench, chat_model: Path) -> None:
    saying = Saying(chat_model, lambda _: "three")

    def dies(request: GenerateRequest) -> Sequence[GeneratePart | None]:
        (whole,) = saying(request)
        return [whole.model_copy(update={"finish_reason": None}), None]

    async def once(task: Task, client: AgentClient) -> float:
        assert (await ask(client)).choices[0].message.content.startswith("three")
        return 1.0

    made = await agents(dies, Saying(chat_model, lambda _: ""), run=once)
    outcome = await made.run(lease(environment="agent", group_size=1))

    assert isinstance(outcome, FinishedLease)


async def test_agents_from_outside_take_tasks_and_post_rewards(agents: MakeAgentBench, chat_model: Path) -> None:
    made = await agents(Saying(chat_model, lambda _: "one"), start=lambda: AgentProgram(AgentOptions()))

    async def visitor(http: aiohttp.ClientSession, reward: float) -> None:
        token = {"Authorization": f"Bearer {AgentBench.token}"}
        async with http.post(f"{made.url}/v1/sessions", json={"environment": "agent"}, headers=token) as said:
            opened = await said.json()
        assert opened["task"]["data"] == {"question": "2+1", "answer": "one"}
        async with AsyncOpenAI(base_url=opened["base_url"], api_key=opened["key"]) as policy:
            await policy.chat.completions.create(model=opened["model"], messages=GO)
        key = {"Authorization": f"Bearer {opened['key']}"}
        async with http.post(opened["reward_url"], json={"reward": "high"}, headers=key) as said:
            assert said.status == 422
        async with http.post(opened["reward_url"], json={"reward": reward, "stop": "solved"}, headers=key) as said:
            assert said.status == 200

    async with aiohttp.ClientSession() as http:
        async with http.post(f"{made.url}/v1/sessions", json={"wait_s": 0}) as said:
            assert said.status == 401
        token = {"Authorization": f"Bearer {AgentBench.token}"}
        async with http.post(f"{made.url}/v1/sessions", json={"wait_s": 0}, headers=token) as said:
            assert (said.status, said.headers["Retry-After"]) == (503, "1")
        rolled = asyncio.create_task(made.finished(lease(environment="agent", task_index=2)))
        await asyncio.gather(visitor(http, 0.25), visitor(http, 0.5))
        group = (await rolled).group

    assert sorted(trajectory.reward.reward or 0 for trajectory in group.trajectories) == [0.25, 0.5]
    assert {trajectory.stop_reason for trajectory in group.trajectories} == {"solved"}


async def test_who_has_left_while_it_waited_takes_no_task(agents: MakeAgentBench, chat_model: Path) -> None:
    made = await agents(
        Saying(chat_model, lambda _: "one"), start=lambda: AgentProgram(AgentOptions()), limits=AgentLimits(idle_s=8.0)
    )
    token = {"Authorization": f"Bearer {AgentBench.token}"}

    async def wait(http: aiohttp.ClientSession) -> tuple[int, Any]:
        async with http.post(f"{made.url}/v1/sessions", json={"wait_s": 20}, headers=token) as said:
            return said.status, await said.json()

    async with aiohttp.ClientSession() as http:
        leaves = asyncio.create_task(wait(http))
        await asyncio.sleep(0.3)
        leaves.cancel()
        await asyncio.gather(leaves, return_exceptions=True)
        await asyncio.sleep(0.3)
        rolled = asyncio.create_task(made.finished(lease(environment="agent", group_size=1)))
        await eventually(lambda: len(made.sessions) == 1)
        status, opened = await wait(http)
        assert status == 200
        async with AsyncOpenAI(base_url=opened["base_url"], api_key=opened["key"]) as policy:
            await policy.chat.completions.create(model=opened["model"], messages=GO)
        key = {"Authorization": f"Bearer {opened['key']}"}
        async with http.post(opened["reward_url"], json={"reward": 1.0}, headers=key) as said:
            assert said.status == 200

    assert (await rolled).group.trajectories[0].reward.reward == 1.0


@pytest.mark.parametrize("ends", ["raises", "returns"])
async def test_an_agent_that_gave_up_waiting_for_generators_is_not_at_fault(
    agents: MakeAgentBench, chat_model: Path, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    monkeypatch.setattr(sessions, "STARVED_S", 0.1)

    async def impatient(task: Task, client: AgentClient) -> float:
        try:
            async with policy_of(client, timeout=0.3) as policy:
                await policy.chat.completions.create(model="m", messages=GO)
        except openai.APITimeoutError:
            if ends == "raises":
                raise
        return 0.0

    made = await agents(Saying(chat_model, lambda _: "one"), run=impatient)
    made.fleet.replace([])
    failed = await made.failed(lease(environment="agent", group_size=1))

    assert (failed.data_fault, "no generator sampled a turn of it" in failed.reason) == (False, True)
