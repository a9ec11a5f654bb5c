"""What an env_service counts."""

from services.metrics import Metrics

_SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000)

# Not below 0: the client library leaves the sum, and with it the mean, out of a histogram that has such a bound.
_REWARDS = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0, 2.0, 5.0, 10.0)


class RolloutMetrics:
    """The metrics of the rollout loop and of the connection to the learner."""

    def __init__(self, metrics: Metrics) -> None:
        self.groups = metrics.counter("finished_groups", "Groups rolled out, by environment.", labels=("environment",))
        self.tokens = metrics.counter("sampled_tokens", "Tokens of completions in finished groups.")
        self.continued = metrics.counter(
            "continued_completions", "Completions in finished groups that more than one generator sampled."
        )
        self.failures = metrics.counter("failed_leases", "Leases that came to nothing, by kind.", labels=("kind",))
        self.cancelled = metrics.counter("cancelled_leases", "Leases that the learner took back.")
        self.unscored = metrics.counter("unscored_trajectories", "Trajectories whose reward is an error.")
        self.rewards = metrics.histogram(
            "verifier_reward",
            "Rewards of trajectories, by environment and verifier.",
            buckets=_REWARDS,
            labels=("environment", "verifier"),
        )
        self.reward_errors = metrics.counter(
            "verifier_errors", "Trajectories without a reward, by verifier and kind.", labels=("verifier", "kind")
        )
        self.generator_failures = metrics.counter(
            "generator_failures", "Failed requests to a generator.", labels=("generator_id",)
        )
        self.rollout_s = metrics.histogram("rollout_seconds", "From grant to finished group.", buckets=_SECONDS)
        self.scoring_s = metrics.histogram("scoring_seconds", "Scoring of a group.", buckets=_SECONDS)
        self.running = metrics.gauge("running_leases", "Leases in progress.")
        self.unacknowledged = metrics.gauge("unacknowledged_outcomes", "Outcomes that the learner has not confirmed.")
        self.resent = metrics.counter("resent_outcomes", "Outcomes that were sent again.")
        self.hellos = metrics.counter("hellos", "Times this process introduced itself to a learner.")
        self.refusals = metrics.counter("refusals", "Refusals by the learner, by reason.", labels=("reason",))
