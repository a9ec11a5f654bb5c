"""Waits of the runs of a service with real queues, and a scripted trainer that is held at its work."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from learner.tenants.run_records import shown_name
from learner.tenants.standing import TenantsStanding
from learner.training.client_operations import AdamStep
from protocol.status import PeerStatus
from protocol.tenants import TenantRunStatus
from tests.learner.tenants.service_client import Served, served
from tests.learner.tenants.test_run_records import operation

GENERATOR = PeerStatus(name="g", kind="generator", url="http://g", last_heard_s=3.0, state="answers")


def waits(parts: Served, model_id: str, *, viewer: str | None = None) -> str:
    return run_of(parts, model_id, viewer=viewer).waits_for


def run_of(parts: Served, model_id: str, *, viewer: str | None = None) -> TenantRunStatus:
    owner = parts.service.models.by_id[model_id].entry.owner
    runs = TenantsStanding(parts.service, viewer=viewer).runs(most=100)
    return next(each for each in runs if each.name == shown_name(owner, model_id))


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not holds():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.01)


async def test_each_run_says_whom_it_waits_for(tmp_path: Path) -> None:
    async with served(tmp_path) as parts:
        a, b = parts.client("a"), parts.client("b")
        first, second, third = await a.model(0), await b.model(0), await a.model(1)
        assert {waits(parts, each) for each in (first, second, third)} == {"its client"}

        parts.trainer.released.clear()
        try:
            one = await a.train(first, 1)
            await until(parts.trainer.entered.is_set)
            other = await b.train(second, 1)
            await b.train(second, 2)
            await a.train(third, 2)
            assert waits(parts, first) == "the trainer, which has it in hand"
            assert waits(parts, second) == "its turn, behind a"
            assert run_of(parts, second).queued == 2
            assert waits(parts, third) == "operation 1, which its client has not sent"
            found = TenantsStanding(parts.service).status()
            assert (found.queued, found.run_count, found.clients) == (3, 3, 2)
            assert found.at_work is not None
            assert (found.at_work.tenant, found.at_work.rows, found.at_work.tokens) == ("a", 1, 2)
            assert [(each.name, each.queued) for each in found.tenants] == [("b", 2), ("a", 1)]
        finally:
            parts.trainer.released.set()
        await a.result(one)
        await b.result(other)
        await until(lambda: TenantsStanding(parts.service).status().at_work is None)
        assert waits(parts, second) == "its client"
        assert run_of(parts, first).rows_per_s > 0


async def test_a_tenant_sees_no_name_and_no_number_of_others(tmp_path: Path) -> None:
    async with served(tmp_path) as parts:
        a, b = parts.client("a"), parts.client("b")
        first, second = await a.model(), await b.model()
        parts.trainer.released.clear()
        try:
            await a.train(first, 1, tokens=tuple(range(1, 78)))
            await until(parts.trainer.entered.is_set)
            await b.train(second, 1)
            standing = TenantsStanding(parts.service, viewer="b")
            told = (
                json.dumps([each.model_dump() for each in standing.runs(most=10)]) + standing.status().model_dump_json()
            )
            assert waits(parts, second, viewer="b") == "its turn, behind another tenant"
            assert standing.status().tenant_count == standing.status().run_count == 1
            assert '"a"' not in told
            assert shown_name("a", first) not in told
            work = standing.status().at_work
            assert work is not None
            assert (work.run, work.kind, work.rows, work.tokens) == ("", "", 0, 0)
        finally:
            parts.trainer.released.set()


async def test_completions_wait_for_a_generator_and_its_silence_is_told(tmp_path: Path) -> None:
    async with served(tmp_path) as parts:
        a, gate = parts.client("a"), asyncio.Event()
        model_id = await a.model()
        parts.sampler.gate = gate.wait
        saved = await a.post(
            "save_weights_for_sampler", model_id=model_id, seq_id=1, sampling_session_seq_id=1, kind="inflight"
        )
        session = (await a.result(saved))["sampling_session_id"]
        assert TenantsStanding(parts.service, [GENERATOR]).status().generator_silent_s is None, "nobody waits for it"
        prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]}
        await a.post(
            "asample", sampling_session_id=session, seq_id=1, prompt=prompt, num_samples=4,
            sampling_params={"max_tokens": 2},
        )  # fmt: skip
        await asyncio.sleep(0.05)

        assert waits(parts, model_id) == "a generator, for 4 completions"
        silent_s = TenantsStanding(parts.service, [GENERATOR]).status().generator_silent_s
        assert silent_s is not None
        assert 0 < silent_s <= 3.0
        gate.set()
        await until(lambda: waits(parts, model_id) == "its client")
        assert TenantsStanding(parts.service, [GENERATOR]).status().completions == 0


async def test_refused_calls_and_parked_and_unloaded_runs_are_told(tmp_path: Path) -> None:
    async with served(tmp_path, max_resident=1, max_queued_operations=1) as parts:
        a = parts.client("a")
        first, second = await a.model(0), await a.model(1)
        await a.loss(second, 1)
        assert (run_of(parts, first).place, run_of(parts, second).place) == ("disk", "memory")

        await a.train(first, 2)
        await a.train(first, 3, status=429)
        (found, _) = TenantsStanding(parts.service).status().tenants
        assert (found.name, found.refused, found.queued, found.queue_limit) == ("a", 1, 1, 1)
        await a.post("unload_model", model_id=first)
        assert waits(parts, first) == "nobody: it was unloaded"
        assert run_of(parts, first).place == "unloaded"


async def test_a_run_whose_client_is_gone_waits_for_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with served(tmp_path) as parts:
        model_id = await parts.client("a").model()
        monkeypatch.setattr(parts.service.sessions, "_clock", lambda: 1e12)

        assert waits(parts, model_id) == "nobody: its client is gone"
        assert TenantsStanding(parts.service).status().clients == 0


async def test_what_is_listed_is_bounded_and_the_busiest_come_first(tmp_path: Path) -> None:
    async with served(tmp_path) as parts:
        a = parts.client("a")
        models = [await a.model(number) for number in range(70)]
        await a.train(models[3], 2)

        found = TenantsStanding(parts.service).status()
        assert (len(found.runs), found.run_count) == (64, 70)
        assert found.runs[0].name == shown_name("a", models[3])


@pytest.mark.parametrize(
    ("names", "behind"),
    [
        (["c", "a", "b", "d", "e"], "a, b, c and 2 more"),
        (["z" * 64, "x" * 64, "y" * 64], f"{'x' * 64}, {'y' * 64} and 1 more"),
        ([f"{number:064}" for number in range(1000)], f"{0:064}, {1:064} and 998 more"),
    ],
)
async def test_names_of_any_length_fit_into_the_status(tmp_path: Path, names: list[str], behind: str) -> None:
    async with served(tmp_path) as parts:
        service = parts.service
        model_id = await parts.client("b").model()
        entry = service.models.by_id[model_id].entry
        for name in names:
            service.models.add_model(entry.model_copy(update={"owner": name, "model_id": f"of {name}"}), covered=None)
        service.records.begin([operation(f"of {name}", AdamStep(f"of {name}")) for name in names])
        waiting = operation(model_id, AdamStep(model_id))
        service.models.enqueue(replace(waiting, seq_id=1))

        assert waits(parts, model_id) == f"its turn, behind {behind}"
        assert len(TenantsStanding(service).status().model_dump_json()) > 0
        service.models.take([service.models.by_id[model_id].ready[0]])
        service.records.end()
