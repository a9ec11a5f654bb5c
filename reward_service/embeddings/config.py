"""What a user can set about a similarity of embeddings, and what a task may say to it."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from reward_service.endpoints.config import CacheConfig, EndpointConfig


class EmbeddingConfig(EndpointConfig):
    """A similarity: an entry of [[reward-service.embeddings]]. `url` is that of the API, such as https://host/v1."""

    model: str = Field(min_length=1, description="name of the embedding model at the endpoint")
    prefix: str = Field("", description="text before each text, for models that were trained with one: 'query: '")
    batch_texts: int = Field(64, ge=1, le=2048, description="most texts in one request")
    wait_s: float = Field(0.005, ge=0, le=1.0, description="how long texts are gathered for a request, in seconds")
    keep_thinking: bool = Field(False, description="compare the completion's thought before </think>, too")
    extra: dict[str, JsonValue] = Field({}, description="more fields of the request, such as dimensions")
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
