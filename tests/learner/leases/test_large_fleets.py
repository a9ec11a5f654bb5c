"""Cost of one message: it does not grow with the number of env_services, of leases, or of changes of the fleet."""

from collections.abc import Iterable
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.evaluation.config import EvaluationConfig
from learner.leases.env_services import ConnectedEnvService
from learner.leases.evaluation_leases import Evaluator
from learner.leases.granting import Granting
from learner.ledger import ledger as ledger_module
from learner.ledger.lease import Remaining, blockage, last_without_a_place
from protocol.messages import Fleet, Goodbye, Lease, Message
from protocol.model import PolicyVersion
from services.zmq.sockets import RouterSocket
from tests.learner.envs import ScriptedEnv, learner
from tests.learner.generators import announcement
from tests.learner.ledger.test_ledger import granted, make_ledger
from tests.learner.samples import LEDGER, group, trajectory


class _NotLookedThrough(dict[Any, Any]):
    """Values can be asked for by key alone."""

    def _refuse(self) -> NoReturn:
        raise AssertionError("all of them were looked through")

    __iter__ = items = values = keys = _refuse


def test_a_lease_to_be_granted_again_is_found_without_looking_at_all_of_them() -> None:
    ledger = make_ledger(groups_per_step=50)
    held = granted(ledger, now=0.0)
    ledger.expire(now=1000.0)
    ledger._table.pending = _NotLookedThrough(ledger._table.pending)
    assert granted(ledger, now=1000.0) == held


def test_leases_come_back_after_their_backoff_in_the_order_of_their_ids() -> None:
    ledger = make_ledger(groups_per_step=3)
    held = granted(ledger, now=0.0)
    for number, lease_id in enumerate(reversed(held)):
        ledger.fail(now=float(number), lease_id=lease_id, attempt=0, kind="infrastructure", reason="x")
    backoff_s = ledger.config.infrastructure_backoff_s
    assert granted(ledger, room=2, now=backoff_s + 1.5) == held[-2:]
    assert granted(ledger, room=1, now=backoff_s + 100.0) == held[:1]
    assert granted(ledger, now=backoff_s + 100.0) == held[1:-2]


def test_a_step_that_leaves_a_place_for_every_group_looks_at_none_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at = []

    def remaining(**values: Any) -> Remaining:
        looked_at.append(values)
        return Remaining(**values)

    monkeypatch.setattr(ledger_module, "Remaining", remaining)
    ledger = make_ledger(groups_per_step=20, max_lag=3)
    held = granted(ledger)
    for lease_id in held[:20]:
        ledger.accept(lease_id=lease_id, attempt=0, oldest_version=0, size=1)
    ledger.take(now=0.0)
    assert len(held) == 80
    assert looked_at == []


@st.composite
def left_behind(draw: st.DrawFn) -> list[Remaining]:
    groups = st.tuples(st.integers(0, 6), st.booleans(), st.integers(0, 2), st.booleans())
    return [
        Remaining(version=version, lease_id=lease_id, running=running, drops=drops, droppable=droppable)
        for lease_id, (version, running, drops, droppable) in enumerate(draw(st.lists(groups, max_size=30)))
    ]


@given(left_behind(), st.integers(4, 6), st.integers(0, 3), st.integers(1, 4))
def test_groups_newer_than_the_last_without_a_place_play_no_part(
    remaining: list[Remaining], version: int, max_lag: int, groups_per_step: int
) -> None:
    bound = {"version": version, "max_lag": max_lag, "groups_per_step": groups_per_step}
    newest = last_without_a_place((group.version for group in remaining), **bound)
    looked_at = [] if newest is None else [group for group in remaining if group.version <= newest]
    assert blockage(looked_at, **bound) == blockage(remaining, **bound)


async def test_a_finished_group_asks_its_env_service_for_room_and_not_all_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    leases_for = Granting.leases_for

    def counted(self: Granting, holder: ConnectedEnvService, *, environment: str) -> list[Lease]:
        asked.append(holder.name)
        return leases_for(self, holder, environment=environment)

    monkeypatch.setattr(Granting, "leases_for", counted)
    monkeypatch.setattr("learner.leases.intake._TICK_S", 60.0)
    config = replace(LEDGER, groups_per_step=8)
    async with learner(tmp_path, ledger_config=config) as ours, AsyncExitStack() as stack:
        envs = [await stack.enter_async_context(ours.env(f"e{number}")) for number in range(3)]
        leases = []
        for env in envs:
            await env.enter(capacity=1)
            leases += await env.leases(1)
        asked.clear()
        await envs[0].finish(group(leases[0].lease_id, trajectory(0), trajectory(0, reward=0.0)))
        await envs[0].leases(1)
        assert set(asked) == {"e0"}


