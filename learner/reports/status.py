"""The learner as it shows itself while it runs: its Prometheus metrics, and its part of `GET /v1/status`.

Nothing here waits or computes.
"""

import shutil
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from learner.leases.granting import Peer
from learner.ledger import ATTEMPT_OUTCOMES, LEASE_STATES, Books, Ledger
from learner.reports.tally import StepRecord
from learner.training.guard import GuardChange
from learner.training.step import StepMetrics
from learner.weights.fleet import Fleet, Member
from learner.weights.published import PublishReport
from protocol.model import PolicyVersion
from protocol.status import DiskStatus, EventStatus, PeerStatus, ProgressStatus, QueueStatus, Report
from services.http.metrics import Metrics

_ARTICLES = ("a", "an", "the", "its")


class Measures:
    """Gauges and counters of the newest step, publish and wait."""

    def __init__(self, metrics: Metrics) -> None:
        self.last_at: dict[str, float] = {}
        """When the newest step and publish ended, on the monotonic clock."""
        self._version = metrics.gauge("policy_version", "Version of the learner's policy.")
        self._reward = metrics.gauge("reward_mean", "Mean reward of the newest batch.")
        self._steps = metrics.counter("steps", "Training steps.")
        self._skipped = metrics.counter("skipped_updates", "Updates left out since their gradient was not finite.")
        self._tokens = metrics.counter("trained_tokens", "Sampled tokens that entered a loss, by lag.", labels=("lag",))
        self._trajectories = metrics.counter("trained_trajectories", "Trained trajectories, by lag.", labels=("lag",))
        self._wait = metrics.counter("batch_wait_seconds", "Time that the trainer waited for batches.")
        self._train = metrics.counter("train_seconds", "Time in training steps.")
        self._waited = metrics.counter("waited_seconds", "Time of all waits, by whom was waited for.", labels=("whom",))
        self._ess = metrics.gauge("effective_sample_share", "Effective sample size over sample size, newest batch.")
        self._mismatch = metrics.gauge("mismatch_kl", "Numerical gap between engine and learner, nats, newest batch.")
        self._behavior_kl = metrics.gauge("behavior_kl", "KL of sampling to learning policy, nats, newest batch.")
        self._ratio_mean = metrics.gauge("importance_ratio_mean", "Mean importance ratio of the newest batch.")
        self._ratio_max = metrics.gauge("importance_ratio_max", "Largest importance ratio of the newest batch.")
        self._entropy = metrics.gauge("entropy_nats", "Mean entropy of the policy, newest batch.")
        self._lag_bound = metrics.gauge("lag_bound", "Largest lag that the next batch may have.")
        self._level = metrics.gauge("curriculum_level", "Level of new leases, 0 the easiest, or the only one.")
        self._guard = metrics.counter("guard_changes", "What the guard did.", labels=("change", "measure"))
        self._refused = metrics.counter("refused_messages", "ZeroMQ messages refused, by reason.", labels=("reason",))
        self._leases = metrics.gauge("leases", "Leases of the present history, by where they are.", labels=("state",))
        self._attempts = metrics.gauge(
            "attempts", "Attempts at leases, by where they are or how they ended last.", labels=("outcome",)
        )
        self._left_out = metrics.counter(
            "left_out_groups", "Groups and attempts that came to nothing, by reason.", labels=("reason",)
        )
        self._failed = metrics.counter("failed_writes", "Writes that the disk did not take, by what.", labels=("what",))
        self._publish = metrics.gauge("publish_seconds", "Duration of the newest publish.")
        self._pause = metrics.gauge("publish_pause_seconds", "Longest pause of a generator in the newest publish.")
        self._gap = metrics.gauge("probe_gap_nats", "Largest logprob gap of the probe in the newest publish.")

    def step(self, record: StepRecord, step: StepMetrics) -> None:
        """Notes a training step."""
        self.last_at["step"] = time.monotonic()
        self._version.set(record.step)
        self._reward.set(record.reward_mean)
        self._steps.inc()
        self._skipped.inc(step.skipped_updates)
        self._wait.inc(record.wait_s)
        self._train.inc(record.train_s)
        for lag, count in record.token_lag_counts.items():
            self._tokens.labels(lag=lag).inc(count)
        for lag, count in record.lag_counts.items():
            self._trajectories.labels(lag=lag).inc(count)
        measured = (
            (self._ess, step.effective_sample_share),
            (self._mismatch, step.mismatch_kl),
            (self._behavior_kl, step.behavior_kl),
            (self._ratio_mean, step.importance_ratio_mean),
            (self._ratio_max, step.importance_ratio_max),
            (self._entropy, step.entropy),
        )
        for gauge, value in measured:
            if value is not None:
                gauge.set(value)

    def lag_bound(self, max_lag: Callable[[], int]) -> None:
        """Shows the bound in use as it is when somebody looks; to be called once."""
        self._lag_bound.set_function(max_lag)

    def level(self, level: Callable[[], int | None]) -> None:
        """Shows the level of new leases as it is when somebody looks; to be called once."""
        self._level.set_function(lambda: level() or 0)

    def guard(self, change: GuardChange) -> None:
        """Notes what the guard did, and for which measure."""
        measure = "none" if change.reading is None else change.reading.measure
        self._guard.labels(change=change.kind, measure=measure).inc()

    def published(self, report: PublishReport) -> None:
        """Notes a publish."""
        self.last_at["publish"] = time.monotonic()
        self._publish.set(report.total_s)
        self._pause.set(report.pause_s)
        self._gap.set(report.probe_gap)

    def refused(self, reason: str) -> None:
        """Notes a message that was refused."""
        self._refused.labels(reason=reason).inc()

    def books(self, books: Callable[[], Books]) -> None:
        """Shows the books as they are when somebody looks; to be called once."""
        for state in LEASE_STATES:
            self._leases.labels(state=state).set_function(lambda state=state: getattr(books(), state))
        for outcome in ATTEMPT_OUTCOMES:
            self._attempts.labels(outcome=outcome).set_function(lambda outcome=outcome: getattr(books(), outcome))

    def left_out(self, reason: str) -> None:
        """Notes a group or an attempt that came to nothing."""
        self._left_out.labels(reason=reason).inc()

    def failed_write(self, what: str) -> None:
        """Notes something that could not be written: a file's name, or `checkpoint`."""
        self._failed.labels(what=what).inc()

    def waited(self, whom: str, seconds: float) -> None:
        """Notes a wait; `whom` is cut to its kind, to keep the number of labels small."""
        words = (word.rstrip(":,") for word in whom.split())
        self._waited.labels(whom=next((word for word in words if word not in _ARTICLES), "others")).inc(seconds)


