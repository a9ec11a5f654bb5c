"""An engine whose model is shared by two workers, here on a CPU: updates, joins, probes, checksums, a worker's death.

The real publisher of the learner is at the other end: each worker is a rank of its process group.
"""

import asyncio
import dataclasses
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from generator.weights.plan import WeightSyncError
from tests.generator.conftest import Rig, largest_gap, sample, start_rig
from tests.generator.engine.test_engine import TOLERANCE, gaps
from tests.generator.real_sync import TEXTS, served, snapshot_of
from tests.learner.weights.publishing import OPTIONS, learner

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="module")]

WORKERS = 2


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    """A model with tied embeddings, cut in two."""
    rig = await start_rig(
        folder=tmp_path_factory.mktemp("tied"), tied=True,
        change=lambda options: dataclasses.replace(options, tensor_parallel_size=WORKERS),
    )  # fmt: skip
    yield rig
    await rig.engine.shutdown()


async def test_both_workers_join_by_download_and_take_broadcasts_and_prove_them(rig: Rig) -> None:
    options = dataclasses.replace(OPTIONS, bucket_timeout_s=10.0, commit_timeout_s=30.0)
    fingerprints = {await rig.engine.fingerprint()}
    async with learner(options) as ours, served(rig, ours, world_size=WORKERS) as generator:
        for version in range(3):
            rig.policy.change(seed=10 + version)
            if not version:
                generator.join(ours)
            ours.publisher.offer(snapshot_of(rig.policy, version=version))
            await ours.until_served(real=version)
            await ours.until(lambda at=version: ours.reports[-1].version == at)  # type: ignore[misc]
            assert ours.reports[-1].probe_gap < 1e-4
            completions = await sample(rig)
            assert max(largest_gap(rig, completion) for completion in completions) < TOLERANCE
            fingerprints.add(await rig.engine.fingerprint())
        assert len(ours.joined) == 1, "the first by download, the others by broadcast"
    assert len(fingerprints) == 4, "each version has a checksum of its own"


async def test_the_death_of_one_worker_is_the_death_of_the_engine_and_no_sync_waits_for_it(rig: Rig) -> None:
    """The last test of this module: the engine is gone after it."""
    from generator.engine.engine import EngineGone
    from generator.service import watch_life

    assert await gaps(rig) < TOLERANCE
    workers = worker_processes()
    assert len(workers) >= WORKERS
    os.kill(workers[-1], signal.SIGKILL)
    with pytest.raises(EngineGone):
        await asyncio.wait_for(watch_life(rig.engine), 60)
    with pytest.raises((EngineGone, WeightSyncError)):
        await rig.engine.commit(version="9.9")
    with pytest.raises((EngineGone, ValueError)):
        await rig.engine.score(request_id="after", token_ids=TEXTS[0])


def worker_processes() -> list[int]:
    """The processes of vLLM's workers below this one, by name."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            name = (stat.parent / "comm").read_text(encoding="utf-8")
        except OSError:
            continue
        if name.startswith("VLLM::Worker") and os.getpid() in ancestors(int(stat.parent.name)):
            found.append(int(stat.parent.name))
    return sorted(found)


def ancestors(pid: int) -> list[int]:
    found = []
    while pid > 1:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
        pid = int(status.rpartition(")")[2].split()[1])
        found.append(pid)
    return found
