"""The verdict on a run in one sentence: the same on its page, in `headway status`, `headway doctor` and a webhook."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from protocol.status import Status
from services.diagnosis.asked import AskedProcess
from services.diagnosis.bounds import Bottleneck, bottleneck_of, shares_full_cores
from services.diagnosis.culprits import Diagnosis
from services.diagnosis.pace import is_done, standing_s
from services.diagnosis.tenants import judge_tenants

State = Literal["healthy", "starting", "ending", "bounded", "sick"]
_MAX_CAUSE = 200
_START_S = 600.0


@dataclass(frozen=True)
class RunVerdict:
    """The state of a run, and what is to be done. While `state`, `cause` and `who` stay the same it is the same
    verdict: the numbers of its sentence move.
    """

    state: State
    sentence: str
    remedy: str = ""
    cause: str = ""
    who: str = ""

    @property
    def text(self) -> str:
        """Sentence and remedy."""
        return f"{self.sentence}; {self.remedy}" if self.remedy else self.sentence

    def is_like(self, other: "RunVerdict | None") -> bool:
        """True if only numbers differ."""
        return other is not None and (self.state, self.cause, self.who) == (other.state, other.cause, other.who)


def verdict_on(procs: Sequence[AskedProcess], diagnosis: Diagnosis) -> RunVerdict:
    """The verdict, by who does not answer or is waited for in vain, then by what bounds the run."""
    statuses = [proc.status for proc in procs if proc.status is not None]
    learner = next((status for status in statuses if status.service == "learner"), None)
    young = learner is not None and _is_young(learner)
    for culprit in diagnosis.culprits if not (young and diagnosis.by_waiting) else ():
        what = culprit.what if len(culprit.what) <= _MAX_CAUSE else f"{culprit.what[:_MAX_CAUSE]}…"
        return RunVerdict(
            state="sick", sentence=f"{culprit.who}: {what}", remedy=culprit.remedy, cause="culprit", who=culprit.who
        )
    starting = next((remark for remark in diagnosis.remarks if " is starting since " in remark), None)
    if starting is not None:
        return RunVerdict(state="starting", sentence=f"On the way: {starting}", cause="start")
    if learner is not None and is_done(learner):
        return RunVerdict(state="ending", sentence="Ending: its last step is done, or it was told to stop", cause="end")
    if learner is not None and learner.tenants is not None:
        judged = judge_tenants(learner.tenants)
        return RunVerdict(judged.state, judged.sentence, judged.remedy, judged.cause, judged.who)
    if learner is not None and young:
        return _on_the_way(learner, statuses)
    if learner is not None and (evaluating := _first_evaluation(learner)) is not None:
        return RunVerdict(state="starting", sentence=f"On the way: {evaluating}, before its first step", cause="start")
    bottleneck = bottleneck_of(statuses)
    stands_s = None if learner is None else standing_s(learner)
    if learner is not None and stands_s is not None:
        return _standing(learner, stands_s, bottleneck)
    if bottleneck is not None:
        return RunVerdict(
            state="bounded",
            sentence=bottleneck.what,
            remedy=bottleneck.remedy,
            cause=bottleneck.cause,
            who=bottleneck.who,
        )
    return RunVerdict(state="healthy", sentence=_healthy(statuses, learner))


def _is_young(learner: Status) -> bool:
    """True before its first publish, for as long as a start may take: processes wait for each other until then."""
    return learner.uptime_s < _START_S and not any(event.name in ("publish", "step") for event in learner.events)


def _first_evaluation(learner: Status) -> str | None:
    """Tells of the wait for the evaluation that a run begins with: nothing is trained, nor to be sped up, meanwhile."""
    if learner.progress is None or learner.progress.done:
        return None
    waits = (wait for wait in learner.waits if wait.whom.startswith("the evaluation of "))
    return next((f"the learner waits for {wait.whom} since {wait.since_s:.0f} s" for wait in waits), None)


def _on_the_way(learner: Status, statuses: Sequence[Status]) -> RunVerdict:
    there = {status.service for status in statuses} | {peer.kind for peer in learner.peers}
    missing = [kind for kind in ("generator", "env-service") if kind not in there]
    waits = "; ".join(f"the learner waits for {wait.whom} since {wait.since_s:.0f} s" for wait in learner.waits)
    unheard = f"no {' and no '.join(missing)} has been heard of yet" if missing else ""
    return RunVerdict(
        state="starting",
        sentence=f"On the way: {'; '.join(filter(None, (unheard, waits))) or 'no weights are published yet'}",
        remedy=f"if it stays so, see the log of the {missing[0]}, or start one" if missing else "",
        cause="start",
    )


def _standing(learner: Status, stands_s: float, bottleneck: Bottleneck | None) -> RunVerdict:
    usual_s = 0.0 if learner.progress is None else learner.progress.usual_s or 0.0
    said = f"No step has ended for {stands_s:.0f} s, one takes {usual_s:.2g} s"
    if bottleneck is not None:
        return RunVerdict(
            state="sick",
            sentence=f"{said}. {bottleneck.what}",
            remedy=bottleneck.remedy,
            cause=bottleneck.cause,
            who=bottleneck.who,
        )
    waits = "; ".join(f"the learner waits for {wait.whom} since {wait.since_s:.0f} s" for wait in learner.waits)
    return RunVerdict(
        state="sick",
        sentence=f"{said}: {waits or 'the learner waits for nobody, so it is within a step'}",
        remedy="look into the logs of the processes on the way, the learner's first",
        cause="standstill",
    )


def _healthy(statuses: Sequence[Status], learner: Status | None) -> str:
    if learner is None or learner.load is None:
        return "Healthy"
    loads = [status.load.busy_share for status in statuses if status.service == "generator" and status.load]
    told = f"Healthy: the learner trains {learner.load.busy_share:.0%} of the time"
    told += f", generators work {sum(loads) / len(loads):.0%} of theirs" if loads else ""
    return told + (", and the cores that they share are all at work" if shares_full_cores(statuses) else "")
