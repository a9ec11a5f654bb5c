"""An agent's calls become the turns of a trajectory: real clients of the openai package over real sockets."""

from pathlib import Path

from openai import AsyncOpenAI

from env_service.environments.interface import AgentClient, Task
from env_service.environments.tokenization import Tokenization
from tests.env_service.agents.served import MakeAgentBench, Saying
from tests.env_service.peers import lease


async def two_questions(task: Task, client: AgentClient) -> float:
    async with AsyncOpenAI(base_url=client.base_url, api_key=client.key) as policy:
        messages = [{"role": "user", "content": "go"}]
        for word in ("more", "enough"):
            answer = await policy.chat.completions.create(model=client.model, messages=messages)  # type: ignore[arg-type]
            messages += [{"role": "assistant", "content": answer.choices[0].message.content or ""}]
            messages += [{"role": "user", "content": word}]
    return 0.75


async def test_an_agents_calls_are_the_turns_of_its_trajectory(agents: MakeAgentBench, chat_model: Path) -> None:
    made = await agents(Saying(chat_model, lambda prompt: "two" if "more" in prompt else "one"), run=two_questions)

    group = (await made.finished(lease(environment="agent", group_size=2))).group

    for trajectory in group.trajectories:
        (text,) = Tokenization(chat_model).decode([trajectory.token_ids.tolist()], special=True)
        assert text == (
            "<|im_start|>user\ngo<|im_end|>\n<|im_start|>assistant\none<|im_end|>\n"
            "<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\ntwo<|im_end|>"
        )
        assert (trajectory.reward.reward, trajectory.reward.verifier) == (0.75, "agent")
        assert trajectory.reward.components["turns"] == 2.0
        assert trajectory.sequence_starts == ()
        assert trajectory.completion_text == "one\n\nmore\n\ntwo"
    assert len(made.sessions) == 0
