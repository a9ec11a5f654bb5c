"""The settings of the learner. Loads no torch."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self

from pydantic import BaseModel, Field, SecretStr, field_validator, model_validator

from learner.algorithms.knobs import DivergenceKnobs, TeacherKnobs
from learner.algorithms.old_tokens import OldTokenBound
from learner.algorithms.presets.distill import DistillConfig
from learner.algorithms.presets.grpo import GrpoConfig
from learner.algorithms.presets.pass_at_k import PassAtKConfig
from learner.algorithms.presets.registry import AlgorithmConfig
from learner.data.fingerprints import fingerprint_data
from learner.evaluation.config import EvaluationConfig, TrackersConfig
from learner.ledger.records import ReusePriority
from learner.releases.config import ReleaseConfig
from learner.teachers.config import TeacherConfig, check_size, check_teachers, check_use
from learner.tenants.config import TinkerConfig
from learner.training.config import GuardConfig, LoraConfig, TrainingConfig
from learner.trust.config import TrustConfig
from protocol.fleet import Backend
from services.config.agreements import EqualTo, Listens, ModelFolder
from services.config.devices import is_worth_threads
from services.config.made_with import settings_of
from services.config.models import ConfigModel, HttpConfig, ProcessConfig
from services.config.run_paths import WrittenPath
from services.cores import cores
from services.model_folder import fingerprint_directory, quantization
from services.network import check_key_settings, is_http_address, is_loopback, is_wildcard
from services.process import WrongSettings
from services.rotating_secrets import SHORTEST_TOKEN, accepted
from services.zmq.keys import KeyFile

if TYPE_CHECKING:
    from learner.algorithms.preset import Preset

_ROUNDING = 1e-9
# Half of the age, in updates, at which some losses were seen to fall apart.
_OLD_UPDATES = 16
FROM_FILES = ("sft", "rm", "dpo", "distill")
"""The algorithms that learn from examples in files, and sample nothing."""
_OF_SAMPLING = (
    "groups_per_step", "max_lag", "rollouts", "lag", "reuse", "guard", "leases", "weights", "trust", "evaluation",
    "release", "http", "demonstrations",
    "checkpoint.journal", "checkpoint.journal_mb", "checkpoint.whole_journal", "checkpoint.keep_best",
    "checkpoint.best_by", "samples", "verdict", "training.router.replay", "training.partial_batches",
)  # fmt: skip
_USED_BY_TENANTS = {
    "": {
        "run", "log", "devices", "http", "model", "ranks", "rank_restarts", "threads", "training", "weights", "tinker",
    },
    "training.": {
        "dtype", "logprob_chunk_tokens", "logprob_chunk_vocabulary", "collective_timeout_s", "rank_silence_s",
    },
    "weights.": {"generator_token"},
}  # fmt: skip
"""Settings that serve the Tinker API, by group; the others are of a run."""
_OF_LOGPROBS = (
    "training.temperature", "training.logprob_chunk_tokens", "training.logprob_chunk_vocabulary",
    "training.report_entropy", "training.head_dtype",
)  # fmt: skip


class CurriculumConfig(ConfigModel):
    """Moves of the level, where the environment's training tasks are in levels (`source = "levels"`)."""

    start: int = Field(
        0, ge=0, description="level of the first leases, 0 the easiest; if there are fewer levels, the hardest"
    )
    window: int = Field(32, ge=1, le=100_000, description="groups of the present level that are looked at")
    raise_at: float = Field(
        0.8,
        gt=0,
        le=1,
        description="the next level is taken if at least this share of rollouts is solved, by "
        "evaluation.success_reward",
    )
    lower_at: float = Field(
        0.2, ge=0, lt=1, description="the level before is taken if at most this share of rollouts is solved"
    )

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.lower_at >= self.raise_at:
            raise ValueError(
                f"lower_at is {self.lower_at:g} and raise_at {self.raise_at:g}: a level would be both too hard and too "
                "easy; lower the first or raise the second"
            )
        return self


class TaskDrawConfig(ConfigModel):
    """Choice of the tasks of new leases."""

    by: Literal["order", "signal"] = Field(
        "order",
        description="order: each task once in an epoch, shuffled; signal: tasks that the policy solves sometimes, by "
        "how many of their recent rollouts were solved (evaluation.success_reward), within their level and their part "
        "of a mix",
    )
    candidates: int = Field(
        16,
        ge=1,
        le=4096,
        description="tasks, taken at random, of which the one with most to teach is drawn; more of them choose more "
        "sharply, and more often the same",
    )
    floor: float = Field(
        0.1, gt=0, le=1, description="share of leases that keep the task of the order, so that no task is left out"
    )
    half_life_steps: float = Field(
        32.0, gt=0, description="steps of the learner in which what was seen of a task comes to count half"
    )

    priors: Path | None = Field(
        None,
        description="file of pass rates that tasks begin with: evaluation.json of an evaluation by itself on the "
        'training tasks, or a JSONL of lines {"task": 0, "passes": 3, "trials": 8}; none: nothing is known at first',
    )
    prior_weight: float = Field(
        4.0, gt=0, le=4096, description="rollouts as which the trials of a task in priors count at most"
    )

    @model_validator(mode="after")
    def _counts(self) -> Self:
        fields = type(self).model_fields
        if self.by == "order" and any(getattr(self, name) != field.default for name, field in fields.items()):
            raise ValueError(
                'candidates, floor, half_life_steps, priors and prior_weight count with by = "signal" only, and by is '
                '"order": set by, or leave them out'
            )
        if self.priors is None and self.prior_weight != fields["prior_weight"].default:
            raise ValueError(
                f"prior_weight is {self.prior_weight:g} and priors is not set: set priors to a file, or leave "
                "prior_weight out"
            )
        return self


