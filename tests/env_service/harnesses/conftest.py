"""Runs of harnesses against sessions on real sockets, on computers of their own; the policy says chosen words."""

import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from env_service.agents import routes
from env_service.agents.sessions import AgentRequest
from env_service.environments.rules import Rules
from env_service.harnesses.environment import HarnessAgent, HarnessOptions
from env_service.rollouts.completions import RolloutProgress
from env_service.runtimes.config import RuntimeLimits, RuntimesConfig
from env_service.runtimes.pool import RuntimePool, use_runtimes
from protocol.generation import GeneratePart, GenerateRequest
from protocol.messages import FailedLease, FinishedLease
from protocol.trajectories import Trajectory
from tests.env_service.agents.served import AgentBench, Saying, agent, agent_benches
from tests.env_service.peers import ScriptedRewards, lease, part

COUNT = {
    "prompt": "Write the number of lines of app.log that begin with ERROR into answer.txt.",
    "files": {"app.log": "ERROR a\nINFO b\n"},
    "checks": [{"run": "cat answer.txt", "prints": "1"}],
    "solution": "grep -c ^ERROR app.log > answer.txt",
}
QUESTION = {"prompt": "What is 2+3?", "answer": "5", "topic": "sums"}


class ChosenTokens(Saying):
    """Says the answers in turn, letter by letter, in tokens that no tokenizer would choose, and keeps what was shown
    and sampled. `before` is called before an answer, with its number. `by_turns`: the number is that of the turn in its
    conversation, of which there may be several.
    """

    by_turns = False

    def __init__(
        self, model: Path, answers: Sequence[str], *, before: Callable[[int], object] = lambda _: None
    ) -> None:
        super().__init__(model, str)
        self._answers = answers
        self._before = before
        self.shown: list[tuple[int, ...]] = []
        self.sampled: list[tuple[int, ...]] = []

    def __call__(self, request: GenerateRequest) -> Sequence[GeneratePart]:
        (text,) = self.tokenization.decode([request.prompt_token_ids], special=True)
        self.prompts.append(text)
        turn = text.count("<|im_start|>assistant") - 1 if self.by_turns else len(self.sampled)
        number = turn % len(self._answers)
        self._before(number)
        ids = [token for letter in self._answers[number] for token in self.tokenization.encode_after("", letter)]
        self.shown.append(tuple(request.prompt_token_ids))
        self.sampled.append((*ids, self.end))
        return [part(0, [*ids, self.end])]


def call(tool: str, **arguments: object) -> str:
    """A call as the model's template writes it, in spacing of its own."""
    return f'<tool_call>\n{{"name": "{tool}",  "arguments": {json.dumps(arguments, indent=1)}}}\n</tool_call>'


@dataclass(frozen=True)
class EndedHarness:
    """A lease that was rolled out, the words of the policy, and the bench that it was on."""

    outcome: FinishedLease | FailedLease
    policy: ChosenTokens
    bench: AgentBench

    @property
    def trajectories(self) -> tuple[Trajectory, ...]:
        assert isinstance(self.outcome, FinishedLease), self.outcome
        return self.outcome.group.trajectories


HarnessRun = Callable[..., Awaitable[EndedHarness]]


@pytest.fixture
def asked_by(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Number of requests to the policy by each API: chat, responses, and messages."""
    asked = Counter[str]()

    def counted(api: str) -> Callable[..., AgentRequest]:
        read: Callable[..., AgentRequest] = getattr(routes, f"asked_of_{api}")

        def count(*given: Any, **named: Any) -> AgentRequest:
            asked[api] += 1
            return read(*given, **named)

        return count

    for api in ("chat", "responses", "messages"):
        monkeypatch.setattr(routes, f"asked_of_{api}", counted(api))
    return asked


@pytest.fixture
async def runtimes() -> AsyncIterator[RuntimePool]:
    """Runtimes with small limits."""
    limits = RuntimeLimits(memory_mib=128, disk_mib=8, command_s=20)
    pool = use_runtimes(RuntimePool(RuntimesConfig(spare=0, limits=limits)))
    yield pool
    await pool.close()


@pytest.fixture
async def rolled_out(chat_model: Path, tmp_path: Path, runtimes: RuntimePool) -> AsyncIterator[HarnessRun]:
    """Rolls out one lease of a harness, whose policy says the answers in turn."""

    async with agent_benches(chat_model) as make:

        async def roll(
            options: dict[str, Any],
            answers: Sequence[str],
            *,
            questions: bool = False,
            before: Callable[[int], object] = lambda _: None,
            rules: Rules | None = None,
            group_size: int = 1,
            by_turns: bool = False,
        ) -> EndedHarness:
            file = tmp_path / "tasks.jsonl"
            file.write_text(json.dumps(QUESTION if questions else COUNT))
            kind = (
                {"questions": {"train_file": file, "verifier": "exact"}}
                if questions
                else {"computer": {"train_file": file}}
            )
            given = HarnessOptions.model_validate({"tasks": kind, **options})
            offered = replace(agent(lambda: HarnessAgent(given), rules=rules), tasks=HarnessAgent.tasks(given))
            policy = ChosenTokens(chat_model, answers, before=before)
            policy.by_turns = by_turns
            rewards = ScriptedRewards(lambda text, arguments: float(text.strip() == arguments["answer"]))
            bench = await make(policy, offered=offered, rewards=[rewards], timeout_s=150.0, environment_timeout_s=60.0)
            outcome = await bench.rollout.run(lease(environment="agent", group_size=group_size), RolloutProgress())
            return EndedHarness(outcome, policy, bench)

        yield roll


def turns_of(trajectory: Trajectory) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """For each turn, what the policy was shown before it and what it sampled, as they are trained."""
    ids = trajectory.token_ids.tolist()
    starts = [0, *trajectory.sequence_starts]
    for turn in trajectory.turns:
        begin = max(start for start in starts if start <= turn.completion_start)
        yield tuple(ids[begin : turn.completion_start]), tuple(ids[turn.completion_start : turn.end])
