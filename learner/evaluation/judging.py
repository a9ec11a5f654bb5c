"""Compares our completions with an opponent's, from an earlier evaluation or a file, by a pairwise verifier."""

import logging
import math
import statistics
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from learner.evaluation.config import JudgingConfig
from learner.evaluation.results import (
    EvaluationReport,
    JudgedComparison,
    NotComparable,
    TaskSamples,
    read_report,
    wilson_interval,
)
from protocol.rewards import ScoreItem, VerifierInfo, VerifierList
from services.http.client import HttpClient, ServiceError
from services.http.tls import TlsContext
from services.rewards.client import RewardClient
from services.rewards.items import ItemScore
from services.rewards.settings import ClientSettings

logger = logging.getLogger(__name__)

# So many tasks show how prompts of a file stand in prompts as the model reads them.
_SHOWING_TASKS = 64
_ARGUMENT = "baseline"
_TIE = 0.5
_START_S = 60.0
_BATCH = 16


@dataclass(frozen=True)
class ComparisonOpponent:
    """The other side of a comparison of one of our tasks: the prompt as the judge is to read it, and at least one
    completion.
    """

    prompt: str
    completions: tuple[str, ...]


class _Line(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")

    prompt: str
    completion: str


Answers = Mapping[str, Sequence[str]]
"""Completions by prompt."""


def is_answers_file(path: Path) -> bool:
    """True if it is a JSONL file of one's own, and not an evaluation."""
    return path.suffix == ".jsonl"


def read_answers(path: Path) -> Answers:
    """A file of lines {"prompt": ..., "completion": ...}; a prompt may have several. Raises NotComparable."""
    answers: dict[str, list[str]] = {}
    try:
        with path.open(encoding="utf-8-sig") as file:
            for line in _lines(file, path):
                answers.setdefault(line.prompt, []).append(line.completion)
    except (OSError, UnicodeDecodeError) as error:
        raise NotComparable(f"evaluation.against cannot be read: {error}") from error
    if not answers:
        raise NotComparable(f'evaluation.against: {path} is empty; expected lines {{"prompt": ..., "completion": ...}}')
    return answers


def _lines(file: Collection[str] | Iterator[str], path: Path) -> Iterator[_Line]:
    for number, text in enumerate(file, 1):
        if not text.strip():
            continue
        try:
            yield _Line.model_validate_json(text)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, first["loc"]))
            raise NotComparable(
                f"evaluation.against: {path}, line {number}: {where and where + ': '}{first['msg']}; expected "
                '{"prompt": text, "completion": text}'
            ) from error


def opponents_of(tasks: Sequence[TaskSamples], against: Answers | EvaluationReport) -> Mapping[int, ComparisonOpponent]:
    """By the index of each of our tasks that `against` has, too. The environments must be the same."""
    if isinstance(against, EvaluationReport):
        theirs = {task.task_index: tuple(sample.completion for sample in task.samples) for task in against.tasks}
        return {
            task.task_index: ComparisonOpponent(task.prompt, theirs[task.task_index])
            for task in tasks
            if theirs.get(task.task_index)
        }
    before, after = surroundings(tasks, against)
    found = {}
    for task in tasks:
        if not (task.prompt.startswith(before) and task.prompt.endswith(after)):
            continue
        prompt = task.prompt[len(before) : len(task.prompt) - len(after)]
        if prompt in against:
            found[task.task_index] = ComparisonOpponent(prompt, tuple(against[prompt]))
    return found


def surroundings(tasks: Sequence[TaskSamples], prompts: Collection[str]) -> tuple[str, str]:
    """The text that the chat template puts before and after a prompt: the pair with which most tasks have one of
    `prompts`.

    A task's text is a prompt as the model reads it; a file of one's own has the prompt alone.
    """
    seen: Counter[tuple[str, str]] = Counter()
    for task in tasks[:_SHOWING_TASKS]:
        seen.update(
            {
                (task.prompt[:at], task.prompt[at + len(prompt) :])
                for prompt in prompts
                if (at := task.prompt.find(prompt)) >= 0
            }
        )
    return max(seen, key=lambda pair: (seen[pair], -len(pair[0]) - len(pair[1])), default=("", ""))


def read_against(path: Path) -> Answers | EvaluationReport:
    """An earlier evaluation, or a file of one's own by its name's end. Raises NotComparable."""
    return read_answers(path) if is_answers_file(path) else read_report(path)


@dataclass(frozen=True)
class _Pair:
    """A pair of one of our completions and one of the opponent's."""

    task_index: int
    prompt: str
    ours: str
    theirs: str


async def check_judge(config: JudgingConfig, *, tls: TlsContext | None = None) -> None:
    """Raises NotComparable unless a reward service has the verifier, and it takes a baseline."""
    problems = []
    async with HttpClient(token=config.token, tls=tls) as client:
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
    tasks: Sequence[TaskSamples],
    opponents: Mapping[int, ComparisonOpponent],
    *,
    config: JudgingConfig,
    against: Path,
    tls: TlsContext | None = None,
) -> JudgedComparison:
    """Each of our samples against one of the opponent's, in turn. Raises NotComparable if nothing could be judged."""
    assert config.verifier is not None, "no judge is set"
    pairs = [
        pair for task in tasks if task.task_index in opponents for pair in _pairs(task, opponents[task.task_index])
    ]
    if not pairs:
        raise NotComparable(f"evaluation.against: {against} has no prompt in common with this evaluation")
    settings = ClientSettings(deadline_s=config.timeout_s, patience_s=None, batch_items=_BATCH)
    async with RewardClient(config.addresses, token=config.token, settings=settings, tls=tls) as client:
        scored = await client.score([_item(pair, config.verifier, number) for number, pair in enumerate(pairs)])
    return comparison_of(pairs, scored, verifier=config.verifier, against=against)


def _pairs(task: TaskSamples, opponent: ComparisonOpponent) -> list[_Pair]:
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
    pairs: Sequence[_Pair], scored: Sequence[ItemScore], *, verifier: str, against: Path
) -> JudgedComparison:
    """The shares of pairs that were won and tied. Raises NotComparable if none of them could be judged."""
    rewards: dict[int, list[float]] = {}
    for pair, one in zip(pairs, scored, strict=True):
        if one.reward is not None:
            rewards.setdefault(pair.task_index, []).append(_checked(one.reward, verifier))
    failures = [one.error.message for one in scored if one.error is not None]
    if failures:
        logger.warning("%d of %d pairs could not be judged, the first since %s", len(failures), len(pairs), failures[0])
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