async def test_changes_of_the_fleet_in_a_row_are_told_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Message] = []
    send_to_all = RouterSocket.send_to_all
    async with learner(tmp_path) as ours, ours.env("e") as env:

        async def slowly(self: RouterSocket, peers: Iterable[str], message: Message, *, deadline_s: float) -> list[str]:
            told.append(message)
            ours.clock.now += 0.1
            return await send_to_all(self, peers, message, deadline_s=deadline_s)

        monkeypatch.setattr(RouterSocket, "send_to_all", slowly)
        await env.enter()
        await env.next(Fleet)
        for number in range(20):
            ours.fleet.announce(announcement(f"g{number}", "http://127.0.0.1:1"), now=0.0)
            ours.fleet.committed(f"g{number}", version=PolicyVersion(1, 0), fingerprint="f")
            await ours.intake.fleet_changed()
        assert len((await env.next(Fleet)).generators) == 2
        assert len(told) == 1
        ours.clock.now += 2.0
        assert len((await env.next(Fleet)).generators) == 21
        assert len(told) == 2


async def test_how_many_leases_of_an_evaluation_an_env_service_holds_is_known_without_looking_at_all() -> None:
    evaluator = Evaluator(config=EvaluationConfig(), max_tokens=8, timeout_s=60.0, incarnation=1)
    evaluator.start(tasks=10, version=0)
    for holder in ("a", "b", "a"):
        evaluator.grant(now=0.0, holder=holder, environment="addition", room=2)
    evaluator._line[0].outstanding = _NotLookedThrough(evaluator._line[0].outstanding)
    assert (evaluator.running("a"), evaluator.running("b"), evaluator.running("c")) == (4, 2, 0)
    evaluator.failed(0, reason="x")
    assert evaluator.running("a") == 3
    assert evaluator.has_waiting


async def test_who_serves_is_told_at_once_after_changes_that_changed_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("learner.leases.intake._TICK_S", 60.0)
    send_to_all = RouterSocket.send_to_all
    async with learner(tmp_path) as ours, ours.env("e") as env:

        async def slowly(self: RouterSocket, peers: Iterable[str], message: Message, *, deadline_s: float) -> list[str]:
            ours.clock.now += 0.1
            return await send_to_all(self, peers, message, deadline_s=deadline_s)

        await env.enter()
        await env.next(Fleet)
        monkeypatch.setattr(RouterSocket, "send_to_all", slowly)
        ours.fleet.announce(announcement("g2", "http://127.0.0.1:1"), now=0.0)  # it does not serve yet
        await ours.intake.fleet_changed()
        ours.fleet.committed("g2", version=PolicyVersion(1, 0), fingerprint="f")
        await ours.intake.fleet_changed()
        assert len((await env.next(Fleet)).generators) == 2


async def test_an_env_service_that_did_not_take_who_serves_is_told_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("learner.leases.intake._TICK_S", 0.05)
    send_to_all = RouterSocket.send_to_all
    refused: list[Message] = []

    async def first_to_nobody(
        self: RouterSocket, peers: Iterable[str], message: Message, *, deadline_s: float
    ) -> list[str]:
        if refused:
            return await send_to_all(self, peers, message, deadline_s=deadline_s)
        refused.append(message)
        return list(peers)

    async with learner(tmp_path) as ours, ours.env("e") as env:
        await env.enter()
        await env.next(Fleet)
        monkeypatch.setattr(RouterSocket, "send_to_all", first_to_nobody)
        ours.fleet.committed("g", version=PolicyVersion(2, 0), fingerprint="f")
        await ours.intake.fleet_changed()
        assert len(refused) == 1
        assert (await env.next(Fleet)).generators[0].policy_version == "2.0"


async def versions_told(env: ScriptedEnv) -> list[str]:
    """Of the only generator, up to the learner's goodbye."""
    told = []
    while not isinstance(message := await env.dealer.receive(), Goodbye):
        told += [message.generators[0].policy_version] if isinstance(message, Fleet) else []
    return told


async def test_who_comes_later_is_told_what_the_others_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("learner.leases.intake._TICK_S", 60.0)
    send_to_all = RouterSocket.send_to_all
    async with learner(tmp_path) as ours, ours.env("e") as env, ours.env("later") as later:

        async def slowly(self: RouterSocket, peers: Iterable[str], message: Message, *, deadline_s: float) -> list[str]:
            ours.clock.now += 0.1
            return await send_to_all(self, peers, message, deadline_s=deadline_s)

        monkeypatch.setattr(RouterSocket, "send_to_all", slowly)
        await env.enter()
        for number in (2, 3, 2):  # and back, while nobody is told
            ours.fleet.committed("g", version=PolicyVersion(number, 0), fingerprint="f")
            await ours.intake.fleet_changed()
            if number == 3:
                await later.enter()
        ours.clock.now += 10.0
        await ours.intake.fleet_changed()
        await ours.intake.leave("the end")
        assert [await versions_told(each) for each in (env, later)] == [["1.0", "2.0"], ["2.0"]]
