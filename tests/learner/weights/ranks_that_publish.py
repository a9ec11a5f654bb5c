"""Two ranks that publish what each has: `ranks_that_publish.py MODEL OUT CASE...`, each a training config as JSON.

Without RANK in the environment it is rank 0, which starts rank 1, publishes to two generators of two workers each in
this process, and writes OUT/N.json for each case. With `dies` as a case, rank 1 dies in the middle of a broadcast.
"""

import asyncio
import dataclasses
import json
import logging
import os
import signal
import sys
from pathlib import Path

import torch

from learner.algorithms.presets.grpo import GrpoConfig
from learner.snapshots import Snapshots
from learner.training.config import TrainingConfig
from learner.training.trainer import Trainer
from learner.weights.probe import Probe
from learner.weights.senders import own_buckets
from tests.learner.generators import ScriptedGenerator, probe_logprobs
from tests.learner.training.rank_processes import two_started_ranks
from tests.learner.training.tiny_model import random_sequences
from tests.learner.weights.publishing import OPTIONS, PROBE, PublishingLearner, learner

BUCKET_BYTES = 1 << 14
DIES = "dies"


def other_rank() -> int:
    (child,) = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text(encoding="ascii").split()
    return int(child)


def wrong(generator: ScriptedGenerator, expected: dict[str, torch.Tensor]) -> list[str]:
    """Names of weights that a generator does not have as they are, bit by bit."""
    names = expected.keys() ^ generator.weights.keys()
    return [
        *names,
        *(name for name in expected.keys() - names if not torch.equal(expected[name], generator.weights[name])),
    ]


async def published(trainer: Trainer, ours: PublishingLearner, *generators: ScriptedGenerator) -> dict[str, object]:
    """Versions 0 by download, 1 and 2 by broadcast, and 2 to one that comes late: what differs, and bytes by sender."""
    snapshots = Snapshots(trainer, bucket_bytes=BUCKET_BYTES, lora=None, shared=True)
    probe = Probe(texts=PROBE, logprobs=probe_logprobs(PROBE))
    first, late = generators
    differs: list[str] = []
    for version in range(3):
        trainer.train_step(random_sequences(8, seed=version), version=version)
        expected = {each.name: each.value for each in trainer.host_copy().tensors}
        ours.publisher.offer(snapshots.take(version=version, probe=probe))
        if version == 0:
            ours.join(first)
        await ours.until_served(**{first.name: version})
        differs += wrong(first, expected)
    ours.join(late)
    await ours.until_served(**{first.name: 2, late.name: 2})
    differs += wrong(late, expected)
    total, newest = sum(value.nbytes for value in expected.values()), ours.shelf.newest
    assert newest is not None, "it was published"
    return {
        "differs": differs, "received": first.received, "bytes": total, "joined": len(ours.joined), "pulls": late.pulls,
        "kept": sum(bucket.spec.nbytes for bucket in own_buckets(newest.buckets)),
    }  # fmt: skip


async def bereft(trainer: Trainer, ours: PublishingLearner, *generators: ScriptedGenerator) -> dict[str, object]:
    """Rank 1 dies while the second version is under way: who serves what then, and who is blamed."""
    snapshots = Snapshots(trainer, bucket_bytes=BUCKET_BYTES, lora=None, shared=True)
    probe = Probe(texts=PROBE, logprobs=probe_logprobs(PROBE))
    for generator in generators:
        ours.join(generator)
    for version in range(2):
        ours.publisher.offer(snapshots.take(version=version, probe=probe))
        await ours.until_served(**{each.name: version for each in generators})
    before = [dict(each.weights) for each in generators]
    spared = asyncio.Event()

    def note(line: logging.LogRecord) -> bool:
        if "serve on" in line.msg:
            spared.set()
        return True

    logging.getLogger("learner.weights.broadcast").addFilter(note)
    for generator in generators:
        generator.preparing.clear()
        generator.hold["prepare"] = asyncio.Event()
    ours.publisher.offer(snapshots.take(version=2, probe=probe))
    for generator in generators:
        await generator.preparing.wait()
    os.kill(other_rank(), signal.SIGKILL)
    for generator in generators:
        generator.hold.pop("prepare").set()
    await spared.wait()
    return {
        "serving": ours.serving,
        "versions": [each.version for each in generators],
        "changed": [wrong(each, weights) for each, weights in zip(generators, before, strict=True)],
        "expelled": ours.fleet.expulsions,
        "reports": [report.version for report in ours.reports],
    }


async def lead(trainer: Trainer, *, dies: bool) -> dict[str, object]:
    options = dataclasses.replace(OPTIONS, bucket_timeout_s=20.0, meet_timeout_s=30.0, commit_timeout_s=30.0)
    if dies:  # at the end, a meeting to which the dead rank does not come is waited out
        options = dataclasses.replace(options, bucket_timeout_s=6.0, meet_timeout_s=6.0)
    async with (
        learner(options) as ours,
        ScriptedGenerator("a", workers=2).running() as first,
        ScriptedGenerator("b", workers=2).running() as second,
    ):
        return await (bereft if dies else published)(trainer, ours, first, second)


def main() -> None:
    model, out = Path(sys.argv[1]), Path(sys.argv[2])
    with two_started_ranks() as (ranks, commands):
        for number, text in enumerate(sys.argv[3:]):
            dies = text == DIES
            config = TrainingConfig.model_validate_json('{"zero_stage": 3}' if dies else text)
            trainer = Trainer(model, algorithm=GrpoConfig(), config=config, ranks=ranks, commands=commands)
            if not ranks.leads:
                trainer.follow()
                continue
            seen = asyncio.run(lead(trainer, dies=dies))
            (out / f"{number}.json").write_text(json.dumps(seen), encoding="utf-8")
            if dies:
                os._exit(0)  # no collective can end any more
            trainer.close()


if __name__ == "__main__":
    main()
