"""Files of a download that is given up: what still writes to one writes to no other."""

import asyncio
import os
import threading
import warnings
from pathlib import Path
from typing import Any, cast

import pytest
import xxhash

from protocol.fleet import CHUNK_HASH_HEADER, BucketSpec, PullPlan, TensorSpec

with warnings.catch_warnings():  # those of vLLM
    warnings.simplefilter("ignore")
    from generator import weight_sync

DATA = bytes(range(16))
PLAN = PullPlan(
    version="1.1", chunk_bytes=16,
    buckets=(BucketSpec(tensors=(TensorSpec(name="w", dtype="uint8", shape=(16,), offset=0),), nbytes=16, xxh3="0"),),
)  # fmt: skip


class OneBucketClient:
    async def get(self, url: str, response: object, **limits: object) -> PullPlan:
        return PLAN

    async def download(self, url: str, *, deadline_s: float) -> tuple[bytes, dict[str, str]]:
        return DATA, {CHUNK_HASH_HEADER: xxhash.xxh3_64_hexdigest(DATA)}


async def test_a_thread_that_is_left_behind_still_writes_to_its_own_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writing, go_on, wrote = threading.Event(), threading.Event(), threading.Event()
    pwrite, places = os.pwrite, list[str]()

    def slow(file: int, data: Any, offset: int) -> int:
        writing.set()
        go_on.wait(30)
        try:
            places.append(os.readlink(f"/proc/self/fd/{file}"))
            return pwrite(file, data, offset)
        except OSError as error:
            places.append(str(error))
            raise
        finally:
            wrote.set()

    monkeypatch.setattr(os, "pwrite", slow)
    puller = weight_sync.Puller(client=cast("Any", OneBucketClient()), learner="http://learner")
    pulling = asyncio.create_task(puller.download("1.1", tmp_path))
    await asyncio.to_thread(writing.wait, 30)
    pulling.cancel()
    await asyncio.wait([pulling])
    other = os.open(tmp_path / "another", os.O_RDWR | os.O_CREAT)
    go_on.set()
    await asyncio.to_thread(wrote.wait, 30)
    os.close(other)
    assert places == [str(tmp_path / "0.bucket")]
    assert (tmp_path / "another").read_bytes() == b""
    assert (tmp_path / "0.bucket").read_bytes() == DATA
