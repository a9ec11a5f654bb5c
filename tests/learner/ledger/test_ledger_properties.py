"""The ledger under random schedules, failures, deaths and restarts: a small world around it that knows the truth.

The world plays the caller (with a journal and a batch log), the holders, the generators and the policies. A policy is
identified by the batches that made it, so that its distance from another one is the number of updates between them,
whatever numbers the versions have. All randomness comes from one seed.
"""

import json
import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import Literal

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from learner.ledger import (
    Batch,
    EndedAttempt,
    FailureKind,
    FailureResult,
    Grant,
    GroupVerdict,
    Ledger,
    LedgerConfig,
    LedgerSnapshot,
)

History = tuple[tuple[int, ...], ...]  # the batches that made a policy; its length is the policy's version
HOLDERS = ("a", "b", "c")
Key = tuple[int, int, int]  # life, lease id and attempt: how a holder names an attempt


@dataclass(frozen=True)
class ModelGroup:
    """policy: of the oldest token. life: of the learner that granted the attempt."""

    grant: Grant
    life: int
    policy: History

    @property
    def key(self) -> Key:
        return self.life, self.grant.lease_id, self.grant.attempt

    @property
    def version(self) -> int:
        return len(self.policy)


@dataclass
class ModelRollout:
    grant: Grant
    life: int
    policy: History | None = None

    @property
    def key(self) -> Key:
        return self.life, self.grant.lease_id, self.grant.attempt


@dataclass
class ModelCheckpoint:
    form: str
    history: History


@dataclass
class SurvivingState:
    """The part of a run that survives the learner."""

    checkpoint: ModelCheckpoint
    journal: dict[int, ModelGroup] = field(default_factory=dict)
    batches: list[tuple[int, ...]] = field(default_factory=list)  # batch i made version i + 1
    filtered: set[int] = field(default_factory=set)
    dead: set[int] = field(default_factory=set)


def make_config(
    *, groups_per_step: int, max_lag: int, on_lag: Literal["wait", "drop"], straggler_timeout_s: float = 8.0
) -> LedgerConfig:
    return LedgerConfig(
        groups_per_step=groups_per_step,
        max_lag=max_lag,
        on_lag=on_lag,
        straggler_timeout_s=straggler_timeout_s,
        lease_timeout_s=25.0,
        infrastructure_retries=2,
        data_retries=1,
        infrastructure_backoff_s=2.0,
        infrastructure_backoff_max_s=6.0,
    )


