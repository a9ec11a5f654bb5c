"""The settings of training, and the learning rate as a function of the update's number. Loads no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from services.config.models import ConfigModel

Dtype = Literal["float32", "bfloat16"]
OptimizerType = Literal["adamw", "muon"]
HeadDtype = Literal["model", "float32"]
Schedule = Literal["constant", "linear", "cosine", "inverse_sqrt", "wsd"]
Offload = Literal["none", "optimizer", "all"]
ALL_LINEAR = "all-linear"


class OptimizerConfig(BaseModel):
    """AdamW (arXiv 1711.05101), or Muon (arXiv 2502.16982) beside it, and the schedule of the learning rate."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    type: OptimizerType = Field(
        "adamw",
        description="The optimizer: adamw for all weights, or muon for the matrices of the decoder's layers and adamw "
        "for the others (embeddings, output head, norms, biases). muon needs dtype float32 and zero_stage 0, and takes "
        "neither LoRA nor stacked experts.",
    )
    learning_rate: float = Field(1e-5, gt=0, description="Peak learning rate, of adamw and muon alike.")
    schedule: Schedule = Field("constant", description="Shape of the learning rate after the warm-up.")
    warmup_updates: int = Field(0, ge=0, description="Updates over which the learning rate rises linearly from 0.")
    total_updates: int | None = Field(
        None,
        gt=0,
        description="Updates after which linear, cosine and wsd have reached final_fraction. Required by those three.",
    )
    decay_updates: int | None = Field(
        None, gt=0, description="Updates at the end of wsd over which the learning rate falls. Required by wsd."
    )
    final_fraction: float = Field(
        0.0, ge=0, le=1, description="Share of learning_rate left at the end of linear, cosine or wsd."
    )
    beta1: float = Field(0.9, ge=0, lt=1, description="Decay of AdamW's mean of gradients, per update.")
    beta2: float = Field(0.95, ge=0, lt=1, description="Decay of AdamW's mean of squared gradients, per update.")
    epsilon: float = Field(1e-8, gt=0, description="Added to AdamW's denominator.")
    momentum: float = Field(0.95, ge=0, lt=1, description="With muon: decay of its mean of gradients, per update.")
    weight_decay: float = Field(0.0, ge=0, description="Decoupled weight decay, per update and unit of learning rate.")
    max_grad_norm: float = Field(
        1.0, ge=0, description="Gradients are scaled down to this global L2 norm. 0 turns it off."
    )

    @model_validator(mode="after")
    def _a_momentum_for_muon_alone(self) -> OptimizerConfig:
        if self.type != "muon" and self.momentum != type(self).model_fields["momentum"].default:
            raise ValueError(
                f"momentum is set but type is {self.type}: only muon uses it; adamw has beta1. Remove it, or set type."
            )
        return self

    @model_validator(mode="after")
    def _an_end_where_the_schedule_has_one(self) -> OptimizerConfig:
        endless = self.schedule in ("constant", "inverse_sqrt")
        if endless and self.total_updates is not None:
            raise ValueError(
                f"total_updates is set but schedule is {self.schedule}, which has no end. Remove one of them."
            )
        if endless and self.final_fraction:
            raise ValueError(
                f"final_fraction is set but schedule is {self.schedule}, which has no end. Remove one of them."
            )
        if not endless and self.total_updates is None:
            raise ValueError(
                f"schedule is {self.schedule}, which needs total_updates. Set it to the updates of the run."
            )
        return self

    @model_validator(mode="after")
    def _a_decay_for_wsd_alone(self) -> OptimizerConfig:
        if self.schedule != "wsd" and self.decay_updates is not None:
            raise ValueError(f"decay_updates is set but schedule is {self.schedule}: only wsd uses it. Remove it.")
        if self.schedule == "wsd" and self.decay_updates is None:
            raise ValueError("schedule is wsd, which needs decay_updates. Set it to a tenth of total_updates, say.")
        if self.total_updates is not None and self.warmup_updates + (self.decay_updates or 0) > self.total_updates:
            raise ValueError(
                f"warmup_updates {self.warmup_updates} and decay_updates {self.decay_updates or 0} do not fit into "
                f"total_updates {self.total_updates}: their sum may at most equal it."
            )
        return self


