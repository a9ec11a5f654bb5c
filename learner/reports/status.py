"""The learner as it shows itself while it runs: its Prometheus metrics, and its part of `GET /v1/status`.

Nothing here waits or computes.
"""

import contextlib
import itertools
import math
import shutil
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import get_args

from learner.algorithms.old_tokens import LEFT_OUT_OF_OLD
from learner.journal.journal import FOLDER as JOURNAL
from learner.leases.env_services import ConnectedEnvService
from learner.ledger import ATTEMPT_OUTCOMES, LEASE_STATES, Books, Ledger
from learner.reports.history import CURVES, figure_of
from learner.reports.tally import StepRecord
from learner.training.guard import GuardChange, Measure
from learner.training.lag_gradients import LagReading
from learner.training.step import StepMetrics
from learner.weights.fleet import FleetMember, FleetMembers
from learner.weights.published import PublishReport
from learner.weights.tree import DeltaReport
from protocol.model import PolicyVersion
from protocol.status import DiskStatus, EventStatus, PeerStatus, ProgressStatus, QueueStatus, Report
from services.http.gpu_metrics import GpuMetrics
from services.http.metrics import Metrics, one_label
from services.http.waiting import Waiting
from services.load import LoadSample, LoadWindow

_ARTICLES = ("a", "an", "the", "its")
_SECONDS = (0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000, 3600)
_SYNCS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10)
_LAGS = (0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 16)
_WHOM = ("groups", "lease", "generator", "env_service", "evaluation", "teacher", "room")
_FOR_GROUPS = ("groups", "lease")
_USUAL_STEPS = 32
_REFUSALS = (
    "protocol", "malformed", "protocol_version", "too_large", "checksum", "connection", "unknown_peer", "unexpected",
    "hello", "name_taken",
)  # fmt: skip
_LEFT_OUT = (
    "duplicate", "stale", "late", "unknown", "uniform", "mean_reward_low", "mean_reward_high", "failed_late",
    "failed_data", "failed_infrastructure", "too_old", "holder_gone", "unproven", "expired", "overdue",
    "untaught",
)  # fmt: skip
_GUARD_CHANGES = (
    *itertools.product(("tightened", "powerless"), get_args(Measure)),
    ("loosened", "none"),
)
_GENERATOR_STATES = ("serving", "behind", "joining")
_LEAST_FREE_BYTES = 64 << 20


