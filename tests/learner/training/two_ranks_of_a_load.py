"""Loads a model in parts over the ranks, and whole on each: `two_ranks_of_a_load.py OUT MODEL KIND DTYPE LORA...`.

KIND is `policy` or `scores`; LORA the rank of adapters. Rank 0 forks rank 1. Each rank writes OUT/RANK.json: for each
model what differs between the two ways, and how many numbers the rank kept.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import nn

from learner.training.config import TrainingConfig
from learner.training.engine import TrainingEngine, sharder
from learner.training.models import new_policy, new_score_model
from learner.training.policy import PolicyModel, TextFiles, host_copy, write_model_directory
from learner.training.shards import is_sharded, own_part, part_of, whole_shape, whole_size
from tests.learner.training.engine_parts import CPU
from tests.learner.training.rank_processes import two_ranks


def opened(path: Path, kind: str, config: TrainingConfig, *, parts: bool) -> nn.Module:
    torch.manual_seed(3)
    shard = sharder(config) if parts else None
    if kind == "scores":
        return new_score_model(path, config=config, shard=shard)
    return new_policy(path, config=config, entropy=(False, False), adapted=config.lora.enabled, shard=shard)


def differences(found: nn.Module, whole: nn.Module) -> list[str]:
    """Names of what is not the same, bit by bit, in this rank's part of the model and in the whole one."""
    expected, parameters = dict(whole.named_parameters()), dict(found.named_parameters())
    wrong = [*expected.keys() ^ parameters.keys()]
    for name, parameter in parameters.items():
        value = part_of(expected[name].detach(), parameter)
        same = own_part(parameter).dtype == value.dtype and torch.equal(own_part(parameter), value)
        if not same or whole_shape(parameter) != expected[name].shape:
            wrong.append(name)
        if parameter.requires_grad != expected[name].requires_grad:
            wrong.append(f"{name}: requires_grad")
    buffers = dict(found.named_buffers())
    wrong += [
        name
        for name, value in whole.named_buffers()
        if value.dtype != buffers[name].dtype or not torch.equal(value, buffers[name])
    ]
    return wrong


def compared(path: Path, kind: str, config: TrainingConfig, *, export: Path | None) -> dict[str, object]:
    """Outcome of a load in parts; rank 0 writes the model that is put together of them to `export`."""
    try:
        found = opened(path, kind, config, parts=True)
    except (OSError, SafetensorError) as error:
        return {"error": str(error)}
    wrong = differences(found, opened(path, kind, config, parts=False))
    sharded = [each for each in found.parameters() if is_sharded(each)]
    sizes = {
        "kept": sum(own_part(each).numel() for each in sharded),
        "whole": sum(map(whole_size, sharded)),
        "of": sum(map(whole_size, found.parameters())),
    }
    engine: TrainingEngine[object] = TrainingEngine(found, config=config, device=CPU)
    snapshot = host_copy(engine, dtype=config.dtype, keep=export is not None)
    if export is not None and isinstance(found, PolicyModel):
        source = TextFiles(path)
        write_model_directory(snapshot, causal_lm=found.causal_lm, source=source, destination=export)
    engine.close()
    return {"wrong": wrong, **sizes}


def main() -> None:
    out, given = Path(sys.argv[1]), sys.argv[2:]
    seen = []
    with two_ranks() as (ranks, _):
        for path, kind, dtype, lora in zip(*(given[place::4] for place in range(4)), strict=True):
            settings = {"zero_stage": 3, "dtype": dtype, "lora": {"rank": int(lora)}}
            config = TrainingConfig.model_validate(settings)
            export = out / Path(path).name / dtype / lora if ranks.leads else None
            seen.append(compared(Path(path), kind, config, export=export))
        (out / f"{ranks.rank}.json").write_text(json.dumps(seen), encoding="utf-8")
        torch.distributed.barrier()


if __name__ == "__main__":
    main()
