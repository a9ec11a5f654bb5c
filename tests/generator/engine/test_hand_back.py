"""Requests are handed back beside a commit, which nothing may resume before its version is stamped."""

import asyncio
import json
import warnings
from typing import Any, cast

import pytest

from generator.engine.options import EngineOptions
from generator.weights.plan import WeightSyncError
from protocol.fleet import BucketSpec, Prepare, TensorSpec

with warnings.catch_warnings():  # those of vLLM
    warnings.simplefilter("ignore")
    from generator.engine.engine import Engine
    from generator.engine.gated_llm import GatedLLM


class OrderedCalls:
    """An engine's process that notes what it is told, in order. Each answer waits for a turn of the loop, and one that
    says if it is paused for `told`.
    """

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.told, self.asked, self.paused = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.output_processor = self
        self.engine_core = self
        self.packed = True
        self.cache_version = ""
        self._closed = False

    send_at_once = GatedLLM.send_at_once

    async def close_gate(self) -> None:
        self._closed = True

    def open_gate(self) -> None:
        self._closed = False

    async def pause_scheduler_async(self, *, mode: str, clear_cache: bool) -> None:
        self.paused.set()
        await self._note("pause")

    async def resume_generation(self) -> None:
        await self._note("resume")

    async def update_weight_version(self, version: str) -> None:
        await self._note("stamp")

    async def get_weight_version(self) -> str:
        return ""

    async def is_paused(self) -> bool:
        answer = "pause" in self.calls
        self.asked.set()
        await self.told.wait()
        return answer

    async def hand_back(self) -> None:
        await self._note("hand back")

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        await self._note(method.removeprefix("headway_"))
        match method:
            case "headway_load":
                return [json.dumps({"error": "", "unloaded": False, "load_s": 0.0})]
            case "headway_stage_files":
                return [""]
            case "headway_progress":
                return [(True, "")]
        return ["f"]

    async def _note(self, call: str) -> None:
        self.calls.append(call)
        for _ in range(10):
            await asyncio.sleep(0)


@pytest.fixture
async def llm() -> OrderedCalls:
    return OrderedCalls()


def engine_of(llm: OrderedCalls) -> Engine:
    """It has staged version 1.1."""
    engine = Engine(options=EngineOptions(model="m"), llm=cast("Any", llm), last_words=cast("Any", None))
    engine._staged = "1.1"
    return engine


def before_the_stamp(llm: OrderedCalls) -> list[str]:
    return llm.calls[llm.calls.index("pause") : llm.calls.index("stamp")]


async def test_a_commit_that_begins_while_tokens_are_asked_for_is_resumed_by_nobody_else(llm: OrderedCalls) -> None:
    engine = engine_of(llm)
    handing = asyncio.create_task(engine.hand_back())
    await llm.asked.wait()
    committing = asyncio.create_task(engine.commit(version="1.1"))
    for _ in range(15):
        await asyncio.sleep(0)
    llm.told.set()
    await asyncio.gather(handing, committing)
    assert before_the_stamp(llm) == ["pause", "load"]
    assert llm.calls.count("resume") == 2


async def test_tokens_are_not_asked_for_within_a_commit(llm: OrderedCalls) -> None:
    engine = engine_of(llm)
    committing = asyncio.create_task(engine.commit(version="1.1"))
    await llm.paused.wait()
    await engine.hand_back()
    await committing
    assert "resume" not in before_the_stamp(llm)
    assert not llm.asked.is_set()


async def test_what_another_sync_has_staged_is_not_loaded_under_a_version_that_was_staged_before(
    llm: OrderedCalls,
) -> None:
    engine = engine_of(llm)
    tensor = TensorSpec(name="w", dtype="float32", shape=(1,), offset=0)
    plan = Prepare(version="1.2", epoch=0, buckets=(BucketSpec(nbytes=4, xxh3="0" * 16, tensors=(tensor,)),))
    staging = asyncio.create_task(engine.stage_files(plan, paths=["b"]))
    await asyncio.sleep(0)
    with pytest.raises(WeightSyncError, match=r"version 1\.1 is not what is staged here, but 1\.2"):
        await engine.commit(version="1.1")
    await staging
    assert "load" not in llm.calls
    assert (await engine.commit(version="1.2")).version == "1.2"