class LoraConfig(BaseModel):
    """Low-rank adapters (LoRA, arXiv 2106.09685): only scale * up @ down is trained, on top of frozen weights."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    rank: int = Field(0, ge=0, description="Rank of the adapters. 0 turns LoRA off, and every weight is trained.")
    alpha: float = Field(32.0, gt=0, description="The adapters are scaled by alpha / rank.")
    dropout: float = Field(0.0, ge=0, lt=1, description="Share of the adapters' inputs that is dropped in training.")
    targets: tuple[str, ...] = Field(
        (ALL_LINEAR,),
        min_length=1,
        description=f"Names of the linear layers that are adapted, such as q_proj; {ALL_LINEAR} is all of the "
        "decoder's, and each expert of a mixture. Embeddings, routers and the output projection are never adapted.",
    )

    @model_validator(mode="after")
    def _refuse_unused_knobs(self) -> LoraConfig:
        fields = ("alpha", "dropout", "targets")
        unused = [name for name in fields if getattr(self, name) != type(self).model_fields[name].default]
        if self.rank == 0 and unused:
            raise ValueError(f"{', '.join(unused)} set but rank is 0, which turns LoRA off. Set rank, 16 say.")
        if ALL_LINEAR in self.targets and len(self.targets) > 1:
            raise ValueError(
                f"targets has {ALL_LINEAR} and other names: {ALL_LINEAR} is all of them. Use one or other."
            )
        return self

    @property
    def enabled(self) -> bool:
        """True if adapters are trained instead of the weights."""
        return self.rank > 0


class RouterConfig(BaseModel):
    """Training of the routers of a mixture of experts."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    aux_loss_coef: float = Field(
        0.0,
        ge=0,
        description="Weight of the load-balancing loss (arXiv 2101.03961), beside that of the algorithm; a model's own "
        "config says what it was pretrained with, as router_aux_loss_coef. Above 0 an update of several microbatches "
        "costs a forward pass more. 0 turns it off.",
    )
    replay: Literal["auto", "on", "off"] = Field(
        "auto",
        description="Whether routers take the experts that generators sent tokens to, in place of their own choice, "
        "with weights of their own: wherever model and generators can (auto), off, or on, which refuses a model that "
        "cannot.",
    )


class ReferenceConfig(BaseModel):
    """The frozen policy that a KL penalty or a preference loss compares with."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    mode: Literal["initial", "ema", "refresh"] = Field(
        "initial",
        description="The reference: the initial model, a moving average of the policy's weights (ema), or a copy of "
        "the policy taken every so many steps (refresh).",
    )
    decay: float = Field(
        0.99, ge=0, lt=1, description="With ema, per step: reference = decay * reference + (1 - decay) * policy."
    )
    every_steps: int = Field(100, ge=1, description="With refresh: steps between two copies of the policy.")

    @model_validator(mode="after")
    def _refuse_unused_knobs(self) -> ReferenceConfig:
        for name, mode in (("decay", "ema"), ("every_steps", "refresh")):
            if self.mode != mode and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name} is set but mode is {self.mode}: only {mode} uses it. Remove it, or set mode.")
        return self


class AlignmentConfig(BaseModel):
    """Cosine of consecutive gradients of what is trained, and its control (GAC, arXiv 2603.01501)."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    mode: Literal["off", "measure", "control"] = Field(
        "off",
        description="With measure, each update's gradient is compared with that of the update before, which takes a "
        "copy of it: 4 bytes for each trained weight. control also acts on the cosine.",
    )
    project_above: float = Field(
        0.2,
        ge=0,
        lt=1,
        description="With control: a gradient whose cosine is above loses as much of its part along the former one as "
        "brings the cosine down to this. A negative cosine is left as it is.",
    )
    skip_above: float = Field(
        0.9, gt=0, le=1, description="With control: an update whose cosine is above is left out. 1 turns it off."
    )
    max_skips_in_row: int = Field(
        4,
        ge=1,
        description="With control: updates in a row that may be left out; the next one is projected. Weights that stay "
        "would give such gradients for ever.",
    )

    @model_validator(mode="after")
    def _refuse_unused_knobs(self) -> AlignmentConfig:
        knobs = ("project_above", "skip_above", "max_skips_in_row")
        unused = [name for name in knobs if getattr(self, name) != type(self).model_fields[name].default]
        if self.mode != "control" and unused:
            raise ValueError(
                f"{unused[0]} is set but mode is {self.mode}: only control uses it. Remove it, or set mode to control."
            )
        if self.project_above > self.skip_above:
            raise ValueError(
                f"project_above is {self.project_above:g} and skip_above {self.skip_above:g}: expected the first to be "
                "at most the second, since what is skipped is not projected. Lower project_above, or raise skip_above."
            )
        return self

    @property
    def enabled(self) -> bool:
        """True if gradients are compared."""
        return self.mode != "off"


