"""What came of an item: a reward, or why there is none."""

from dataclasses import dataclass, field

from protocol.rewards import ScoreError, ScoreResult


@dataclass(frozen=True, kw_only=True)
class Scored:
    """Exactly one of `reward` and `error` is set: what could not be scored is never a reward of 0.

    `answered` tells whether a service gave this result; without an answer the error is the client's own, of kind `user`
    (every service refuses the request) or `infrastructure` (none was reached, or all attempts at them failed).
    `service_id` is who answered, at the address `endpoint`; it took `latency_s` seconds there. `attempts` is the number
    of requests that held the item.
    """

    id: str
    verifier: str
    reward: float | None = None
    error: ScoreError | None = None
    answered: bool
    components: dict[str, float] = field(default_factory=dict)
    verifier_version: str = ""
    service_id: str = ""
    endpoint: str = ""
    latency_s: float = 0.0
    attempts: int = 1


def answered(result: ScoreResult, *, id: str, service_id: str, endpoint: str, attempts: int) -> Scored:
    """What a service said about the item that its caller knows as `id`."""
    return Scored(
        id=id,
        verifier=result.verifier,
        reward=result.reward,
        error=result.error,
        answered=True,
        components=result.components,
        verifier_version=result.verifier_version,
        service_id=service_id,
        endpoint=endpoint,
        latency_s=result.latency_s,
        attempts=attempts,
    )
