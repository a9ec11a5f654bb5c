"""Verifiers, and how they are run. Names that a verifier of one's own imports are here."""

from reward_service.verifier.submission import (
    DataError,
    InfrastructureError,
    Score,
    Submission,
    UserError,
    VerifierError,
)

__all__ = ["DataError", "InfrastructureError", "Score", "Submission", "UserError", "VerifierError"]
