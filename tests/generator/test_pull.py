"""A real engine that pulls what each version has changed, from the learner or from a plain web server with its tree."""

import asyncio
from pathlib import Path

import pytest

from protocol.trajectories import VersionSpan
from tests.generator.conftest import PROMPT, Rig, largest_gap, sample
from tests.generator.engine.test_engine import TOLERANCE
from tests.generator.real_sync import served, snapshot_of
from tests.learner.weights.publishing import learner

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600), pytest.mark.asyncio(loop_scope="session")]


async def test_an_engine_that_pulls_proves_each_version_and_requests_go_on_over_the_updates(
    rig: Rig, tmp_path: Path
) -> None:
    held = tmp_path / "held"
    held.mkdir()
    async with (
        learner(tree_folder=tmp_path / "tree") as ours,
        served(rig, ours, held=held) as generator,
    ):
        generator.join(ours)
        running: list[asyncio.Task[list[VersionSpan]]] = []
        for version in range(3):
            rig.policy.change(seed=20 + version)
            ours.publisher.offer(snapshot_of(rig.policy, version=version))
            await ours.until_served(real=version)
            await ours.until(lambda at=version: ours.reports[-1].version == at)  # type: ignore[misc]
            assert ours.reports[-1].probe_gap < 1e-4
            assert max(largest_gap(rig, each) for each in await sample(rig)) < TOLERANCE
            if not running:
                running.append(asyncio.create_task(_spans_of_a_long_one(rig)))
        versions = [span.version for span in await running[0]]
        assert versions[0] == "1.0"
        assert len(versions) > 1, "it ran over an update"
        assert [report.anchor_bytes > 0 for report in ours.grown] == [True, False, False]
        assert len(list(held.iterdir())) == 1, "of the version that is held"


async def _spans_of_a_long_one(rig: Rig) -> list[VersionSpan]:
    (completion,) = await sample(rig, n=1, max_tokens=1024 - len(PROMPT))
    return list(completion.spans)
