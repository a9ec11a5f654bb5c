"""The configuration of reward models."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from services.config.models import ConfigModel


class RewardModelConfig(ConfigModel):
    """A reward model to be served: an entry of [[reward-service.reward_models]]."""

    name: str = Field("reward_model", min_length=1, max_length=256, description="name by which items ask for it")
    path: Path = Field(description="Hugging Face directory of a sequence-classification model with one label")
    device: str = Field("cpu", pattern=r"^(cpu|cuda(:\d+)?)$", description="where it runs: cpu, cuda or cuda:N")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="type of its weights; auto: as they were saved"
    )
    batch_size: int = Field(16, ge=1, le=512, description="most items in one batch, whichever requests they came with")
    batch_tokens: int = Field(
        16384, ge=1, description="most tokens, padding included, in one forward pass; a longer item has one of its own"
    )
    wait_s: float = Field(0.005, ge=0, description="how long an idle model waits for a batch to fill, in seconds")
    threads: int = Field(1, ge=1, description="CPU threads of its process")
    compute_timeout_s: float = Field(60.0, gt=0, description="seconds for one batch; then its process is killed")
    start_timeout_s: float = Field(300.0, gt=0, description="seconds for its process to load it")
    max_attempts: int = Field(2, ge=1, le=10, description="attempts at an item whose process dies")
