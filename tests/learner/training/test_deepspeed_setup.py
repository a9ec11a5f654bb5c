"""DeepSpeed's accelerator is the one that ranks compute on."""

import os
import subprocess
import sys

import pytest
import torch

ASKED = (
    "from learner.training.deepspeed_setup import deepspeed; "
    "print('found', deepspeed.accelerator.get_accelerator().device_name())"
)


@pytest.mark.parametrize("given", ["cpu", "cuda"])
def test_it_is_the_kind_that_torch_sees_whatever_the_environment_says(given: str) -> None:
    environment = {**os.environ, "DS_ACCELERATOR": given}
    done = subprocess.run(
        [sys.executable, "-c", ASKED], env=environment, capture_output=True, text=True, check=True, timeout=120
    )
    expected = "cuda" if torch.cuda.is_available() else "cpu"
    assert done.stdout.splitlines()[-1] == f"found {expected}"
