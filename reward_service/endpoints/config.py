"""The settings of services that verifiers ask over HTTP: verifiers elsewhere, and endpoints of embeddings."""

from pathlib import Path
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, JsonValue, field_validator, model_validator

from protocol.rewards import MAX_DEADLINE_S
from services.config.models import ConfigModel
from services.config.run_paths import WrittenPath
from services.network import is_http_address

_OF_OPENRLHF = ("requests_per_s", "most_requests", "most_tokens")


class LimitsConfig(ConfigModel):
    """Limits on requests to the service. The budget counts from the start of the process."""

    concurrency: int = Field(16, ge=1, le=1024, description="requests under way at once")
    requests_per_s: float | None = Field(
        None, gt=0, description="most requests begun in a second; without a limit if left out"
    )
    request_timeout_s: float = Field(60.0, gt=0, description="longest time of one request, in seconds")
    attempts: int = Field(4, ge=1, le=100, description="attempts at a request that fails through no fault of its own")
    most_requests: int | None = Field(
        None, ge=1, description="requests sent in the life of the process; items beyond them are errors"
    )
    most_tokens: int | None = Field(
        None, ge=1, description="tokens, in and out, paid in the life of the process; items beyond them are errors"
    )


class CacheConfig(ConfigModel):
    """Answers that are kept, so that the same text is not paid twice."""

    entries: int = Field(16384, ge=0, description="answers in memory, the last used ones; 0 keeps none")
    file: Annotated[Path | None, WrittenPath()] = Field(
        None, description="SQLite file of answers that outlive the process; none if left out"
    )
    file_entries: int = Field(1_000_000, ge=1, description="answers in the file, the newest ones")


class EndpointConfig(ConfigModel):
    """Settings of each verifier that asks a service."""

    name: str = Field(min_length=1, max_length=256, description="name by which items ask for it")
    url: str = Field(description="address of the service")
    api_key_env: str | None = Field(
        None, min_length=1, description="environment variable that holds the key to show, as a bearer token"
    )
    api_key_file: Path | None = Field(None, description="file that holds the key, which only its owner may read")
    limits: LimitsConfig = LimitsConfig()

    @field_validator("url")
    @classmethod
    def _address(cls, url: str) -> str:
        parts = urlsplit(url)
        if not is_http_address(url) or parts.query or parts.fragment:
            raise ValueError(f"{url!r} is no address: expected http://host:port or https://host, perhaps with a path")
        if parts.username or parts.password:
            raise ValueError("url holds a password, which logs would show: use api_key_env or api_key_file")
        return url.rstrip("/")

    @model_validator(mode="after")
    def _one_key(self) -> Self:
        if self.api_key_env is not None and self.api_key_file is not None:
            raise ValueError(f"{self.name}: api_key_env and api_key_file are both set; set one of them")
        return self


class RemoteConfig(EndpointConfig):
    """A verifier elsewhere: an entry of [[reward-service.remotes]].

    `url` is the address of a Headway reward service, or the whole address of an OpenRLHF reward server, such as
    http://host:5000/get_reward. The key is the reward service's token.
    """

    kind: Literal["headway", "openrlhf"] = Field(
        "headway", description="a Headway reward service, or a reward server of OpenRLHF's shape"
    )
    verifier: str | None = Field(
        None, min_length=1, max_length=256, description="name of the verifier there; the same as here if left out"
    )
    batch_items: int = Field(256, ge=1, le=4096, description="most items in one request")
    wait_s: float = Field(0.005, ge=0, le=1.0, description="how long items are gathered for a request, in seconds")

    @model_validator(mode="after")
    def _settings_of_its_kind(self) -> Self:
        useless = sorted(self.limits.model_fields_set.intersection(_OF_OPENRLHF))
        if self.kind == "headway" and useless:
            raise ValueError(f"remote {self.name}: limits.{useless[0]} has no effect on kind headway; remove it")
        if self.kind == "headway" and self.limits.request_timeout_s > MAX_DEADLINE_S:
            raise ValueError(
                f"remote {self.name}: limits.request_timeout_s is {self.limits.request_timeout_s:g}; a Headway reward "
                f"service takes at most {MAX_DEADLINE_S:g} seconds"
            )
        if self.kind == "openrlhf" and self.verifier is not None:
            raise ValueError(f"remote {self.name}: verifier has no effect on kind openrlhf; remove it")
        return self


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
    """The text that the completion is compared with."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    references: tuple[Text, ...] = Field(
        min_length=1, max_length=64, strict=False, description="texts that the completion should be close to in meaning"
    )
    pick: Literal["best", "mean"] = Field(
        default="best", description="of several references: the closest one's similarity, or the mean"
    )
