"""An engine whose model is shared by two workers, here on a CPU: updates, joins, probes, checksums, a worker's death.

The real publisher of the learner is at the other end: each worker is a rank of its process group.
"""

import asyncio
import dataclasses
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

from generator.weights.plan import WeightSyncError
from services.local_processes import each_process
from tests.generator.conftest import Rig, largest_gap, sample, start_rig
from tests.generator.engine.test_engine import TOLERANCE, gaps
from tests.generator.real_sync import TEXTS, served, snapshot_of
from tests.generator.sliced_updates import WORKERS, updated_in_slices
from tests.learner.generators import ScriptedGenerator
from tests.learner.weights.publishing import OPTIONS, learner

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="module")]


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


async def test_workers_are_sent_their_slices_and_load_what_whole_tensors_bring_bit_by_bit(
    rig: Rig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    member = await updated_in_slices(rig, tmp_path, caplog)
    whole = sum(value.nbytes for value in rig.policy.tensors().values())
    twice = sum(value.nbytes for name, value in rig.policy.tensors().items() if "norm" in name or "embed" in name)
    assert member.sent_bytes is not None
    assert whole < member.sent_bytes < whole + twice + 16 * 2 * len(rig.policy.tensors()), "each of the rest once"


async def test_the_death_of_one_worker_in_the_middle_of_slices_is_that_of_its_engine_and_nobody_waits_for_it(
    rig: Rig,
) -> None:
    """The last test of this module: the engine is gone after it. The other generator takes the same slices."""
    from generator.engine.engine import EngineGone
    from generator.service import watch_life

    other = ScriptedGenerator("other", workers=WORKERS)
    said: dict[int, np.ndarray[tuple[int, ...], np.dtype[np.float64]]] = {}
    other.says = lambda version: said[version]
    options = dataclasses.replace(OPTIONS, bucket_timeout_s=2.0, meet_timeout_s=20.0, commit_timeout_s=30.0)
    async with other.running(), learner(options) as ours, served(rig, ours, world_size=WORKERS) as generator:
        generator.join(ours)
        for version in range(4):
            rig.policy.change(seed=40 + version)
            snapshot = snapshot_of(rig.policy, version=version)
            said[version] = np.array(snapshot.probe.logprobs)
            if version == 1:
                other.slices = ours.fleet.members()[0].slices
                assert other.slices is not None
                ours.join(other)
            worker = worker_processes()[-1]
            if version == 3:
                os.kill(worker, signal.SIGSTOP)
                other.preparing.clear()
            ours.publisher.offer(snapshot)
            if version == 3:
                await other.preparing.wait()
                os.kill(worker, signal.SIGKILL)
            serve = {"real": range(3), "other": range(1, 4)}
            expected = {name: f"1.{version}" for name, versions in serve.items() if version in versions}
            await ours.until(lambda expected=expected: ours.serving == expected)  # type: ignore[misc]
            assert version == 3 or await gaps(rig) < TOLERANCE
        assert [join.sliced for join in other.joins][:1] == [WORKERS]
    with pytest.raises(EngineGone):
        await asyncio.wait_for(watch_life(rig.engine), 60)
    with pytest.raises((EngineGone, WeightSyncError)):
        await rig.engine.fingerprint()
    with pytest.raises((EngineGone, ValueError)):
        await rig.engine.score(request_id="after", token_ids=TEXTS[0])


def worker_processes() -> list[int]:
    """The processes of vLLM's workers below this one, by name."""
    workers = [pid for pid, name in each_process("comm") if name.startswith(b"VLLM::Worker")]
    return sorted(pid for pid in workers if os.getpid() in ancestors(pid))


def ancestors(pid: int) -> list[int]:
    found = []
    while pid > 1:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
        pid = int(status.rpartition(")")[2].split()[1])
        found.append(pid)
    return found
