"""The configuration of models of our own: reward models and encoders."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from reward_service.endpoints.config import CacheConfig
from services.config.models import ConfigModel


class LocalModelConfig(ConfigModel):
    """A model in a directory, which has a process of its own."""

    name: str = Field(min_length=1, max_length=256, description="name by which items ask for it")
    path: Path = Field(description="Hugging Face directory of the model")
    device: str = Field("cpu", pattern=r"^(cpu|cuda(:\d+)?)$", description="where it runs: cpu, cuda or cuda:N")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="type of its weights; auto: as they were saved"
    )
    threads: int = Field(1, ge=1, description="CPU threads of its process")
    compute_timeout_s: float = Field(60.0, gt=0, description="seconds for one batch; then its process is killed")
    start_timeout_s: float = Field(300.0, gt=0, description="seconds for its process to load it")


class RewardModelConfig(LocalModelConfig):
    """A reward model to be served: an entry of [[reward-service.reward_models]]."""

    name: str = Field("reward_model", min_length=1, max_length=256, description="name by which items ask for it")
    path: Path = Field(description="Hugging Face directory of a sequence-classification model with one label")
    chat_template: Path | None = Field(
        None,
        description="Jinja file of its chat template; its own if not given: run.chat_template is the policy's alone",
    )
    batch_size: int = Field(16, ge=1, le=512, description="most items in one batch, whichever requests they came with")
    batch_tokens: int = Field(
        16384, ge=1, description="most tokens, padding included, in one forward pass; a longer item has one of its own"
    )
    wait_s: float = Field(0.005, ge=0, description="how long an idle model waits for a batch to fill, in seconds")
    max_attempts: int = Field(2, ge=1, le=10, description="attempts at an item whose process dies")


class EncoderConfig(LocalModelConfig):
    """A similarity by a model in a directory, in a process of its own: an entry of [[reward-service.encoders]]."""

    path: Path = Field(description="Hugging Face directory of an encoder")
    pooling: Literal["mean", "first", "last"] = Field(
        "mean", description="which of a text's tokens give its embedding: all of them, the first or the last"
    )
    prefix: str = Field("", description="text before each text, for models that were trained with one: 'query: '")
    max_tokens: int = Field(512, ge=1, description="longest text, in tokens; a longer one is an error of the data")
    batch_texts: int = Field(32, ge=1, le=128, description="most texts in one forward pass")
    wait_s: float = Field(0.005, ge=0, le=1.0, description="how long texts are gathered for a batch, in seconds")
    keep_thinking: bool = Field(False, description="compare the completion's thought before </think>, too")
    cache: CacheConfig = CacheConfig(entries=2048)