class RolloutConfig(ConfigModel):
    """Rollouts that env_services are asked for. The sampling temperature is `training.temperature`: the two must be
    one.
    """

    environment: str | None = Field(
        None, description="environment to take tasks from; the only one offered, if left out"
    )
    group_size: int = Field(8, ge=1, description="trajectories per task")
    max_tokens: int = Field(64, ge=1, description="most tokens in one completion")
    stop_token_ids: tuple[int, ...] = Field((), description="token ids that end a completion, besides the model's own")
    seed: int = Field(0, ge=0, lt=1 << 63, description="seed from which every lease's own seed is derived")
    min_group_size: int = Field(
        2, ge=1, description="fewest trajectories with a reward that make a group worth keeping"
    )
    max_reward: float = Field(
        1e4,
        gt=0,
        le=1e6,
        description="a reward above this, or below its negative, counts as an error of its verifier: one such "
        "number would outweigh all others of its group",
    )
    drop_uniform_groups: bool | None = Field(
        None, description="leave out groups whose rewards are all equal, and take others; none: as the algorithm wants"
    )
    min_mean_reward: float | None = Field(
        None, description="leave out groups of a mean reward below this, and take others"
    )
    max_mean_reward: float | None = Field(
        None, description="leave out groups of a mean reward above this, and take others"
    )
    filter_rounds: int = Field(
        10,
        ge=1,
        description="rounds of groups_per_step groups that may be left out before one batch; then the run stops",
    )

    curriculum: CurriculumConfig = CurriculumConfig()
    tasks: TaskDrawConfig = TaskDrawConfig()

    @model_validator(mode="after")
    def _something_passes(self) -> Self:
        low, high = self.min_mean_reward, self.max_mean_reward
        if low is not None and high is not None and low > high:
            raise ValueError(
                f"min_mean_reward is {low} and max_mean_reward {high}: no group could be kept; lower the first or "
                "raise the second"
            )
        return self


class LagConfig(ConfigModel):
    """Lead of sampling over training, and rules for rollouts that take long. The bound itself is `max_lag`."""

    pacing: Literal["demand", "full"] = Field(
        "demand",
        description="how many groups are asked for ahead: as few as keep the trainer from waiting, or always as many "
        "as max_lag permits, so that data grows as old as that",
    )
    on_lag: Literal["wait", "drop", "mask"] = Field(
        "wait",
        description="what to do before a step that would make a running group too old: wait for the group; drop it, so "
        "that it ends at once and its task is begun again; or go on and let it run to its end: of its tokens those "
        "that are too old by then leave the loss, the others are trained with its reward",
    )
    straggler_timeout_s: float = Field(
        60.0, gt=0, description="longest wait for such a group, in seconds; then it is dropped"
    )
    max_drops_per_lease: int = Field(2, ge=0, description="after so many drops a lease is always waited for")
    measure_every: int | None = Field(
        None,
        ge=1,
        description="steps between two measurements of how far old groups' gradients point where those of lag 0 do; "
        "such a step waits for groups of the newest version, straggler_timeout_s at most. None: never",
    )
    measure_groups: int = Field(
        64,
        ge=2,
        le=4096,
        description="groups of lag 0 in a measurement, and most of each other lag; groups_per_step, if that is less",
    )
    adapt: Literal["off", "gradient"] = Field(
        "off",
        description="gradient: the bound on the lag falls while the gradient of the oldest groups turns away from that "
        "of lag 0, and rises again, up to max_lag",
    )
    min_cosine: float = Field(
        0.8,
        gt=0,
        lt=1,
        description="least cosine to the gradient of lag 0, noise taken out, that adapt puts up with, and the doctor",
    )

    @model_validator(mode="after")
    def _goes_on_without_waiting(self) -> Self:
        if self.on_lag == "mask" and self.max_drops_per_lease == 0:
            raise ValueError(
                'on_lag is "mask" and max_drops_per_lease 0: every running group would be waited for, however long it '
                "takes, and no old token could leave a loss. Set max_drops_per_lease to 1 or more, or leave it out"
            )
        return self

    @model_validator(mode="after")
    def _measured_where_it_counts(self) -> Self:
        fields, knobs = type(self).model_fields, ("measure_groups", "adapt", "min_cosine")
        idle = [name for name in knobs if getattr(self, name) != fields[name].default]
        if self.measure_every is None and idle:
            raise ValueError(
                f"{', '.join(idle)} set and measure_every is not, so that no gradient is measured: set measure_every "
                "to 50, say, or leave it out"
            )
        return self


