"""The settings of verifiers of one's own and of the processes that run them."""

from pydantic import Field

from reward_service.verifier.program import ExecutionConfig, SandboxKind
from services.config.models import ConfigModel, HttpConfig


class CustomVerifier(ConfigModel):
    """A verifier of one's own: an entry of [[reward-service.verifiers]]."""

    name: str = Field(min_length=1, max_length=256, description="name by which items ask for it")
    function: str = Field(description="import path of the function, package.module:function")
    version: str = Field("0", description="recorded with each reward; raise it when the function changes")


class WorkerConfig(ConfigModel):
    """The worker processes, in which the sync verifiers run that could hang."""

    count: int = Field(2, ge=1, le=256, description="worker processes for each verifier; they start at its first item")
    prewarm: tuple[str, ...] = Field((), description="verifiers whose workers start with the service")
    compute_timeout_s: float = Field(
        10.0,
        gt=0,
        description="seconds for one item, after which its worker is killed; longest that an async verifier may block",
    )
    start_timeout_s: float = Field(60.0, gt=0, description="seconds for a worker to load its verifier")
    memory_limit_mib: int = Field(4096, ge=512, description="address space of one worker, in MiB")
    max_attempts: int = Field(2, ge=1, le=10, description="attempts at an item whose worker dies")


class IdempotencyConfig(ConfigModel):
    """Settings of kept answers to requests with an Idempotency-Key, so that a repetition is answered alike."""

    keep_s: float = Field(300.0, gt=0, description="seconds for which an answer is kept")
    max_answers: int = Field(4096, ge=1, description="answers kept at once; the oldest are forgotten first")
    memory_mib: int = Field(64, ge=1, description="MiB of answers kept at once; the oldest are forgotten first")


class ScoringConfig(ConfigModel):
    """Limits of scoring: the part of the service's configuration that verifiers and requests see."""

    http: HttpConfig = HttpConfig(port=7320)
    sandbox: SandboxKind = Field(
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
    workers: WorkerConfig = WorkerConfig()
