import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from learner.training.ranks import CommandChannel, Ranks
from tests.learner.training.engine_parts import LORA, config_with
from tests.learner.training.tiny_model import write_tiny_llama
from tests.learner.training.two_ranks_of_parts import train

SCRIPT = Path(__file__).parent / "two_ranks_of_parts.py"
ROOT = Path(__file__).parents[3]
EMA = {"mode": "ema", "decay": 0.5}
REFRESH = {"mode": "refresh", "every_steps": 2}
CASES: tuple[dict[str, object], ...] = (
    {"zero_stage": 0, "lora": LORA},
    {"zero_stage": 1, "reference": EMA, "offload": "optimizer"},
    {"zero_stage": 2, "lora": LORA, "reference": REFRESH},
    {"zero_stage": 3, "lora": LORA},
    {"zero_stage": 3, "lora": LORA, "reference": EMA, "offload": "all"},
    {"zero_stage": 3, "reference": REFRESH, "gradient_checkpointing": True},
    {"zero_stage": 3, "reference": EMA, "offload": "optimizer"},
)


@pytest.mark.timeout(700)
def test_two_ranks_train_adapters_references_and_offloaded_optimizers_like_one(
    commands: CommandChannel, tmp_path: Path
) -> None:
    # The MLP's matrices are 64 x 1600: above the 100,000 elements up to which ZeRO-3 keeps a parameter whole.
    model = write_tiny_llama(tmp_path / "model", tied=True, intermediate=1600)
    (tmp_path / "two").mkdir()
    (tmp_path / "one").mkdir()
    texts = [config_with(**case).model_dump_json(exclude_none=True) for case in CASES]
    argv = [sys.executable, str(SCRIPT), str(model), str(tmp_path / "two"), *texts]
    subprocess.run(argv, check=True, timeout=500, env={**os.environ, "PYTHONPATH": str(ROOT)})
    for number, case in enumerate(CASES):
        plain = config_with(**{key: case[key] for key in ("lora", "reference") if key in case})
        train(model, tmp_path / "one", config=plain, ranks=Ranks(), name=str(number))
        seen = load_file(tmp_path / "two" / f"{number}.safetensors")
        expected = load_file(tmp_path / "one" / f"{number}.safetensors")
        assert set(seen) == set(expected)
        for name, value in seen.items():
            torch.testing.assert_close(
                value, expected[name], rtol=0, atol=2e-5, msg=partial("{}: {}: {}".format, case, name)
            )
        for name in [name for name in seen if name.startswith("trained.")]:
            resumed = seen[name.replace("trained.", "resumed.")]
            torch.testing.assert_close(resumed, seen[name], rtol=0, atol=1e-6)
