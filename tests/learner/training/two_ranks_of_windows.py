"""A model with windows on two ranks: `two_ranks_of_windows.py MODEL OUT STAGE...`.

At each ZeRO stage the model is checked as at load, right and with its windows lost, and every rank computes logprobs of
a row; rank 0 writes what it saw to files below OUT, named by the stage. Rank 0 forks rank 1.
"""

import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from learner.training import attention
from learner.training.batch import flatten
from learner.training.packing import Microbatch, pack, shared_prefixes
from learner.training.self_check import check_policy
from tests.learner.training.engine_parts import Parts, config_with, logprobs, open_parts
from tests.learner.training.rank_processes import two_ranks
from tests.learner.training.tiny_model import random_sequences

SEQUENCES = random_sequences(8, seed=9)
SHARDED = "causal_lm.model.layers.0.mlp.up_proj.weight"


def row() -> Microbatch:
    """All sequences in one, in order."""
    batch = flatten(SEQUENCES)
    return pack(batch, np.arange(len(SEQUENCES)), prefixes=shared_prefixes(batch))


def seen(parts: Parts, model: Path) -> dict[str, Tensor]:
    """The logprobs and the gap of the check, which no rank passes without the windows."""

    def compute(given: Microbatch) -> Tensor:
        return logprobs(parts, given)

    gap = check_policy(parts.policy, model, compute=compute)
    with (
        mock.patch.object(attention, "_window_of", return_value=None),
        pytest.raises(ValueError, match="computes several sequences together otherwise"),
    ):
        check_policy(parts.policy, model, compute=compute)
    with torch.no_grad():
        return {"logprobs": logprobs(parts, row()).contiguous(), "gap": torch.tensor(gap.found)}


def main() -> None:
    model, out = Path(sys.argv[1]), Path(sys.argv[2])
    with two_ranks() as (ranks, _):
        for stage in sys.argv[3:]:
            parts = open_parts(model, config_with(zero_stage=int(stage)))
            assert (parts.policy.get_parameter(SHARDED).numel() == 0) == (stage == "3")
            found = seen(parts, model)
            if ranks.leads:
                save_file(found, out / f"{stage}.safetensors")
            parts.engine.close()
        torch.distributed.barrier()


if __name__ == "__main__":
    main()
