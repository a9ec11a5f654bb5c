"""What the learner's parts are told, from its configuration."""

from learner.config import LearnerConfig
from learner.history.run_name import run_name
from learner.intake.admission import GroupRules
from learner.intake.evaluation import Evaluator
from learner.intake.filters import GroupFilter
from learner.intake.granting import LeaseTerms
from learner.intake.options import IntakeOptions
from learner.ledger import LedgerConfig
from learner.training_setup import vocabulary_size
from learner.weights.options import PublisherOptions
from protocol.fleet import Fingerprints
from protocol.generation import Sampling

_PROBE_TOLERANCES = {"float32": 1e-3, "bfloat16": 1.5}
"""Nats. Two implementations of one model differed by up to 1e-4 and 0.6; a wrong load, by several at some token."""


def ledger_config(config: LearnerConfig) -> LedgerConfig:
    """The rules of leases and lag."""
    return LedgerConfig(
        groups_per_step=config.groups_per_step,
        max_lag=config.max_lag,
        on_lag=config.lag.on_lag,
        straggler_timeout_s=config.lag.straggler_timeout_s,
        max_drops_per_lease=config.lag.max_drops_per_lease,
        lease_timeout_s=config.leases.timeout_s,
        infrastructure_retries=config.leases.infrastructure_retries,
        data_retries=config.leases.data_retries,
    )


def publisher_options(config: LearnerConfig, incarnation: int) -> PublisherOptions:
    """How weights are published."""
    weights = config.weights
    return PublisherOptions(
        incarnation=incarnation,
        backend=weights.backend,
        host=weights.host,
        bucket_bytes=weights.bucket_mb << 20,
        bucket_timeout_s=weights.bucket_timeout_s,
        meet_timeout_s=weights.meet_timeout_s,
        commit_timeout_s=weights.commit_timeout_s,
        pull_timeout_s=weights.pull_timeout_s,
        probe_tolerance=weights.probe_tolerance or _PROBE_TOLERANCES[config.training.publish_dtype],
    )


def evaluator(config: LearnerConfig, incarnation: int) -> Evaluator:
    """Held-out evaluation."""
    return Evaluator(
        config=config.evaluation,
        max_tokens=config.rollouts.max_tokens,
        timeout_s=config.leases.timeout_s,
        incarnation=incarnation,
        stop_token_ids=config.rollouts.stop_token_ids,
    )


def group_filter(config: LearnerConfig) -> GroupFilter:
    """Which groups are left out; of those without spread the algorithm judges where the configuration is silent."""
    rollouts = config.rollouts
    wanted = rollouts.drop_uniform_groups
    return GroupFilter(
        drop_uniform=config.algo.wants_spread if wanted is None else wanted,
        min_mean_reward=rollouts.min_mean_reward,
        max_mean_reward=rollouts.max_mean_reward,
        rounds=rollouts.filter_rounds,
    )


def intake_options(config: LearnerConfig, incarnation: int, fingerprints: Fingerprints) -> IntakeOptions:
    """How the learner speaks with env_services; reads the model's directory."""
    rollouts = config.rollouts
    return IntakeOptions(
        run=run_name(config.run.folder),
        incarnation=incarnation,
        environment=rollouts.environment,
        heartbeat_every_s=config.leases.heartbeat_every_s,
        lease_timeout_s=config.leases.timeout_s,
        tokenizer=fingerprints.tokenizer,
        chat_template=fingerprints.chat_template,
        rules=GroupRules(
            vocabulary_size=vocabulary_size(config.model),
            min_group_size=rollouts.min_group_size,
            filters=group_filter(config),
        ),
        pacing=config.lag.pacing,
    )


def lease_terms(config: LearnerConfig) -> LeaseTerms:
    """What every training lease says."""
    rollouts = config.rollouts
    return LeaseTerms(
        group_size=rollouts.group_size,
        sampling=Sampling(
            temperature=config.training.temperature,
            max_tokens=rollouts.max_tokens,
            stop_token_ids=rollouts.stop_token_ids,
        ),
        seed=rollouts.seed,
        timeout_s=config.leases.timeout_s,
        total_groups=0 if config.evaluation.only else config.steps * config.groups_per_step,
    )
