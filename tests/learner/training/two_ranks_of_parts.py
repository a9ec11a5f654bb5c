"""Adapters, references, offload and publish on two ranks: `two_ranks_of_parts.py MODEL OUT CONFIG...`.

Every rank runs `train` with each config, a training config as JSON, on its share of the sequences; rank 0 writes what
it saw to files below OUT, named by the config's number. Rank 0 forks rank 1. `train` with one rank and all of the
sequences gives what is expected.
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from learner.training.config import LoraConfig, TrainingConfig
from learner.training.deferred import DeferredFiles
from learner.training.policy import host_copy
from learner.training.ranks import Ranks
from learner.training.reference import Reference, open_reference
from tests.learner.training.engine_parts import Parts, frozen_policy, microbatch, open_parts, update
from tests.learner.training.rank_processes import two_ranks
from tests.learner.training.tiny_model import random_sequences

ROW = microbatch(random_sequences(8, seed=9))
SHARDED = "causal_lm.model.layers.0.mlp.up_proj.weight"


def train(model: Path, out: Path, *, config: TrainingConfig, ranks: Ranks, name: str) -> None:
    """Two steps, a checkpoint beside a third step; then the third once more from the checkpoint."""
    parts = open_parts(model, config)
    reference = open_reference(
        parts.policy,
        engine=parts.engine,
        config=config,
        load=lambda: frozen_policy(model, config.model_copy(update={"lora": LoraConfig()})),
    )
    if config.zero_stage == 3:
        sharded = "causal_lm.model.layers.0.mlp.up_proj.base_layer.weight" if config.lora.enabled else SHARDED
        assert parts.policy.get_parameter(sharded).numel() == 0
    for seed in (1, 2):
        step(parts, reference, ranks, seed=seed)
    folder = out / f"{name}_checkpoint"
    folder.mkdir(exist_ok=True)
    files = DeferredFiles()
    parts.engine.save(folder, later=files)
    reference.save(folder, leads=ranks.leads, later=files)
    step(parts, reference, ranks, seed=3)
    assert files.write() is None
    torch.distributed.barrier()
    seen = outcome(parts, reference, ranks, label="trained")
    parts.engine.load(folder)
    reference.load(folder)
    step(parts, reference, ranks, seed=3)
    seen |= outcome(parts, reference, ranks, label="resumed")
    if ranks.leads:
        save_file(seen, out / f"{name}.safetensors")
    parts.engine.close()


def step(parts: Parts, reference: Reference, ranks: Ranks, *, seed: int) -> None:
    reference.logprobs(ROW)  # a pass before the policy's own, as a step with a penalty makes it
    update(parts, random_sequences(8, seed=seed)[ranks.rank :: ranks.count])
    reference.after_step()


def outcome(parts: Parts, reference: Reference, ranks: Ranks, *, label: str) -> dict[str, Tensor]:
    snapshot = host_copy(parts.engine, dtype="float32", keep=ranks.leads)
    assert ranks.leads or not snapshot.tensors
    weights = {f"{label}.{tensor.name}": tensor.value for tensor in snapshot.tensors}
    return {**weights, f"{label}.reference": reference.logprobs(ROW)}


def main() -> None:
    model, out = Path(sys.argv[1]), Path(sys.argv[2])
    with two_ranks() as (ranks, _):
        for number, text in enumerate(sys.argv[3:]):
            config = TrainingConfig.model_validate_json(text)
            train(model, out, config=config, ranks=ranks, name=str(number))
        torch.distributed.barrier()


if __name__ == "__main__":
    main()
