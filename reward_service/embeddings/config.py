"""What a user can set about a similarity of embeddings.

What a task may say to a similarity of embeddings.
"""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from reward_service.endpoints.config import CacheConfig, EndpointConfig
from services.config.models import ConfigModel


class EmbeddingConfig(EndpointConfig):
    """A similarity: an entry of [[reward-service.embeddings]]. `url` is that of the API, such as https://host/v1."""

    model: str = Field(min_length=1, description="name of the embedding model at the endpoint")
    prefix: str = Field("", description="text before each text, for models that were trained with one: 'query: '")
    batch_texts: int = Field(64, ge=1, le=2048, description="most texts in one request")
    wait_s: float = Field(0.005, ge=0, le=1.0, description="how long texts are gathered for a request, in seconds")
    keep_thinking: bool = Field(False, description="compare the completion's thought before </think>, too")
    extra: dict[str, JsonValue] = Field({}, description="more fields of the request, such as dimensions")
    cache: CacheConfig = CacheConfig(entries=2048)


class EncoderConfig(ConfigModel):
    """A similarity by a model in a directory, in a process of its own: an entry of [[reward-service.encoders]]."""

    name: str = Field(min_length=1, max_length=256, description="name by which items ask for it")
    path: Path = Field(description="Hugging Face directory of an encoder")
    device: str = Field("cpu", pattern=r"^(cpu|cuda(:\d+)?)$", description="where it runs: cpu, cuda or cuda:N")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="type of its weights; auto: as they were saved"
    )
    pooling: Literal["mean", "first", "last"] = Field(
        "mean", description="which of a text's tokens give its embedding: all of them, the first or the last"
    )
    prefix: str = Field("", description="text before each text, for models that were trained with one: 'query: '")
    max_tokens: int = Field(512, ge=1, description="longest text, in tokens; a longer one is an error of the data")
    batch_texts: int = Field(32, ge=1, le=128, description="most texts in one forward pass")
    wait_s: float = Field(0.005, ge=0, le=1.0, description="how long texts are gathered for a batch, in seconds")
    keep_thinking: bool = Field(False, description="compare the completion's thought before </think>, too")
    threads: int = Field(1, ge=1, description="CPU threads of its process")
    compute_timeout_s: float = Field(60.0, gt=0, description="seconds for one batch; then its process is killed")
    start_timeout_s: float = Field(300.0, gt=0, description="seconds for its process to load it")
    cache: CacheConfig = CacheConfig(entries=2048)


Text = Annotated[str, Field(min_length=1, max_length=1 << 20)]


class EmbeddingArguments(BaseModel):
    """What the completion is compared with."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    references: tuple[Text, ...] = Field(
        min_length=1, max_length=64, strict=False, description="texts that the completion should be close to in meaning"
    )
    pick: Literal["best", "mean"] = Field(
        default="best", description="of several references: the closest one's similarity, or the mean"
    )
