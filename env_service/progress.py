"""How far a rollout has come, for heartbeats and for the reason of a timeout."""

from dataclasses import dataclass

from env_service.completions import CompletionGroup


@dataclass
class Progress:
    """Written by the rollout, read when a heartbeat is due."""

    sampling: CompletionGroup | None = None
    waits_for: str = "its environment"

    def oldest_version(self) -> str | None:
        """The oldest version that sampled a token of this group so far, None before the first."""
        return None if self.sampling is None else self.sampling.oldest_version()
