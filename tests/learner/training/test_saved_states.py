"""A checkpoint's pickles are read as tensors and records; what would run code is refused before it does."""

import os
from pathlib import Path

import pytest
import torch

from learner.training.config import Offload
from learner.training.ranks import CommandChannel
from learner.training.saved_parts import saved_weights
from learner.training.saved_states import refuse_foreign_pickles
from tests.learner.training.engine_parts import LORA, config_with, open_parts, update
from tests.learner.training.test_engine import STEPS


class Command:
    """Unpickled, it runs a command."""

    def __init__(self, witness: Path) -> None:
        self.witness = witness

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch {self.witness}",)


@pytest.mark.parametrize("stage", [0, 3])
def test_code_in_a_checkpoint_is_refused_and_never_run(
    tied_llama: Path, commands: CommandChannel, tmp_path: Path, stage: int
) -> None:
    parts = open_parts(tied_llama, config_with(zero_stage=stage))
    update(parts, STEPS[0])
    parts.engine.save(tmp_path / "saved")
    path = next((tmp_path / "saved").rglob("*_model_states.pt"))
    states = torch.load(path, weights_only=True, map_location="cpu")
    witness = tmp_path / "ran"
    torch.save({**states, "more": Command(witness)}, path)

    with pytest.raises(ValueError, match=r"_model_states\.pt was not loaded: .*system") as refused:
        parts.engine.load(tmp_path / "saved")
    assert "weights_only" not in str(refused.value), "torch's advice is to let it in"
    with pytest.raises(ValueError, match="was not loaded"):
        saved_weights(tmp_path / "saved")
    parts.engine.close()
    assert not witness.exists()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("stage", "offload"), [(0, "none"), (1, "optimizer"), (2, "none"), (3, "all")])
@pytest.mark.parametrize("lora", [{}, LORA], ids=["whole", "lora"])
def test_what_deepspeed_writes_needs_no_code(
    tied_llama: Path, commands: CommandChannel, tmp_path: Path, dtype: str, stage: int, offload: Offload, lora: object
) -> None:
    parts = open_parts(tied_llama, config_with(dtype=dtype, zero_stage=stage, offload=offload, lora=lora))
    update(parts, STEPS[0])
    parts.engine.save(tmp_path)
    refuse_foreign_pickles(tmp_path)
    parts.engine.load(tmp_path)
    parts.engine.close()
