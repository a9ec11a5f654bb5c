"""What a user can set about training. Loads no torch."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Dtype = Literal["float32", "bfloat16"]
Schedule = Literal["constant", "linear", "cosine"]


class OptimizerConfig(BaseModel):
    """AdamW (arXiv 1711.05101) and the schedule of its learning rate."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    learning_rate: float = Field(1e-5, gt=0, description="Peak learning rate of AdamW.")
    schedule: Schedule = Field("constant", description="Shape of the learning rate after the warm-up.")
    warmup_updates: int = Field(0, ge=0, description="Updates over which the learning rate rises linearly from 0.")
    total_updates: int | None = Field(
        None,
        gt=0,
        description="Updates after which linear and cosine have reached final_fraction. Required by those two.",
    )
    final_fraction: float = Field(
        0.0, ge=0, le=1, description="Share of learning_rate left at the end of linear or cosine."
    )
    beta1: float = Field(0.9, ge=0, lt=1, description="Decay of AdamW's mean of gradients, per update.")
    beta2: float = Field(0.95, ge=0, lt=1, description="Decay of AdamW's mean of squared gradients, per update.")
    epsilon: float = Field(1e-8, gt=0, description="Added to AdamW's denominator.")
    weight_decay: float = Field(0.0, ge=0, description="Decoupled weight decay, per update and unit of learning rate.")
    max_grad_norm: float = Field(
        1.0, ge=0, description="Gradients are scaled down to this global L2 norm. 0 turns it off."
    )

    @model_validator(mode="after")
    def _refuse_unused_knobs(self) -> OptimizerConfig:
        if self.schedule == "constant" and self.total_updates is not None:
            raise ValueError("total_updates is set but schedule is constant, which has no end. Remove one of them.")
        if self.schedule != "constant" and self.total_updates is None:
            raise ValueError(
                f"schedule is {self.schedule}, which needs total_updates. Set it to the updates of the run."
            )
        return self


class TrainingConfig(BaseModel):
    """How the training step is computed."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig, description="AdamW and its learning rate.")
    zero_stage: Literal[0, 1, 2, 3] = Field(
        0, description="DeepSpeed ZeRO stage: over the ranks, shard nothing, optimizer, gradients too, parameters too."
    )
    dtype: Dtype = Field(
        "float32", description="Type of the forward and backward pass. The optimizer works in float32."
    )
    publish_dtype: Dtype = Field("float32", description="Type of the published weights.")
    temperature: float = Field(1.0, gt=0, description="Logits are divided by it, as in sampling.")
    microbatch_tokens: int = Field(16384, gt=0, description="Most tokens in one forward pass of one rank.")
    updates_per_step: int = Field(1, ge=1, description="Optimizer updates that a step's batch is cut into.")
    gradient_checkpointing: bool = Field(
        False, description="Recompute activations in the backward pass to save memory."
    )
    logprob_chunk_tokens: int = Field(1024, gt=0, description="Tokens whose logits are held at once.")
    logprob_chunk_vocabulary: int = Field(65536, gt=0, description="Vocabulary entries whose logits are held at once.")
    report_entropy: bool = Field(True, description="Compute the policy's mean entropy over the trained tokens.")
    collective_timeout_s: float = Field(
        600.0,
        gt=0,
        description="Seconds after which a collective among the ranks fails because one of them is missing.",
    )
