"""DeepSpeed, behind typed methods.

DeepSpeed divides gradients by the number of ranks and by its own count of microbatches. Both are undone here: one
`update` moves the parameters by the gradient of the plain sum of every `backward` on every rank.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Generic, TypeVar, cast

import torch
from torch import Tensor, nn

from learner.training.alignment import AlignmentJudgement, GradientAlignment
from learner.training.config import AlignmentConfig, Offload, OptimizerConfig, TrainingConfig
from learner.training.deepspeed_setup import CHECKPOINT_TAG, deepspeed, quiet_deepspeed
from learner.training.deferred import DeferredFiles, Writes
from learner.training.finite import all_finite
from learner.training.muon import is_of_muon, muon_of
from learner.training.packing import PackedRow
from learner.training.ranks import raise_on_all
from learner.training.repartition import layout_now, take_up
from learner.training.saved_parts import layout_of
from learner.training.saved_states import optimizer_saved_in, refuse_foreign_pickles
from learner.training.sharded_load import Shard
from learner.training.shards import own_part
from services.costs import CostTally
from services.process import WrongSettings

Output_co = TypeVar("Output_co", covariant=True)
Result = TypeVar("Result")


def _deepspeed_config(
    config: TrainingConfig, *, optimizer: OptimizerConfig, zero_stage: int, fused: bool
) -> dict[str, object]:
    return {
        **_model_config(config),
        # Without ZeRO, DeepSpeed clips without reporting the norm, one parameter at a time: `update` does it instead.
        "gradient_clipping": optimizer.max_grad_norm if zero_stage else 0.0,
        "zero_optimization": {"stage": zero_stage, "overlap_comm": False, **_offload_config(config.offload)},
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        **_adamw_config(optimizer, fused=fused),
    }


def _sharding_config(config: TrainingConfig) -> dict[str, object]:
    """Of a model under ZeRO-3 that has no optimizer."""
    offload = {name: where for name, where in _offload_config(config.offload).items() if name == "offload_param"}
    # Nothing comes back to a weight within a pass that has no gradient: it is let go at once.
    sharding = {"stage": 3, "overlap_comm": False, "stage3_max_reuse_distance": 0, **offload}
    return {**_model_config(config), "zero_optimization": sharding}


def _model_config(config: TrainingConfig) -> dict[str, object]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "bf16": {"enabled": config.dtype == "bfloat16"},
        "steps_per_print": 2**31,
        "wall_clock_breakdown": False,
    }


def _offload_config(offload: Offload) -> dict[str, object]:
    # Pinned memory is what makes the copies to and from a GPU fast; without a GPU there is nothing to pin for.
    host = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    if offload == "none":
        return {}
    if offload == "optimizer":
        return {"offload_optimizer": host}
    return {"offload_optimizer": host, "offload_param": host}


def _adamw_config(optimizer: OptimizerConfig, *, fused: bool) -> dict[str, object]:
    """Empty for another optimizer, which DeepSpeed is given whole."""
    if optimizer.type != "adamw":
        return {}
    settings = {
        "lr": optimizer.learning_rate,
        "betas": (optimizer.beta1, optimizer.beta2),
        "eps": optimizer.epsilon,
        "weight_decay": optimizer.weight_decay,
        "torch_adam": True,
        # One threaded pass over the weights instead of eight; DeepSpeed's own would need a compiler at the first start.
        "fused": fused,
    }
    return {"optimizer": {"type": "AdamW", "params": settings}}


def _set_anew(optimizer: torch.optim.Optimizer, config: OptimizerConfig) -> None:
    """Has it work with the settings of this run again: a checkpoint brings those of the time when it was written."""
    for group in optimizer.param_groups:
        if is_of_muon(group):
            group.update(momentum=config.momentum, weight_decay=config.weight_decay)
        else:
            group.update(betas=(config.beta1, config.beta2), eps=config.epsilon, weight_decay=config.weight_decay)


def _fuse(optimizer: torch.optim.Optimizer) -> None:
    """Has AdamW work in one pass again after a checkpoint has brought the settings of a run that did not."""
    for group in optimizer.param_groups:
        if is_of_muon(group):
            continue
        group.update(fused=True, foreach=None)
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            if "step" in state:
                state["step"] = state["step"].to(parameter.device, torch.float32)


def sharder(config: TrainingConfig) -> Shard | None:
    """Shards a parameter as the engines of this config want it; None where they want it whole."""
    if config.zero_stage != 3:
        return None
    _prepare_deepspeed()
    owner: list[nn.Parameter] = []

    def shard(parameter: nn.Parameter) -> None:
        if owner:
            owner[0].convert_to_zero_parameters(param_list=[parameter])  # type: ignore[attr-defined]
        else:
            holder = nn.ParameterList([parameter])
            deepspeed.zero.Init(module=holder, config_dict_or_path=_sharding_config(config), dtype=parameter.dtype)
            owner.append(parameter)
        padding = parameter.ds_tensor[own_part(parameter).numel() :]  # type: ignore[attr-defined]
        padding.zero_()  # or it is whatever lay there, which need not be a number

    return shard


def _prepare_deepspeed() -> None:
    os.environ.setdefault("LOCAL_RANK", "0")
    quiet_deepspeed()


class OtherOptimizer(WrongSettings, ValueError):
    """A checkpoint is of a run with another optimizer, whose state this one cannot use."""


class EvaluationEngine:
    """A model that is never trained, under ZeRO-3 on this rank: a weight is whole only while a pass needs it.

    All ranks must make it, and call each method, at the same time.
    """

    def __init__(self, model: nn.Module, *, config: TrainingConfig, device: torch.device) -> None:
        _prepare_deepspeed()
        with contextlib.redirect_stdout(io.StringIO()):
            self._engine, *_ = deepspeed.initialize(
                model=_Pass(model.requires_grad_(False).to(device)),
                config=_sharding_config(config),
                dist_init_required=False,
            )
        self._engine.eval()

    def run(self, method: Callable[..., Result], *arguments: object, **named: object) -> Result:
        """The result of the model, or of a method of it, without gradient."""
        with torch.no_grad():
            return cast(Result, self._engine(method, *arguments, **named))

    def moved(self) -> None:
        """To be called after the ranks' parts have changed: small weights stay whole from pass to pass."""
        self._engine.optimizer.empty_partition_cache()

    def close(self) -> None:
        """Releases DeepSpeed's hooks and buffers."""
        self._engine.destroy()


