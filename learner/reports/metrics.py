"""The learner's Prometheus metrics."""

import time
from collections.abc import Callable

from learner.ledger import ATTEMPT_OUTCOMES, LEASE_STATES, Books
from learner.reports.step_record import StepRecord
from learner.training.guard import GuardChange
from learner.training.step import StepMetrics
from learner.weights.snapshot import PublishReport
from services.http.metrics import Metrics


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
        self._waited.labels(whom=whom.split()[0].rstrip(":")).inc(seconds)
