"""Failures of rollouts, of two kinds, which decide if a lease is tried again; and the counts of an env_service."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import get_args

from prometheus_client import Counter, Histogram

from protocol.messages import FailedLease, FinishedLease
from protocol.trajectories import CUT_OFF, ErrorKind, RewardRecord
from services.http.client import ServiceError, ServiceRefused
from services.http.faults import fault_of
from services.http.metrics import Metrics, PeerCounter, one_label

logger = logging.getLogger(__name__)

Outcome = FinishedLease | FailedLease
"""Message to the learner that ends a lease."""
_SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000, 3600)
_REWARDS = (-10.0, -5.0, -2.0, -1.0, -0.5, -0.1, 0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0, 2.0, 5.0, 10.0)
_MAX_VERIFIERS = 64
_FAULTS = ("raised", "nonsense", "hung", "crashed", "killed", "unavailable", "diverged")
_REFUSALS = ("unknown_peer", "unexpected", "hello", "namesake", "name_taken", "malformed", "protocol_version")


class RolloutFailure(Exception):
    """The base of both kinds; the text is the reason that the learner records."""

    data_fault: bool


class InfrastructureFailure(RolloutFailure):
    """A process died, was silent or answered nonsense: the same lease may well succeed later or elsewhere."""

    data_fault = False


class Unavailable(InfrastructureFailure):
    """Nobody took the request up, or nobody answers: it says nothing about the request, which is asked again until
    the rollout's time is over.
    """


class DataFailure(RolloutFailure):
    """The task cannot be rolled out: its environment, its prompt or its verifier is at fault."""

    data_fault = True


class RequestTooLong(DataFailure):
    """A prompt and what may be sampled behind it are more tokens than a generator takes."""


def failure_of(whom: str, error: ServiceError) -> RolloutFailure:
    """The failure that a call's error stands for."""
    text = f"{whom}: {error}"
    if isinstance(error, ServiceRefused) and error.kind == "too_long":
        return RequestTooLong(text)
    match fault_of(error):
        case "request":
            return DataFailure(text)
        case "unavailable":
            return Unavailable(text)
        case "counterpart":
            return InfrastructureFailure(text)


def in_whole_characters(text: str) -> str:
    """The text as it can be sent: errors of others may quote half a surrogate pair."""
    return text if text.isascii() else text.encode("utf-8", errors="replace").decode()


@contextmanager
def rollout_failures(whom: str) -> Iterator[None]:
    """Raises the ServiceError of a call to `whom` as the failure that it stands for."""
    try:
        yield
    except ServiceError as error:
        raise failure_of(whom, error) from error


def why_nothing(*, spoilt: bool, stop_reason: str) -> str:
    """Label of the end of a rollout in which the policy had no turn: `fault`, one of CUT_OFF, or `ended`."""
    if spoilt:
        return "fault"
    return stop_reason if stop_reason in CUT_OFF else "ended"


