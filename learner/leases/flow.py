"""The way of leases and their groups through the learner, all of which the ledger says.

grant_all ─▶ env_services ─▶ accept ─▶ journal ─▶ ledger ─▶ buffer, until a batch takes them
    ▲                    └─▶ fail ─▶ granted again, or a dead letter
    └─────── forget ◀── expired, overdue, too old; their env_service has left

Groups are admitted that are whole, scored and made of this run's tokens; those that teach nothing are left out. A
left-out group gives its place back, so sampling goes on until a batch is full. It may never become full; so the groups
that are left out on the way to a batch are counted, and too many of them end the run.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate

import numpy as np

from learner.journal.journal import DiskRoom, JournalFull, RunLog
from learner.leases.curriculum import Curriculum, CurriculumRules, MakeCurriculum
from learner.leases.dead_letters import DeadLetters, RunFailed
from learner.leases.env_services import EnvServices, Peer
from learner.leases.evaluation_leases import Evaluator
from learner.leases.granting import Granting, LeaseTerms
from learner.leases.incarnations import Belongs, Incarnations, oldest_of, up_to
from learner.leases.pacing import PacingRule
from learner.ledger import AttemptId, EndedAttempt, FailureResult, Ledger, Verdict
from protocol.codec import Frame
from protocol.messages import Failed, Granted
from protocol.model import PolicyVersion
from protocol.trajectories import LARGEST_REWARD, RewardRecord, TrajectoryGroup
from services.http.waiting import Waiting as Waits
from services.tracing import lease_began, lease_ended, lease_trace, span
from services.zmq.sockets import RouterSocket

log = logging.getLogger(__name__)


class FilterReason(StrEnum):
    """Why a group is left out."""

    UNIFORM = "uniform"
    """All its rewards are equal: a group baseline leaves nothing to learn."""
    TOO_HARD = "mean_reward_low"
    TOO_EASY = "mean_reward_high"


@dataclass(frozen=True, kw_only=True)
class GroupFilter:
    """Filter of groups: left out are those without spread of rewards, and those of a mean reward outside of a range. A
    game of several players is left out if it is so for each of them.

    A bound that is None does not count; a mean equal to a bound is inside. `rounds`: how many times `groups_per_step`
    groups may be left out on the way to one batch.
    """

    drop_uniform: bool = False
    min_mean_reward: float | None = None
    max_mean_reward: float | None = None
    rounds: int = 10

    def reason(self, group: TrajectoryGroup) -> FilterReason | None:
        """Why the group is left out; None if it is taken. All its trajectories have a reward."""
        rewards = rewards_of(group)
        reasons = [self._reason([rewards[index] for index in alike]) for alike in group.by_player.values()]
        return reasons[0] if all(reasons) else None

    def _reason(self, rewards: Sequence[float]) -> FilterReason | None:
        mean = sum(rewards) / len(rewards)
        if self.min_mean_reward is not None and mean < self.min_mean_reward:
            return FilterReason.TOO_HARD
        if self.max_mean_reward is not None and mean > self.max_mean_reward:
            return FilterReason.TOO_EASY
        return FilterReason.UNIFORM if self.drop_uniform and len(set(rewards)) == 1 else None


class FilterRounds:
    """Counts the groups that were left out since the last batch, while the next one lacked groups."""

    def __init__(self, rules: GroupFilter, *, groups_per_step: int) -> None:
        self._rules = rules
        self._groups_per_step = groups_per_step
        self._reasons: Counter[FilterReason] = Counter()
        self._rewards = 0.0

    def batch_taken(self) -> None:
        """A batch became full: the count begins anew."""
        self._reasons.clear()
        self._rewards = 0.0

    def left_out(self, group: TrajectoryGroup, reason: FilterReason, *, buffered: int) -> RunFailed | None:
        """Counts a group, unless a whole batch is `buffered` already. Returns why the run must stop, if it must."""
        if buffered >= self._groups_per_step:
            return None
        rewards = rewards_of(group)
        self._reasons[reason] += 1
        self._rewards += sum(rewards) / len(rewards)
        most = self._rules.rounds * self._groups_per_step
        return self._failure(most, buffered=buffered) if self._reasons.total() > most else None

    def _failure(self, most: int, *, buffered: int) -> RunFailed:
        count = self._reasons.total()
        found = ", ".join(f"{self._described(reason)}: {number}" for reason, number in self._reasons.most_common())
        return RunFailed(
            f"{count} groups were filtered since the last batch, and {buffered} of {self._groups_per_step} are there; "
            f"at most {most} may be ({self._rules.rounds} rounds of {self._groups_per_step}). {found}. The mean reward "
            f"of these groups is {self._rewards / count:.3g}. Choose tasks that the policy solves sometimes, not "
            "always or never, or raise rollouts.group_size; or allow more by rollouts.filter_rounds, or filter less by "
            "rollouts.drop_uniform_groups, rollouts.min_mean_reward and rollouts.max_mean_reward"
        )

    def _described(self, reason: FilterReason) -> str:
        return {
            FilterReason.UNIFORM: "without spread of rewards",
            FilterReason.TOO_HARD: f"with a mean reward under {self._rules.min_mean_reward}",
            FilterReason.TOO_EASY: f"with a mean reward over {self._rules.max_mean_reward}",
        }[reason]


def rewards_of(group: TrajectoryGroup) -> Sequence[float]:
    """The rewards of a group that was admitted: every trajectory has one."""
    rewards = [trajectory.reward.reward for trajectory in group.trajectories]
    scored = [reward for reward in rewards if reward is not None]
    assert len(scored) == len(rewards), "a trajectory without a reward leaves its group before"
    return scored


@dataclass(frozen=True)
class GroupRules:
    """`vocabulary_size` bounds token ids; a group of fewer than `min_group_size` scored trajectories is a failure. Of
    a game they are counted for each player, and a player that has fewer leaves the group.

    A reward whose size is beyond `max_reward` does not count as one. `filters` say which of the groups that are in
    order are left out.
    """

    vocabulary_size: int
    min_group_size: int
    filters: GroupFilter
    max_reward: float = LARGEST_REWARD


def admissible(
    group: TrajectoryGroup, *, rules: GroupRules, belongs: Callable[[PolicyVersion], bool]
) -> TrajectoryGroup | Failed:
    """The group without the trajectories that could not be scored, or the failure that it amounts to.

    A reward that could not be computed is not a reward of 0: its trajectory leaves the group. `belongs` tells whether a
    version is of this learner's history; a group with a token of another one is a fault of the generators.
    """
    fault = _fault(group, rules=rules)
    if fault is not None:
        return failure_of(group, reason=fault, data_fault=True)
    strange = _strange_version(group, belongs)
    if strange is not None:
        return failure_of(group, reason=strange, data_fault=False)
    faults = [_reward_fault(trajectory.reward, max_reward=rules.max_reward) for trajectory in group.trajectories]
    unscored = [one for one, fault in zip(group.trajectories, faults, strict=True) if fault is not None]
    scored = group
    if unscored:
        scorable = tuple(one for one, fault in zip(group.trajectories, faults, strict=True) if not fault)
        scored = group.model_copy(update={"trajectories": scorable})
    enough = {player for player, alike in scored.by_player.items() if len(alike) >= rules.min_group_size}
    if enough:
        kept = tuple(one for one in scored.trajectories if one.player in enough)
        return scored.model_copy(update={"trajectories": kept}) if len(kept) < len(group.trajectories) else group
    if not unscored:
        most = max(map(len, scored.by_player.values()))
        reason = f"the group has {most} trajectories; at least {rules.min_group_size} are needed"
        return failure_of(group, reason=reason, data_fault=False)
    reason = f"{len(unscored)} of {len(group.trajectories)} rewards failed: {next(filter(None, faults))}"
    # One that might work at another time is worth a retry, whatever ails the others.
    transient = any(trajectory.reward.error_kind == "infrastructure" for trajectory in unscored)
    return failure_of(group, reason=reason, data_fault=not transient)


def _strange_version(group: TrajectoryGroup, belongs: Callable[[PolicyVersion], bool]) -> str | None:
    texts = {span.version for trajectory in group.trajectories for span in trajectory.version_spans}
    for version in sorted(map(PolicyVersion.parse, texts), reverse=True):
        if not belongs(version):
            return f"a token is stamped with policy version {version}, which is not in this learner's history"
    return None


def _fault(group: TrajectoryGroup, *, rules: GroupRules) -> str | None:
    masks = [trajectory.loss_mask for trajectory in group.trajectories]
    starts = np.array([0, *accumulate(map(len, masks))][:-1])
    largest = int(np.concatenate([trajectory.token_ids for trajectory in group.trajectories]).max())
    all_sampled = np.logical_or.reduceat(np.concatenate(masks), starts).all()
    if largest < rules.vocabulary_size and all_sampled and not any(mask[0] for mask in masks):
        return None  # as almost always; else each is looked at by itself
    for trajectory in group.trajectories:
        largest = int(trajectory.token_ids.max())
        if largest >= rules.vocabulary_size:
            return f"token id {largest} is outside the model's vocabulary of {rules.vocabulary_size}"
        if not trajectory.loss_mask.any():
            return "a trajectory holds no sampled token"
        if trajectory.loss_mask[0]:
            return "a trajectory's first token is marked as sampled, yet nothing precedes it"
    return None


def _reward_fault(record: RewardRecord, *, max_reward: float) -> str | None:
    if record.reward is None:
        return f"{record.verifier}: {record.error or 'no reason was given'}"
    if abs(record.reward) > max_reward:
        return (
            f"{record.verifier}: a reward of {record.reward:g} is beyond rollouts.max_reward, which is {max_reward:g}"
        )
    return None


def failure_of(group: TrajectoryGroup, *, reason: str, data_fault: bool) -> Failed:
    """The failure that its holder would have reported of an attempt that came to nothing."""
    return Failed(
        incarnation=group.incarnation,
        lease_id=group.lease_id,
        attempt=group.attempt,
        purpose=group.purpose,
        data_fault=data_fault,
        reason=reason[:4096],
    )


@dataclass(frozen=True)
class IntakeOptions:
    """`environment` may be left out where only one is offered; the fingerprints are the learner's own.

    `run` is the same at every start of one run, and another for every run.
    """

    run: str
    incarnation: int
    environment: str | None
    heartbeat_every_s: float
    lease_timeout_s: float
    tokenizer: str
    chat_template: str
    rules: GroupRules
    pacing: PacingRule = "demand"
    make_curriculum: MakeCurriculum = lambda levels: Curriculum(levels=levels, rules=CurriculumRules())


class GroupFlow:
    """Moves groups through ledger, journal and buffer; what the intake's docstring says of the callbacks holds here.

    `woken` is set, by `wake`, whenever a batch might be there that was not, or the run has failed with `failure`.
    """

    def __init__(
        self,
        *,
        socket: RouterSocket,
        ledger: Ledger,
        journal: RunLog,
        evaluator: Evaluator,
        terms: LeaseTerms,
        dead_letters: DeadLetters,
        waits: Waits,
        options: IntakeOptions,
        left_out: Callable[[str], None],
        accepted: Callable[[TrajectoryGroup], None],
        forgotten: Callable[[TrajectoryGroup, str], None],
        filtered: Callable[[TrajectoryGroup, str], None],
        failed_write: Callable[[str], None],
        belongs: Belongs | None,
        clock: Callable[[], float],
    ) -> None:
        self.incarnations = Incarnations(
            ledger=ledger, incarnation=options.incarnation, belongs=belongs or up_to(ledger.next_version)
        )
        self.env_services = EnvServices(socket, on_the_wire=self.incarnations.on_the_wire, clock=clock)
        self.granting = Granting(
            ledger=ledger,
            evaluator=evaluator,
            terms=terms,
            incarnation=options.incarnation,
            clock=clock,
            pacing=options.pacing,
            make_curriculum=options.make_curriculum,
        )
        self.rounds = FilterRounds(options.rules.filters, groups_per_step=ledger.config.groups_per_step)
        self.room = DiskRoom(waits=waits, clock=clock, failed=failed_write)
        self.buffer: dict[int, TrajectoryGroup] = {}
        self.woken = asyncio.Event()
        self.failure: RunFailed | None = None
        self.evaluator = evaluator
        self._ledger = ledger
        self._journal = journal
        self._dead_letters = dead_letters
        self._options = options
        self._left_out = left_out
        self._accepted = accepted
        self._forgotten = forgotten
        self._filtered = filtered
        self._clock = clock

    def wake(self) -> None:
        """There may be a batch."""
        self.woken.set()

    async def accept(self, group: TrajectoryGroup, frames: Sequence[Frame] | None) -> bool:
        """Takes a group in. False if the journal has no room for it: unacknowledged, it is sent again.

        `frames` are those that it came in, None if it was changed since.
        """
        lease_id, oldest_version = group.lease_id, oldest_of(group)
        reason = self._options.rules.filters.reason(group)
        trace = lease_trace(group.incarnation, lease_id)
        if self.incarnations.verdict(group, oldest_version=oldest_version) is Verdict.ACCEPTED:
            try:
                with span("journal", parent=trace):
                    self._journal.append_group(group, frames=frames)
                if reason is not None:
                    self._journal.append_filtered(lease_id)
            except JournalFull as error:
                self.room.say(error)
                return False
        answer = self.incarnations.admit(group, oldest_version=oldest_version)
        if answer.verdict is Verdict.ACCEPTED:
            self.granting.accepted(group)
        if answer.verdict is not Verdict.ACCEPTED:
            self._left_out(answer.verdict.value)
        elif reason is not None:
            self._filter(group, reason)
            lease_ended(trace, left_out=reason.value)
        else:
            self.keep(group)
            self._accepted(group)
        await self.env_services.cancel(answer.cancelled)
        return True

    def keep(self, group: TrajectoryGroup) -> None:
        """The group waits for its batch from here on."""
        self.buffer[group.lease_id] = group
        lease_began(lease_trace(group.incarnation, group.lease_id), at="batch")

    def _filter(self, group: TrajectoryGroup, reason: FilterReason) -> None:
        self._ledger.filter(lease_id=group.lease_id)
        self._left_out(reason.value)
        self._filtered(group, reason.value)
        failure = self.rounds.left_out(group, reason, buffered=self._ledger.books().buffered)
        self.failure = self.failure or failure
        self.wake()

    def fail(self, failed: Failed) -> None:
        """An attempt came to nothing."""
        result = self.incarnations.fail(failed, now=self._clock())
        if result is FailureResult.IGNORED:
            self._left_out("failed_late")
            return
        kind = "data" if failed.data_fault else "infrastructure"
        self._left_out(f"failed_{kind}")
        if result is not FailureResult.DEAD_LETTERED:
            return
        self._give_up(failed)

    def _give_up(self, failed: Failed) -> None:
        log.warning("lease %d is given up: %s", failed.lease_id, failed.reason)
        lease_ended(lease_trace(failed.incarnation, failed.lease_id), left_out="dead_lettered")
        task_index = self.granting.task_index(failed.lease_id)
        self._dead_letters.append(failed, task_index=task_index, version=self._ledger.version)
        self.failure = self.failure or self._dead_letters.verdict(self._ledger)
        self.wake()

    async def peer_left(self, holder: Peer) -> None:
        """Passes on to others what an env_service held."""
        self.env_services.part(holder)
        self.forget(self._ledger.holder_gone(holder.name), why="holder_gone")
        self.evaluator.holder_gone(holder.name)
        await self.grant_all()

    async def grant_all(self) -> None:
        """Grants whatever may be granted, to whoever has room."""
        for holder in self.env_services.with_room() if self.granting.may_grant() else ():
            leases = self.granting.leases_for(holder, environment=holder.agreed(self._options.environment).name)
            if self.granting.room_of(holder) <= 0:
                self.env_services.full(holder)
            if leases:
                await self.env_services.send(holder, Granted(leases=tuple(leases)))
                await asyncio.sleep(0)  # sending does not wait, and to grant a hundred thousand leases takes seconds
            elif not self.granting.may_grant():
                return

    def forget(self, ended: Iterable[EndedAttempt], *, why: str) -> None:
        """These attempts are over, and nobody is told."""
        ended = tuple(ended)
        self.env_services.release(ended)
        for attempt in ended:
            self._left_out(why)
            if attempt.holder is None and (group := self.buffer.pop(attempt.lease_id, None)) is not None:
                lease_ended(lease_trace(group.incarnation, group.lease_id), at="batch", left_out=why)
                self._forgotten(group, why)
            if attempt.given_up is not None:
                named = AttemptId(attempt.lease_id, attempt.attempt)
                self._give_up(self.incarnations.failed(named, attempt.given_up, data_fault=attempt.data_fault))
