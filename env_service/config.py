"""Configuration of the env_service."""

from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, SecretStr, model_validator

from env_service.environments.task_configs import AdditionTasks, ClassTasks, LevelTasks, MixTasks, Tasks, VerifierName
from env_service.runtimes.config import RuntimesConfig
from services.config.agreements import EqualTo, ModelFolder, Reaches
from services.config.models import ConfigModel, HttpConfig, ProcessConfig
from services.config.run_paths import WrittenPath
from services.network import HttpAddress, check_key_settings
from services.zmq.keys import AuthorizedBy, KeyFile, PublicKeyOf


class RetryConfig(ConfigModel):
    """Retries, and how long they go on, before a lease is given back as failed."""

    generator_attempts: int = Field(
        8, ge=1, le=100, description="requests to generators that may fail in a row, with no token between them"
    )
    reward_attempts: int = Field(
        8, ge=1, le=100, description="requests to reward services that may fail for one group after they were taken up"
    )
    reward_item_attempts: int = Field(
        2,
        ge=1,
        le=100,
        description="times a completion is scored that a reward service fails to judge, as when a worker dies",
    )
    backoff_s: float = Field(0.2, gt=0, le=60, description="pause after the first failure; doubles with each one")
    backoff_max_s: float = Field(5.0, gt=0, le=600, description="longest pause between two attempts")
    rollout_timeout_s: float = Field(1800.0, gt=0, description="longest time for a lease, with all retries and waits")
    environment_timeout_s: float = Field(
        300.0,
        gt=0,
        description="longest time of an environment for a task, an opening, or a step of all trajectories of a group; "
        "then the task counts as at fault",
    )
    environment_attempts: int = Field(
        8,
        ge=1,
        le=100,
        description="times in a row that an environment whose server has no place is asked to open; one whose server "
        "or host is away is waited for",
    )
    generator_silence_s: float = Field(60.0, gt=0, description="a generator without output for so long is given up")
    reward_timeout_s: float = Field(30.0, gt=0, le=3600, description="time for a group's scoring")


class RoutedRewardService(ConfigModel):
    """A reward service for certain verifiers: an entry of [[env-service.rewards]]."""

    url: HttpAddress = Field(description="its address")
    verifiers: tuple[VerifierName, ...] = Field(
        min_length=1,
        max_length=256,
        description="verifiers that it is asked for; `reward_urls` are not asked for these",
    )
    token: SecretStr | None = Field(None, description="its bearer token; `reward_token` if not given")


class RewardCallsConfig(ConfigModel):
    """Requests to the reward services: completions in each, and second requests where a service is slow."""

    batch_items: int = Field(256, ge=1, le=4096, description="most completions in one request")
    batch_wait_s: float = Field(
        0.002, ge=0, le=1, description="how long a group waits for others to share a request with, in seconds"
    )
    hedge_share: float = Field(
        0.0,
        ge=0,
        le=1,
        description="share of completions that a second service may be asked for when the first is slow; 0: none",
    )
    hedge_after_s: float | None = Field(
        None, gt=0, description="when a service counts as slow, in seconds; from the recent latencies if not given"
    )
    hedge_percentile: float = Field(
        0.95, gt=0, lt=1, description="share of a verifier's recent answers that do not count as slow"
    )


class AgentsConfig(ConfigModel):
    """The sessions of agents, which ask the policy over HTTP; each has its own key."""

    url: HttpAddress | None = Field(
        None, description="address at which agents reach this process, if it is another than that of `http`"
    )
    body_bytes: int = Field(4 << 20, ge=1024, description="largest request of an agent, in bytes")
    messages: int = Field(2048, ge=1, description="most messages in a request")
    calls_at_once: int = Field(16, ge=1, le=4096, description="calls of a session in flight")
    idle_s: float = Field(600.0, gt=0, description="a session without a call for so long is given up, in seconds")
    other_sampling: Literal["refuse", "ignore"] = Field(
        "refuse",
        description="requests that want other sampling than the run's, such as a temperature, a seed or a tool that "
        "must be called: refuse names the field in a 400; ignore samples as the run does, counts the "
        "field, and logs it once",
    )