class ReuseConfig(ConfigModel):
    """Groups that were trained already, and that later steps train once more, within the learner's `max_lag` like all
    others, unless they have a `max_lag` of their own.
    """

    share: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="share of a step's groups_per_step groups that are trained again instead of sampled, rounded down; "
        "a step has fewer groups while there are not as many to train again. 0: none",
    )
    priority: ReusePriority = Field(
        "uniform",
        description="which of them: uniform: by lot; recent: of the newest versions; advantage: by lot, the likelier "
        "the further rewards are from the mean of their group, and none whose rewards are all equal",
    )
    max_reuses: int = Field(1, ge=1, le=64, description="how often one group is trained again at most")
    max_lag: int | None = Field(
        None,
        ge=1,
        le=1024,
        description="no token of a group that is trained again is older than this many policy versions; of those that "
        "are older than learner.max_lag only what second_moment_limit lets pass is trained. none: learner.max_lag is "
        "the bound of these groups, too",
    )
    second_moment_limit: float = Field(
        0.04,
        gt=0,
        description="of the tokens of a step that are older than learner.max_lag those with the largest squared log of "
        "policy / behavior probability are left out, as few as bring the mean of the others' squares to at most this; "
        "0.04 is M2PO's (arXiv 2510.01161)",
    )

    @model_validator(mode="after")
    def _bounds_what_is_old(self) -> Self:
        usual = type(self).model_fields["second_moment_limit"].default
        if self.max_lag is None and self.second_moment_limit != usual:
            raise ValueError(
                "second_moment_limit set and max_lag is not, so that no group is older than learner.max_lag when it is "
                "trained again: set max_lag to four times learner.max_lag, say, or leave it out; for all tokens of a "
                "step there is algo.second_moment_limit"
            )
        return self

    @model_validator(mode="after")
    def _counts(self) -> Self:
        fields, knobs = type(self).model_fields, ("priority", "max_reuses", "max_lag")
        idle = [name for name in knobs if getattr(self, name) != fields[name].default]
        if self.share == 0 and idle:
            raise ValueError(
                f"{' and '.join(idle)} set and share is 0, so that no group is trained again: set share to 0.25, say, "
                "or leave it out"
            )
        return self


class LeaseConfig(ConfigModel):
    """Leases, and what happens to those that fail."""

    address: Annotated[str, Listens()] = Field(
        "tcp://127.0.0.1:7301", description="ZeroMQ address that env_services connect to"
    )
    secret_key_file: Annotated[Path | None, KeyFile("secret")] = Field(
        None, description="file of the learner's secret CURVE key, made by `headway keys`; none speaks without keys"
    )
    authorized_keys: Annotated[Path | None, KeyFile("authorized")] = Field(
        None, description="public keys that may connect: a folder of NAME.pub files, or a file of lines KEY NAME"
    )
    insecure: bool = Field(False, description="allow an address that other machines can reach without keys")
    heartbeat_every_s: float = Field(2.0, gt=0, description="how often an env_service reports, in seconds")
    timeout_s: float = Field(
        30.0, gt=0, description="a lease without a sign of life for so many seconds is granted again"
    )
    longest_attempt_s: float = Field(
        1500.0,
        gt=0,
        description="a rollout that takes longer, though its env_service is alive, counts as a failure of its data; "
        "time without a serving generator, or in waiting for rewards or the environment's host, does not count",
    )
    longest_wait_s: float = Field(
        3600.0,
        gt=0,
        description="a rollout that waits longer for rewards, or for its environment's host, counts as a failure of "
        "infrastructure; more than env-service.retry.rollout_timeout_s, which ends it there",
    )
    infrastructure_retries: int = Field(8, ge=0, description="retries of a lease after failures of infrastructure")
    data_retries: int = Field(1, ge=0, description="retries of a lease after failures of its own data")
    max_dead_letter_share: float = Field(
        0.25, gt=0, le=1, description="share of leases given up, of at least 20 finished, at which the run stops"
    )

    @model_validator(mode="after")
    def _keys_where_needed(self) -> Self:
        files = {"leases.secret_key_file": self.secret_key_file, "leases.authorized_keys": self.authorized_keys}
        check_key_settings(self.address, files, insecure=self.insecure)
        return self


