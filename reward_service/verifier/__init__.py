"""What a verifier is, and how verifiers are run. What a verifier of one's own imports is here."""

from reward_service.verifier.submission import (
    DataError,
    InfrastructureError,
    Score,
    Submission,
    UserError,
    VerifierError,
)

__all__ = ["DataError", "InfrastructureError", "Score", "Submission", "UserError", "VerifierError"]
