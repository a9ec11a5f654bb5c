"""A taskset and a harness of verifiers 0.4: add two numbers, and be asked again while the answer is wrong.

The harness runs in the server's process: nothing is installed from a hub, no container is started.
"""

import random
from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf
from openai import AsyncOpenAI

TASKS = 2000
TURNS = 3


class SumData(vf.TaskData):
    """A question with its answer."""

    answer: str = ""


class SumTask(vf.Task[SumData]):
    """The worth of an answer."""

    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        """1 for the right sum, whatever stands around it."""
        if self.data.answer == "none":
            raise ValueError("a task without an answer")
        return float(self.data.answer in trace.info.get("last", ""))

    @vf.metric
    async def tries(self, trace: vf.Trace) -> float:
        """Number of times that the question was asked."""
        return float(trace.info.get("tries", 0))


class SumTaskset(vf.Taskset[SumTask, vf.TasksetConfig]):
    """Sums of numbers below 10, each drawn from its own seed."""

    def load(self) -> Iterator[SumTask]:
        for index in range(TASKS):
            chance = random.Random(index)
            left, right = chance.randint(0, 9), chance.randint(0, 9)
            yield SumTask(SumData(prompt=f"{left}+{right}=", answer=str(left + right)), self.config.task)


class SumHarness(vf.Harness[vf.HarnessConfig]):
    """Asks until the answer is right, three times at most."""

    NEEDS_CONTAINER = EXECUTES_CODE = False

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any, **_: Any
    ) -> vf.ProgramResult:
        client = AsyncOpenAI(base_url=endpoint, api_key=secret)
        messages: list[Any] = [{"role": "user", "content": data.prompt}]
        for turn in range(TURNS):
            answer = await client.chat.completions.create(model=ctx.model, messages=messages)
            said = answer.choices[0].message.content or ""
            trace.info.update(last=said, tries=turn + 1)
            if data.answer in said:
                break
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "no"}]
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


__all__ = ["SumHarness", "SumTaskset"]
