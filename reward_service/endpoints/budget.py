"""What may be spent at a service in the life of the process."""

from reward_service.endpoints.config import LimitsConfig
from reward_service.verifier import InfrastructureError


class Budget:
    """Counts requests and tokens. Those under way when the tokens run out are still paid."""

    def __init__(self, limits: LimitsConfig) -> None:
        self._limits = limits
        self.requests = 0
        self.tokens = 0

    def take_request(self) -> None:
        """Count a request that is about to be sent. Raises InfrastructureError if nothing is left."""
        for what, spent, most in (
            ("requests", self.requests, self._limits.most_requests),
            ("tokens", self.tokens, self._limits.most_tokens),
        ):
            if most is not None and spent >= most:
                raise InfrastructureError(
                    f"budget: {spent} {what} are spent, and limits.most_{what} is {most}: raise it and start the "
                    "service again"
                )
        self.requests += 1

    def spend(self, *, tokens: int) -> None:
        """Count what an answer has cost."""
        self.tokens += tokens
