"""The end of a runtime of any kind."""

import asyncio
from typing import Any

from env_service.runtimes.standing import StandingRuntime


class SlowToEnd(StandingRuntime):
    """Ends when it is let."""

    def __init__(self) -> None:
        self.left, self.let = 1, asyncio.Event()
        super().__init__("host", lifetime_s=60, ended=lambda _: self._count())

    def _count(self) -> None:
        self.left -= 1

    async def _end_all(self) -> None:
        await self.let.wait()

    async def exec(self, command: Any) -> Any:
        """Nothing runs in it."""

    _write = _read = _differing = exec  # type: ignore[assignment]


async def test_a_runtime_takes_its_room_until_it_has_ended_whoever_stops_it() -> None:
    runtime = SlowToEnd()
    first, second = asyncio.ensure_future(runtime.stop()), asyncio.ensure_future(runtime.stop())
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait((first, second), timeout=0.05)
    assert (first.cancelled(), second.done(), runtime.left) == (True, False, 1)

    runtime.let.set()
    await second
    await runtime.stop()
    assert (runtime.stands, runtime.left) == (False, 0)


async def test_a_runtime_that_has_ended_by_itself_has_given_its_room_back_when_it_is_stopped() -> None:
    runtime = SlowToEnd()
    runtime.let.set()
    runtime.end("it was full")
    await asyncio.sleep(0.01)
    assert runtime.left == 1, "who has it still gives it back"
    await runtime.stop()
    assert runtime.left == 0
