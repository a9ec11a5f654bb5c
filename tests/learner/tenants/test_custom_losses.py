"""Custom losses in the catalog: bounded, and there for as long as an operation may have to be done again."""

import asyncio
import errno
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from learner.tenants import service
from learner.tenants.catalog import LossEntry, ModelEntry
from learner.tenants.custom_losses import CustomLosses
from learner.tenants.models import TrainingModels
from learner.tenants.operations import OperationLog
from learner.training.client_operations import AdapterShape
from protocol.tinker.bodies import CreateCustomLoss
from protocol.tinker.messages import MESSAGES
from tests.learner.tenants.service_client import forward_backward, served


def loss(name: str, *, owner: str = "a", session: str = "s", created_at: float = 0.0) -> LossEntry:
    body = CreateCustomLoss.model_validate(
        {"session_id": session, "custom_loss_seq_id": 0, "name": name, "inputs": [], "graph": {}}
    )
    return LossEntry(owner=owner, session_id=session, created_at=created_at, loss_id=name, body=body)


class Kept:
    """The losses of a journal, of which a tenant may have two, and a model `m`."""

    def __init__(self, folder: Path) -> None:
        self.log, self.models = OperationLog(folder), TrainingModels()
        shape = AdapterShape(rank=2)
        entry = ModelEntry(owner="a", session_id="s", created_at=0.0, model_id="m", base_model="b", shape=shape)
        self.model = self.models.add_model(entry, covered=None)
        self.losses = CustomLosses(self.log, self.models, most=2)

    @property
    def names(self) -> list[str]:
        return list(self.log.catalog.losses)


@pytest.fixture
async def kept(tmp_path: Path) -> AsyncIterator[Kept]:
    found = Kept(tmp_path)
    yield found
    await found.log.close()


async def test_losses_of_a_session_that_was_silent_for_long_go_for_good(kept: Kept, tmp_path: Path) -> None:
    await kept.log.entry(loss("old", session="gone"))
    await kept.log.entry(loss("new"))
    await kept.losses.drop({"gone"})

    assert kept.names == ["new"]
    again = OperationLog(tmp_path)
    assert list(again.catalog.losses) == ["new"], "a start does not bring it back"
    await again.close()


async def test_a_loss_stays_while_a_start_would_do_an_operation_again_that_needs_it(kept: Kept) -> None:
    await kept.log.entry(loss("old", session="gone"))
    kept.losses.used("old", "m", 5)
    kept.model.next_seq, kept.model.done_seq, kept.model.snapshot_seq = 8, 7, 4
    await kept.losses.drop({"gone"})
    assert kept.names == ["old"]

    kept.model.snapshot_seq = 7
    assert kept.model.covered_seq == sys.maxsize
    await kept.losses.drop({"gone"})
    assert kept.names == []


async def test_of_too_many_those_that_were_used_first_go_and_others_tenants_keep_theirs(kept: Kept) -> None:
    for place, name in enumerate(("one", "two", "three", "four")):
        await kept.log.entry(loss(name, created_at=float(place)))
    await kept.log.entry(loss("theirs", owner="b"))
    kept.model.entry = kept.model.entry.model_copy(update={"unloaded": True})
    kept.losses.used("two", "m", 3)
    kept.losses.made("four")
    await kept.losses.drop(set())

    assert kept.names == ["two", "four", "theirs"], "one and three were neither made nor used of late"


async def test_a_loss_that_is_being_dropped_is_there_for_no_operation(kept: Kept, tmp_path: Path) -> None:
    await kept.log.entry(loss("old", session="gone"))
    dropping = asyncio.create_task(kept.losses.drop({"gone"}))
    await asyncio.sleep(0)
    assert kept.names == ["old"], "it is not on the disk yet"
    kept.model.accepting = 1

    assert kept.losses.used("old", "m", 1) is False
    await dropping
    assert kept.losses.used("old", "m", 1) is False
    assert kept.names == []


async def test_a_loss_whose_drop_the_disk_refused_is_there_again(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    await kept.log.entry(loss("old", session="gone"))

    def full(parts: object) -> None:
        raise OSError(errno.ENOSPC, "no room")

    monkeypatch.setattr(kept.log, "_append_synced", full)
    with pytest.raises(OSError, match="no room"):
        await kept.losses.drop({"gone"})
    assert kept.losses.used("old", "m", 1) is True


def by_custom_loss(model_id: str, seq_id: int, loss_id: str) -> bytes:
    request = MESSAGES["ForwardBackwardRequest"].FromString(forward_backward(model_id, seq_id))
    request.loss_fn = "custom"
    request.loss_fn_config_v2["loss_id"].text = loss_id
    return bytes(request.SerializeToString())


async def test_a_loss_is_not_dropped_while_an_operation_that_uses_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "_OFF_LOOP_BYTES", 0)  # all bodies are read in a thread
    entered, go_on = threading.Event(), threading.Event()

    def parse(body: CreateCustomLoss) -> str:
        entered.set()
        assert go_on.wait(60)
        return body.name

    async with served(tmp_path) as parts:
        client = parts.client("a")
        model_id = await client.model()
        monkeypatch.setattr(parts.service, "_parse_graph", parse)
        await parts.service.log.entry(loss("l", session="gone"))
        headers = {"Content-Type": "application/x-protobuf"}
        content = by_custom_loss(model_id, 1, "l")
        sent = asyncio.create_task(client.http.post("/forward_backward", content=content, headers=headers))
        try:
            assert await asyncio.to_thread(entered.wait, 60)
            await parts.service._losses.drop({"gone"})
        finally:
            go_on.set()
        await client.result((await sent).json())

        assert list(parts.service.log.catalog.losses) == ["l"]
