"""Turns of the real trainer: what an operation computes is the same whatever waits with it, and after a replay."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from learner.tenants.catalog import ModelEntry
from learner.tenants.checkpoints import TenantCheckpoints
from learner.tenants.futures import ResultFuture
from learner.tenants.snapshots import ModelSnapshots
from learner.tenants.turns import TrainerTurns, rounds_of
from learner.tenants.work import FORWARD_BACKWARD, Operation, Work
from learner.training.adapter_trainer import AdapterTrainer
from learner.training.client_operations import AdamStep, AdapterShape, ClientDatum, ForwardBackward
from tests.learner.tenants.tiny import make_tiny_model

BASE, RUN = "tiny/qwen", "session:train:0"
TOKENS = np.array([(5 * place) % 250 for place in range(40)], dtype=np.int64)
STEPS, PASSES = 4, 3
APART = [1] * (STEPS * (PASSES + 1))


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> AdapterTrainer:
    folder = tmp_path_factory.mktemp("model")
    make_tiny_model(folder)
    return AdapterTrainer.open(folder, name=BASE)


def operation(seq_id: int, work: Work, *, model_id: str = RUN) -> Operation:
    kind = FORWARD_BACKWARD if isinstance(work, ForwardBackward) else "optim_step"
    return Operation(model_id, seq_id, kind, work, ResultFuture(f"{model_id}:{seq_id}", "a", "", kind), 0)


def train(model_id: str = RUN, *, tokens: int = 39, rows: int = 1) -> ForwardBackward:
    inputs: dict[str, Any] = {"target_tokens": TOKENS[1 : tokens + 1], "weights": np.ones(tokens, dtype=np.float32)}
    return ForwardBackward(model_id, (ClientDatum(TOKENS[:tokens], inputs),) * rows, "cross_entropy")


def history() -> Iterator[Operation]:
    """Some steps, each of three passes."""
    works = ([train()] * PASSES + [AdamStep(RUN, learning_rate=1e-2)]) * STEPS
    yield from (operation(number, work) for number, work in enumerate(works, start=1))


class LifeOfTurns:
    """Turns from the snapshot that a former life left in the folder, if one did."""

    def __init__(self, folder: Path, trainer: AdapterTrainer, *, shared_tokens: int = 1024) -> None:
        self.trainer, self.entries = trainer, dict[str, ModelEntry]()
        self.turns = TrainerTurns(
            trainer=trainer,
            checkpoints=TenantCheckpoints(folder / "checkpoints"),
            snapshots=ModelSnapshots(folder / "models"),
            shared_tokens=shared_tokens,
        )

    def do(self, operations: Sequence[Operation]) -> list[Any]:
        """The answers, by models and numbers."""
        for model_id in {each.model_id for each in operations}:
            shape = AdapterShape(rank=4, seed=5)
            self.entries[model_id] = ModelEntry(
                session_id="session", owner="a", created_at=0.0, model_id=model_id, base_model=BASE, shape=shape
            )
        outcomes = self.turns.run(operations, self.entries)
        found = sorted(outcomes, key=lambda each: (each.operation.model_id, each.operation.seq_id))
        return [each.payload for each in found]

    def end(self) -> dict[str, Mapping[str, np.ndarray]]:
        """The models' states; the trainer forgets them."""
        states: dict[str, Mapping[str, np.ndarray]] = {
            model_id: self.trainer.state(model_id) for model_id in self.entries
        }
        for model_id in self.entries:
            self.turns.remove(model_id)
        return states


def lived(folder: Path, trainer: AdapterTrainer, sizes: Sequence[int], *, dies_after: int = 0) -> tuple[list[Any], Any]:
    """The answers to the history, so many operations of it in each turn, and the model's state at its end. After so
    many turns a life ends, and the next one goes on from a snapshot.
    """
    life, waiting, answers = LifeOfTurns(folder, trainer), history(), []
    for number, size in enumerate(sizes, start=1):
        asked = list(islice(waiting, size))
        answers += life.do(asked)
        if number == dies_after:
            life.turns.snapshot(life.entries[RUN], asked[-1].seq_id, [])
            life.end()
            life = LifeOfTurns(folder, trainer)
    assert next(waiting, None) is None
    return answers, life.end()[RUN]


def assert_same_bits(one: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if one[name].tobytes() != other[name].tobytes()] == []


@pytest.mark.parametrize(
    ("sizes", "dies_after"),
    [([4] * STEPS, 0), ([1, 3, 2, 2, 3, 1, 4], 0), (APART, 6), ([1, 3, 2, 2, 3, 1, 4], 3)],
    ids=["queued", "in part", "a life ends", "a life ends, and what is done again waits together"],
)
def test_answers_and_weights_are_the_same_bit_by_bit_however_operations_wait_together(
    trainer: AdapterTrainer, tmp_path: Path, sizes: Sequence[int], dies_after: int
) -> None:
    expected, state = lived(tmp_path / "apart", trainer, APART)
    answers, other = lived(tmp_path / "together", trainer, sizes, dies_after=dies_after)
    assert answers == expected
    assert_same_bits(state, other)


def test_an_operation_that_shares_no_pass_is_the_same_bit_by_bit_beside_others(
    trainer: AdapterTrainer, tmp_path: Path
) -> None:
    names = ["session:train:1", "session:train:2", "session:train:3"]
    asked = [
        operation(1, train(name, tokens=39 - 8 * place, rows=3), model_id=name) for place, name in enumerate(names)
    ]
    alone, together = (LifeOfTurns(tmp_path / each, trainer, shared_tokens=0) for each in ("alone", "together"))
    expected = [answer for each in asked for answer in alone.do([each])]
    states = alone.end()
    assert together.do(asked[::-1]) == expected
    assert together.turns.rounds == 3
    for name, state in together.end().items():
        assert_same_bits(state, states[name])


def test_models_share_a_round_with_one_operation_each_and_large_ones_have_their_own() -> None:
    sizes = {"a1": 39, "a2": 20, "b1": 30, "a3": 5, "c1": 31, "b2": 1}
    passes: Any = [SimpleNamespace(model_id=name[0], tokens=size, name=name) for name, size in sizes.items()]

    def rounds(shared_tokens: int) -> list[list[str]]:
        done: Any = rounds_of(passes, shared_tokens=shared_tokens)
        return [[each.name for each in together] for together in done]

    assert rounds(39) == [["a1", "b1", "c1"], ["a2", "b2"], ["a3"]]
    assert rounds(30) == [["b1"], ["a1"], ["c1"], ["a2", "b2"], ["a3"]]
    assert rounds(0) == [["a1"], ["b1"], ["c1"], ["a2"], ["b2"], ["a3"]]