class WeightsConfig(ConfigModel):
    """Weight sync."""

    backend: Backend = Field("gloo", description="collective: gloo on CPUs, nccl on GPUs")
    host: str = Field(
        "auto",
        description="where generators meet the learner, on a private network; auto: the address on the way to them",
    )
    port: Annotated[int, Listens()] = Field(
        0,
        ge=0,
        le=65535,
        description="TCP port of the learner where generators meet it before broadcasts, for firewalls; 0: any, "
        "another each time. The system chooses the ports of the broadcasts themselves (gloo, NCCL)",
    )
    generator_hosts: tuple[str, ...] = Field(
        (),
        description="hosts, patterns (*.gpu.example) and networks (10.0.0.0/8) beyond this machine at which generators "
        "may be; those at https:// need no entry if http.tls_ca_file is set",
    )
    lora: Literal["adapter", "merged"] = Field(
        "adapter",
        description="what generators are sent of a run with training.lora: each version's adapter alone, and its base "
        "weights once; or the model with the adapter merged, as of models that cannot be sent otherwise",
    )
    senders: Literal["all ranks", "rank 0"] = Field(
        "all ranks",
        description="of several ranks, each copies, hashes and sends its share of the weights, so that none holds the "
        "whole model; or rank 0 sends all, where generators reach no other host of the learner",
    )
    same_host: Literal["auto", "shared memory", "broadcast"] = Field(
        "auto",
        description="way of whole weights to a generator of one worker that can map the learner's memory (on its host, "
        "in its process namespace, of its user): shared memory, or the broadcast as to others; auto: shared memory, "
        "but the broadcast with nccl or where the learner has a GPU",
    )
    slices: bool = Field(
        True,
        description="over gloo, workers of a tensor-parallel generator are sent the parts of weights that they read, "
        "or else all of them whole tensors",
    )
    bucket_mb: int = Field(64, ge=1, le=2048, description="size of one broadcast, in MiB")
    bucket_timeout_s: float = Field(10.0, gt=0, description="longest wait for one bucket, in seconds")
    meet_timeout_s: float = Field(10.0, gt=0, description="longest wait for all generators to meet, in seconds")
    commit_timeout_s: float | None = Field(
        None,
        gt=0,
        description="longest wait for a generator to load weights and answer the probe, in seconds; if none, 20, and "
        "20 more for each GB of the model's files",
    )
    pull_timeout_s: float = Field(
        120.0,
        gt=0,
        description="longest time of a generator's download, in seconds, beyond the time that its bytes take",
    )
    pull_mb_per_s: float = Field(
        20.0,
        gt=0,
        description="least speed of the learner's link to the generators, in MB/s; it bounds the time of downloads",
    )
    parallel_pulls: int = Field(
        4, ge=1, description="downloads of generators at once; the others wait, or are taken by the next broadcast"
    )
    anchor_every: int = Field(
        50,
        ge=1,
        description="versions after which generators that pull (generator.join.weights) find the weights as they are "
        "again, and between which what has changed; only late comers download the former",
    )
    announce_every_s: float = Field(2.0, gt=0, description="how often a generator announces itself, in seconds")
    silence_s: float = Field(15.0, gt=0, description="a generator silent for so long leaves the fleet")
    probe_tokens: int = Field(
        256, ge=2, le=4096, description="tokens of recent batches whose logprobs are compared at each publish"
    )
    probe_tolerance: float | None = Field(
        None,
        gt=0,
        description="largest mean gap of those logprobs, in nats; none: 0.02 if all is float32, otherwise 0.5",
    )
    generator_token: Annotated[SecretStr | None, EqualTo("generator", "http.token")] = Field(
        None, description="bearer token of the generators"
    )
    tree_token: SecretStr | None = Field(
        None,
        description="bearer token, besides http.token, that opens the tree of weights and nothing else, for relays",
    )

    @model_validator(mode="after")
    def _generators_reach_it(self) -> Self:
        if is_wildcard(self.host):
            raise ValueError(
                f"weights.host = {self.host!r} stands for every address, and generators need one to come to: name the "
                "learner's address on the private network, or leave it at auto"
            )
        elsewhere = [host for host in self.generator_hosts if not is_loopback(host)]
        if is_loopback(self.host) and elsewhere:
            raise ValueError(
                f"weights.host = {self.host!r} is reached from this machine alone, and generators may be at "
                f"{', '.join(elsewhere)}: name the learner's address on the network of both, or leave it at auto"
            )
        return self


class CheckpointConfig(ConfigModel):
    """Checkpoints, in the run's folder."""

    every_steps: int = Field(100, ge=1, description="steps between checkpoints")
    journal_mb: int = Field(
        4096, ge=1, description="a checkpoint is due, too, when the journal has grown by so many MiB since the last one"
    )
    beside_training: bool = Field(
        False,
        description="write them while training goes on, from a copy in host memory; what that has no room for is "
        "written while training waits, and with false all of it",
    )
    keep: int = Field(2, ge=1, description="how many of the newest are kept")
    keep_best: int = Field(
        1, ge=0, description="how many of the best by held-out evaluation are kept besides; 0 turns it off"
    )
    best_by: Literal["accuracy", "reward"] = Field("accuracy", description="what makes a checkpoint the best")
    journal: bool = Field(
        True,
        description="keep accepted groups on disk, so that a killed run can be resumed without losing any; "
        "false is for measuring what that costs",
    )
    check_signature: bool = Field(
        True,
        description="with a `leases.secret_key_file`, a checkpoint is resumed only if that key signed it; false for "
        "once, after the key was changed",
    )
    whole_journal: bool = Field(
        False, description="keep the journal from the first step on, so that `learner replay` can train all of it again"
    )


class SamplesConfig(ConfigModel):
    """Trajectories that are kept to be looked at on the run's page, in `trajectories/` of its folder."""

    enabled: bool = Field(True, description="whether any are kept")
    budget_mb: int = Field(2048, ge=4, description="room on the disk in MiB; beyond it the oldest steps are deleted")
    time_share: float = Field(
        0.0025,
        ge=0,
        le=1,
        description="share of one core's time that keeping them may take; above it one group for a step is kept, of "
        "those with the best and worst reward, the longest, most stale, largest ratio, failing, and by lot; above "
        "twice it none",
    )


class VerdictConfig(ConfigModel):
    """The verdict on the run: the sentence on top of its page, of `headway status` and of `headway doctor`."""

    webhook: SecretStr | None = Field(
        None,
        description="address, http:// or https://, that is sent a JSON object by POST whenever the verdict changes; "
        "none: nobody is told",
    )

    @field_validator("webhook")
    @classmethod
    def _an_address(cls, webhook: SecretStr | None) -> SecretStr | None:
        if webhook is not None and not is_http_address(webhook.get_secret_value()):
            raise ValueError("webhook is no address: expected http://HOST/PATH or https://HOST/PATH")
        return webhook


class DataConfig(ConfigModel):
    """Examples for the algorithms that learn from files; docs/algorithms.md says what each of them reads."""

    path: Path | None = Field(
        None,
        description="JSONL or Parquet file, or folder of a saved dataset (`folder#split`); needed by sft, rm, dpo and "
        "distill",
    )
    held_out_share: float = Field(0.0, ge=0, lt=1, description="share of the prompts that is only measured")
    batch_size: int = Field(128, ge=1, description="examples per step")
    epochs: int | None = Field(
        None,
        ge=1,
        description="passes over the examples to train, in place of `steps`; the last step may begin another",
    )
    measure_every_steps: int | None = Field(
        None, ge=1, description="steps between two measurements of what is held out; none: before and after all of them"
    )
    stop_at_nll: float | None = Field(
        None,
        gt=0,
        description="mean negative log-likelihood of what is held out, in nats per trained token, at which training "
        "ends before its last step; looked at every measure_every_steps. None: never",
    )
    seed: int = Field(0, ge=0, lt=1 << 63, description="seed of the order of examples")

    @model_validator(mode="after")
    def _something_to_measure(self) -> Self:
        if self.measure_every_steps is not None and not self.held_out_share:
            raise ValueError("measure_every_steps is set and held_out_share is 0: nothing is held out; set the second")
        if self.stop_at_nll is not None and self.measure_every_steps is None:
            raise ValueError(
                "stop_at_nll is set and measure_every_steps is not, so that it would never be looked at: set the second"
            )
        return self