class LedgerWorld:
    """loss: the share of grants that never reach their holder."""

    def __init__(self, config: LedgerConfig, seed: int, *, loss: float) -> None:
        self.random = random.Random(seed)
        self.loss = loss
        self.filter_share = 0.1
        self.now = 0.0
        self.ledger = Ledger(config)
        self.disk = SurvivingState(ModelCheckpoint(json.dumps(asdict(self.ledger.snapshot())), ()))
        self.life = 0
        self.history: History = ()  # the learner's policy
        self.replaying: list[tuple[int, ...]] = []
        self.taken: tuple[int, ...] | None = None
        self.buffer: dict[int, ModelGroup] = {}
        self.named: tuple[ModelGroup, ...] = ()  # those that the next batch is sure to begin with
        self.generators: list[History | None] = [(), ()]
        self.rollouts: dict[str, list[ModelRollout]] = {holder: [] for holder in HOLDERS}
        self.sent: list[ModelGroup] = []
        self.adopted: dict[Key, int] = {}  # the attempts of former lives that this one has given a number
        self.dropped: Counter[int] = Counter()  # running groups, in this life
        self.too_old: set[int] = set()  # leases of which a group came to nothing in this life, since it was too old
        self.updated()

    # The generators

    def lineage(self) -> History:
        """The policies of this learner are the prefixes of it; a replay leads along it again."""
        return (*self.history, *([self.taken] if self.taken else self.replaying))

    def is_ours(self, policy: History) -> bool:
        return self.lineage()[: len(policy)] == policy

    def updated(self) -> None:
        serving = [len(policy) for policy in self.generators if policy is not None and self.is_ours(policy)]
        self.ledger.served_changed(min(serving, default=None))

    def publish(self) -> None:
        """Has a generator commit the newest policy, or come back with it; the others still serve theirs."""
        self.generators[self.random.randrange(len(self.generators))] = self.history
        self.updated()

    def generator_dies(self) -> None:
        self.generators[self.random.randrange(len(self.generators))] = None
        self.updated()

    # The holders

    def grant(self) -> None:
        holder = self.random.choice(HOLDERS)
        room = self.random.randint(0, 5)
        grants = self.ledger.grant(now=self.now, holder=holder, room=room)
        assert len(grants) <= room
        assert all(older.lease_id < newer.lease_id for older, newer in pairwise(grants))
        self.rollouts[holder] += [
            ModelRollout(grant, self.life) for grant in grants if self.random.random() >= self.loss
        ]

    def start(self) -> None:
        serving = [policy for policy in self.generators if policy is not None and self.is_ours(policy)]
        for rollouts in self.rollouts.values():
            for rollout in rollouts:
                if rollout.policy is None and serving and self.random.random() < 0.7:
                    rollout.policy = self.random.choice(serving)

    def pick(self, started: bool = True) -> ModelRollout | None:
        holder = self.random.choice(HOLDERS)
        found = [rollout for rollout in self.rollouts[holder] if not started or rollout.policy is not None]
        if not found:
            return None
        chosen = self.random.choice(found)
        self.rollouts[holder].remove(chosen)
        return chosen

    def finish(self) -> None:
        rollout = self.pick()
        if rollout is not None and rollout.policy is not None:
            group = ModelGroup(rollout.grant, rollout.life, rollout.policy)
            self.sent.append(group)
            self.deliver(group)

    def send_again(self) -> None:
        if self.sent:
            self.deliver(self.random.choice(self.sent))

    def fail(self) -> None:
        rollout = self.pick(started=False)
        attempt = None if rollout is None else self.number(rollout.key)
        if rollout is not None and attempt is not None:
            kind: FailureKind = self.random.choice(("infrastructure", "infrastructure", "data"))
            self.charge(rollout.grant.lease_id, attempt, kind)

    def charge(self, lease_id: int, attempt: int, kind: FailureKind) -> None:
        result = self.ledger.fail(now=self.now, lease_id=lease_id, attempt=attempt, kind=kind, reason="by chance")
        if result is FailureResult.DEAD_LETTERED:
            self.disk.dead.add(lease_id)

    def heartbeat(self) -> None:
        holder = self.random.choice(HOLDERS)
        keys = {}
        unwanted = set()
        for rollout in self.rollouts[holder]:
            attempt = self.number(rollout.key)
            if attempt is None:
                attempt = self.adopt(holder, rollout)
            if attempt is None:
                unwanted.add(rollout.key)
            else:
                keys[rollout.grant.lease_id, attempt] = rollout
        running = {
            attempt: None if rollout.policy is None else len(rollout.policy) for attempt, rollout in keys.items()
        }
        ended = self.ledger.heartbeat(now=self.now, holder=holder, running=running)
        unwanted |= {keys[attempt].key for attempt in ended}
        if self.random.random() < 0.5:  # else the cancellation is lost, and the work goes on
            self.cancel(unwanted)

    def number(self, key: Key) -> int | None:
        """An attempt's number in this life; None for one of a former life that was not adopted."""
        return key[2] if key[0] == self.life else self.adopted.get(key)

    def adopt(self, holder: str, rollout: ModelRollout) -> int | None:
        if rollout.policy is not None and not self.is_ours(rollout.policy):
            return None
        version = None if rollout.policy is None else len(rollout.policy)
        lease_id = rollout.grant.lease_id
        before = self.ledger.books()
        attempt = self.ledger.adopt(now=self.now, lease_id=lease_id, holder=holder, version=version)
        if attempt is not None:
            self.adopted[rollout.key] = attempt
            assert self.ledger.books().running == before.running + 1
            assert lease_id not in self.disk.dead | self.disk.filtered | self.buffer.keys()
        return attempt

    def cancel(self, keys: set[Key]) -> None:
        for holder, rollouts in self.rollouts.items():
            self.rollouts[holder] = [rollout for rollout in rollouts if rollout.key not in keys]

    def cancel_ended(self, ended: Iterable[EndedAttempt]) -> None:
        names = {(key[1], number): key for key, number in self.adopted.items()}
        attempts = [(attempt.lease_id, attempt.attempt) for attempt in ended]
        self.cancel({names.get(attempt, (self.life, *attempt)) for attempt in attempts})

    def holder_dies(self) -> None:
        holder = self.random.choice(HOLDERS)
        self.rollouts[holder].clear()
        if self.random.random() < 0.5:  # else it is only silent
            self.expired(self.ledger.holder_gone(holder))

    def time_passes(self) -> None:
        self.now += self.random.choice((0.5, 1.0, 4.0, 13.0))
        self.expired(self.ledger.expire(now=self.now))

    def expired(self, ended: Iterable[EndedAttempt]) -> None:
        self.disk.dead |= {attempt.lease_id for attempt in ended if attempt.given_up is not None}

    # The caller

    def deliver(self, group: ModelGroup) -> None:
        """A group whose policy is not of the learner's history is a failure; a learner knows it by its versions."""
        lease_id, version, attempt = group.grant.lease_id, group.version, self.number(group.key)
        if not self.is_ours(group.policy):
            assert group.life != self.life
            if attempt is not None:
                self.charge(lease_id, attempt, "infrastructure")
            return
        if attempt is None:
            self.readmit(group)
            return
        foreseen = self.ledger.would_accept(lease_id=lease_id, attempt=attempt, oldest_version=version)
        if foreseen is GroupVerdict.ACCEPTED and self.random.random() < self.filter_share:
            self.cancel_ended(self.ledger.filter(lease_id=lease_id, attempt=attempt))
            self.disk.filtered.add(lease_id)
            return
        if foreseen is GroupVerdict.ACCEPTED:
            self.disk.journal[lease_id] = group
        answer = self.ledger.accept(lease_id=lease_id, attempt=attempt, oldest_version=version, size=1)
        assert answer.verdict is foreseen
        self.cancel_ended(answer.cancelled)
        if answer.verdict is GroupVerdict.ACCEPTED:
            self.buffer[lease_id] = group
        if answer.verdict is GroupVerdict.STALE:
            self.too_old.add(lease_id)

    def readmit(self, group: ModelGroup) -> None:
        lease_id = group.grant.lease_id
        foreseen = self.ledger.would_readmit(lease_id=lease_id, oldest_version=group.version)
        answer = self.ledger.readmit(lease_id=lease_id, oldest_version=group.version, size=1)
        assert answer.verdict is foreseen
        self.cancel_ended(answer.cancelled)
        if answer.verdict is not GroupVerdict.ACCEPTED:
            return
        self.disk.journal[lease_id] = group
        if self.random.random() < self.filter_share:
            assert self.ledger.filter(lease_id=lease_id) == ()
            self.disk.filtered.add(lease_id)
        else:
            self.buffer[lease_id] = group

    def filter(self) -> None:
        if self.buffer:
            lease_id = self.random.choice(list(self.buffer))
            del self.buffer[lease_id]
            assert self.ledger.filter(lease_id=lease_id) == ()
            self.disk.filtered.add(lease_id)

    def sure(self) -> None:
        """Groups named before come first, but for those that are gone."""
        before = [group for group in self.named if self.buffer.get(group.grant.lease_id) is group]
        self.named = tuple(self.buffer[lease_id] for lease_id in self.ledger.sure())
        assert list(self.named[: len(before)]) == before
        assert len(self.named) <= self.ledger.config.groups_per_step

    def take(self) -> None:
        if self.taken is not None or self.replaying:
            return
        batch = self.ledger.take(now=self.now)
        if isinstance(batch, Batch):
            self.taken = batch.lease_ids
            self.judge(batch)
            for ended in batch.dropped:
                assert (ended.holder is None) == (ended.lease_id in self.buffer)
                if self.buffer.pop(ended.lease_id, None) is None:
                    self.dropped[ended.lease_id] += 1
                self.too_old.add(ended.lease_id)
            assert max(self.dropped.values(), default=0) <= self.ledger.config.max_drops_per_lease
            self.disk.batches.append(batch.lease_ids)
        else:
            assert (batch.have < batch.need) != bool(batch.stragglers), batch
            assert batch.have == len(self.buffer)

    def bound(self) -> None:
        """The bound falls or rises, at any moment. What it drops was running, or is in the buffer no more."""
        before, buffered = self.ledger.max_lag, len(self.buffer)
        ended = self.ledger.bound_lag(self.random.randint(0, self.ledger.config.max_lag))
        assert not ended or self.ledger.max_lag < before
        for attempt in ended:
            assert (attempt.holder is None) == (attempt.lease_id in self.buffer)
            self.buffer.pop(attempt.lease_id, None)
        self.cancel_ended(ended)
        assert buffered - len(self.buffer) == sum(attempt.holder is None for attempt in ended)
        newest = self.ledger.next_version
        assert all(newest - group.version <= self.ledger.max_lag for group in self.buffer.values())

    def judge(self, batch: Batch) -> None:
        """No group is further behind than the bound, and none was passed over for a newer one."""
        config = self.ledger.config
        named = [group for group in self.named if self.buffer.get(group.grant.lease_id) is group]
        groups = [self.buffer.pop(lease_id) for lease_id in batch.lease_ids]
        assert groups[: len(named)] == named, "a group that was sure to be in the batch is not"
        assert len(groups) == config.groups_per_step
        assert batch.version == len(self.history)
        for group, lag in zip(groups, batch.lags, strict=True):
            assert self.history[: group.version] == group.policy, "a policy that is not an ancestor of the learner's"
            assert 0 <= lag == len(self.history) - group.version <= self.ledger.max_lag <= config.max_lag
        self.named = ()
        last = max(((group.version, group.grant.lease_id) for group in groups[len(named) :]), default=(-1, -1))
        assert all((group.version, group.grant.lease_id) > last for group in self.buffer.values())

    def trained(self) -> None:
        if self.taken is None and not self.replaying:
            return
        batch = self.taken if self.taken is not None else self.replaying.pop(0)
        self.taken = None
        self.history = (*self.history, batch)
        self.ledger.trained(len(self.history))

    def checkpoint(self) -> None:
        self.disk.checkpoint = ModelCheckpoint(json.dumps(asdict(self.ledger.snapshot())), self.history)

    def learner_dies(self) -> None:
        """It comes back from the checkpoint; rarely with a batch log of which the end is lost."""
        checkpoint, disk = self.disk.checkpoint, self.disk
        if self.random.random() < 0.2 and len(disk.batches) > len(checkpoint.history):
            del disk.batches[self.random.randint(len(checkpoint.history), len(disk.batches) - 1) :]
        self.life += 1
        self.adopted.clear()
        self.dropped.clear()
        self.too_old.clear()
        self.ledger = Ledger.restore(self.ledger.config, LedgerSnapshot(**json.loads(checkpoint.form)))
        self.ledger.books().check()
        self.history, self.taken, self.buffer, self.named = checkpoint.history, None, {}, ()
        self.replaying = disk.batches[len(checkpoint.history) :]
        for batch in self.replaying:
            self.ledger.replay(batch)
        self.ledger.replay_filtered(disk.filtered)
        self.ledger.replay_dead_lettered(disk.dead)
        for group in list(disk.journal.values()):
            if self.is_ours(group.policy):
                self.readmit(group)
        self.check_nothing_lost()
        self.updated()

    def check_nothing_lost(self) -> None:
        """Every group that was acknowledged is consumed, filtered or at hand, but for those that are too old."""
        settled = {lease_id for batch in self.lineage() for lease_id in batch} | self.disk.filtered | self.disk.dead
        for lease_id, group in self.disk.journal.items():
            lag = self.ledger.next_version - group.version
            if self.is_ours(group.policy) and lag <= self.ledger.max_lag:
                assert lease_id in settled or lease_id in self.buffer

    # What always holds

    def check(self) -> None:
        books, snapshot = self.ledger.books(), self.ledger.snapshot()
        books.check()
        consumed = [lease_id for batch in self.lineage() for lease_id in batch]
        in_training = {lease_id for batch in self.lineage()[len(self.history) :] for lease_id in batch}
        outstanding = set(snapshot.lease_ids) - in_training
        everywhere = [*consumed, *self.disk.filtered, *self.disk.dead, *outstanding]
        assert sorted(everywhere) == list(range(snapshot.cursor)), "a lease is lost, or in two places"
        assert books.trained == len(consumed)
        assert books.buffered == len(self.buffer)
        assert self.ledger.next_version == len(self.lineage())
        self.check_admission()

    def check_admission(self) -> None:
        config, books, served = self.ledger.config, self.ledger.books(), self.ledger.served
        used = books.trained + books.buffered + books.running
        limit = 0 if served is None else (served + self.ledger.max_lag + 1) * config.groups_per_step
        assert self.ledger.places() == max(0, limit - used)

    def run(self, operations: dict[str, float], count: int) -> None:
        names = list(operations)
        for name in self.random.choices(names, [operations[name] for name in names], k=count):
            operation: Callable[[], None] = getattr(self, name)
            operation()
            self.check()

    def is_stuck(self, steps: int) -> bool:
        """True if a fair world without further mishaps fails to train `steps` more steps and all that is open now."""
        self.filter_share = self.loss = 0.0
        cursor = self.ledger.snapshot().cursor
        goal = len(self.lineage()) + steps
        for _ in range(40 * (goal + self.ledger.books().outstanding)):
            self.fair_round()
            still_open = min(self.ledger.snapshot().lease_ids, default=cursor) < cursor
            if len(self.history) >= goal and not still_open:
                return False
        return True

    def fair_round(self) -> None:
        self.trained()
        self.generators = [self.history] * len(self.generators)
        self.updated()
        for operation in (self.grant, self.start, *[self.finish] * 4, self.heartbeat, self.take, self.check):
            operation()
        self.now += 1.0
        self.expired(self.ledger.expire(now=self.now))


