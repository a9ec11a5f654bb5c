"""A run of many tiny steps keeps no more than one of few: objects, the ledger's file, and what a resume reads."""

import asyncio
import gc
import json
from dataclasses import asdict
from pathlib import Path

import pytest

from learner.journal.checkpoints import Checkpoints
from learner.leases.dead_letters import dead_lettered_since
from learner.recovery import recover
from protocol.messages import FailedLease, FinishedLease, LeaseGrant
from tests.learner.envs import RunningIntake, ScriptedEnv, learner
from tests.learner.samples import INCARNATION, LEDGER, group, trajectory

STEPS_BETWEEN = 60


async def answer(ours: RunningIntake, env: ScriptedEnv) -> None:
    """Finishes every lease at once; every fifth task fails, each time for a reason of its own."""
    while True:
        message = await env.dealer.receive()
        for lease in message.leases if isinstance(message, LeaseGrant) else ():
            if lease.lease_id % 5:
                texts = [trajectory(ours.ledger.version, reward=reward) for reward in (0.0, 1.0)]
                await env.send(FinishedLease(group=group(lease.lease_id, *texts, attempt=lease.attempt)))
                continue
            reason = f"task {lease.lease_id} is broken at attempt {lease.attempt}"
            about = {"incarnation": INCARNATION, "lease_id": lease.lease_id, "attempt": lease.attempt}
            await env.send(
                FailedLease.model_validate({**about, "purpose": "train", "data_fault": True, "reason": reason})
            )


async def test_a_run_of_many_steps_keeps_no_more_than_one_of_few(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("learner.leases.dead_letters._FEWEST_FINISHED", 10**9)
    async with learner(tmp_path) as ours, ours.env("e") as env:
        await env.enter(capacity=4)
        checkpoints = Checkpoints(tmp_path, keep=2, journal=ours.intake._journal)
        answering = asyncio.create_task(answer(ours, env))
        objects, ledger_bytes = [], []
        for _ in range(4):
            for _ in range(STEPS_BETWEEN):
                await ours.train()
            ledger = await ours.intake.checkpoint()
            checkpoints.write(version=ledger.version, ledger=ledger, save_trainer=Path.mkdir)
            ledger_bytes.append(len(json.dumps(asdict(ledger))))
            gc.collect()
            objects.append(len(gc.get_objects()))
        assert not answering.done()
        answering.cancel()
    grown = objects[3] - objects[1]
    assert grown < STEPS_BETWEEN, f"objects after each {STEPS_BETWEEN} steps: {objects}"
    assert ledger_bytes[3] < ledger_bytes[1] + 200, ledger_bytes
    recovered = recover(tmp_path, config=LEDGER, resume=True, incarnation=2)
    assert (recovered.version, recovered.batches) == (4 * STEPS_BETWEEN, ())
    letters = (tmp_path / "dead_letters.jsonl").read_text().splitlines()
    assert len(letters) > STEPS_BETWEEN
    newest = dead_lettered_since(4 * STEPS_BETWEEN - 5, tmp_path / "dead_letters.jsonl")
    assert newest == [json.loads(line)["lease_id"] for line in letters[-len(newest) :]]
    assert 0 < len(newest) < 12


def test_dead_letters_are_read_from_their_end_up_to_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "dead_letters.jsonl"
    assert dead_lettered_since(0, path) == []
    lines = [json.dumps({"lease_id": number, "version": number // 10, "reason": "x" * 997}) for number in range(300)]
    path.write_text("not even JSON\n" + "\n".join(lines) + '\n{"lease_id": 300, "ver')
    assert dead_lettered_since(3, path) == list(range(30, 300))
    assert dead_lettered_since(29, path) == list(range(290, 300))
    assert dead_lettered_since(30, path) == []
    path.write_text('{"lease_id": 4}\n{"lease_id": 2}\n')
    assert dead_lettered_since(7, path) == [4, 2], "of a release that did not note the version"
