"""Scores by a judge: its verdicts on one completion, or on a pair in both orders."""

import asyncio
import statistics
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import TypeVar

from protocol.rewards import ScoreItem
from reward_service.extraction import strip_thinking
from reward_service.judges.arguments import PairwiseArguments, ScoreArguments
from reward_service.judges.asking import Asking, Material, Verdict
from reward_service.judges.config import JudgeConfig
from reward_service.judges.template import RUBRIC, built_in, placeholders
from reward_service.verifier import Outcome, Score, UserError

T = TypeVar("T")

TIE = 0.5


@dataclass(frozen=True, kw_only=True)
class Judge:
    """A judge that is ready to be asked. `template` is the user's, if there is one."""

    config: JudgeConfig
    template: str | None
    asking: Asking

    async def judge(self, item: ScoreItem, arguments: ScoreArguments, deadline: float) -> Outcome:
        """The mean verdict on the completion, from 0 to 1; of a pair 1 if it is always the better one.

        Raises UserError for an item that lacks what the template shows, and what `Asking.verdict` raises.
        """
        if isinstance(arguments, PairwiseArguments):
            return await self._compared(item, arguments, deadline=deadline)
        material = self._material(item, arguments, completion=self._shown(item.completion))
        verdicts = await self._verdicts([material], deadline=deadline)
        values = [verdict.value for verdict in verdicts]
        score = Score(reward=statistics.fmean(values), components={"lowest": min(values), "highest": max(values)})
        return Outcome(result=score, cached=_all_kept(verdicts))

    async def _compared(self, item: ScoreItem, arguments: PairwiseArguments, *, deadline: float) -> Outcome:
        ours, theirs = self._shown(item.completion), self._shown(arguments.baseline)
        if ours == theirs:
            return Outcome(result=Score(reward=TIE))
        there = self._material(item, arguments, first=ours, second=theirs)
        back = self._material(item, arguments, first=theirs, second=ours)
        verdicts = await self._verdicts([there, back] if self.config.swap else [there], deadline=deadline)
        shown_first = [verdict.value for verdict in verdicts[: self.config.votes]]
        shown_second = [1.0 - verdict.value for verdict in verdicts[self.config.votes :]]
        score = _agreed(shown_first, shown_second) if shown_second else Score(reward=statistics.fmean(shown_first))
        return Outcome(result=score, cached=_all_kept(verdicts))

    async def _verdicts(self, materials: Sequence[Material], *, deadline: float) -> list[Verdict]:
        """All votes on each of the materials, one material after the other."""
        votes = range(self.config.votes)
        return await together(
            [self.asking.verdict(material, vote=vote, deadline=deadline) for material in materials for vote in votes]
        )

    def _material(self, item: ScoreItem, arguments: ScoreArguments, **judged: str) -> Material:
        reference = arguments.reference
        template = self.template or built_in(self.config.kind, with_reference=reference is not None)
        shown = placeholders(template)
        if "reference" in shown and reference is None:
            raise UserError("the judge's template shows a reference: give the argument `reference`")
        if "reference" not in shown and reference is not None:
            raise UserError("the judge's template has no {reference}: leave the argument `reference` out, or add it")
        if "prompt" in shown and not item.prompt:
            raise UserError(
                "the item has no prompt, which the judge's template shows: what does the completion answer?"
            )
        rubric = arguments.rubric or self.config.rubric or RUBRIC
        texts = {**judged, "prompt": item.prompt, "reference": reference or "", "rubric": rubric}
        return Material(template=template, texts={name: text for name, text in texts.items() if name in shown})

    def _shown(self, completion: str) -> str:
        return completion if self.config.keep_thinking else strip_thinking(completion)


def _agreed(shown_first: Sequence[float], shown_second: Sequence[float]) -> Score:
    """Where the two orders disagree, the order has decided: a tie."""
    agreed = [one if one == other else TIE for one, other in zip(shown_first, shown_second, strict=True)]
    disagreements = [float(one != other) for one, other in zip(shown_first, shown_second, strict=True)]
    return Score(
        reward=statistics.fmean(agreed),
        components={
            "shown_first": statistics.fmean(shown_first),
            "shown_second": statistics.fmean(shown_second),
            "disagreement": statistics.fmean(disagreements),
        },
    )


def _all_kept(verdicts: Sequence[Verdict]) -> bool:
    return all(verdict.kept for verdict in verdicts)


async def together(questions: Sequence[Coroutine[None, None, T]]) -> list[T]:
    """The answers in order. The first error ends the other questions, and is raised as itself."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(question) for question in questions]
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from failed
    return [task.result() for task in tasks]
