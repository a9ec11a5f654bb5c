"""The configuration of the reward service: the table [reward-service]."""

from pydantic import Field

from reward_service.endpoints.config import EmbeddingConfig, RemoteConfig
from reward_service.judges.config import JudgeConfig
from reward_service.models.config import EncoderConfig, RewardModelConfig
from reward_service.verifier.config import CustomVerifier, IdempotencyConfig, ScoringConfig
from services.config.models import ProcessConfig


class RewardServiceConfig(ProcessConfig, ScoringConfig):
    """The reward service."""

    id: str | None = Field(
        None,
        min_length=1,
        max_length=256,
        description="name in each score that it makes; host name and port if not given",
    )
    verifiers: tuple[CustomVerifier, ...] = Field((), description="verifiers of one's own: name, function, version")
    reward_models: tuple[RewardModelConfig, ...] = Field(
        (), description="reward models to be served: name, path, device, batch size"
    )
    embeddings: tuple[EmbeddingConfig, ...] = Field(
        (), description="similarities of embeddings: name, url, model, limits"
    )
    encoders: tuple[EncoderConfig, ...] = Field(
        (), description="similarities by an encoder in a directory: name, path, device, pooling"
    )
    judges: tuple[JudgeConfig, ...] = Field(
        (), description="language models that judge: name, url, model, kind, template, limits"
    )
    remotes: tuple[RemoteConfig, ...] = Field(
        (), description="verifiers of other reward services: name, url, kind, verifier, limits"
    )
    drain_s: float = Field(5.0, ge=0, description="how long items may be scored after SIGTERM, in seconds")
    idempotency: IdempotencyConfig = IdempotencyConfig()
