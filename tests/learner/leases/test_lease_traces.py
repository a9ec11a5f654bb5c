"""The learner's spans of leases whose first group, or every group, came to nothing."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from protocol.messages import FailedLease, OutcomeReceipt
from services import tracing
from tests.learner.envs import RunningIntake, ScriptedEnv, learner
from tests.learner.samples import INCARNATION, LEDGER, group, trajectory

Span = tuple[str, int, int, dict[str, Any]]
"""Its name, when it began and ended, and what it says."""


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Span]]:
    """Spans that this process exports, in the order in which they end, by trace."""
    exported: dict[str, list[Span]] = {}

    def make(name: str, own: str, parent: str, began: int, ended: int, told: dict[str, Any]) -> tuple[str, Span]:
        return own.split("-")[1], (name, began, ended, dict(told))

    def keep(made: tuple[str, Span]) -> None:
        exported.setdefault(made[0], []).append(made[1])

    monkeypatch.setattr(tracing, "_exporting", tracing._Exporting("one", 1.0, make, keep))
    return exported


def of_lease(spans: dict[str, list[Span]], lease_id: int) -> list[Span]:
    return spans.get(tracing.lease_trace(INCARNATION, lease_id).split("-")[1], [])


@asynccontextmanager
async def two_leases(folder: Path) -> AsyncIterator[tuple[RunningIntake, ScriptedEnv]]:
    """Batches of one group, lag at most 2, and an env_service that holds leases 0 and 1."""
    config = replace(LEDGER, groups_per_step=1, max_lag=2)
    async with learner(folder, ledger_config=config) as ours, ours.env("e") as env:
        await env.enter()
        await env.leases(2)
        yield ours, env


async def test_a_group_that_waited_until_it_was_too_old_ends_its_span_and_the_next_one_has_its_own(
    tmp_path: Path, spans: dict[str, list[Span]]
) -> None:
    async with two_leases(tmp_path) as (ours, env):
        await env.finish(group(0))
        await ours.intake.take()
        await env.leases(1)
        await env.finish(group(1))
        await ours.intake.trained(1, max_lag=0)
        await ours.serve(1)
        (again,) = await env.leases(1)
        assert (again.lease_id, again.attempt) == (1, 1)
        await env.finish(group(1, version=1, attempt=1))
        await ours.intake.take()

    (first, last) = (span for span in of_lease(spans, 1) if span[0] == "batch")
    assert (first[3], last[3]) == ({"left_out": "too_old"}, {"version": 1})
    assert first[1] < first[2] <= last[1] < last[2]
    assert "lease" not in [span[0] for span in of_lease(spans, 1)], "it ends with its step"


async def test_a_lease_that_is_given_up_ends_with_the_reason(tmp_path: Path, spans: dict[str, list[Span]]) -> None:
    async with two_leases(tmp_path) as (ours, env):
        await env.finish(group(0, trajectory(0, reward=None), trajectory(0, reward=1.0)))
        assert ours.intake.books().dead_lettered == 1
        (later,) = await env.leases(1)
        for lease_id, data_fault in ((1, True), (later.lease_id, False)):
            await env.send(_failed(lease_id, data_fault=data_fault))
            await env.next(OutcomeReceipt)
        assert of_lease(spans, later.lease_id) == [], "it is granted again"

    for lease_id in (0, 1):
        (root,) = (span for span in of_lease(spans, lease_id) if span[0] == "lease")
        assert root[1] < root[2]
        assert root[3] == {"left_out": "dead_lettered"}


async def test_a_group_taken_back_from_the_journal_waits_from_then_on(
    tmp_path: Path, spans: dict[str, list[Span]]
) -> None:
    async with learner(tmp_path, ledger_config=replace(LEDGER, groups_per_step=1), serves=False) as ours:
        ours.intake.readmit([group(0)])
        await ours.intake.take()
    (batch,) = (span for span in of_lease(spans, 0) if span[0] == "batch")
    assert batch[1] < batch[2]


def test_of_too_many_that_never_end_the_oldest_is_forgotten(
    spans: dict[str, list[Span]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracing, "_MAX_BEGAN", 2)
    traces = [tracing.lease_trace(INCARNATION, lease_id) for lease_id in range(3)]
    for trace in traces:
        tracing.lease_began(trace)
    for trace in traces:
        tracing.lease_ended(trace)
    assert [of_lease(spans, lease_id)[0][1] < of_lease(spans, lease_id)[0][2] for lease_id in range(3)] == [
        False, True, True,
    ]  # fmt: skip


def _failed(lease_id: int, *, data_fault: bool) -> FailedLease:
    return FailedLease(
        incarnation=INCARNATION,
        lease_id=lease_id,
        attempt=0,
        purpose="train",
        data_fault=data_fault,
        reason="the program ended with code 1",
    )
