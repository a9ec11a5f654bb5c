"""Updates of a generator of two workers in slices, against a load of the same version whole."""

import dataclasses
import logging
from pathlib import Path

import pytest

from learner.weights.fleet import FleetMember
from learner.weights.senders import own_buckets
from protocol.fleet import Prepare
from tests.generator.conftest import Rig
from tests.generator.engine.test_engine import TOLERANCE, gaps
from tests.generator.real_sync import TEXTS, served, snapshot_of
from tests.learner.weights.publishing import OPTIONS, learner

WORKERS = 2


async def updated_in_slices(rig: Rig, folder: Path, caplog: pytest.LogCaptureFixture) -> FleetMember:
    """A download, and two broadcasts in slices, which load what whole tensors bring, bit by bit; the learner's view."""
    options = dataclasses.replace(OPTIONS, bucket_timeout_s=10.0, commit_timeout_s=30.0)
    async with learner(options) as ours, served(rig, ours, world_size=WORKERS) as generator:
        with caplog.at_level(logging.INFO, logger="learner.weights.broadcast"):
            for version in range(3):
                rig.policy.change(seed=20 + version)
                if not version:
                    generator.join(ours)
                ours.publisher.offer(snapshot_of(rig.policy, version=version))
                await ours.until_served(real=version)
                await ours.until(lambda at=version: ours.reports[-1].version == at)  # type: ignore[misc]
                assert await gaps(rig) < TOLERANCE
        (member,), newest = ours.fleet.members(), ours.publisher.newest
        assert [record for record in caplog.records if "in slices for 2 workers" in record.message]
        assert len(ours.joined) == 1, "the first by download, the others by broadcast"
    sliced = await scores(rig), await rig.engine.fingerprint()
    assert newest is not None
    paths: list[str] = []
    for bucket in own_buckets(newest.buckets):
        paths.append(str(folder / f"{len(paths)}"))
        bucket.data.numpy().tofile(paths[-1])
    specs = tuple(bucket.spec for bucket in newest.buckets)
    await rig.engine.stage_files(Prepare(version="1.9", epoch=1, buckets=specs), paths=paths)
    report = await rig.engine.commit(version="1.9")
    assert report.slices == member.slices, "the same is read of whole tensors each time"
    assert (await scores(rig), await rig.engine.fingerprint()) == sliced
    return member


async def scores(rig: Rig) -> list[tuple[float, ...]]:
    """Logprobs of some texts."""
    texts = (*TEXTS, tuple(range(3, 30)), tuple(range(29, 2, -1)))
    return [(await rig.engine.score(request_id=rig.next_request(), token_ids=text)).logprobs for text in texts]
