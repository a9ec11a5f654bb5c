"""Trains adapters of two clients on two ranks: `two_ranks_of_adapters.py MODEL OUT`, and `history` on one.

After the history some calls fail, on both ranks or on one.

Without RANK in the environment it is rank 0, which starts rank 1 and writes what it saw to OUT.
"""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from learner.algorithms.client_graphs import LossGraph
from learner.training.adapter_ranks import RankedAdapters, RanksApart, follow_adapters
from learner.training.adapter_trainer import AdapterTrainer
from learner.training.client_operations import AdamStep, Array, ForwardBackward, OperationError, OperationResult
from tests.learner.training.client_work import operation, shape_of, with_models
from tests.learner.training.rank_processes import two_started_ranks

ON_BOTH, ON_ONE = 0.25, 0.5
_GRAPHS = Path(__file__).parents[1] / "algorithms" / "client_graphs"


def history(trainer: AdapterTrainer | RankedAdapters) -> dict[str, Array]:
    """All that clients are told, and all that their models are, over rounds in which they meet and one fails."""
    seen: dict[str, Array] = {}
    one, two = with_models(trainer, 2)
    rounds: list[list[ForwardBackward]] = [
        [operation(one, 1), operation(two, 2, loss="ppo"), operation(one, 3, forward_only=True)],
        [_custom("squares", operation(two, 4)), operation(two, 5, width=3), _spoiled(operation(one, 6), 3e38)],
        [operation(one, 7), _spoiled(_custom("weighted", operation(two, 8)), -np.inf)],
        [operation(one, 9, lengths=(9,))],
    ]
    for number, asked in enumerate(rounds):
        _note(seen, f"{number}", trainer.run_round(asked))
        for name in (one, two):
            seen |= {f"{number}.{name}.{key}": value for key, value in trainer.state(name).items()}
        if number == 0:
            seen[f"{number}.norm"] = np.array(trainer.step(AdamStep(one, learning_rate=1e-2))["grad_norm:mean"])
    for name in (one, two):
        trainer.step(AdamStep(name, learning_rate=1e-2, grad_clip_norm=0.5))
    parked = trainer.state(two)
    trainer.remove(two)
    trainer.restore(two, shape_of(1), parked)
    _note(seen, "parked", trainer.run_round([operation(two, 10)]))
    seen |= {f"peft.{key}": value for key, value in trainer.peft(two)[0].items()}
    tokens = operation(two, 11).data[1].token_ids
    seen["drawn"] = trainer.draw(two, tokens, count=3, temperature=1.0, seed=5)[1]
    return seen


def _note(seen: dict[str, Array], place: str, results: Sequence[OperationResult | OperationError]) -> None:
    for number, result in enumerate(results):
        if isinstance(result, OperationError):
            seen[f"{place}.{number}.error"] = np.frombuffer(str(result).encode(), dtype=np.uint8)
            continue
        for name, value in result.metrics.items():
            seen[f"{place}.{number}.{name}"] = np.array(value)
        for datum, output in enumerate(result.outputs):
            seen[f"{place}.{number}.{datum}"] = output.arrays["logprobs"]


def _custom(name: str, of: ForwardBackward) -> ForwardBackward:
    told = json.loads((_GRAPHS / f"{name}.json").read_text(encoding="utf-8"))
    return replace(of, loss="custom", graph=LossGraph.parse(name=name, inputs=told["inputs"], graph=told["graph"]))


def _spoiled(of: ForwardBackward, weight: float) -> ForwardBackward:
    """The weights of its second datum, the longest, are all the same; that one lies on the second rank."""
    data = list(of.data)
    data[1] = replace(data[1], inputs={**data[1].inputs, "weights": np.full_like(data[1].inputs["weights"], weight)})
    return replace(of, data=tuple(data))


def _short_of_memory(own: AdapterTrainer, *, leads: bool) -> None:
    """A step of some learning rates finds no memory: of one on both ranks, of the other on rank 0 alone."""
    step = own.step

    def failing(asked: AdamStep) -> dict[str, float]:
        if asked.learning_rate == ON_BOTH or (leads and asked.learning_rate == ON_ONE):
            raise MemoryError("no memory")
        return step(asked)

    own.step = failing  # type: ignore[method-assign,assignment]


def _fail(ranked: RankedAdapters) -> None:
    """Failures on both ranks, or before the other is told, leave them together; those on one do not."""
    name = "model-0"
    for _ in range(2):
        _expect(MemoryError, lambda: ranked.step(AdamStep(name, learning_rate=ON_BOTH)))
    unpacked = replace(operation(name, 1), config={"epsilon": object()})  # type: ignore[dict-item]
    _expect(TypeError, lambda: ranked.run_round([unpacked]))
    _expect(AttributeError, lambda: ranked.restore(name, shape_of(0), {"steps": None}))  # type: ignore[dict-item]
    (done,) = ranked.run_round([operation(name, 1)])
    assert isinstance(done, OperationResult)
    ranked.step(AdamStep(name, learning_rate=1e-2))
    _expect(RanksApart, lambda: ranked.step(AdamStep(name, learning_rate=ON_ONE)))


def _expect(kind: type[Exception], work: Callable[[], object]) -> None:
    try:
        work()
    except kind:
        return
    raise AssertionError(f"no {kind.__name__}")


def main() -> None:
    model, out = Path(sys.argv[1]), Path(sys.argv[2])
    with two_started_ranks() as (ranks, commands):
        own = AdapterTrainer.open(model, name="tiny")
        if ranks.leads:
            ranked = RankedAdapters(own, commands)
            save_file(history(ranked), out)
            _short_of_memory(own, leads=True)
            _fail(ranked)
        else:
            _short_of_memory(own, leads=False)
            _expect(RanksApart, lambda: follow_adapters(own, commands))
            assert own.passes, "rank 1 has had rows of its own"


if __name__ == "__main__":
    main()