class LearnerMetrics:
    """Counts of the learner: steps, publishes, waits, leases, its disk. Sums and histograms hold what lies between
    two scrapes; gauges of the newest batch do not.
    """

    def __init__(self, metrics: Metrics, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._step_times: deque[float] = deque(maxlen=_USUAL_STEPS)
        self.groups_waited_s = 0.0
        """Time for which the trainer has waited for groups, without a wait in progress."""
        self.published_version = -1
        """Number of the newest version that was published; -1 before the first publish."""
        self.last_at: dict[str, float] = {}
        """Ends of the newest step and publish, on the monotonic clock."""
        self._clock = clock
        self._stepped_at = clock()
        self._newest_step, self._last_step = 0, math.inf
        self._make_training(metrics)
        self._make_newest(metrics)
        self._make_leases(metrics)
        self._make_publishes(metrics)
        self._make_files(metrics)
        self.gpus = GpuMetrics(metrics)
        """GPUs of the learner and its ranks."""

    def _make_training(self, metrics: Metrics) -> None:
        self._version = metrics.gauge("policy_version", "Version of the learner's policy.")
        metrics.gauge(
            "step_age",
            "Seconds since the end of the newest step, also one that was trained again; before the first, since the "
            "start of this process; 0 once the last one is done.",
        ).set_function(self._no_step_s)
        self._usual = metrics.late_gauge("usual_step_time", "Seconds: median time of the last steps.")
        self._steps = metrics.counter("steps", "Training steps, those without the replayed ones.")
        self._replayed = metrics.counter("replayed_steps", "Steps that were trained again from the journal.")
        self._step_s = metrics.histogram("step_seconds", "Time of a step: wait, training and copy.", buckets=_SECONDS)
        self._skipped = metrics.counter("skipped_updates", "Updates left out since their gradient was not finite.")
        self._tokens = metrics.counter("trained_tokens", "Sampled tokens that entered a loss.")
        self._trajectories = metrics.counter("trained_trajectories", "Trained trajectories.")
        self._reused = metrics.counter("reused_groups", "Groups that steps trained once more, after their first time.")
        self._beyond = metrics.counter(
            "tokens_beyond_max_lag",
            "Tokens of such groups that were older than max_lag (reuse.max_lag), whether they were left out or not.",
        )
        self._left_out_of_old = metrics.counter(
            "second_moment_left_out_tokens", "Those of them that reuse.second_moment_limit left out of the loss."
        )
        self._token_lags = metrics.distribution(
            "trained_token_lag_versions", "Versions that trained tokens were behind.", buckets=_LAGS
        )
        self._lags = metrics.distribution(
            "trained_trajectory_lag_versions",
            "Versions that trained trajectories were behind, by their oldest token.",
            buckets=_LAGS,
        )
        self._wait = metrics.counter(
            "batch_wait_seconds",
            "Time that the trainer waited for batches. waited_seconds holds it as well: do not add them up.",
        )
        self._train = metrics.counter("train_seconds", "Time in training steps.")
        self._copy = metrics.counter("copy_seconds", "Time in which steps copied weights for a publish.")
        self._waited = metrics.counter(
            "waited_seconds",
            "Time of all waits, by whom was waited for; waits may overlap, and the trainer's are among them.",
            labels=("whom",),
            known=one_label(*_WHOM, "others"),
        )

    def _make_newest(self, metrics: Metrics) -> None:
        self._newest = {
            curve.name: metrics.late_gauge(curve.gauge, f"{figure_of(curve).heading}: {curve.title}, newest step.")
            for curve in CURVES
            if curve.gauge
        }
        self._lag_bound = metrics.gauge("lag_bound_versions", "Largest lag that the next batch's new groups may have.")
        self._configured = metrics.gauge("lag_bound_configured_versions", "The bound of the settings, max_lag.")
        self._level = metrics.gauge("curriculum_level", "Level of new leases, 0 the easiest, or the only one.")
        self._cosines = metrics.gauge(
            "gradient_cosine", "Cosine of the gradient of groups of these lags to that of lag 0.", labels=("lag",)
        )
        self._norms = metrics.gauge(
            "gradient_norm_ratio", "Norm of the gradient of groups of these lags over that of lag 0.", labels=("lag",)
        )
        self._compare_s = metrics.counter(
            "gradient_comparison_seconds", "Time in comparing gradients by lag, with the wait for groups of lag 0."
        )
        self.reading: LagReading | None = None
        """The newest comparison of gradients by lag; None without one."""
        self._guard = metrics.counter(
            "guard_changes",
            "Changes of the lag bound by the guard.",
            labels=("change", "measure"),
            known=_GUARD_CHANGES,
        )

    def _make_leases(self, metrics: Metrics) -> None:
        self._refused = metrics.counter(
            "refused_messages", "ZeroMQ messages refused, by reason.", labels=("reason",), known=one_label(*_REFUSALS)
        )
        self._leases = metrics.gauge("leases", "Leases of the present history, by where they are.", labels=("state",))
        self._ended_leases = metrics.rises(
            "ended_leases", "Leases that came to their end since the start of this process.", label="state"
        )
        self._attempts = metrics.gauge(
            "attempts",
            "Attempts at leases of the present history, by where they are or how they ended last; a resume takes back "
            "those of steps that are lost.",
            labels=("outcome",),
        )
        self._ended_attempts = metrics.rises(
            "ended_attempts",
            "Attempts that ended since the start of this process; one that expired and was accepted after all is both.",
            label="outcome",
        )
        self._left_out = metrics.counter(
            "left_out_groups",
            "Groups and attempts that came to nothing, by reason.",
            labels=("reason",),
            known=one_label(*_LEFT_OUT),
        )
        self._masked = metrics.counter(
            "masked_tokens",
            "Sampled tokens of accepted groups that were too old for a loss, and left it (lag.on_lag = mask).",
        )
        self._emptied = metrics.counter(
            "masked_trajectories",
            "Trajectories of accepted groups whose tokens were all too old; others are still compared with them.",
        )
        self._env_services = metrics.gauge("env_services", "Env-services that the learner gives leases to.")

    def _make_publishes(self, metrics: Metrics) -> None:
        self._publish = metrics.histogram(
            "publish_seconds", "Time from the offer of a version until generators serve it.", buckets=_SECONDS
        )
        self._prepare = metrics.histogram(
            "publish_prepare_seconds", "Time in which a publish sends weights into staging.", buckets=_SECONDS
        )
        self._commit = metrics.histogram(
            "publish_commit_seconds", "Time of a publish's commits and their proofs.", buckets=_SECONDS
        )
        self._pause = metrics.histogram(
            "publish_pause_seconds", "Longest pause of a generator in a publish.", buckets=_SECONDS
        )
        self._sent = metrics.late_gauge(
            "publish_bytes", "Bytes that each generator received in the newest publish; 0 if all map them."
        )
        self._changes = metrics.late_gauge(
            "changes_bytes", "Bytes of what the newest version has changed, as generators that pull download it."
        )
        self._changed = metrics.late_gauge(
            "changed_weights_ratio", "Share of the weights that the newest version has changed, if a generator pulls."
        )
        self._gap = metrics.late_gauge("probe_gap_nats", "Largest logprob gap of the probe in the newest publish.")
        self._joins = metrics.counter("joins", "Generators that caught up by a download.")
        self._generators = metrics.gauge(
            "generators",
            "Generators of the fleet: serving the newest published version, behind, or joining.",
            labels=("state",),
        )
        self._evidence = metrics.gauge(
            "distrust_nats",
            "Evidence that a generator samples otherwise than it says; at learner.trust.evidence it is named.",
            labels=("generator",),
        )
        self._evidence_of: frozenset[str] = frozenset()
        self._expulsions: Callable[[], int] = int
        metrics.count(
            "expelled_generators", "Generators that were expelled from the fleet.", lambda: self._expulsions()
        )

    def _make_files(self, metrics: Metrics) -> None:
        self._failed = metrics.counter(
            "failed_writes",
            "Writes that the disk refused, by what was to be written.",
            labels=("what",),
            known=one_label(
                "journal", "checkpoint", "evaluation", "metrics.jsonl", "samples.jsonl", "dead_letters.jsonl"
            ),
        )
        self.synced: Callable[[float], None] = metrics.histogram(
            "journal_sync_seconds", "Time until the disk had written the journal.", buckets=_SYNCS
        ).observe
        self._journal = metrics.gauge("journal_bytes", "Size of the journal on disk.")
        self._disk_free = metrics.gauge("disk_free_bytes", "Room on the disk of the run's folder.")
        self._disk_size = metrics.gauge("disk_size_bytes", "Size of the disk of the run's folder.")
        self._unseen: Callable[[], int] = int
        metrics.count(
            "samples_left_out",
            "Trajectories that are not kept for the page: beyond the bounds of [learner.samples], or the disk "
            "refused them.",
            lambda: self._unseen(),
        )
        self._news = metrics.counter(
            "webhook_posts",
            "Verdicts for the webhook, by what became of them.",
            labels=("outcome",),
            known=one_label("sent", "failed", "dropped"),
        )
        self._drops = metrics.rises(
            "tracker_drops", "Entries that a tracker was too slow for, or failed to take.", label="tracker"
        )

    def step(self, record: StepRecord, step: StepMetrics) -> None:
        """Notes a training step."""
        self.last_at["step"] = time.monotonic()
        self._reached(record.step)
        self._steps.inc()
        self._skipped.inc(step.skipped_updates)
        self._wait.inc(record.wait_s)
        self._train.inc(record.train_s)
        self._copy.inc(record.copy_s)
        self._step_s.observe(record.wait_s + record.train_s + record.copy_s)
        self._step_times.append(record.wait_s + record.train_s + record.copy_s)
        self._usual.set(statistics.median(self._step_times))
        self._tokens.inc(sum(record.token_lag_counts.values()))
        self._trajectories.inc(record.trajectories)
        self._reused.inc(len(record.reused_lease_ids))
        self._beyond.inc(record.tokens_beyond_max_lag or 0)
        self._left_out_of_old.inc(step.means.get(LEFT_OUT_OF_OLD, 0))
        for lag, count in record.token_lag_counts.items():
            self._token_lags.add(lag, count)
        for lag, count in record.lag_counts.items():
            self._lags.add(lag, count)
        for name, gauge in self._newest.items():
            value = getattr(record if hasattr(record, name) else step, name)
            if value is not None:
                gauge.set(value)

    def by_lag(self, reading: LagReading) -> None:
        """Notes a comparison of gradients by lag."""
        self.reading = reading
        self._compare_s.inc(reading.wait_s + reading.pass_s)
        for each in reading.buckets:
            if each.cosine is not None:
                self._cosines.labels(lag=each.label).set(each.cosine)
            if each.norm_ratio is not None:
                self._norms.labels(lag=each.label).set(each.norm_ratio)

    @property
    def usual_step_s(self) -> float | None:
        """Median of the last steps' times; None before the first."""
        return statistics.median(self._step_times) if self._step_times else None

    def replayed(self, version: int) -> None:
        """Notes a step that was trained again, and led to this version."""
        self._reached(version)
        self._replayed.inc()

    def begins(self, version: int, *, last_step: int) -> None:
        """Shows the version that this process begins with; the run ends with `last_step`."""
        self._last_step = last_step
        self._reached(version)

    def _reached(self, version: int) -> None:
        self._version.set(version)
        self._newest_step, self._stepped_at = version, self._clock()

    def _no_step_s(self) -> float:
        return 0.0 if self._newest_step >= self._last_step else self._clock() - self._stepped_at

    def lag_bound(self, max_lag: Callable[[], int], *, configured: int) -> None:
        """Shows the bound in use as it is when somebody looks; to be called once."""
        self._lag_bound.set_function(max_lag)
        self._configured.set(configured)

    def level(self, level: Callable[[], int | None]) -> None:
        """Shows the level of new leases as it is when somebody looks; to be called once."""
        self._level.set_function(lambda: level() or 0)

    def guard(self, change: GuardChange) -> None:
        """Notes what the guard did, and for which measure."""
        measure = "none" if change.reading is None else change.reading.measure
        self._guard.labels(change=change.kind, measure=measure).inc()

    def published(self, report: PublishReport) -> None:
        """Notes a publish."""
        self.published_version = report.version
        self.last_at["publish"] = time.monotonic()
        self._publish.observe(report.total_s)
        self._prepare.observe(report.prepare_s)
        self._commit.observe(report.commit_s)
        self._pause.observe(report.pause_s)
        self._sent.set(report.sent_bytes)
        self._gap.set(report.probe_gap)

    def grown(self, report: DeltaReport) -> None:
        """Notes a version that was written for generators that pull."""
        if report.changes_bytes:
            self._changes.set(report.changes_bytes)
            self._changed.set(report.changed_share)

    def joined(self) -> None:
        """Notes a generator that caught up by a download."""
        self._joins.inc()

    def fleet(self, states: Callable[[], Iterable[str]], *, expulsions: Callable[[], int]) -> None:
        """Shows the state of each generator, and how many were expelled; to be called once."""
        self._expulsions = expulsions
        for state in _GENERATOR_STATES:
            self._generators.labels(state).set_function(lambda state=state: list(states()).count(state))

    def distrust(self, evidence: Mapping[str, float]) -> None:
        """Shows the evidence against each generator, by name; of those that are not named any more it shows none."""
        for gone in self._evidence_of - evidence.keys():
            self._evidence.remove(gone)
        self._evidence_of = frozenset(evidence)
        for name, nats in evidence.items():
            self._evidence.labels(generator=name).set(nats)

    def env_services(self, count: Callable[[], int]) -> None:
        """Shows how many env_services there are; to be called once."""
        self._env_services.set_function(count)

    def refused(self, reason: str) -> None:
        """Notes a message that was refused."""
        self._refused.labels(reason=reason).inc()

    def books(self, books: Callable[[], Books]) -> None:
        """Shows the books as they are when somebody looks; to be called once."""
        for state in LEASE_STATES:
            self._leases.labels(state=state).set_function(lambda state=state: getattr(books(), state))
        for outcome in ATTEMPT_OUTCOMES:
            self._attempts.labels(outcome=outcome).set_function(lambda outcome=outcome: getattr(books(), outcome))

        def ended(names: Iterable[str]) -> dict[str, float]:
            now = books()
            return {name: float(getattr(now, name)) for name in names}

        self._ended_leases.follow(lambda: ended(("trained", "filtered", "dead_lettered")))
        self._ended_attempts.follow(lambda: ended(name for name in ATTEMPT_OUTCOMES if name != "running"))

    def left_out(self, reason: str) -> None:
        """Notes a group or an attempt that came to nothing."""
        self._left_out.labels(reason=reason).inc()

    def masked(self, tokens: int, trajectories: int) -> None:
        """Notes tokens of a group that left the loss, and its trajectories that have none in it any more."""
        self._masked.inc(tokens)
        self._emptied.inc(trajectories)

    def failed_write(self, what: str) -> None:
        """Notes something that could not be written: a file's name, or `checkpoint`."""
        self._failed.labels(what=what).inc()

    def folder(self, folder: Path, *, unseen: Callable[[], int]) -> None:
        """Shows the run's folder and its disk as they are when somebody looks; to be called once.

        `unseen`: how many trajectories its store did not keep.
        """
        self._unseen = unseen
        self._journal.set_function(lambda: _bytes_in(folder / JOURNAL))
        self._disk_free.set_function(lambda: _disk(folder)[0])
        self._disk_size.set_function(lambda: _disk(folder)[1])

    def news(self, outcome: str) -> None:
        """Notes what became of news for the webhook."""
        self._news.labels(outcome=outcome).inc()

    def trackers(self, drops: Callable[[], Mapping[str, float]]) -> None:
        """Shows what trackers have dropped; to be called once."""
        self._drops.follow(drops)

    def waited(self, whom: str, seconds: float) -> None:
        """Notes a wait; `whom` is cut to its kind, to keep the number of labels small."""
        words = (word.rstrip(":,") for word in whom.split())
        kind = next((word for word in words if word not in _ARTICLES), "others")
        if kind in _FOR_GROUPS:
            self.groups_waited_s += seconds
        self._waited.labels(whom=kind if kind in _WHOM else "others").inc(seconds)


def _disk(folder: Path) -> tuple[float, float]:
    """Free bytes and size of its disk; not numbers for one that is not there."""
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return math.nan, math.nan
    return usage.free, usage.total


def _bytes_in(folder: Path) -> int:
    """Of its files; a segment may be removed meanwhile."""
    total = 0
    for path in folder.glob("*"):
        with contextlib.suppress(OSError):
            total += path.stat().st_size
    return total


class LearnerStatus:
    """Reads ledger, fleet and env_services; `total_steps` is the run's end, `folder` the run's. `clock` is theirs.

    `distrusted` says in words which generators are not believed; `min_cosine` is the least cosine of old gradients to
    new ones that is not spoken of. `released` says what users get, and who holds it.
    """

    def __init__(
        self,
        *,
        name: str,
        folder: Path,
        total_steps: int,
        incarnation: int,
        ledger: Ledger,
        fleet: FleetMembers,
        env_services: Callable[[], Iterable[ConnectedEnvService]],
        metrics: LearnerMetrics,
        waits: Waiting,
        teachers: Callable[[], tuple[PeerStatus, ...]] = tuple,
        distrusted: Callable[[], tuple[str, ...]] = tuple,
        min_cosine: float = 0.8,
        released: Callable[[], tuple[str, ...]] = tuple,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name = name
        self._folder = folder
        self._total_steps = total_steps
        self._incarnation = incarnation
        self._ledger = ledger
        self._fleet = fleet
        self._env_services = env_services
        self._metrics = metrics
        self._waits = waits
        self._teachers = teachers
        self._distrusted = distrusted
        self._min_cosine = min_cosine
        self._released = released
        self._clock = clock
        self._served = False
        self.load = LoadWindow(self._look, limit=lambda: None, clock=clock)

    def report(self) -> Report:
        """The learner's part of its status."""
        disks, problems = self._disks()
        return Report(
            id=self._name,
            policy_version=str(PolicyVersion(self._incarnation, self._ledger.version)),
            progress=ProgressStatus(
                unit="steps", done=self._ledger.version, total=self._total_steps, usual_s=self._metrics.usual_step_s
            ),
            load=self.load.status(),
            usage=self.load.usage,
            peers=(
                *(self._generator(member) for member in self._fleet.members()),
                *(self._env_service(holder) for holder in self._env_services()),
                *self._teachers(),
            ),
            queues=self._queues(),
            events=tuple(
                EventStatus(name=name, age_s=max(0.0, self._clock() - when))
                for name, when in self._metrics.last_at.items()
            ),
            disks=disks,
            problems=problems,
            notes=(*self._distrusted(), *self._guarded(), *self._by_lag(), *self._released()),
        )

    def _look(self) -> LoadSample:
        """The trainer is idle while it waits for groups. Whom else it waits for is told beside that."""
        waits, env_services = self._waits.status(), list(self._env_services())
        at_groups = max((one.since_s for one in waits if one.whom.startswith(_FOR_GROUPS)), default=0.0)
        serves = any(member.serving is not None for member in self._fleet.members())
        if serves and not self._served:
            self.load.restart()
        self._served = serves
        full = all(len(one.running) >= one.hello.capacity for one in env_services)
        has_places = self._ledger.places() > 0
        seen = {
            "evaluation": any("evaluation" in wait.whom for wait in waits),
            "others": any(wait.blocks_readiness for wait in waits),
            "max_lag": serves and not has_places,
            "capacity": has_places and full and bool(env_services),
        }
        return LoadSample(
            done=self._ledger.version,
            running=0 if at_groups else 1,
            idle_s=self._metrics.groups_waited_s + at_groups,
            waits={name: int(is_so) for name, is_so in seen.items()},
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

    def _by_lag(self) -> tuple[str, ...]:
        reading = self._metrics.reading
        if reading is None or not reading.text:
            return ()
        text = f"cosine of gradients to that of lag 0, before step {reading.version + 1}: {reading.text}"
        if not reading.tells:
            return (f"{text}; that is too noisy to conclude from: raise lag.measure_groups",)
        turned = next((each for each in reading.buckets if each.is_under(self._min_cosine)), None)
        if turned is None:
            return (text,)
        return (
            f"{text}; groups of lag {turned.label} pull elsewhere than new ones: a smaller max_lag, a correction "
            '(algo.correction), or lag.adapt = "gradient"',
        )

    def _generator(self, member: FleetMember) -> PeerStatus:
        return PeerStatus(
            name=member.generator_id,
            kind="generator",
            url=member.url,
            last_heard_s=max(0.0, self._clock() - member.last_seen),
            serving_version=None if member.serving is None else str(member.serving),
            state=self._state(member),
        )

    def generator_states(self) -> Iterator[str]:
        """Of each member of the fleet: serving, behind, joining. Between a step and its publish nobody is behind."""
        return map(self._state, self._fleet.members())

    def _state(self, member: FleetMember) -> str:
        if member.serving is None:
            return "joining"
        return "behind" if member.serving.number < self._metrics.published_version else "serving"

    def _env_service(self, holder: ConnectedEnvService) -> PeerStatus:
        return PeerStatus(
            name=holder.name,
            kind="env-service",
            last_heard_s=max(0.0, self._clock() - holder.last_seen),
            state=f"{len(holder.running)} of {holder.hello.capacity} groups",
        )

    def _lags(self, serving: PolicyVersion) -> bool:
        return serving.number < self._ledger.version

    def _disks(self) -> tuple[tuple[DiskStatus, ...], tuple[str, ...]]:
        """The disk of the run's folder, and what is wrong with it."""
        try:
            usage = shutil.disk_usage(self._folder)
        except OSError as error:  # who looks for the reason of what goes wrong gets all the rest
            return (), (f"the run's folder {self._folder} cannot be reached: {error.strerror}: bring its disk back",)
        disk = DiskStatus(path=str(self._folder), free_bytes=usage.free, total_bytes=usage.total)
        return (disk,), (_disk_full(disk),) if disk.free_bytes < _LEAST_FREE_BYTES else ()


def _disk_full(disk: DiskStatus) -> str:
    return f"the disk of {disk.path} has {disk.free_bytes >> 20} MiB left: make room there, the journal is on it"
