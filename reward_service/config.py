"""The configuration of the reward service: the table [reward-service]."""

from pydantic import Field

from reward_service.embeddings.config import EmbeddingConfig, EncoderConfig
from reward_service.judges.config import JudgeConfig
from reward_service.remote.config import RemoteConfig
from reward_service.reward_models.config import RewardModelConfig
from reward_service.sandbox.config import ExecutionConfig, SandboxKind
from services.config import ConfigModel, HttpConfig, ProcessConfig

Sandbox = SandboxKind


class CustomVerifier(ConfigModel):
    """A verifier of one's own: an entry of [[reward-service.verifiers]]."""

    name: str = Field(min_length=1, max_length=256, description="name by which items ask for it")
    function: str = Field(description="import path of the function, package.module:function")
    version: str = Field("0", description="recorded with each reward; raise it when the function changes")


class WorkerConfig(ConfigModel):
    """The worker processes, in which the sync verifiers run that could hang."""

    count: int = Field(2, ge=1, le=256, description="worker processes for each verifier; they start at its first item")
    prewarm: tuple[str, ...] = Field((), description="verifiers whose workers start with the service")
    compute_timeout_s: float = Field(10.0, gt=0, description="seconds for one item, after which its worker is killed")
    start_timeout_s: float = Field(60.0, gt=0, description="seconds for a worker to load its verifier")
    memory_limit_mib: int = Field(4096, ge=512, description="address space of one worker, in MiB")
    max_attempts: int = Field(2, ge=1, le=10, description="attempts at an item whose worker dies")


class IdempotencyConfig(ConfigModel):
    """What is kept of answers to requests with an Idempotency-Key, so that a repetition is answered alike."""

    keep_s: float = Field(300.0, gt=0, description="seconds for which an answer is kept")
    max_answers: int = Field(4096, ge=1, description="answers kept at once; the oldest are forgotten first")
    memory_mib: int = Field(64, ge=1, description="MiB of answers kept at once; the oldest are forgotten first")


class RewardServiceConfig(ProcessConfig):
    """The reward service."""

    http: HttpConfig = HttpConfig(port=7320)
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
    sandbox: Sandbox = Field(
        "required",
        description="required: programs run isolated, or it does not start; off: none run; unsafe: not isolated",
    )
    execution: ExecutionConfig = ExecutionConfig()
    max_deadline_s: float = Field(120.0, gt=0, description="longest deadline that a request can ask for, in seconds")
    max_pending_items: int = Field(16384, ge=1, description="items in the service at once; more are turned away")
    max_pending_mib: int = Field(512, ge=1, description="MiB of requests in the service at once; more are turned away")
    verifier_share: float = Field(
        0.75,
        gt=0,
        le=1,
        description="part of max_pending_items that one verifier can take, unless it judges at once",
    )
    async_concurrency: int = Field(64, ge=1, description="items at once in each async verifier")
    drain_s: float = Field(5.0, ge=0, description="how long items may be scored after SIGTERM, in seconds")
    workers: WorkerConfig = WorkerConfig()
    idempotency: IdempotencyConfig = IdempotencyConfig()
