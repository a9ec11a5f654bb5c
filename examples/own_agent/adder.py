"""An agent that asks the policy for a sum, and lets it look at its answer once more."""

import random
from typing import Any

from openai import AsyncOpenAI

from env_service.environments.interface import AgentClient, Task


async def run(task: Task, client: AgentClient) -> float:
    a, b = random.Random(task.seed).sample(range(100), 2)
    messages: list[Any] = [{"role": "user", "content": f"What is {a} + {b}? Say the number alone."}]
    async with AsyncOpenAI(base_url=client.base_url, api_key=client.key) as policy:
        for following in ("Are you sure? Say the number again.", ""):
            said = await policy.chat.completions.create(model=client.model, messages=messages)
            answer = said.choices[0].message.content or ""
            messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": following}]
    return float(answer.strip() == str(a + b))
