"""A real reward service whose pairwise judge is scripted, and evaluations to be judged."""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager

from learner.evaluation.config import JudgingConfig
from learner.evaluation.results import Sample, TaskSamples
from reward_service.config import RewardServiceConfig
from tests.reward_service.judges.scripted_judge import JudgeRequest, judge, winner
from tests.reward_service.scripted_api import Answer, ScriptedApi
from tests.reward_service.serving import reachable


def tasks(completions: Mapping[int, Sequence[str]]) -> tuple[TaskSamples, ...]:
    def sample(text: str) -> Sample:
        return Sample(completion=text, reward=0.0, answer=None, length=1, truncated=False)

    return tuple(
        TaskSamples(task_index=index, prompt=f"task {index}", samples=tuple(map(sample, texts)))
        for index, texts in completions.items()
    )


def longer_wins(number: int, asked: JudgeRequest) -> Answer:
    first, second = len(asked.text(1)), len(asked.text(2))
    return winner(asked, "tie" if first == second else "first" if first > second else "second")


@asynccontextmanager
async def judging(
    script: Callable[[int, JudgeRequest], Answer] = longer_wins, *, verifier: str = "pairs", kind: str = "pairwise"
) -> AsyncIterator[tuple[JudgingConfig, ScriptedApi]]:
    api = judge(script)
    async with api.running() as model:
        entry = {"name": "pairs", "url": model, "model": "m", "kind": kind, "limits": {"attempts": 1}}
        service = RewardServiceConfig.model_validate({"judges": (entry,), "http": {"port": 0, "token": "t"}})
        async with reachable(service) as url:
            yield JudgingConfig.model_validate({"verifier": verifier, "urls": (f"{url}/",), "token": "t"}), api