class CriticConfig(BaseModel):
    """PPO's critic."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    kind: Literal["model", "head"] = Field(
        "model", description="A model of its own, or a linear head on the policy's last hidden states."
    )
    model: Path | None = Field(
        None, description="Hugging Face directory that the critic starts from; the policy's initial model if left out"
    )
    trunk_gradient: float = Field(
        0.0,
        ge=0,
        description="With head: weight of the value loss in the gradient of the policy's layers below it. 0 "
        "detaches it.",
    )
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig, description="Optimizer of the critic alone.")
    warmup_steps: int = Field(0, ge=0, description="First steps in which the critic learns and the policy stays.")

    @model_validator(mode="after")
    def _refuse_unused_knobs(self) -> CriticConfig:
        if self.kind == "head" and self.model is not None:
            raise ValueError("model is set but kind is head, which stands on the policy. Remove model, or set kind.")
        if self.kind == "model" and self.trunk_gradient:
            raise ValueError(
                "trunk_gradient is set but kind is model, which shares no layers with the policy. Remove it, or set "
                "kind to head."
            )
        if self.kind == "head" and self.optimizer.type == "muon":
            raise ValueError(
                "optimizer.type is muon but kind is head, and a head has no hidden layers, which muon is for. Set "
                "optimizer.type to adamw, or kind to model."
            )
        return self


class TrainingConfig(BaseModel):
    """Computation of the training step."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig, description="Optimizer and learning rate.")
    zero_stage: Literal[0, 1, 2, 3] = Field(
        0, description="DeepSpeed ZeRO stage: over the ranks, shard nothing, optimizer, gradients too, parameters too."
    )
    offload: Offload = Field(
        "none",
        description="Kept in host memory instead of the GPU's: optimizer (its states and its update; needs "
        "zero_stage 1 or more), or all (parameters too; needs zero_stage 3).",
    )
    lora: LoraConfig = Field(default_factory=LoraConfig, description="Low-rank adapters.")
    router: RouterConfig = Field(default_factory=RouterConfig, description="Routers of a mixture of experts.")
    reference: ReferenceConfig = Field(default_factory=ReferenceConfig, description="The reference policy.")
    critic: CriticConfig = Field(default_factory=CriticConfig, description="The critic, of algorithms that have one.")
    alignment: AlignmentConfig = Field(default_factory=AlignmentConfig, description="Consecutive gradients.")
    head_seed: int = Field(0, ge=0, lt=1 << 63, description="Seed of a reward model's new head.")
    dtype: Dtype = Field(
        "float32", description="Type of the forward and backward pass. The optimizer works in float32."
    )
    head_dtype: HeadDtype = Field(
        "model",
        description="Type of the products with the output matrix, of which logits are made: dtype, or float32, in "
        "which bfloat16's products are added up before they are rounded. As generator.engine.head_dtype.",
    )
    publish_dtype: Dtype = Field(
        "float32",
        description="Type of the published weights. Adapters are merged in float32; bfloat16 then rounds the sum, and "
        "with it what the adapters add.",
    )
    temperature: float = Field(1.0, gt=0, description="Logits are divided by it, as in sampling.")
    microbatch_tokens: int = Field(16384, gt=0, description="Most tokens in one forward pass of one rank.")
    sequence_parallel: int = Field(
        1,
        ge=1,
        description="Ranks that share each row of sequences (DeepSpeed-Ulysses): each computes a part of its tokens, "
        "and within attention a part of the heads. A divisor of the ranks and of the model's attention heads. For "
        "sequences whose activations are too large for a rank.",
    )
    updates_per_step: int = Field(1, ge=1, description="Optimizer updates that a step's batch is cut into.")
    epochs_per_step: int = Field(
        1, ge=1, description="Times that a step's batch is gone through, each in updates_per_step updates."
    )
    partial_batches: bool = Field(
        False,
        description="Compute the gradient of a step's first groups while the others are still sampled, as soon as they "
        "fill a row of microbatch_tokens; the optimizer's step is taken when the batch is complete, and is the same. "
        "For algorithms that look at each group by itself, and one update a step.",
    )
    gradient_checkpointing: bool = Field(
        False, description="Recompute activations in the backward pass to save memory."
    )
    recompute_attention: bool = Field(
        True,
        description="With gradient_checkpointing: recompute attention, too. Otherwise its results are kept (selective "
        "checkpointing), which saves its forward pass, most of a long sequence's, for as much memory as a layer's "
        "inputs take.",
    )
    offload_activations: bool = Field(
        False,
        description="With gradient_checkpointing: keep the layers' inputs in host memory until the backward pass. "
        "Without a GPU they are there anyway.",
    )
    compile: bool = Field(
        False,
        description="Compile the layers of what is trained with torch.compile: faster on a GPU, after a minute at the "
        "start. For models without experts that take packed rows, with zero_stage 2 at most, where a C compiler is.",
    )
    logprob_chunk_tokens: int = Field(1024, gt=0, description="Tokens whose logits are held at once.")
    logprob_chunk_vocabulary: int = Field(65536, gt=0, description="Vocabulary entries whose logits are held at once.")
    report_entropy: bool = Field(True, description="Compute the policy's mean entropy over the trained tokens.")
    max_skipped_updates: int = Field(
        8,
        ge=1,
        description="Updates in a row that may be left out because their gradient is not finite; at so many the run "
        "ends with an error.",
    )
    collective_timeout_s: float = Field(
        600.0,
        gt=0,
        description="Seconds after which a collective among the ranks fails because one of them is late.",
    )
    rank_silence_s: float = Field(
        60.0,
        ge=2,
        description="Seconds without a sign of life after which a rank, such as one that hangs, is given up as lost; "
        "one that loads its model has collective_timeout_s.",
    )

    @property
    def moves_within_step(self) -> bool:
        """True if a step has updates after its first one, for which the policy is no longer that of its beginning."""
        return self.updates_per_step * self.epochs_per_step > 1

    @model_validator(mode="after")
    def _steps_that_can_begin_early(self) -> TrainingConfig:
        if not self.partial_batches:
            return self
        several = [name for name in ("updates_per_step", "epochs_per_step") if getattr(self, name) > 1]
        if several:
            raise ValueError(
                f"partial_batches is true and {several[0]} is {getattr(self, several[0])}: which update a group is "
                f"in is known of a whole batch alone: expected {several[0]} 1. Set it to 1, or leave partial_batches "
                "out."
            )
        if self.router.aux_loss_coef:
            raise ValueError(
                "partial_batches is true and router.aux_loss_coef is above 0: how evenly tokens are routed is known "
                "of a whole batch alone. Leave one of them out."
            )
        if self.offload != "none":
            raise ValueError(
                f"partial_batches is true and offload is {self.offload}: gradients in host memory cannot be taken "
                "back, as where a group of a batch is withdrawn: expected offload none. Leave one of them out."
            )
        return self

    @model_validator(mode="after")
    def _routers_that_are_trained(self) -> TrainingConfig:
        if self.router.aux_loss_coef and self.lora.enabled:
            raise ValueError(
                "router.aux_loss_coef is set and lora.rank is above 0: routers have no adapters, and stay as they are. "
                "Leave aux_loss_coef out, or set lora.rank to 0."
            )
        return self

    @model_validator(mode="after")
    def _matrices_that_are_whole_for_muon(self) -> TrainingConfig:
        keys = (("optimizer", self.optimizer), ("critic.optimizer", self.critic.optimizer))
        for key in [f"{prefix}.type" for prefix, config in keys if config.type == "muon"]:
            if self.zero_stage:
                raise ValueError(
                    f"{key} is muon and zero_stage is {self.zero_stage}: muon needs each matrix whole, and ZeRO gives "
                    f"a rank flat parts: expected zero_stage 0. Set zero_stage to 0, or {key} to adamw."
                )
            if self.dtype != "float32":
                raise ValueError(
                    f"{key} is muon and dtype is {self.dtype}, which trains with ZeRO stage 1, whose parts of weights "
                    f"are flat: muon needs each matrix whole: expected dtype float32. Set dtype, or {key} to adamw."
                )
        if self.optimizer.type == "muon" and self.lora.enabled:
            raise ValueError(
                "optimizer.type is muon and lora.rank is above 0: muon makes the update of a weight orthogonal, and an "
                "adapter is two factors, whose product's update would not be: expected adamw. Set optimizer.type to "
                "adamw, or lora.rank to 0."
            )
        return self

    @model_validator(mode="after")
    def _gradients_that_can_be_compared(self) -> TrainingConfig:
        mode = self.alignment.mode
        if mode == "off":
            return self
        if self.zero_stage == 3:
            raise ValueError(
                f"alignment.mode is {mode} and zero_stage is 3, which adds gradients up part by part and keeps none "
                "whole until its step: expected zero_stage 2 or less. Lower zero_stage, or set alignment.mode to off."
            )
        if self.offload != "none":
            raise ValueError(
                f"alignment.mode is {mode} and offload is {self.offload}, with which gradients lie in host memory, "
                "where they are not compared: expected offload none. Set offload to none, or alignment.mode to off."
            )
        if mode == "control" and self.optimizer.type == "muon":
            raise ValueError(
                "alignment.mode is control and optimizer.type is muon, which gives all directions of a matrix the same "
                "length, so that a part of a gradient that was made shorter would be as long again: expected adamw. "
                "Set optimizer.type to adamw, or alignment.mode to measure."
            )
        return self

    @model_validator(mode="after")
    def _activations_that_are_recomputed(self) -> TrainingConfig:
        given = None if self.recompute_attention else "recompute_attention is false"
        given = "offload_activations is true" if self.offload_activations else given
        if given and not self.gradient_checkpointing:
            raise ValueError(
                f"{given} and gradient_checkpointing is false, so all activations of layers are kept, on the device. "
                f"Set gradient_checkpointing to true, or leave {given.partition(' ')[0]} out."
            )
        return self

    @model_validator(mode="after")
    def _a_stage_that_compiles(self) -> TrainingConfig:
        if self.compile and not self.recompute_attention:
            raise ValueError(
                "compile is true and recompute_attention is false: what attention gives is told apart between kernels "
                "that torch runs one by one: expected recompute_attention true. Leave one of them out."
            )
        if self.compile and self.zero_stage == 3:
            raise ValueError(
                "compile is true and zero_stage is 3: a layer's parameters come and go between its kernels, which are "
                "compiled for whole ones: expected zero_stage 2 or less. Lower zero_stage, or leave compile out."
            )
        return self

    @model_validator(mode="after")
    def _a_stage_that_can_offload(self) -> TrainingConfig:
        # bfloat16 trains with stage 1 at least, since DeepSpeed's plain bfloat16 optimizer lacks float32 sums.
        stage = max(self.zero_stage, 1) if self.dtype == "bfloat16" else self.zero_stage
        needed = {"none": 0, "optimizer": 1, "all": 3}[self.offload]
        if stage < needed:
            raise ValueError(
                f"offload is {self.offload} and zero_stage is {self.zero_stage}: offload {self.offload} needs "
                f"zero_stage {needed}{' or more' if needed < 3 else ''}. Raise zero_stage, or set offload to none."
            )
        return self


class GuardConfig(ConfigModel):
    """Limits that lower the lag bound for a while. A measure without one is not looked at; KL is in nats a token."""

    enabled: bool = Field(True, description="whether the bound is lowered at all")
    min_effective_sample_share: float | None = Field(
        0.05, gt=0, lt=1, description="least effective sample size, as a share of the trained tokens"
    )
    max_behavior_kl: float | None = Field(
        1.0, gt=0, description="largest KL of the sampling policies to the learner's, over all trained tokens"
    )
    max_mismatch_kl: float | None = Field(
        0.1, gt=0, description="largest such KL where both hold the same weights, so that only numerics differ"
    )
    max_importance_ratio: float | None = Field(
        None, gt=1, description="largest importance ratio of a token; no limit if left out"
    )
    patience: int = Field(2, ge=1, description="steps in a row beyond a limit before the bound is halved")
    recovery_steps: int = Field(20, ge=1, description="healthy steps in a row before the bound rises by one version")