WORK = {"grant": 5.0, "start": 4.0, "finish": 10.0, "heartbeat": 3.0, "take": 5.0, "trained": 4.0, "publish": 4.0}
MISHAPS = {
    "time_passes": 1.5,
    "send_again": 1.5,
    "fail": 1.0,
    "filter": 0.4,
    "holder_dies": 0.4,
    "generator_dies": 0.4,
    "checkpoint": 0.5,
    "learner_dies": 0.25,
}

configs = st.builds(
    make_config,
    groups_per_step=st.integers(1, 4),
    max_lag=st.integers(0, 4),
    on_lag=st.sampled_from(("wait", "drop")),
)
seeds = st.integers(0, 2**32)
work = st.sampled_from((WORK, {**WORK, "sure": 5.0}))
"""With or without a trainer that begins with a batch before it is complete."""


def seeded(examples: int) -> settings:
    return settings(max_examples=examples, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@seeded(200)
@given(config=configs, seed=seeds, mishaps=st.sets(st.sampled_from(sorted(MISHAPS))), work=work)
def test_no_group_lags_too_far_and_none_is_lost_or_trained_twice_and_the_run_goes_on(
    config: LedgerConfig, seed: int, mishaps: set[str], work: dict[str, float]
) -> None:
    world = LedgerWorld(config, seed, loss=0.03)
    world.run({**work, **{name: MISHAPS[name] for name in sorted(mishaps)}}, 250)
    assert not world.is_stuck(steps=3)


@seeded(200)
@given(config=configs, seed=seeds, mishaps=st.sets(st.sampled_from(sorted(MISHAPS))), work=work)
def test_a_bound_that_falls_and_rises_is_kept_and_the_run_goes_on_under_the_last_one(
    config: LedgerConfig, seed: int, mishaps: set[str], work: dict[str, float]
) -> None:
    """A restarted learner's ledger begins with the configured bound, so that it takes every batch that was logged."""
    world = LedgerWorld(config, seed, loss=0.03)
    world.run({**work, "bound": 2.0, **{name: MISHAPS[name] for name in sorted(mishaps)}}, 250)
    assert not world.is_stuck(steps=3)


@seeded(100)
@given(config=configs, seed=seeds)
def test_after_a_lower_bound_a_patient_learner_drops_nothing_that_it_grants_from_there_on(
    config: LedgerConfig, seed: int
) -> None:
    """Every group that is granted first under the new bound finds its place in time."""
    endless = float("inf")
    patient = replace(config, on_lag="wait", straggler_timeout_s=endless, lease_timeout_s=endless)
    world = LedgerWorld(patient, seed, loss=0.0)
    world.run(WORK, 100)
    world.ledger.bound_lag(config.max_lag)
    world.run({"bound": 1.0}, 1)
    first_new = world.ledger.snapshot().cursor
    world.run(WORK, 200)
    assert world.too_old <= set(range(first_new))
    assert not world.is_stuck(steps=3)


@seeded(100)
@given(config=configs, seed=seeds)
def test_a_learner_that_dies_often_adopts_what_runs_and_readmits_what_was_finished(
    config: LedgerConfig, seed: int
) -> None:
    world = LedgerWorld(config, seed, loss=0.03)
    often = {"learner_dies": 2.0, "checkpoint": 1.0, "send_again": 4.0, "fail": 0.5, "time_passes": 0.5}
    world.run({**WORK, "heartbeat": 6.0, **often}, 300)
    assert not world.is_stuck(steps=3)


@seeded(100)
@given(config=configs, seed=seeds, work=work)
def test_a_patient_learner_in_a_world_without_mishaps_never_drops_anything(
    config: LedgerConfig, seed: int, work: dict[str, float]
) -> None:
    """Every group that was granted finds a place in time, in whatever order the groups are completed."""
    endless = float("inf")
    patient = replace(config, on_lag="wait", straggler_timeout_s=endless, lease_timeout_s=endless)
    world = LedgerWorld(patient, seed, loss=0.0)
    world.run({**work, "filter": 0.4, "fail": 0.4, "send_again": 1.0, "generator_dies": 0.3}, 300)
    books = world.ledger.books()
    assert books.dropped == 0
    assert not world.is_stuck(steps=3)


@seeded(60)
@given(config=configs, order=st.randoms(use_true_random=False))
def test_the_order_of_completion_does_not_change_the_batches(config: LedgerConfig, order: random.Random) -> None:
    ledger = Ledger(config)
    ledger.served_changed(0)
    grants = list(ledger.grant(now=0.0, holder="a", room=100))
    order.shuffle(grants)
    for grant in grants:
        ledger.accept(lease_id=grant.lease_id, attempt=0, oldest_version=0, size=1)
    trained: list[int] = []
    for version in range(config.max_lag + 1):
        batch = ledger.take(now=0.0)
        assert isinstance(batch, Batch)
        trained += batch.lease_ids
        ledger.trained(version + 1)
    assert trained == list(range((config.max_lag + 1) * config.groups_per_step))


@seeded(60)
@given(config=configs, order=st.randoms(use_true_random=False))
def test_a_batch_that_is_begun_early_has_the_groups_that_it_has_anyway(
    config: LedgerConfig, order: random.Random
) -> None:
    """Each is named as soon as it comes, if it can be."""
    begins, waits = Ledger(config), Ledger(config)
    versions: dict[int, int] = {}
    for version in range(3):
        for ledger in (begins, waits):
            ledger.served_changed(version)
            versions |= {each.lease_id: each.version for each in ledger.grant(now=0.0, holder="a", room=100)}
        coming = sorted(waits.snapshot().lease_ids)
        order.shuffle(coming)
        taken: list[set[int]] = []
        for ledger in (begins, waits):
            come = iter(coming)
            while not isinstance(batch := ledger.take(now=0.0), Batch):
                lease_id = next(come)
                ledger.accept(lease_id=lease_id, attempt=0, oldest_version=versions[lease_id], size=1)
                if ledger is begins:
                    ledger.sure()
            taken.append(set(batch.lease_ids))
            ledger.trained(version + 1)
        assert taken[0] == taken[1]