_LEAST_FREE_BYTES = 64 << 20


class LearnerStatus:
    """Reads ledger, fleet and env_services; `total_steps` is the run's end, `folder` the run's. `clock` is theirs."""

    def __init__(
        self,
        *,
        name: str,
        folder: Path,
        total_steps: int,
        incarnation: int,
        ledger: Ledger,
        fleet: Fleet,
        env_services: Callable[[], Iterable[Peer]],
        measures: Measures,
        teachers: Callable[[], tuple[PeerStatus, ...]] = tuple,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name = name
        self._folder = folder
        self._total_steps = total_steps
        self._incarnation = incarnation
        self._ledger = ledger
        self._fleet = fleet
        self._env_services = env_services
        self._measures = measures
        self._teachers = teachers
        self._clock = clock

    def report(self) -> Report:
        """The learner's part of its status."""
        disk = self._disk()
        problems = (_disk_full(disk),) if disk.free_bytes < _LEAST_FREE_BYTES else ()
        return Report(
            id=self._name,
            policy_version=str(PolicyVersion(self._incarnation, self._ledger.version)),
            progress=ProgressStatus(unit="steps", done=self._ledger.version, total=self._total_steps),
            peers=(
                *(self._generator(member) for member in self._fleet.members()),
                *(self._env_service(holder) for holder in self._env_services()),
                *self._teachers(),
            ),
            queues=self._queues(),
            events=tuple(
                EventStatus(name=name, age_s=max(0.0, self._clock() - when))
                for name, when in self._measures.last_at.items()
            ),
            disks=(disk,),
            problems=(*problems, *self._guarded()),
        )

    def _queues(self) -> tuple[QueueStatus, ...]:
        books = self._ledger.books()
        behind = sum(member.serving is None or self._lags(member.serving) for member in self._fleet.members())
        return (
            QueueStatus(name="pending leases", depth=books.pending),
            QueueStatus(name="running leases", depth=books.running),
            QueueStatus(name="buffered groups", depth=books.buffered),
            QueueStatus(name="generators to be published to", depth=behind),
        )

    def _guarded(self) -> tuple[str, ...]:
        bound, configured = self._ledger.max_lag, self._ledger.config.max_lag
        if bound == configured:
            return ()
        return (
            f"the guard bounds the lag by {bound} instead of {configured}: the log says which measure made it do so",
        )

    def _generator(self, member: Member) -> PeerStatus:
        state = "joining"
        if member.serving is not None:
            state = "behind" if self._lags(member.serving) else "serving"
        return PeerStatus(
            name=member.generator_id,
            kind="generator",
            url=member.url,
            last_heard_s=max(0.0, self._clock() - member.last_seen),
            serving_version=None if member.serving is None else str(member.serving),
            state=state,
        )

    def _env_service(self, holder: Peer) -> PeerStatus:
        return PeerStatus(
            name=holder.name,
            kind="env-service",
            last_heard_s=max(0.0, self._clock() - holder.last_seen),
            state=f"{len(holder.running)} of {holder.hello.capacity} groups",
        )

    def _lags(self, serving: PolicyVersion) -> bool:
        return serving.number < self._ledger.version

    def _disk(self) -> DiskStatus:
        usage = shutil.disk_usage(self._folder)
        return DiskStatus(path=str(self._folder), free_bytes=usage.free, total_bytes=usage.total)


def _disk_full(disk: DiskStatus) -> str:
    return f"the disk of {disk.path} has {disk.free_bytes >> 20} MiB left: make room there, the journal is on it"
