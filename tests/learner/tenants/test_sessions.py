from pathlib import Path

import pytest

from learner.tenants.operations import OperationLog
from learner.tenants.refusals import QueueFull
from learner.tenants.sessions import DEAD_S, TenantSessions
from learner.tenants.targets import sampling_entry
from protocol.tinker.bodies import CreateSession, FinishSession


async def test_of_dead_sessions_that_hold_nothing_the_last_ones_of_each_tenant_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("learner.tenants.sessions.MAX_EMPTY", 2)
    now = 0.0
    log = OperationLog(tmp_path)
    sessions = TenantSessions(log, clock=lambda: now)
    names = [await sessions.create("a", CreateSession()) for _ in range(5)]
    other = await sessions.create("b", CreateSession())
    await log.entry(sampling_entry("a", f"{names[0]}:sample:0", base_model="m", target_id=None))
    now = DEAD_S
    sessions.beat(names[1], owner="a")
    await sessions.tidy()
    await log.close()
    left = {names[0], names[1], names[3], names[4], other}
    assert set(log.catalog.sessions) == left
    log = OperationLog(tmp_path)
    await log.close()
    assert set(log.catalog.sessions) == left


async def test_a_tenant_with_too_many_open_sessions_is_told_to_finish_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("learner.tenants.sessions.MAX_LIVING", 1)
    log = OperationLog(tmp_path)
    sessions = TenantSessions(log)
    names = [await sessions.create("a", CreateSession()) for _ in range(2)]
    await sessions.tidy()
    with pytest.raises(QueueFull, match="2 sessions of yours are open"):
        await sessions.create("a", CreateSession())
    await sessions.create("b", CreateSession())
    await sessions.finish(names[0], FinishSession(), owner="a")
    await sessions.tidy()
    await sessions.create("a", CreateSession())
    await log.close()
