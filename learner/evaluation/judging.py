"""Pairs of completions, ours and an opponent's, judged by a pairwise verifier of a reward service."""

import logging
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from learner.evaluation.baseline import Opponent
from learner.evaluation.config import JudgingConfig
from learner.evaluation.estimators import wilson_interval
from learner.evaluation.report import JudgedComparison, NotComparable
from learner.evaluation.results import TaskSamples
from protocol.rewards import ScoreItem, VerifierInfo, VerifierList
from services.http_client import HttpClient, ServiceError
from services.rewards.client import RewardClient
from services.rewards.scored import Scored
from services.rewards.settings import ClientSettings

log = logging.getLogger(__name__)

_ARGUMENT = "baseline"
_TIE = 0.5
_START_S = 60.0
_BATCH = 16


@dataclass(frozen=True)
class _Pair:
    """One of our completions beside one of the opponent's."""

    task_index: int
    prompt: str
    ours: str
    theirs: str


async def check_judge(config: JudgingConfig) -> None:
    """Raises NotComparable unless a reward service has the verifier, and it takes a baseline."""
    problems = []
    async with HttpClient(token=config.token) as client:
        for url in config.addresses:
            try:
                listed = await client.get(f"{url}/v1/verifiers", VerifierList, deadline_s=_START_S, retries=1000)
            except ServiceError as error:
                problems.append(str(error))
                continue
            _check_listed(listed.verifiers, config, url=url)
            return
    raise NotComparable(f"evaluation.judge: no reward service answers: {'; '.join(problems)}")


def _check_listed(verifiers: Sequence[VerifierInfo], config: JudgingConfig, *, url: str) -> None:
    named = next((verifier for verifier in verifiers if verifier.name == config.verifier), None)
    pairwise = [verifier.name for verifier in verifiers if _takes_a_baseline(verifier)]
    if named is not None and (named.name in pairwise or named.arguments_schema.get("additionalProperties") is True):
        return
    what = "takes no argument `baseline`" if named is not None else "is none of its verifiers"
    raise NotComparable(
        f"evaluation.judge: {config.verifier!r} {what} at {url}; pairwise ones are: {', '.join(pairwise) or 'none'}. "
        'Add one to [[reward-service.judges]] with kind = "pairwise"'
    )


def _takes_a_baseline(verifier: VerifierInfo) -> bool:
    properties = verifier.arguments_schema.get("properties")
    return isinstance(properties, dict) and _ARGUMENT in properties


async def judged(
    tasks: Sequence[TaskSamples], opponents: Mapping[int, Opponent], *, config: JudgingConfig, against: Path
) -> JudgedComparison:
    """Each of our samples against one of the opponent's, in turn. Raises NotComparable if nothing could be judged."""
    assert config.verifier is not None, "no judge is set"
    pairs = [
        pair for task in tasks if task.task_index in opponents for pair in _pairs(task, opponents[task.task_index])
    ]
    if not pairs:
        raise NotComparable(f"evaluation.against: {against} has no prompt in common with this evaluation")
    settings = ClientSettings(deadline_s=config.timeout_s, patience_s=None, batch_items=_BATCH)
    async with RewardClient(config.addresses, token=config.token, settings=settings) as client:
        scored = await client.score([_item(pair, config.verifier, number) for number, pair in enumerate(pairs)])
    return comparison_of(pairs, scored, verifier=config.verifier, against=against)


def _pairs(task: TaskSamples, opponent: Opponent) -> list[_Pair]:
    theirs = opponent.completions
    return [
        _Pair(task.task_index, opponent.prompt, ours=sample.completion, theirs=theirs[number % len(theirs)])
        for number, sample in enumerate(task.samples)
    ]


def _item(pair: _Pair, verifier: str, number: int) -> ScoreItem:
    return ScoreItem(
        id=str(number),
        verifier=verifier,
        completion=pair.ours,
        prompt=pair.prompt,
        arguments={_ARGUMENT: pair.theirs},
    )


def comparison_of(
    pairs: Sequence[_Pair], scored: Sequence[Scored], *, verifier: str, against: Path
) -> JudgedComparison:
    """The shares of pairs that were won and tied. Raises NotComparable if none of them could be judged."""
    rewards: dict[int, list[float]] = {}
    for pair, one in zip(pairs, scored, strict=True):
        if one.reward is not None:
            rewards.setdefault(pair.task_index, []).append(_checked(one.reward, verifier))
    failures = [one.error.message for one in scored if one.error is not None]
    if failures:
        log.warning("%d of %d pairs could not be judged, the first since %s", len(failures), len(pairs), failures[0])
    if not rewards:
        raise NotComparable(f"evaluation.judge: {verifier!r} could judge none of {len(pairs)} pairs: {failures[0]}")
    win_rate = _mean_over_tasks(rewards)
    tie_rate = _mean_over_tasks({task: [float(one == _TIE) for one in values] for task, values in rewards.items()})
    low, high = wilson_interval(share=win_rate, count=len(rewards))
    tie_low, tie_high = wilson_interval(share=tie_rate, count=len(rewards))
    return JudgedComparison(
        against=against,
        verifier=verifier,
        versions=tuple(sorted({one.verifier_version for one in scored if one.reward is not None})),
        tasks=len(rewards),
        pairs=len(pairs) - len(failures),
        failed=len(failures),
        win_rate=win_rate,
        low=low,
        high=high,
        tie_rate=tie_rate,
        tie_low=tie_low,
        tie_high=tie_high,
    )


def _checked(reward: float, verifier: str) -> float:
    if not 0 <= reward <= 1:
        raise NotComparable(
            f"evaluation.judge: {verifier!r} gave a reward of {reward:g}; a pairwise verifier gives 1 for a win, 0.5 "
            "for a tie and 0 for a loss"
        )
    return reward


def _mean_over_tasks(values: Mapping[int, Sequence[float]]) -> float:
    return min(1.0, math.fsum(statistics.fmean(task) for task in values.values()) / len(values))
