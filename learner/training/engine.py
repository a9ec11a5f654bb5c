"""DeepSpeed, behind typed methods. The only module that imports it.

DeepSpeed divides gradients by the number of ranks and by its own count of microbatches. Both are undone here: one
`update` moves the parameters by the gradient of the plain sum of every `backward` on every rank.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

if not torch.cuda.is_available():
    # Read once, when deepspeed is imported; without it deepspeed probes for accelerators and may settle on a wrong one.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
from deepspeed.utils import safe_get_full_fp32_param

from learner.training.config import TrainingConfig

CHECKPOINT_TAG = "deepspeed"
# DeepSpeed would compile a C++ extension for shared-memory reductions on first use; gloo needs none.
SHARED_MEMORY_EXTENSION = "deepspeed_shm_comm"


def _deepspeed_config(config: TrainingConfig, *, zero_stage: int) -> dict[str, object]:
    optimizer = config.optimizer
    bf16 = config.dtype == "bfloat16"
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        # Without ZeRO, DeepSpeed clips without reporting the norm, one parameter at a time: `update` does it instead.
        "gradient_clipping": optimizer.max_grad_norm if zero_stage else 0.0,
        "zero_optimization": {"stage": zero_stage, "overlap_comm": False},
        "bf16": {"enabled": bf16},
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 2**31,
        "wall_clock_breakdown": False,
        "optimizer": {
            "type": "AdamW",
            "params": {
                "lr": optimizer.learning_rate,
                "betas": (optimizer.beta1, optimizer.beta2),
                "eps": optimizer.epsilon,
                "weight_decay": optimizer.weight_decay,
                "torch_adam": True,
            },
        },
    }


def _quiet_deepspeed() -> None:
    """Turns off a compiler run at start, and warnings about aging parts of torch that a user cannot act on."""
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    deepspeed.ops.__compatible_ops__[SHARED_MEMORY_EXTENSION] = False
    warnings.filterwarnings("ignore", message=r"`torch\.", category=DeprecationWarning)
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\.", category=FutureWarning)


class Engine:
    """One model under DeepSpeed on this rank. A process group must exist before it is made."""

    def __init__(self, model: nn.Module, *, config: TrainingConfig, device: torch.device) -> None:
        self._config = config
        self._ranks = torch.distributed.get_world_size()
        # DeepSpeed's plain bfloat16 optimizer adds gradients up in bfloat16; its ZeRO-1 adds them up in float32.
        self._stage = max(config.zero_stage, 1) if config.dtype == "bfloat16" else config.zero_stage
        os.environ.setdefault("LOCAL_RANK", "0")
        _quiet_deepspeed()
        with contextlib.redirect_stdout(io.StringIO()):  # it prints the memory in use, with no way to turn it off
            self._engine, *_ = deepspeed.initialize(
                model=model.to(device),
                model_parameters=[parameter for parameter in model.parameters() if parameter.requires_grad],
                config=_deepspeed_config(config, zero_stage=self._stage),
                dist_init_required=False,
            )
        self._model: nn.Module = self._engine.module

    @property
    def model(self) -> nn.Module:
        """The model itself. Under ZeRO-3 its parameters are empty outside of `forward` and `gathered`."""
        return self._model

    @property
    def zero_stage(self) -> int:
        """The ZeRO stage in use."""
        return self._stage

    def forward(self, *inputs: object) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The model's output."""
        output: tuple[Tensor, Tensor | None, Tensor | None] = self._engine(*inputs)
        return output

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Adds the gradient of `loss`. `last`: no other microbatch follows before `update`.

        Gradients travel between ranks at the last one (ZeRO 0 and 1), or at each one (2 and 3, which keep only a
        shard).
        """
        self._engine.set_gradient_accumulation_boundary(last)
        self._engine.backward(loss * self._ranks, scale_wrt_gas=False)

    def update(self, *, learning_rate: float) -> float:
        """One AdamW step; gradients are 0 afterwards. Returns their global L2 norm before clipping."""
        for group in self._engine.optimizer.param_groups:
            group["lr"] = learning_rate
        unsharded_norm = self._clip_unsharded()
        self._engine.step()
        if unsharded_norm is not None:
            return unsharded_norm
        return float(self._engine.get_global_grad_norm() or 0.0)

    def _clip_unsharded(self) -> float | None:
        if self._stage != 0:
            return None
        limit = self._config.optimizer.max_grad_norm
        norm = torch.nn.utils.get_total_norm(
            [parameter.grad for parameter in self._model.parameters() if parameter.grad is not None], foreach=True
        )
        if limit > 0:
            torch.nn.utils.clip_grads_with_norm_(self._model.parameters(), limit, norm, foreach=True)
        return float(norm)

    def discard_gradients(self) -> None:
        """Forgets gradients of an update that is abandoned."""
        self._engine.zero_grad()
        self._engine.optimizer.zero_grad()

    @contextmanager
    def gathered(self, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
        """Within it the parameters are whole on every rank. All ranks must enter it with the same ones."""
        if self._stage != 3:
            yield
            return
        with deepspeed.zero.GatheredParameters(list(parameters)):
            yield

    def master_weight(self, parameter: nn.Parameter) -> Tensor:
        """The float32 weight that the optimizer keeps, whole. All ranks must call it with the same parameter."""
        if self._stage == 0:
            return parameter.detach()
        weight: Tensor | None = safe_get_full_fp32_param(parameter)
        assert weight is not None, "every parameter is trained"
        return weight

    def save(self, directory: Path) -> None:
        """Writes model and optimizer, each rank its part."""
        self._engine.save_checkpoint(str(directory), tag=CHECKPOINT_TAG, save_latest=False)

    def load(self, directory: Path) -> None:
        """Reads what `save` wrote with the same number of ranks, ZeRO stage and types.

        DeepSpeed's checkpoints are pickles: load only what this learner wrote. Raises FileNotFoundError.
        """
        path, _ = self._engine.load_checkpoint(str(directory), tag=CHECKPOINT_TAG)
        if path is None:
            raise FileNotFoundError(f"no DeepSpeed checkpoint in {directory}: expected {directory / CHECKPOINT_TAG}")

    def close(self) -> None:
        """Releases DeepSpeed's hooks and buffers."""
        self._engine.destroy()
