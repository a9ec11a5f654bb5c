"""What a user can set about a similarity of embeddings."""

from pydantic import Field, JsonValue

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