class RolloutMetrics:
    """The metrics of the rollout loop and of the connection to the learner."""

    def __init__(self, metrics: Metrics) -> None:
        self.groups = metrics.counter("finished_groups", "Groups rolled out, by environment.", labels=("environment",))
        self.tokens = metrics.counter("sampled_tokens", "Tokens of completions in finished groups.")
        self.continued = metrics.counter(
            "continued_completions", "Completions in finished groups that more than one generator sampled."
        )
        self.failures = metrics.counter(
            "failed_leases",
            "Leases that came to nothing, by kind.",
            labels=("kind",),
            known=one_label("data", "infrastructure"),
        )
        self.cancelled = metrics.counter("cancelled_leases", "Leases that the learner took back.")
        self.turns = metrics.counter("turns", "Turns of finished trajectories.", labels=("environment",))
        self.invalid_actions = metrics.counter(
            "invalid_actions", "Actions that could not be read or are not allowed.", labels=("environment",)
        )
        self.stops = metrics.counter(
            "stopped_trajectories", "Trajectories of several turns by why they ended.", labels=("environment", "reason")
        )
        self.agent_requests = metrics.counter(
            "agent_requests",
            "Requests of agents by how they were matched: new, continued, rewritten, again; alike: of several.",
            labels=("environment", "match"),
        )
        self.ignored_fields = metrics.counter(
            "agent_fields_ignored",
            "Requests of agents that wanted other sampling than the run's, and got the run's (other_sampling).",
            labels=("environment", "field"),
        )
        self.faults = metrics.counter(
            "environment_faults", "Trajectories that their environment spoilt.", labels=("environment", "kind")
        )
        self.overflows = metrics.counter(
            "overflowing_texts",
            "Openings, observations and agents' messages that alone are longer than the model's context.",
            labels=("environment",),
        )
        self.drawn_again = metrics.counter(
            "games_drawn_again",
            "Games that were drawn again, since their opponent had ended them before the policy's first turn, by why.",
            labels=("environment", "reason"),
        )
        self.turnless = metrics.counter(
            "turnless_rollouts",
            "Rollouts that left their group, since the policy had no turn in them, by why.",
            labels=("environment", "reason"),
        )
        self.redundant = metrics.counter(
            "redundant_trajectories", "Trajectories that were begun and not needed.", labels=("environment",)
        )
        self.redundant_tokens = metrics.counter(
            "redundant_tokens", "Tokens of redundant trajectories when they were broken off.", labels=("environment",)
        )
        self._measure_ways(metrics)
        self._measure_rewards(metrics)
        self._measure_work(metrics)

    def _measure_ways(self, metrics: Metrics) -> None:
        """Measures how conversations go on: in a shorter context, or in several branches."""
        self.full = metrics.counter(
            "full_contexts",
            "Contexts that were about to be full, by what on_full answered: shortened, summary, step, declined.",
            labels=("environment", "answer"),
        )
        self.forked = metrics.counter(
            "forked_environments", "Forks of environments, one for each branch but the first.", labels=("environment",)
        )

    def _measure_rewards(self, metrics: Metrics) -> None:
        self._verifiers: set[str] = set()
        self._series: dict[tuple[str, str], tuple[Histogram, Counter, Counter]] = {}
        self.unscored = metrics.counter("unscored_trajectories", "Trajectories whose reward is an error.")
        self.rewards = metrics.histogram(
            "verifier_reward",
            "Rewards of trajectories, by environment and verifier; their sum is in two counters, since it may fall.",
            buckets=_REWARDS,
            labels=("environment", "verifier"),
        )
        self.rewards_above = metrics.counter(
            "verifier_positive_reward", "Sum of the rewards above 0.", labels=("environment", "verifier")
        )
        self.rewards_below = metrics.counter(
            "verifier_negative_reward",
            "Sum of the rewards below 0, without their sign. The mean reward is the positive sum less this one, over"
            " the count.",
            labels=("environment", "verifier"),
        )
        self.reward_errors = metrics.counter(
            "verifier_errors", "Trajectories without a reward, by verifier and kind.", labels=("verifier", "kind")
        )

    def _measure_work(self, metrics: Metrics) -> None:
        """Measures leases and the services that they need, and no single trajectory."""
        self.generator_failures = PeerCounter(
            metrics.counter("generator_failures", "Failed requests to a generator.", labels=("generator_id",))
        )
        self.rollout_s = metrics.histogram("rollout_seconds", "Time from grant to finished group.", buckets=_SECONDS)
        self.scoring_s = metrics.histogram("scoring_seconds", "Time of scoring a group.", buckets=_SECONDS)
        self.level = metrics.gauge(
            "environment_level",
            "Level of the newest training lease, 0 the easiest, of an environment that has levels.",
            labels=("environment",),
        )
        self.running = metrics.gauge("running_leases", "Leases in progress.")
        self.environment_leases = metrics.gauge(
            "environment_leases",
            "Leases of an environment that has `places` of its own, by state: running, or waiting for a place.",
            labels=("environment", "state"),
        )
        self.unacknowledged = metrics.gauge("unacknowledged_outcomes", "Outcomes that the learner has not confirmed.")
        self.resent = metrics.counter("resent_outcomes", "Outcomes that were sent again.")
        self.hellos = metrics.counter("hellos", "Times this process introduced itself to a learner.")
        self.refusals = metrics.counter(
            "refusals", "Refusals by the learner, by reason.", labels=("reason",), known=one_label(*_REFUSALS)
        )

    def know(self, environment: str) -> None:
        """Shows what is counted by environment before the first event of this one; may be called again."""
        for counter in (
            self.groups,
            self.turns,
            self.invalid_actions,
            self.redundant,
            self.redundant_tokens,
            self.overflows,
            self.forked,
        ):
            counter.labels(environment=environment)
        for kind in _FAULTS:
            self.faults.labels(environment=environment, kind=kind)

    def note_overflow(self, environment: str, characters: int) -> None:
        """Counts a text that was not tokenized, since its beginning alone is longer than what a prompt may have."""
        self.overflows.labels(environment=environment).inc()
        logger.info(
            "environment %s: a text of %d characters is longer than the model's context", environment, characters
        )

    def judged(self, reward: RewardRecord, *, environment: str) -> None:
        """Notes a trajectory's reward, or that it has none."""
        verifier = self._label(reward.verifier)
        if reward.reward is None:
            self._show_errors(verifier)
            self.unscored.inc()
            self.reward_errors.labels(verifier=verifier, kind=reward.error_kind).inc()
            return
        rewards, above, below = self._reward_series(environment, verifier)
        rewards.observe(reward.reward)
        if reward.reward > 0:
            above.inc(reward.reward)
        elif reward.reward < 0:
            below.inc(-reward.reward)

    def _reward_series(self, environment: str, verifier: str) -> tuple[Histogram, Counter, Counter]:
        """Kept: to find them anew would cost more than to count."""
        series = self._series.get((environment, verifier))
        if series is None:
            self._show_errors(verifier)
            labels = {"environment": environment, "verifier": verifier}
            of_all = (self.rewards, self.rewards_above, self.rewards_below)
            rewards, above, below = (metric.labels(**labels) for metric in of_all)
            series = self._series[environment, verifier] = (rewards, above, below)
        return series

    def _show_errors(self, verifier: str) -> None:
        """The series of its errors are there before the first one."""
        for kind in get_args(ErrorKind):
            self.reward_errors.labels(verifier=verifier, kind=kind)

    def _label(self, verifier: str) -> str:
        """Tasks name their verifiers: of a file with a name in each row only the first ones have series."""
        if len(self._verifiers) < _MAX_VERIFIERS:
            self._verifiers.add(verifier)
        return verifier if verifier in self._verifiers else "others"
