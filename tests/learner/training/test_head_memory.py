import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.learner.training.head_memory import CHUNKING, LENGTH, SEQUENCES, VOCABULARY

ROOT = Path(__file__).parents[3]
FLOAT32_BYTES = 4


@pytest.mark.timeout(900)  # half a minute of arithmetic, which a busy machine may stretch
def test_a_training_step_never_holds_a_logit_of_every_token_and_every_word(tmp_path: Path) -> None:
    # The plain way holds at least the logits of all tokens: 8192 x 150,000 x 4 bytes, 4.9 GB.
    plain = SEQUENCES * LENGTH * VOCABULARY * FLOAT32_BYTES
    assert plain > 4.9e9
    argv = [sys.executable, str(ROOT / "tests/learner/training/head_memory.py"), str(tmp_path)]
    process = subprocess.run(
        argv, check=True, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    growth = int(process.stdout.split()[-1])
    # One chunk of logits there must have been, or the measurement sees nothing.
    assert growth > CHUNKING.tokens * CHUNKING.vocabulary * FLOAT32_BYTES
    assert growth < 1.5e9