class ConcurrencyConfig(ConfigModel):
    """Bounds on the completions outstanding at each generator. What waits here goes by the age of its lease, what waits
    in a generator's queue does not.
    """

    adaptive: bool = Field(
        True, description="fewer while completions wait in a generator's queue, more while few do; false: no bound"
    )
    least: int = Field(64, ge=1, description="completions outstanding at a generator that are never too many")
    most: int = Field(4096, ge=1, description="completions outstanding at a generator at most")
    queue_share: float = Field(
        0.5, gt=0, le=1, description="share of a generator's completions that may wait for their first token"
    )
    poll_s: float = Field(2.0, gt=0, le=60, description="how often generators are asked, in seconds")

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.least > self.most:
            raise ValueError(f"least is {self.least} and most {self.most}: lower the first or raise the second")
        return self


class CheckpointsConfig(ConfigModel):
    """Records of conversations that are going on, for the next process of this name."""

    folder: Annotated[Path | None, WrittenPath()] = Field(
        None,
        description="folder in which each env_service has one by its `env_id`, and which outlives the process. Of "
        "environments whose rules say replayable, conversations go on where they were when the process died; none: "
        "leases are rolled out anew",
    )
    max_mb: int = Field(
        1024, ge=1, le=1 << 24, description="records of an env_service in MiB; leases beyond that have none"
    )


