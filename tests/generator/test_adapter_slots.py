"""Slots of adapters whose targets come and go while others wait for one."""

import asyncio
import warnings
from collections.abc import AsyncIterator, Sequence
from typing import Any, cast

import pytest

from protocol.adapters import OfferedAdapter
from services.http.metrics import Metrics
from services.http.refusals import RequestRefused

with warnings.catch_warnings():  # those of vLLM
    warnings.simplefilter("ignore")
    from generator.adapters import AdapterSlots


FIRST = "1" * 64


class WillingEngine:
    """Loads and drops whatever it is told to."""

    async def load_adapter(self, request: object) -> None: ...

    async def drop_adapter(self, number: int) -> None: ...


class OneSlot:
    """The only slot, and a source that has first versions at once, and others when `may_answer` is set; a name of sixes
    is of damaged files.
    """

    def __init__(self) -> None:
        self.may_answer = asyncio.Event()
        self.slots = AdapterSlots(
            engine=cast("Any", WillingEngine()), fetch=self._fetch, slots=1, max_rank=8, metrics=Metrics("adapters")
        )

    async def _fetch(self, name: str) -> Sequence[bytes]:
        if name != FIRST:
            await self.may_answer.wait()
        if name == "6" * 64:
            raise RequestRefused(503, "adapter_damaged", "other bytes came")
        return b"{}", b""

    async def use(self, adapter: OfferedAdapter) -> None:
        async with self.slots.using(adapter):
            return


@pytest.fixture
async def one_slot() -> AsyncIterator[OneSlot]:
    made = OneSlot()
    yield made
    made.slots.close()


def adapter(target: str, *, version: int = 1, digit: str = "1") -> OfferedAdapter:
    return OfferedAdapter(target_id=target, version=version, name=digit * 64, rank=4, is_replaced=True)


async def _begun(work: Any) -> "asyncio.Task[Any]":
    task = asyncio.create_task(work)
    for _ in range(5):
        await asyncio.sleep(0)
    return task


@pytest.mark.parametrize("end", ["offered", "refused", "cancelled"])
async def test_who_waits_for_the_slot_of_a_target_that_is_being_replaced_gets_it_after_that(
    one_slot: OneSlot, end: str
) -> None:
    await one_slot.use(adapter("first"))
    later = adapter("first", version=2, digit="6" if end == "refused" else "2")
    replacing = await _begun(one_slot.slots.offer(later))
    other = await _begun(one_slot.use(adapter("second")))

    if end == "cancelled":
        replacing.cancel()
        await asyncio.wait([replacing])
    one_slot.may_answer.set()

    async with asyncio.timeout(10):
        await asyncio.wait([replacing])
        await other
