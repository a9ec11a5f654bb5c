"""A rollout whose agents reach the policy over real sockets, and a policy that says words that a test chose."""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from env_service.agents.attempts import attempts_in
from env_service.agents.registry import AgentLimits, AgentSessions
from env_service.agents.routes import sessions_alone
from env_service.environments.interface import Agent, AgentClient, AgentResult, Environment, OfferedEnvironment, Task
from env_service.environments.rules import Rules
from env_service.environments.tokenization import Tokenization
from protocol.generation import GeneratePart, GenerateRequest
from tests.env_service.bench import Bench, Script, benches
from tests.env_service.peers import part

Run = Callable[[Task, AgentClient], Awaitable[AgentResult | float]]


class Saying:
    """A generator's script: answers with `answer(prompt text)`, in parts of `size` tokens, and ends the turn."""

    def __init__(self, model: Path, answer: Callable[[str], str], *, size: int = 1 << 20) -> None:
        self.tokenization = Tokenization(model)
        self.end = self.tokenization.special_tokens[min(self.tokenization.end_tokens)]
        self.prompts: list[str] = []
        self._answer = answer
        self._size = size

    def __call__(self, request: GenerateRequest) -> Sequence[GeneratePart]:
        (text,) = self.tokenization.decode([request.prompt_token_ids], special=True)
        self.prompts.append(text)
        ids = [*self.tokenization.encode_after("", self._answer(text)), self.end]
        parts = []
        for start in range(0, len(ids), self._size):
            piece = ids[start : start + self._size]
            whole = part(0, ids[: start + len(piece)])
            parts.append(
                whole.model_copy(
                    update={
                        "token_ids": tuple(piece),
                        "behavior_logprobs": tuple(-0.5 for _ in piece),
                        "finish_reason": "stop" if start + len(piece) == len(ids) else None,
                    }
                )
            )
        return parts


class AgentTasks:
    train_tasks = 4
    evaluation_tasks = 1

    def task(self, purpose: object, index: int) -> Task:
        return Task(seed=index, data={"question": f"{index}+1", "answer": "one"})


@dataclass
class FunctionAgent:
    """An agent given as a function."""

    function: Run

    async def run(self, task: Task, client: AgentClient) -> AgentResult | float:
        return await self.function(task, client)


def agent(make: Callable[[], Agent], *, rules: Rules | None = None) -> OfferedEnvironment:
    """An environment named `agent`."""
    return OfferedEnvironment(
        name="agent",
        tasks=AgentTasks(),
        start=cast("Callable[[], Environment]", make),
        rules=rules or Rules(max_turns=64),
        agent=make,
    )


@dataclass
class AgentBench(Bench):
    """With sessions, served at `url` to who shows `token`."""

    sessions: AgentSessions
    url: str
    token = "process-token"


MakeAgentBench = Callable[..., Awaitable[AgentBench]]


@asynccontextmanager
async def agent_benches(model: Path) -> AsyncIterator[MakeAgentBench]:
    """Makes benches of agents."""
    async with AsyncExitStack() as stack:
        make_bench = await stack.enter_async_context(benches(model))

        async def make(
            *scripts: Script,
            run: Run | None = None,
            start: Callable[[], Agent] | None = None,
            offered: OfferedEnvironment | None = None,
            rules: Rules | None = None,
            limits: AgentLimits | None = None,
            **settings: float,
        ) -> AgentBench:
            sessions = await stack.enter_async_context(sessions_alone(limits=limits, token=AgentBench.token))
            begin = start or (lambda: FunctionAgent(run))  # type: ignore[arg-type]
            bench = await make_bench(
                *scripts, extra=[offered or agent(begin, rules=rules)], agents=attempts_in(sessions), **settings
            )
            return AgentBench(**vars(bench), sessions=sessions, url=sessions.url)

        yield make
