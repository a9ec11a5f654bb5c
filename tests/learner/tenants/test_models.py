import sys
from typing import Any

import pytest

from learner.tenants.catalog import ModelEntry
from learner.tenants.futures import ResultFuture
from learner.tenants.models import TrainingModels
from learner.tenants.work import Operation, UnfitOperation
from learner.training.client_operations import AdamStep, AdapterShape, ForwardBackward


def entry(name: str, **more: Any) -> ModelEntry:
    shape = AdapterShape(rank=2)
    return ModelEntry(owner="a", session_id="s", created_at=0.0, model_id=name, base_model="b", shape=shape, **more)


def operation(name: str, seq_id: int, *, step: bool = False) -> Operation:
    work = AdamStep(name) if step else ForwardBackward(name, (), "cross_entropy")
    return Operation(name, seq_id, "x", work, ResultFuture(f"{name}:{seq_id}", "a", "", "x"), 10)


def test_operations_run_by_their_numbers_whatever_the_order_they_come_in() -> None:
    models = TrainingModels()
    model = models.add_model(entry("m"), covered=None)
    for seq_id in (3, 2):
        models.enqueue(operation("m", seq_id))
    assert not model.ready
    models.enqueue(operation("m", 1))
    assert [each.seq_id for each in model.ready] == [1, 2, 3]


def test_a_model_made_of_a_checkpoint_begins_with_its_load() -> None:
    models = TrainingModels()
    assert models.add_model(entry("m", loads="tinker://x/weights/y"), covered=None).next_seq == 0
    assert models.add_model(entry("n", loads="tinker://x/weights/y"), covered=7).next_seq == 8


def test_a_round_takes_passes_up_to_the_next_step_and_that() -> None:
    models = TrainingModels()
    models.add_model(entry("m"), covered=None)
    for seq_id in range(1, 6):
        models.enqueue(operation("m", seq_id, step=seq_id in (3, 5)))
    (backlog,) = models.backlogs({})
    assert [each.seq_id for each in backlog.queues[0]] == [1, 2, 3]


def test_the_queue_is_counted_until_it_is_taken_or_dropped() -> None:
    models = TrainingModels()
    model = models.add_model(entry("m"), covered=None)
    for seq_id in (1, 3):
        models.enqueue(operation("m", seq_id))
    assert (models.queue_length("a").operations, models.queue_length("a").size) == (2, 20)
    models.take(list(model.ready))
    assert models.queue_length("a").operations == 1
    (early,) = model.early.values()
    models.drop_early(model, "its session is dead")
    assert early.future.payload == {
        "error": f"operation {early.seq_id} was not done: its session is dead",
        "category": "user",
    }
    assert models.queue_length("a").operations == models.queue_length("a").size == 0


def test_the_least_recently_used_model_leaves_first() -> None:
    now = 0.0
    models = TrainingModels(clock=lambda: now)
    for name in ("m", "n", "o"):
        now += 1
        models.add_model(entry(name), covered=None).resident = name != "o"
    now += 1
    models.enqueue(operation("m", 1))
    assert [each.entry.model_id for each in models.to_park(room=2, needed=["o"])] == ["n"]
    assert models.to_park(room=3, needed=["o"]) == []
    assert models.to_park(room=1, needed=["m", "n"]) == []


def test_all_of_a_model_is_covered_once_nothing_of_it_is_under_way() -> None:
    models = TrainingModels()
    model = models.add_model(entry("m"), covered=4)
    assert model.covered_seq == sys.maxsize
    models.enqueue(operation("m", 9))
    assert model.covered_seq == 4, "it waits for those before it"
    models.drop_early(model, "its client is gone")
    assert model.covered_seq == sys.maxsize
    model.accepting = 1
    assert model.covered_seq == 4, "it may be in the journal"
    model.accepting = 0
    models.enqueue(operation("m", 5))
    assert model.covered_seq == 4
    models.take(list(model.ready))
    assert model.covered_seq == 4, "it is being done"
    model.done_seq = 5
    assert model.covered_seq == 4, "it is not in the snapshot"
    model.snapshot_seq = 5
    assert model.covered_seq == sys.maxsize


@pytest.mark.parametrize("loads", [None, "tinker://x/weights/y"])
def test_all_of_a_model_is_covered_that_never_had_the_operation_it_begins_with(loads: str | None) -> None:
    models = TrainingModels()
    model = models.add_model(entry("m", loads=loads), covered=None)
    assert model.covered_seq == sys.maxsize
    models.enqueue(operation("m", model.next_seq))
    models.take(list(model.ready))
    assert model.covered_seq == -1


def test_another_tenant_does_not_find_a_model() -> None:
    models = TrainingModels()
    models.add_model(entry("m"), covered=None)
    assert models.find("m", owner="a") is not None
    assert models.find("m", owner="b") is None


def test_what_cannot_be_done_still_has_its_turn() -> None:
    work = UnfitOperation("no")
    failed = Operation("m", 1, "x", work, ResultFuture("m:1", "a", "", "x"), 10)
    assert (failed.tokens, failed.is_pass) == (0, False)