class _Pass(nn.Module):
    """Root of an evaluated model: DeepSpeed takes a call of it for a whole pass, whichever method that runs."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, method: Callable[..., Result], *arguments: object, **named: object) -> Result:
        return method(*arguments, **named)


class TrainingEngine(Generic[Output_co]):
    """A model under DeepSpeed on this rank, whose `forward` returns an `Output_co`.

    A process group must exist before it is made. A process may have several, each with its own parameters, optimizer,
    learning rate and checkpoint folder. What `requires_grad` when it is made is trained, and nothing else.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        config: TrainingConfig,
        device: torch.device,
        optimizer: OptimizerConfig | None = None,
        alignment: AlignmentConfig | None = None,
    ) -> None:
        """`optimizer` is that of this model, where it is another than `config.optimizer`. Consecutive gradients are
        compared only with an `alignment`, so that those of a critic are not.

        Raises ValueError for a model that Muon cannot train, if that is the optimizer.
        """
        self._optimizer = optimizer or config.optimizer
        self._ranks = torch.distributed.get_world_size()
        # DeepSpeed's plain bfloat16 optimizer adds gradients up in bfloat16; its ZeRO-1 adds them up in float32.
        self._stage = max(config.zero_stage, 1) if config.dtype == "bfloat16" else config.zero_stage
        self._frozen = not all(parameter.requires_grad for parameter in model.parameters())
        # Of what is offloaded the CPU has the optimizer; on devices other than these torch has none that is fused.
        self._fused = config.offload != "none" or device.type in ("cpu", "cuda")
        _prepare_deepspeed()
        model = model.to(device)
        muon = muon_of(model, self._optimizer, fused=self._fused) if self._optimizer.type == "muon" else None
        with contextlib.redirect_stdout(io.StringIO()):  # it prints the memory in use, with no way to turn it off
            self._engine, *_ = deepspeed.initialize(
                model=model,
                optimizer=muon,
                model_parameters=[parameter for parameter in model.parameters() if parameter.requires_grad],
                config=_deepspeed_config(config, optimizer=self._optimizer, zero_stage=self._stage, fused=self._fused),
                dist_init_required=False,
            )
        self._model: nn.Module = self._engine.module
        self._trained = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        self._drops = [each for each in self._model.modules() if isinstance(each, nn.Dropout) and each.p > 0]
        self._alone = self._ranks == 1 and self._stage <= 1 and not hasattr(self._engine.optimizer, "reduce_gradients")
        if self._alone:
            # It would flatten all gradients, send them to nobody, and copy them back.
            self._engine.enable_backward_allreduce = False
        self.alignment: GradientAlignment | None = None
        """Of consecutive gradients; None where they are not compared."""
        if alignment is not None and alignment.enabled:
            assert self._stage < 3, "gradients in parts of parts: refused by TrainingConfig"
            whole = self._stage == 0 or self._keeps_whole_gradients
            self.alignment = GradientAlignment(alignment, parts=not whole)
        self.skipped = 0
        """Updates that were left out because their gradient was not finite; the same on every rank."""
        self.skipped_in_row = 0
        self.costs = CostTally(2)
        """Of forward passes, by 1 and by the tokens of each, of rows that ranks share this rank's own; a backward pass
        is as much as two.
        """
        self._tokens = 0.0
        self._shared_by = config.sequence_parallel

    @property
    def model(self) -> nn.Module:
        """The model itself. Under ZeRO-3 its parameters are empty outside of `forward` and `gathered`."""
        return self._model

    @property
    def zero_stage(self) -> int:
        """The ZeRO stage in use."""
        return self._stage

    def forward(self, *inputs: object) -> Output_co:
        """The model's output. A pass without gradient drops nothing, and so draws no number: it is of the model as it
        is published, and a replay that makes fewer such passes still trains with the same masks.
        """
        dropping = torch.is_grad_enabled()
        for module in self._drops:
            module.train(dropping)
        began = time.thread_time()
        output = cast(Output_co, self._engine(*inputs))
        row_tokens = next((len(each.token_ids) for each in inputs if isinstance(each, PackedRow)), 0)
        self._tokens = row_tokens / self._shared_by
        self.costs.add(time.thread_time() - began, 1, self._tokens)
        return output

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Adds the gradient of `loss`. `last`: no other microbatch follows before `update`.

        Gradients travel between ranks at the last one (ZeRO 0 and 1), or at each one (2 and 3, which keep only a
        shard).
        """
        began = time.thread_time()
        self._engine.set_gradient_accumulation_boundary(last)
        self._engine.backward(loss * self._ranks, scale_wrt_gas=False)
        each_s = (time.thread_time() - began) / 2  # as much as two forward passes
        for _ in range(2):
            self.costs.add(each_s, 1, self._tokens)

    @property
    def trained_sizes(self) -> list[int]:
        """Number of weights of each parameter that is trained, in the order of `gradients_beside`."""
        return [parameter.numel() for parameter in self._trained]

    def gradients_beside(self, loss_of: Callable[[Output_co], Tensor], *inputs: object) -> tuple[Tensor | None, ...]:
        """The gradient of a loss of the model's output by each parameter that is trained, on this rank alone.

        Neither a parameter's own gradient nor DeepSpeed hears of it, and nothing is dropped. Where the stage is 3 no
        parameter is whole.
        """
        assert self._stage < 3, "its weights are in parts: checked by LearnerConfig"
        for module in self._drops:
            module.train(False)
        loss = loss_of(cast(Output_co, self._model(*inputs)))
        return torch.autograd.grad(loss, self._trained, allow_unused=True)

    def update(self, *, learning_rate: float, divisor: float = 1.0) -> float:
        """Takes a step of the optimizer; gradients are 0 afterwards. Returns their global L2 norm before clipping, and
        before anything was taken off as aligned with the former one.

        Gradients are divided by `divisor` first. One whose norm is not finite moves nothing, neither weights nor the
        optimizer's means; it is counted. Nor does one that `alignment` skips.
        """
        for group in self._engine.optimizer.param_groups:
            group["lr"] = learning_rate
        remaining = self._divide(divisor)
        judged = self._examined()
        if judged.action == "skip":
            self.discard_gradients()
        else:
            norm = self._clip_and_step() if self._stage == 0 else self._step_sharded(remaining)
        if judged.action != "keep":
            norm = judged.norm / remaining
        made = math.isfinite(norm)
        self.skipped += not made
        self.skipped_in_row = 0 if made else self.skipped_in_row + 1
        return norm

    def _examined(self) -> AlignmentJudgement:
        """The decision on the gradient, which may be projected then; to keep it where gradients are not compared."""
        if self.alignment is None:
            return AlignmentJudgement(0.0)
        judged = self.alignment.examine(self._own_gradients())
        if judged.action == "project" and self._keeps_whole_gradients:
            # Of a weight without a gradient of its own it would leave what is taken off out of the norm.
            flags = self._engine.optimizer.fp32_groups_has_gradients
            flags[:] = [[True] * len(group) for group in flags]
        return judged

    def _divide(self, divisor: float) -> float:
        """Divides the gradients; returns what is left to divide them by, which ZeRO does in its step."""
        if self._stage and not self._keeps_whole_gradients:
            return divisor
        if self._alone and self._stage == 0:
            self._fill_in_gradients()
        if divisor != 1.0:
            torch._foreach_div_(self._own_gradients(), divisor)
        return 1.0

    @property
    def _keeps_whole_gradients(self) -> bool:
        """True of DeepSpeed's plain optimizer for bfloat16, which has no scale."""
        return hasattr(self._engine.optimizer, "fp32_groups_gradients_flat")

    def _own_gradients(self) -> list[Tensor]:
        """The gradient of an update in this rank's memory, over all ranks: all of it, or with ZeRO this rank's part."""
        if self._stage == 0:
            return [parameter.grad for parameter in self._trained if parameter.grad is not None]
        sharded = self._engine.optimizer
        if self._keeps_whole_gradients:
            return list(sharded.fp32_groups_gradients_flat)
        return [part for group in sharded.averaged_gradients.values() for part in group]

    def _step_sharded(self, divisor: float) -> float:
        sharded = self._engine.optimizer
        sharded.loss_scale = divisor  # as if each loss had been multiplied by it, which is undone here
        self._engine.step()  # under ZeRO it looks at the norm itself, and then says that it is infinite
        sharded.loss_scale = 1.0
        norm = float(self._engine.get_global_grad_norm() or 0.0)
        if not math.isfinite(norm):
            self.discard_gradients()  # of bfloat16 in host memory it would add the next ones to what it has left out
        return norm

    def _clip_and_step(self) -> float:
        norm = self._clip_unsharded()
        if math.isfinite(norm):
            self._engine.step()
        else:
            self.discard_gradients()
        return norm

    def _fill_in_gradients(self) -> None:
        """Gives zeros to what got no gradient, as DeepSpeed makes when it reduces: weights decay alike everywhere."""
        for parameter in self._model.parameters():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def _clip_unsharded(self) -> float:
        limit = self._optimizer.max_grad_norm
        norm = torch.nn.utils.get_total_norm(
            [parameter.grad for parameter in self._model.parameters() if parameter.grad is not None], foreach=True
        )
        if limit > 0:
            torch.nn.utils.clip_grads_with_norm_(self._model.parameters(), limit, norm, foreach=True)
        return float(norm)

    def discard_gradients(self) -> None:
        """Forgets gradients of an update that is abandoned."""
        self._engine.zero_grad()
        sharded = self._engine.optimizer
        sharded.zero_grad()
        for sums in (getattr(sharded, name, {}) for name in ("averaged_gradients", "all_grad_tensors")):
            sums.update(dict.fromkeys(sums))  # which ZeRO forgets after a step alone

    @contextmanager
    def gathered(self, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
        """Within it the parameters are whole on every rank. All ranks must enter it with the same ones."""
        if self._stage != 3:
            yield
            return
        with deepspeed.zero.GatheredParameters(list(parameters)):
            yield

    def master_weight(self, parameter: nn.Parameter) -> Tensor:
        """The float32 weight that the optimizer keeps, whole; of one that is not trained, the weight as it is.

        All ranks must call it with the same parameter, within `gathered`.
        """
        if self._stage == 0 or not parameter.requires_grad:
            return parameter.detach()
        weight: Tensor | None = deepspeed.utils.safe_get_full_fp32_param(parameter)
        assert weight is not None, "the optimizer has every parameter that is trained"
        return weight

    def own_master(self, parameter: nn.Parameter) -> Tensor:
        """This rank's part of the master weight of a parameter in parts, flat; of one that is not trained, of itself.

        Padding may follow it.
        """
        assert self._stage == 3, "only then are parameters in parts"
        if not parameter.requires_grad:
            return own_part(parameter)
        weight: Tensor | None = deepspeed.utils.safe_get_local_fp32_param(parameter)
        assert weight is not None, "the optimizer has every parameter that is trained"
        return weight.detach().reshape(-1)

    def has_finite_weights(self) -> bool:
        """True if this rank's part of the weights is finite."""
        return all(all_finite(own_part(parameter)) for parameter in self._model.parameters())

    def save(self, directory: Path, *, later: DeferredFiles | None = None) -> None:
        """Writes what is trained of the model, and the optimizer, each rank its part; or has them written `later`.

        Raises OSError on every rank if one of them could not write.
        """
        with _deferred_writes(self._engine, later) as writes:
            self._engine.save_checkpoint(
                str(directory), tag=CHECKPOINT_TAG, save_latest=False, exclude_frozen_parameters=self._frozen
            )
        raise_on_all(writes.error, directory=directory)

    def load(self, directory: Path) -> None:
        """Reads what `save` wrote, also with another number of ranks, ZeRO stage or type of the weights.

        Weights that are not trained stay as they are. Raises FileNotFoundError, and ValueError for files with more in
        them than tensors and DeepSpeed's own records; OtherOptimizer and OtherWeights for those of a run with others.
        """
        refuse_foreign_pickles(directory)
        self._check_optimizer(directory)
        written = layout_of(directory)
        if written is None:
            raise FileNotFoundError(f"no DeepSpeed checkpoint in {directory}: expected {directory / CHECKPOINT_TAG}")
        if written == layout_now(self._engine):
            self._engine.load_checkpoint(str(directory), tag=CHECKPOINT_TAG, load_module_strict=not self._frozen)
        else:
            take_up(self._engine, directory)
        _set_anew(self._engine.basic_optimizer, self._optimizer)
        sharded = self._engine.optimizer
        if hasattr(sharded, "clip_grad"):  # of stages 1 and 2 a checkpoint brings the limit, too
            sharded.clip_grad = self._optimizer.max_grad_norm
        if self._fused:
            _fuse(self._engine.basic_optimizer)

    def _check_optimizer(self, directory: Path) -> None:
        found, expected = optimizer_saved_in(directory), self._optimizer.type
        if found is not None and found != expected:
            raise OtherOptimizer(
                f"{directory} is of a run whose optimizer is {found}, and optimizer.type is {expected} now: a "
                f"checkpoint holds the optimizer's own state, which no other one can use. Set optimizer.type to "
                f"{found}, or begin a new run from the exported model"
            )

    def close(self) -> None:
        """Releases DeepSpeed's hooks and buffers."""
        self._engine.destroy()


@contextmanager
def _deferred_writes(engine: deepspeed.DeepSpeedEngine, later: DeferredFiles | None) -> Iterator[Writes]:
    """Within it an error of the disk is kept: the ranks meet several times in a save, and none may stay away.

    What is to be written `later` is copied.
    """
    writes = Writes()
    storage = engine.checkpoint_engine
    write = storage.save

    def copy(state_dict: object, path: str) -> None:
        assert later is not None, "asked for by the caller"
        later.put(write, state_dict, path)

    save = write if later is None else copy
    storage.save, storage.makedirs = writes.deferring(save), writes.deferring(storage.makedirs)
    engine._copy_recovery_script = writes.deferring(engine._copy_recovery_script)
    try:
        yield writes
    finally:
        del storage.save, storage.makedirs, engine._copy_recovery_script


def learning_rate(config: OptimizerConfig, *, update: int) -> float:
    """The learning rate of update number `update`, counted from 0.

    Rises linearly to the peak, which update `warmup_updates` is the first to use. Then, with w the warm-up and t the
    total:

    - `constant` stays.
    - `linear` and `cosine` fall along a line or half a cosine to `final_fraction` of the peak at t.
    - `inverse_sqrt` falls as sqrt((w + 1) / (update + 1)) (arXiv 1706.03762).
    - `wsd` stays, and falls along a line to `final_fraction` over the last `decay_updates` (arXiv 2404.06395).
    """
    if update < config.warmup_updates:
        return config.learning_rate * (update + 1) / (config.warmup_updates + 1)
    if config.schedule == "constant":
        return config.learning_rate
    if config.schedule == "inverse_sqrt":
        return config.learning_rate * math.sqrt((config.warmup_updates + 1) / (update + 1))
    remaining = 1.0 - _fallen(config, update=update)
    if config.schedule == "cosine":
        remaining = 0.5 * (1.0 - math.cos(math.pi * remaining))
    return config.learning_rate * (config.final_fraction + (1.0 - config.final_fraction) * remaining)


def _fallen(config: OptimizerConfig, *, update: int) -> float:
    """Share of the fall that is done, from 0 to 1."""
    assert config.total_updates is not None, "validated by OptimizerConfig"
    span = config.decay_updates or max(config.total_updates - config.warmup_updates, 1)
    return min(max((update - config.total_updates + span) / span, 0.0), 1.0)
