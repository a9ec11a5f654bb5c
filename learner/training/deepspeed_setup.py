"""DeepSpeed as it is imported here: for this machine's accelerator, and quiet. The only module that imports it."""

from __future__ import annotations

import logging
import os
import warnings

import torch

# Read once, when deepspeed is imported; without it deepspeed probes for accelerators and may settle on a wrong one.
# What is set already may be wrong here: a rank computes where torch sees a GPU, and deepspeed has to do so, too.
os.environ["DS_ACCELERATOR"] = "cuda" if torch.cuda.is_available() else "cpu"

import deepspeed
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

__all__ = ["CHECKPOINT_TAG", "RECORDS", "deepspeed", "get_fp32_state_dict_from_zero_checkpoint", "quiet_deepspeed"]

RECORDS = (DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address)
"""The classes whose instances stand in DeepSpeed's files; all are plain records."""
CHECKPOINT_TAG = "deepspeed"
# DeepSpeed would compile a C++ extension for shared-memory reductions on first use; gloo needs none.
SHARED_MEMORY_EXTENSION = "deepspeed_shm_comm"


def quiet_deepspeed() -> None:
    """Turns off a compiler run at start, and warnings about aging parts of torch that a user cannot act on."""
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    deepspeed.ops.__compatible_ops__[SHARED_MEMORY_EXTENSION] = False
    warnings.filterwarnings("ignore", message=r"`torch\.", category=DeprecationWarning)
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\.", category=FutureWarning)
