"""When the next request to a service may begin."""

import asyncio

from reward_service.verifier import InfrastructureError


class Pace:
    """Gives turns to requests, in the order in which they ask: at most `per_s` a second, none in a pause."""

    def __init__(self, *, per_s: float | None) -> None:
        self._gap_s = 0.0 if per_s is None else 1.0 / per_s
        self._next = float("-inf")
        self._paused_until = float("-inf")
        self._front = asyncio.Lock()

    def pause(self, seconds: float) -> None:
        """No turns for so long, in seconds from now."""
        self._paused_until = max(self._paused_until, _now() + seconds)

    async def turn(self, *, deadline: float) -> None:
        """Wait for a turn. Raises InfrastructureError at once if a pause lasts beyond `deadline`."""
        self._check(deadline)
        async with self._front:
            while (begin := max(self._next, self._paused_until)) > _now():
                self._check(deadline)
                await asyncio.sleep(begin - _now())
            self._next = _now() + self._gap_s

    def _check(self, deadline: float) -> None:
        if self._paused_until > deadline:
            rest_s = self._paused_until - _now()
            raise InfrastructureError(
                f"busy: the service wants to be left alone for {rest_s:.1f} s more, beyond the item's deadline"
            )


def _now() -> float:
    return asyncio.get_running_loop().time()
