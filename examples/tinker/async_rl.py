"""Asynchronous RL in a loop of one's own, with an environment and verifiers of Headway: `async_rl.py [STEPS] [MODEL]`.

It samples while it trains: groups of the next steps are under way with the newest weights, and since the oldest are
trained first, no token is more than LAG optimizer steps old. Beside it run, each in a terminal of its own,

    headway serve models/addition
    reward-service
    env-service host sums:Sums --port 7340       # in examples/tinker
"""

import asyncio
import os
import sys
from collections import deque
from dataclasses import dataclass
from itertools import islice

import httpx
import tinker
from tinker import types

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 40
MODEL = sys.argv[2] if len(sys.argv) > 2 else "models/addition"
LAG, GROUPS, SAMPLES = 2, 16, 8
PARAMS = types.SamplingParams(max_tokens=5, temperature=1.0)
ENVIRONMENT = os.environ.get("ENVIRONMENT_URL", "http://127.0.0.1:7340") + "/v1/environment"
REWARDS = os.environ.get("REWARDS_URL", "http://127.0.0.1:7320") + "/v1/score"


async def asked(web, url, **body):
    answer = (await web.post(url, json=body)).raise_for_status().json()
    if answer.get("fault"):
        raise RuntimeError(answer["fault"]["text"])
    return answer


async def group(web, sampler, tokenizer, *, task):
    """Conversations of one task as data, each of whose sampled tokens has its advantage, and their mean reward."""
    names = [f"{os.getpid()}-{task}-{number}" for number in range(SAMPLES)]
    reset = {"task": {"seed": task}, "seed": task}
    opened = [await asked(web, ENVIRONMENT, kind="reset", about=name, reset=reset) for name in names]
    prompt = tokenizer.encode(opened[0]["opening"]["prompt"], add_special_tokens=False)
    first = await sampler.sample_async(types.ModelInput.from_ints(prompt), SAMPLES, PARAMS)
    said = (talk(web, sampler, tokenizer, prompt, *each) for each in zip(names, first.sequences, strict=True))
    talks = await asyncio.gather(*said)
    items = [{"id": name, **talk.judged} for name, talk in zip(names, talks, strict=True) if talk.judged]
    results = (await asked(web, REWARDS, items=items))["results"] if items else []
    if errors := [result["error"]["message"] for result in results if result["error"]]:
        raise RuntimeError(f"no reward: {errors[0]}")
    judged = {result["id"]: result["reward"] for result in results}
    rewards = [talk.reward + judged.get(name, 0.0) for name, talk in zip(names, talks, strict=True)]
    mean = sum(rewards) / SAMPLES
    advantages = [reward - mean for reward in rewards]
    return [datum(talk, each) for talk, each in zip(talks, advantages, strict=True) if each], mean


@dataclass
class Talk:
    """A conversation: tokens, their logprobs (None if not sampled), its turns' reward, and what a verifier judges."""

    tokens: list
    logprobs: list
    reward: float = 0.0
    judged: dict | None = None


async def talk(web, sampler, tokenizer, prompt, name, said):
    """Goes on from the first turn that was sampled, for as many turns as the environment wants."""
    found = Talk(list(prompt), [None] * len(prompt))
    while True:
        found.tokens += said.tokens
        found.logprobs += said.logprobs
        text = tokenizer.decode(said.tokens, skip_special_tokens=True)
        answer = await asked(web, ENVIRONMENT, kind="step", about=name, action={"text": text, "value": text})
        found.reward += answer["step"]["reward"]
        if not answer["step"]["observation"]:
            break
        told = tokenizer.encode(answer["step"]["observation"], add_special_tokens=False)
        found.tokens += told
        found.logprobs += [None] * len(told)
        said = (await sampler.sample_async(types.ModelInput.from_ints(found.tokens), 1, PARAMS)).sequences[0]
    await asked(web, ENVIRONMENT, kind="close", about=name)
    if judge := answer["step"]["verification"]:
        found.judged = {"completion": text, **judge}
    return found


def datum(talk, advantage):
    sampled = [each is not None for each in talk.logprobs[1:]]
    inputs = {
        "target_tokens": talk.tokens[1:],
        "logprobs": [each or 0.0 for each in talk.logprobs[1:]],
        "advantages": [advantage * each for each in sampled],
    }
    return types.Datum(model_input=types.ModelInput.from_ints(talk.tokens[:-1]), loss_fn_inputs=inputs)


async def main():
    service = tinker.ServiceClient()
    training = await service.create_lora_training_client_async(base_model=MODEL, rank=16, seed=1)
    tokenizer = training.get_tokenizer()
    sampler = await training.save_weights_and_get_sampling_client_async()
    tasks, under_way = iter(range(STEPS * GROUPS)), deque()
    async with httpx.AsyncClient(timeout=60, limits=httpx.Limits(max_connections=64)) as web:
        for step in range(1, STEPS + 1):
            for task in islice(tasks, (LAG + 1) * GROUPS - len(under_way)):
                under_way.append(asyncio.create_task(group(web, sampler, tokenizer, task=task)))
            groups = [await under_way.popleft() for _ in range(GROUPS)]
            print(f"step {step:3d}  reward {sum(mean for _, mean in groups) / GROUPS:.3f}", flush=True)
            if data := [each for data, _ in groups for each in data]:
                passed = await training.forward_backward_async(data, "ppo")
                await (await training.optim_step_async(types.AdamParams(learning_rate=3e-3)))
                await passed
                sampler = await training.save_weights_and_get_sampling_client_async()


asyncio.run(main())
