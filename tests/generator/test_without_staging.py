"""An engine without room for new weights beside the old ones: a broadcast is received within the pause."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator

import numpy as np
import pytest
import pytest_asyncio
import torch

from generator.weights.plan import WeightSyncError
from protocol.fleet import LowRank
from tests.generator.conftest import Rig, pack, plan_of, start_rig
from tests.generator.engine.test_engine import TOLERANCE, gaps
from tests.generator.real_sync import TEXTS, served, snapshot_of
from tests.learner.generators import ScriptedGenerator
from tests.learner.weights.publishing import OPTIONS, learner

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    """A model without tied embeddings."""
    folder = tmp_path_factory.mktemp("untied")
    rig = await start_rig(
        folder=folder, tied=False, change=lambda options: dataclasses.replace(options, staging="none")
    )
    yield rig
    await rig.engine.shutdown()


async def test_logprobs_agree_with_transformers_after_an_update_of_an_untied_model(rig: Rig) -> None:
    assert await gaps(rig) < TOLERANCE
    rig.policy.change(seed=1)
    sender = await rig.connect()
    buckets = pack(rig.policy.tensors())
    await rig.engine.stage(plan_of(buckets, version="1.1"))
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(asyncio.to_thread(sender.send, buckets))
        tasks.create_task(rig.engine.commit(version="1.1"))
    assert await gaps(rig) < TOLERANCE

    await rig.connect(bucket_timeout_s=1.0)
    await rig.engine.stage(plan_of(buckets, version="1.2"))
    with pytest.raises(WeightSyncError) as silent:
        await rig.engine.commit(version="1.2")
    assert not silent.value.unloaded
    assert await gaps(rig) < TOLERANCE
    assert rig.engine.version == "1.1"


async def test_an_adapter_that_comes_within_the_pause_is_added_to_base_weights_that_came_before(rig: Rig) -> None:
    sender, base = await rig.connect(), rig.policy.snapshot()
    layers = [name.removesuffix(".weight") for name in base if "_proj" in name]
    for number in range(2):
        random = torch.Generator().manual_seed(number)
        factors: dict[str, torch.Tensor] = {}
        merged = dict(base)
        for layer in layers:
            rows, columns = base[f"{layer}.weight"].shape
            down, up = torch.randn(4, columns, generator=random) / 16, torch.randn(rows, 4, generator=random) / 16
            factors |= {f"base_model.model.{layer}.lora_A.weight": down, f"base_model.model.{layer}.lora_B.weight": up}
            merged[f"{layer}.weight"] = base[f"{layer}.weight"] + 2.0 * up @ down
        buckets = [*([] if number else pack(base)), *pack(factors)]
        adapter = LowRank(base="held", rank=4, alpha=8.0)
        plan = plan_of(buckets, version=f"2.{number}").model_copy(update={"adapter": adapter})
        await rig.engine.stage(plan)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(asyncio.to_thread(sender.send, buckets))
            tasks.create_task(rig.engine.commit(version=plan.version))
        rig.policy.restore(merged)
        assert await gaps(rig) < TOLERANCE
    rig.policy.restore(base)


async def test_the_learner_broadcasts_to_it_beside_generators_that_stage(rig: Rig) -> None:
    said: dict[int, np.ndarray[tuple[int, ...], np.dtype[np.float64]]] = {}
    beside = ScriptedGenerator("staged")
    beside.says = lambda version: said[version]
    options = dataclasses.replace(OPTIONS, commit_timeout_s=20.0)
    async with beside.running(), learner(options) as ours, served(rig, ours, staging=False) as generator:
        for version in range(4):
            rig.policy.change(seed=10 + version)
            snapshot = snapshot_of(rig.policy, version=version)
            said[version] = np.array(snapshot.probe.logprobs)
            if not version:
                ours.join(beside)
                generator.join(ours)
            ours.publisher.offer(snapshot)
            await ours.until_served(real=version, staged=version)
            assert await gaps(rig) < TOLERANCE
        assert [report.members for report in ours.reports if report.version] == [2, 2, 2], "by broadcast"
        assert len(ours.joined) == 2


async def test_a_death_in_the_middle_of_a_broadcast_costs_it_a_second_load_and_no_half_loaded_weights(
    rig: Rig,
) -> None:
    dying = ScriptedGenerator("staged", dies_in_prepare=lambda prepare: prepare.version == "1.1")
    said: dict[int, np.ndarray[tuple[int, ...], np.dtype[np.float64]]] = {}
    dying.says = lambda version: said[version]
    options = dataclasses.replace(OPTIONS, commit_timeout_s=20.0)
    async with dying.running(), learner(options) as ours, served(rig, ours, staging=False) as generator:
        for version in range(3):
            rig.policy.change(seed=20 + version)
            snapshot = snapshot_of(rig.policy, version=version)
            said[version] = np.array(snapshot.probe.logprobs)
            if not version:
                ours.join(dying)
                generator.join(ours)
            ours.publisher.offer(snapshot)
            await ours.until(lambda at=f"1.{version}": ours.serving.get("real") == at)  # type: ignore[misc]
            assert await gaps(rig) < TOLERANCE
            score = await rig.engine.score(request_id=rig.next_request(), token_ids=TEXTS[0])
            assert score.version == f"1.{version}"
