"""Promotes a candidate in child processes, each killed at another call of the disk; prints what is left of the release.

A program of its own, so that it may fork: `python -m tests.learner.releases.promoting FOLDER`.
"""

import asyncio
import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import torch

from learner.releases.config import ReleaseConfig
from learner.releases.history import ReleaseHistory
from learner.releases.kept_weights import KeptWeights, ReleaseDamaged
from learner.releases.making import releases_without_learner
from learner.releases.releases import Releases
from learner.weights.published import PackedWeights, Packer
from services.process import DaemonThreads
from tests.learner.releases.evaluations import TASKS, evaluation
from tests.learner.weights.publishing import snapshot

CALLS = ("fsync", "fdatasync", "pwrite", "replace", "rename", "mkdir", "unlink", "rmdir", "link")
CONFIG = ReleaseConfig(enabled=True, every_steps=1, tasks=TASKS, standard_errors=2.0, keep=1)


def releases_in(run: Path) -> Releases:
    return releases_without_learner(CONFIG, run=run, secret_key_file=None, may_write=lambda: None)


async def packed(version: int) -> PackedWeights:
    return await Packer(incarnation=1, threads=DaemonThreads(name="t")).pack(snapshot(version))


async def judge(run: Path, version: int, *, solved: int) -> None:
    await releases_in(run).judge(evaluation(version, solved=solved), await packed(version))


def die_before(number: int) -> None:
    """Kills this process before its call of that number, which is after the one before; 0 is the first one."""
    count = 0

    def dying(real: Any) -> Any:
        def call(*given: Any, **named: Any) -> Any:
            nonlocal count
            is_due, count = count == number, count + 1
            if is_due:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*given, **named)

        return call

    for name in CALLS:
        setattr(os, name, dying(getattr(os, name)))


def promoted_and_killed(run: Path, number: int) -> bool:
    """False if it came to its end: it makes fewer calls than that."""
    child = os.fork()
    if child == 0:
        die_before(number)
        asyncio.run(judge(run, 20, solved=18))
        os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


def left(run: Path) -> dict[str, object]:
    """The next start: tells its findings, and promotes a later candidate if it can."""
    state, kept = ReleaseHistory(run / "releases").state, KeptWeights(run)
    assert state.released is not None
    try:
        version, fault = str(kept.load(state.released).version), ""
    except ReleaseDamaged as error:
        version, fault = "", str(error)
    asyncio.run(releases_in(run).open())
    asyncio.run(judge(run, 30, solved=20))
    after = ReleaseHistory(run / "releases").state.released
    drafts = [path.name for path in (run / "releases").glob("draft-*")]
    return {"released": state.released, "loaded": version, "fault": fault, "after": after, "drafts": drafts}


def main() -> None:
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    whole = folder / "whole"
    for version, solved in ((0, 0), (10, 8)):
        asyncio.run(judge(whole, version, solved=solved))
    found = []
    number, killed = 0, True
    while killed:
        run = folder / str(number)
        shutil.copytree(whole, run)
        killed = promoted_and_killed(run, number)
        found.append({"number": number, "killed": killed, **left(run)})
        number += 1
    print(json.dumps(found))


if __name__ == "__main__":
    main()