class EnvServiceConfig(ProcessConfig):
    """An env_service: its peers, and how many groups it rolls out."""

    usual_groups: ClassVar[tuple[str, ...]] = (
        "retry", "scoring", "concurrency", "agents", "http", "runtimes", "checkpoints",
    )  # fmt: skip

    http: HttpConfig = HttpConfig(port=7330)
    model: Annotated[Path, ModelFolder(("tokenizer", "chat_template"))] = Field(
        description="Hugging Face directory whose tokenizer and chat template are used"
    )
    env_id: str | None = Field(
        None, min_length=1, max_length=256, description="name of this process; host name and HTTP port if not given"
    )
    learner: Annotated[str, Reaches("learner", "leases.address")] = Field(
        "tcp://127.0.0.1:7301", description="ZeroMQ address of the learner's intake"
    )
    secret_key_file: Annotated[Path | None, KeyFile("secret"), AuthorizedBy("learner", "leases.authorized_keys")] = (
        Field(
            None,
            description="file of this process's secret CURVE key, made by `headway keys`; none speaks without keys",
        )
    )
    learner_key_file: Annotated[Path | None, KeyFile("public"), PublicKeyOf("learner", "leases.secret_key_file")] = (
        Field(None, description="file of the learner's public CURVE key")
    )
    insecure: bool = Field(False, description="allow a learner on another machine without keys")
    reward_urls: Annotated[tuple[HttpAddress, ...], Reaches("reward-service")] = Field(
        ("http://127.0.0.1:7320",),
        description="addresses of the reward services, asked in turn; some may be absent",
    )
    rewards: tuple[RoutedRewardService, ...] = Field(
        (), max_length=256, description="reward services for certain verifiers: url, verifiers, token"
    )
    reward_token: Annotated[SecretStr | None, EqualTo("reward-service", "http.token")] = Field(
        None, description="bearer token of the reward services"
    )
    generator_token: Annotated[SecretStr | None, EqualTo("generator", "http.token")] = Field(
        None, description="bearer token of the generators"
    )
    capacity: int = Field(64, ge=1, le=1 << 16, description="groups that are rolled out at once")
    workers: int = Field(
        2, ge=1, le=1024, description="processes that all environments with isolation = `workers` share"
    )
    resend_s: float = Field(5.0, gt=0, description="an unacknowledged group is sent again after so long")
    drain_s: float = Field(2.0, ge=0, le=60, description="time for acknowledgements when stopping")
    retry: RetryConfig = RetryConfig()
    scoring: RewardCallsConfig = RewardCallsConfig()
    concurrency: ConcurrencyConfig = ConcurrencyConfig()
    agents: AgentsConfig = AgentsConfig()
    runtimes: RuntimesConfig = RuntimesConfig()
    checkpoints: CheckpointsConfig = CheckpointsConfig()
    environments: tuple[Tasks, ...] = Field(
        (AdditionTasks(),), min_length=1, max_length=256, description="what can be rolled out, by name"
    )

    @model_validator(mode="after")
    def _keys_where_needed(self) -> "EnvServiceConfig":
        files = {"secret_key_file": self.secret_key_file, "learner_key_file": self.learner_key_file}
        check_key_settings(self.learner, files, insecure=self.insecure)
        return self

    @model_validator(mode="after")
    def _someone_scores(self) -> "EnvServiceConfig":
        if self.needs_rewards and not self.reward_urls and not self.rewards:
            raise ValueError(
                "reward_urls is empty and there are no rewards, which environments of tasks for verifiers need; name "
                "at least one reward service"
            )
        return self

    @property
    def needs_rewards(self) -> bool:
        """True if an environment surely has tasks that verifiers judge. One of a class may give all rewards itself."""
        return any(not isinstance(one, ClassTasks | MixTasks | LevelTasks) for one in self.environments)

    @model_validator(mode="after")
    def _names_differ(self) -> "EnvServiceConfig":
        names = [environment.name for environment in self.environments]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"environments: {', '.join(twice)} is used twice; give each environment its own name")
        return self

    @model_validator(mode="after")
    def _weights_share_something(self) -> "EnvServiceConfig":
        mixed = {part.environment for one in self.environments if isinstance(one, MixTasks) for part in one.parts}
        for one in self.environments:
            if isinstance(one, MixTasks | LevelTasks) or one.places.weight is None or one.name in mixed:
                continue
            raise ValueError(
                f"environments: {one.name} has places.weight and is in no mix, so that it shares its places with no "
                f'other: name it in one (source = "mix"), or leave the weight out'
            )
        return self

    @model_validator(mode="after")
    def _levels_are_there(self) -> "EnvServiceConfig":
        names = [environment.name for environment in self.environments if not isinstance(environment, LevelTasks)]
        for given in self.environments:
            wanted = given.levels if isinstance(given, LevelTasks) else ()
            strange = [name for name in wanted if name not in names or wanted.count(name) > 1]
            if strange:
                raise ValueError(
                    f"environments: {given.name} has the level {strange[0]!r}; expected, once each, environments of "
                    f"this file that have no levels themselves: {', '.join(names) or 'there are none'}"
                )
        return self

    @model_validator(mode="after")
    def _levels_have_no_limits(self) -> "EnvServiceConfig":
        limited = {
            one.name
            for one in self.environments
            if not isinstance(one, MixTasks | LevelTasks) and one.places.most is not None
        }
        parts = {
            one.name: {one.name, *(part.environment for part in one.parts)}
            for one in self.environments
            if isinstance(one, MixTasks)
        }
        for given in self.environments:
            for level in given.levels if isinstance(given, LevelTasks) else ():
                if found := sorted(limited & parts.get(level, {level})):
                    raise ValueError(
                        f"environments: {found[0]} has places.most and is of level {level} of {given.name}, whose "
                        "leases are granted by level and not by places: those over the limit would hold the places of "
                        "all others. Leave places.most out, lower capacity, or train on a mix"
                    )
        return self

    @model_validator(mode="after")
    def _mixes_have_parts(self) -> "EnvServiceConfig":
        kinds = MixTasks | LevelTasks
        plain = [environment.name for environment in self.environments if not isinstance(environment, kinds)]
        for mix in self.environments:
            wanted = [part.environment for part in mix.parts] if isinstance(mix, MixTasks) else []
            for name in wanted:
                if name not in plain or wanted.count(name) > 1:
                    raise ValueError(
                        f"environments: the mix {mix.name} names {name!r}; expected, once each, environments of this "
                        f"file that are no mix: {', '.join(plain) or 'there are none'}"
                    )
        return self
