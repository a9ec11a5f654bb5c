"""What the intake is told at the start."""

from dataclasses import dataclass

from learner.intake.admission import GroupRules
from learner.intake.pacing import PacingRule


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