class DemonstrationsConfig(ConfigModel):
    """Examples that each step trains beside what was sampled, by their cross-entropy."""

    path: Path | None = Field(
        None, description="file of examples, in any form that sft reads; none: nothing is trained beside the samples"
    )
    sequences_per_step: int = Field(8, ge=1, description="examples in one step, prompts and completions")
    weight: float = Field(
        0.1,
        gt=0,
        description="weight in the loss of their mean cross-entropy, in nats per token of a completion",
    )

    @property
    def fingerprint(self) -> dict[str, str | None]:
        """Fingerprint of the file; nothing without one."""
        return {} if self.path is None else {"demonstrations_fingerprint": fingerprint_data(self.path)}

    @model_validator(mode="after")
    def _counts(self) -> Self:
        fields, knobs = type(self).model_fields, ("sequences_per_step", "weight")
        idle = [name for name in knobs if getattr(self, name) != fields[name].default]
        if self.path is None and idle:
            raise ValueError(
                f"{' and '.join(idle)} set and path is not, so that there are no demonstrations: set path to a file of "
                "examples, or leave it out"
            )
        return self


class LearnerConfig(ProcessConfig):
    """The learner: its model, its steps, and the bound on the age of tokens."""

    http: HttpConfig = Field(HttpConfig(port=7300), description="the learner's HTTP address")
    model: Annotated[Path, ModelFolder(("model", "tokenizer", "chat_template"))] = Field(
        description="Hugging Face directory of the initial model"
    )
    output: Annotated[Path | None, WrittenPath()] = Field(
        None, description="where the trained model goes; the run's folder if left out"
    )
    algo: AlgorithmConfig = Field(GrpoConfig(), description="the algorithm")
    steps: int = Field(100, ge=1, description="steps to train; each consumes groups_per_step groups")
    time_limit_s: float | None = Field(
        None,
        gt=0,
        description="training stops after so many seconds, as it does after the last step; `--resume` goes on",
    )
    groups_per_step: int = Field(32, ge=1, description="groups (tasks) in one step")
    max_lag: int = Field(
        4,
        ge=0,
        description="no token older than this many policy versions is trained on; 0 is synchronous. Groups that are "
        "trained again can have another bound, reuse.max_lag",
    )
    ranks: int = Field(1, ge=1, description="data-parallel ranks on this host")
    rank_restarts: int = Field(
        5,
        ge=0,
        description="how often in a row the learner restarts itself, with resume, after it lost a rank on this "
        "host; a minute of life begins the count anew; then it ends with exit code 75",
    )
    threads: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        "auto",
        description="CPU threads of each rank; auto: the machine's cores, shared out to the ranks, for a model of "
        "width 256 or more, with a GPU too, otherwise 1",
    )
    seed: int = Field(0, ge=0, lt=1 << 63, description="seed of the learner's random numbers")
    resume: bool | Literal["auto"] = Field(
        False, description="continue the run of this name from its newest checkpoint; auto: if there is one"
    )
    accept_changes: bool = Field(
        False, description="resume even if the algorithm, the model, the group size or the like were changed"
    )
    training: TrainingConfig = Field(TrainingConfig(), description="the training step")
    rollouts: RolloutConfig = RolloutConfig()
    lag: LagConfig = LagConfig()
    reuse: ReuseConfig = ReuseConfig()
    guard: GuardConfig = GuardConfig()
    leases: LeaseConfig = LeaseConfig()
    weights: WeightsConfig = WeightsConfig()
    trust: TrustConfig = TrustConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    release: ReleaseConfig = ReleaseConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    samples: SamplesConfig = SamplesConfig()
    verdict: VerdictConfig = VerdictConfig()
    data: DataConfig = DataConfig()
    demonstrations: DemonstrationsConfig = DemonstrationsConfig()
    trackers: TrackersConfig = TrackersConfig()
    teachers: tuple[TeacherConfig, ...] = Field(
        (), max_length=64, description="models to distill from, by opd or algo.teacher_weight"
    )
    tinker: TinkerConfig = TinkerConfig()

    usual_groups: ClassVar[tuple[str, ...]] = ("algo", "data", "rollouts", "training.optimizer", "training")

    @classmethod
    def without_effect(cls, settings: Mapping[str, object]) -> Mapping[str, str]:
        """Settings that an algorithm makes no use of: those that learn from files sample nothing, the others read
        no file; a server of the Tinker API has no run at all.
        """
        if settings.get("tinker.enabled") in (True, "true"):
            return dict.fromkeys(_of_a_run(), "tinker.enabled is true, and no run is trained. Remove one of them")
        idle = cls._without_effect_on_a_run(settings)
        given = (key for key in settings if key.startswith("tinker.") and key != "tinker.enabled")
        return {**idle, **dict.fromkeys(given, "tinker.enabled is false. Set it to true")}

    @classmethod
    def _without_effect_on_a_run(cls, settings: Mapping[str, object]) -> dict[str, str]:
        algo = str(settings.get("algo.type", "grpo"))
        if algo == "custom" or settings.get("evaluation.only") in (True, "true"):
            return {}
        applies = f"Remove it; `learner --algo {algo} --help` lists what applies"
        head = {} if algo == "rm" else {"training.head_seed": f"algo {algo} has no new head, only rm has. {applies}"}
        if algo not in FROM_FILES:
            return {**head, "data": f"algo {algo} samples its data; {', '.join(FROM_FILES)} read files. {applies}"}
        reason = f"algo {algo} learns from the file data.path and samples nothing. {applies}"
        logprobs = dict.fromkeys(_OF_LOGPROBS if algo == "rm" else (), f"algo rm has scores, no logprobs. {applies}")
        return {**head, **dict.fromkeys(_OF_SAMPLING, reason), **logprobs}

    @property
    def reused_per_step(self) -> int:
        """Number of groups in a step that were trained before, once there are as many."""
        return int(self.reuse.share * self.groups_per_step + _ROUNDING)

    @property
    def reused_lag(self) -> int:
        """The largest lag of a group that is trained again."""
        return self.max_lag if self.reuse.max_lag is None else self.reuse.max_lag

    @property
    def doubt_of_age(self) -> str:
        """Says what tokens as old as these settings allow have done to the algorithm; empty if it bore them."""
        updates = self.training.updates_per_step * self.training.epochs_per_step
        if not self.algo.lost_to_age or self.max_lag * updates < _OLD_UPDATES:
            return ""
        return (
            f"{self.algo.lost_to_age}, and max_lag {self.max_lag} with {updates} update{'' if updates == 1 else 's'} a "
            "step lets them become old: with 8 and 4 it lost all that it had learned, or most, on sums of two numbers "
            "(docs/results.md). Lower max_lag or training.updates_per_step, or take grpo, "
            "gspo or gmpo"
        )

    @property
    def old_tokens(self) -> OldTokenBound | None:
        """The bound on tokens that are older than `max_lag`; None where there are none."""
        if self.reuse.max_lag is None:
            return None
        return OldTokenBound(self.max_lag, self.reuse.second_moment_limit)

    @property
    def fresh_per_step(self) -> int:
        """Number of groups in a step that are trained for the first time."""
        return self.groups_per_step - self.reused_per_step

    @property
    def gpus_wanted(self) -> int:
        """Counts one GPU for each rank."""
        return self.ranks

    @property
    def threads_of_rank(self) -> int:
        """As set, or what the model needs on this machine; reads the model's config.json then."""
        if self.threads != "auto":
            return self.threads
        return max(1, cores() // self.ranks) if is_worth_threads(self.model) else 1

    @property
    def unheard(self) -> frozenset[str]:
        """Addresses of a run, where none is trained online."""
        return frozenset(() if self.collective else ("leases.address", "weights.port"))

    @property
    def collective(self) -> str:
        """Of its weight broadcasts."""
        return "" if self.learns_from_files or self.tinker.enabled else self.weights.backend

    @property
    def sent_alone(self) -> LoraConfig | None:
        """The adapters, if generators are sent nothing else; None for whole weights."""
        lora = self.training.lora
        return lora if lora.enabled and self.weights.lora == "adapter" else None

    @property
    def exported_model(self) -> Path:
        """Folder in which the trained model is written."""
        return self.output or self.run.folder / "model"

    @model_validator(mode="after")
    def _weights_can_be_trained(self) -> Self:
        method = None if self.evaluation.only else quantization(self.model)
        if method is not None:
            raise ValueError(
                f"model: the weights in {self.model} are quantized ({method}, by its own files): expected float32 or "
                "bfloat16, which can be trained. Load the model with transformers, dequantize() it and write it with "
                "save_pretrained"
            )
        return self

    @model_validator(mode="after")
    def _relays_have_a_token(self) -> Self:
        token = self.weights.tree_token
        if token is not None and self.http.token is None:
            raise ValueError(
                "weights.tree_token is set, and http.token is not: without that all routes are open; set http.token or "
                "http.token_file, too"
            )
        if token is not None and min(map(len, accepted(token))) < SHORTEST_TOKEN:
            raise ValueError(
                f"weights.tree_token has fewer than {SHORTEST_TOKEN} characters, and a short one can be guessed: "
                "write a longer one, such as of `openssl rand -hex 32`"
            )
        return self

    @model_validator(mode="after")
    def _tenants_are_served(self) -> Self:
        if self.tinker.enabled and self.http.token is None:
            raise ValueError(
                "tinker.enabled is true and http.token is not set: generators show it where they fetch adapters; set "
                "http.token or http.token_file, and adapters.token of the generators to the same"
            )
        return self

    @model_validator(mode="after")
    def _gradients_can_be_compared(self) -> Self:
        if self.lag.measure_every is None:
            return self
        if self.max_lag == 0:
            raise ValueError(
                "lag.measure_every is set and max_lag is 0: all groups have lag 0, and there is nothing to compare "
                "with. Raise max_lag, or leave measure_every out"
            )
        if self.groups_per_step == 1:
            raise ValueError(
                "lag.measure_every is set and groups_per_step is 1: the noise of a gradient is told by what two groups "
                "of one lag have in common. Raise groups_per_step to 2 or more, or leave measure_every out"
            )
        if self.training.zero_stage == 3:
            raise ValueError(
                "lag.measure_every is set and training.zero_stage is 3: a gradient beside that of training needs each "
                "weight whole: expected zero_stage 2 or less. Lower it, or leave measure_every out"
            )
        return self

    @model_validator(mode="after")
    def _old_tokens_can_leave(self) -> Self:
        if self.lag.on_lag == "mask" and (why := self.algo.whole_only):
            raise ValueError(f'lag.on_lag is "mask": {why}. Set lag.on_lag to "wait" or "drop", or change that')
        return self

    @model_validator(mode="after")
    def _groups_can_be_reused(self) -> Self:
        share = self.reuse.share
        if share == 0:
            return self
        if self.learns_from_files:
            raise ValueError(
                f"reuse.share is {share:g}, and algo {self.algo.type} learns from the file data.path: data.epochs says "
                "how often each example is trained. Leave reuse out"
            )
        if self.reused_lag == 0:
            raise ValueError(
                f"reuse.share is {share:g} and max_lag 0: a group that was trained is one version old at the next "
                "step, which max_lag does not admit. Raise max_lag, set reuse.max_lag, or leave reuse out"
            )
        if self.reused_per_step == 0:
            raise ValueError(
                f"reuse.share is {share:g} and groups_per_step {self.groups_per_step}: that is less than one group, so "
                "that none would be trained again. Raise one of them, or leave reuse out"
            )
        if why := self.algo.once_only:
            raise ValueError(f"reuse.share is {share:g}: {why}. Leave reuse out, or change that")
        return self

    @model_validator(mode="after")
    def _old_groups_are_bounded(self) -> Self:
        most = self.reuse.max_lag
        if most is None:
            return self
        if most <= self.max_lag:
            raise ValueError(
                f"reuse.max_lag is {most} and max_lag {self.max_lag}, which holds for groups that are trained again "
                "anyway: expected reuse.max_lag above it. Raise it, or leave it out"
            )
        if self.training.partial_batches:
            raise ValueError(
                "reuse.max_lag is set and training.partial_batches is true: reuse.second_moment_limit bounds a mean "
                "over a whole step. Leave one of them out"
            )
        if why := self.algo.young_only:
            raise ValueError(f"reuse.max_lag is {most}: {why}. Leave reuse.max_lag out, or change that")
        return self

    @model_validator(mode="after")
    def _groups_stand_for_themselves(self) -> Self:
        if self.training.partial_batches and (why := self.algo.whole_step):
            raise ValueError(
                f"training.partial_batches is true: {why}. Leave training.partial_batches out, or change that"
            )
        return self

    @model_validator(mode="after")
    def _rows_are_shared_evenly(self) -> Self:
        shared = self.training.sequence_parallel
        # Of ranks that torchrun starts the config does not know.
        if self.ranks > 1 and self.ranks % shared:
            raise ValueError(
                f"training.sequence_parallel is {shared} and ranks is {self.ranks}: rows are shared by groups of "
                f"{shared} ranks: expected ranks to be a multiple of it. Change one of them"
            )
        return self

    @model_validator(mode="after")
    def _one_rank_has_what_is_mapped(self) -> Self:
        weights = self.weights
        # Of ranks that torchrun starts the config does not know: their learner says so at its first version.
        if self.ranks > 1 and weights.same_host == "shared memory" and weights.senders == "all ranks":
            raise ValueError(
                f'weights.same_host is "shared memory", ranks is {self.ranks} and weights.senders "all ranks": '
                "generators map what one process has, and each rank would have a part. Set weights.senders to "
                '"rank 0", or weights.same_host to "auto", by which these weights are broadcast'
            )
        return self

    @model_validator(mode="after")
    def _data_where_needed(self) -> Self:
        if self.algo.learns_from_files and self.data.path is None:
            raise ValueError(
                f"algo {self.algo.type} learns from a file and none is set: set data.path to a JSONL or Parquet file"
            )
        return self

    @model_validator(mode="after")
    def _demonstrations_fit(self) -> Self:
        shown, updates = self.demonstrations, self.training.updates_per_step
        if shown.path is None:
            return self
        if self.learns_from_files:
            raise ValueError(
                f"demonstrations.path is set, and algo {self.algo.type} learns from the file data.path, with nothing "
                "sampled for them to stand beside: put them into that file, or remove demonstrations"
            )
        if self.training.partial_batches:
            raise ValueError(
                "demonstrations.path is set and training.partial_batches is true: demonstrations are trained with a "
                "whole step. Leave one of them out"
            )
        if shown.sequences_per_step < updates:
            raise ValueError(
                f"demonstrations.sequences_per_step is {shown.sequences_per_step} and training.updates_per_step "
                f"{updates}: each update of a step takes its part of them: raise the first to {updates} or more"
            )
        return self

    @model_validator(mode="after")
    def _good_enough_can_be_told(self) -> Self:
        if self.data.stop_at_nll is not None and self.algo.type in ("rm", "dpo"):
            raise ValueError(
                f"data.stop_at_nll is {self.data.stop_at_nll:g}, and algo {self.algo.type} learns from pairs, which no "
                "likelihood says to be good enough: leave it out, and set steps or data.epochs"
            )
        return self

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if self.data.epochs is not None and "steps" in self.model_fields_set:
            raise ValueError(f"steps is {self.steps} and data.epochs {self.data.epochs}: set one of them")
        return self

    def made_with(self) -> dict[str, object]:
        """All settings by dotted key, without secrets, and which model is in the folder, with which chat template, and
        which demonstrations are in their file.
        """
        model = fingerprint_directory(self.model).model if self.model.is_dir() else None
        return {
            **settings_of(self),
            "model_fingerprint": model,
            **self.run.template_fingerprint,
            **self.demonstrations.fingerprint,
        }

    def preset(self) -> "Preset":
        """The algorithm as the trainer sees it. Imports torch, and the module of an own algorithm.

        Raises WrongSettings for one that cannot be had, or that does not go with other settings: of those that are
        included, that is told by their settings alone.
        """
        preset = self.algo.preset()
        if self.lag.on_lag == "mask" and (why := preset.whole_only):
            raise WrongSettings(
                f'lag.on_lag is "mask", and the Preset {preset.name} of algo {self.algo.type} needs whole '
                f'trajectories: {why}. Set lag.on_lag to "wait" or "drop", or change that'
            )
        if self.reuse.share and (why := preset.once_only):
            raise WrongSettings(
                f"reuse.share is {self.reuse.share:g}, and the Preset {preset.name} of algo {self.algo.type} trains a "
                f"group once: {why}. Leave reuse out, or change that"
            )
        return preset

    @property
    def teacher_top(self) -> int:
        """The number of a teacher's likeliest tokens that are compared in each place; 0 if none are, or the loss is
        an own one, which says so itself.
        """
        if not isinstance(self.algo, DivergenceKnobs) or self.algo.compared_by is None:
            return 0
        return self.algo.teacher_tokens

    @property
    def learns_from_files(self) -> bool:
        """True if the run has examples, and no generators."""
        return self.algo.learns_from_files or (self.algo.type == "custom" and self.data.path is not None)

    @model_validator(mode="after")
    def _models_that_are_used(self) -> Self:
        for name, used in (("reference", self.algo.uses_reference), ("critic", self.algo.type in ("ppo", "custom"))):
            if not used and getattr(self.training, name) != type(self.training).model_fields[name].get_default(
                call_default_factory=True
            ):
                raise ValueError(f"training.{name} is set, and algo {self.algo.type} as it is has none: remove it")
        return self

    @model_validator(mode="after")
    def _spread_where_needed(self) -> Self:
        if self.algo.type in ("online_dpo", "best_of_k") and self.rollouts.drop_uniform_groups is False:
            raise ValueError(
                f"rollouts.drop_uniform_groups is false, and algo {self.algo.type} takes the best of a group: one of "
                "equal rewards, as where all failed, has none; leave it out, or set it to true"
            )
        if self.rollouts.drop_uniform_groups and self.rollouts.group_size == 1 and not self.algo.greedy_baseline:
            raise ValueError(
                "rollouts.drop_uniform_groups is true and rollouts.group_size 1: a group of one has no spread of "
                "rewards, so none could be kept; raise group_size, or, for an algorithm that does not compare rewards "
                "within a group, such as ppo, set drop_uniform_groups to false"
            )
        return self

    @model_validator(mode="after")
    def _teachers_fit(self) -> Self:
        check_teachers(self.teachers, temperature=self.training.temperature)
        check_use(
            self.teachers,
            algo=self.algo.type,
            asks=self.algo.uses_teacher,
            weighed=isinstance(self.algo, TeacherKnobs),
            from_files=self.algo.learns_from_files,
        )
        check_size(self.teachers, top=self.teacher_top, completion_tokens=self.rollouts.max_tokens)
        average = next((teacher.name for teacher in self.teachers if teacher.average is not None), None)
        if average is not None and self.training.zero_stage == 3:
            raise ValueError(
                f"teachers: {average} has an average, and training.zero_stage is 3: the average stands in the policy's "
                "place while it is asked, for which each rank needs the weights whole: expected zero_stage 2 or less"
            )
        return self

    @model_validator(mode="after")
    def _one_temperature(self) -> Self:
        if isinstance(self.algo, DistillConfig) and self.algo.sft_weight and self.training.temperature != 1:
            raise ValueError(
                f"training.temperature is {self.training.temperature:g} and algo.sft_weight {self.algo.sft_weight:g}: "
                "the likelihood of the data is wanted at temperature 1, and logprobs are computed at one temperature "
                "only; set training.temperature to 1 or sft_weight to 0"
            )
        return self

    @model_validator(mode="after")
    def _resumed_with_a_journal(self) -> Self:
        if self.resume and not self.checkpoint.journal:
            raise ValueError(
                "resume is true and checkpoint.journal is false: a run without a journal cannot be resumed; set "
                "checkpoint.journal to true if the run has one, or start without --resume"
            )
        return self

    @model_validator(mode="after")
    def _groups_large_enough(self) -> Self:
        least, size = self.rollouts.min_group_size, self.rollouts.group_size
        if not self.learns_from_files and least > size:
            remedy = "lower the first or raise the second"
            if size == 1:
                remedy = (
                    f"raise the second to {least} or more; groups of one, by lowering the first, are for algorithms "
                )
                remedy += "that do not compare rewards within a group, such as ppo"
            raise ValueError(
                f"rollouts.min_group_size is {least} and rollouts.group_size {size}: no group could be kept; {remedy}"
            )
        if isinstance(self.algo, PassAtKConfig) and self.algo.k >= size:
            raise ValueError(
                f"algo.k is {self.algo.k} and rollouts.group_size {size}: the one set of k answers would be the group, "
                "and nothing could be compared; lower algo.k or raise rollouts.group_size, to several times as many"
            )
        return self


def _of_a_run() -> Iterator[str]:
    groups: Mapping[str, type[BaseModel]] = {
        "": LearnerConfig,
        "training.": TrainingConfig,
        "weights.": WeightsConfig,
    }
    for prefix, used in _USED_BY_TENANTS.items():
        yield from (f"{prefix}{name}" for name in groups[prefix].model_fields if name not in used)
