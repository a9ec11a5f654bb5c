"""The settings of evaluations, of their judge, and of the trackers of a run. Loads no torch."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, SecretStr, model_validator

from protocol.generation import LOWEST_TEMPERATURE
from services.config.models import ConfigModel
from services.config.run_paths import WrittenPath
from services.network import HttpAddress

_DEFAULT_URL = "http://127.0.0.1:7320"


class JudgingConfig(ConfigModel):
    """The judge of pairs of completions, ours and those of `against`: a verifier that takes a `baseline`."""

    verifier: str | None = Field(
        None, min_length=1, max_length=256, description="pairwise verifier of the reward service; none: no such judging"
    )
    urls: tuple[HttpAddress, ...] = Field(
        (), description=f"addresses of reward services that have it; {_DEFAULT_URL} if left out"
    )
    token: SecretStr | None = Field(None, description="bearer token of the reward services")
    timeout_s: float = Field(120.0, gt=0, le=3600, description="time for one request of pairs, in seconds")

    @property
    def addresses(self) -> tuple[str, ...]:
        """The reward services, without a slash at the end."""
        return tuple(url.rstrip("/") for url in self.urls or (_DEFAULT_URL,))


class EvaluationConfig(ConfigModel):
    """Held-out evaluation, by the same generators: during a run, or by itself (`headway eval`)."""

    tasks: int = Field(200, ge=0, description="held-out tasks in an evaluation during the run; 0 turns it off")
    every_steps: int = Field(50, ge=1, description="steps between evaluations")
    final_tasks: int = Field(
        500, ge=0, description="held-out tasks before the first and after the last step, and of an evaluation by itself"
    )
    share: float = Field(
        0.5, gt=0, le=1, description="share of an env_service's places that an evaluation during the run takes at most"
    )
    samples: int = Field(1, ge=1, le=4096, description="completions of each held-out task")
    k: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        (), description="the k of pass@k and cons@k, at most samples; if left out 1, 2, 4, ... and samples itself"
    )
    temperature: float = Field(1.0, ge=0, description="sampling temperature; 0 is greedy")
    top_p: float = Field(
        1.0, gt=0, le=1, description="only the most probable tokens of together this probability are sampled"
    )
    top_k: int = Field(0, ge=0, lt=1 << 31, description="only so many most probable tokens are sampled; 0: all")
    min_p: float = Field(
        0.0, ge=0, le=1, description="only tokens of at least this share of the likeliest one's probability are sampled"
    )
    success_reward: float = Field(1.0, description="a reward of at least this counts as solved")
    only: bool = Field(False, description="evaluate the model on final_tasks tasks, train nothing, and end")
    checkpoint: Path | None = Field(
        None, description="checkpoint folder of a run of the same settings to evaluate instead of the model; with only"
    )
    output: Annotated[Path | None, WrittenPath()] = Field(
        None, description="file for an evaluation by itself; evaluation.json in the run's folder if left out"
    )
    against: Path | None = Field(
        None,
        description="file of an earlier evaluation by itself to give a win rate against, or for a judge a JSONL of "
        "prompt and completion; with only",
    )
    judge: JudgingConfig = Field(JudgingConfig(), description="judge of pairs, ours and those of against; with only")

    @property
    def ks(self) -> tuple[int, ...]:
        """The k of pass@k and cons@k, ascending."""
        powers = (1 << bit for bit in range(self.samples.bit_length()))
        return tuple(sorted(set(self.k or (*powers, self.samples))))

    @model_validator(mode="after")
    def _enough_samples(self) -> Self:
        if max(self.k, default=1) > self.samples:
            raise ValueError(
                f"k holds {max(self.k)} and samples is {self.samples}: pass@k needs k samples of a task; raise samples "
                "or lower k"
            )
        if self.samples > 1 and self.temperature < LOWEST_TEMPERATURE:
            raise ValueError(
                f"samples is {self.samples} at temperature {self.temperature}: greedy samples are all the same; set "
                "samples to 1, or raise temperature"
            )
        return self

    @model_validator(mode="after")
    def _by_itself(self) -> Self:
        given = [name for name in ("checkpoint", "output", "against") if getattr(self, name) is not None]
        if given and not self.only:
            raise ValueError(f"{given[0]} needs an evaluation by itself, and only is false: set only to true")
        if self.judge.verifier is not None and self.against is None:
            raise ValueError("judge.verifier is set and against is not: set against to what ours is compared with")
        if self.against is not None and self.against.suffix == ".jsonl" and self.judge.verifier is None:
            raise ValueError(f"against is {self.against}, which has no rewards: set judge.verifier to a pairwise one")
        if self.only and self.final_tasks == 0:
            raise ValueError("only is true and final_tasks is 0: nothing would be evaluated; set final_tasks")
        return self


class TrackersConfig(ConfigModel):
    """Trackers that get the numbers of `metrics.jsonl`. What one is too slow for is left out and counted."""

    tensorboard: bool = Field(False, description="write TensorBoard files, by the package tensorboardX")
    wandb: Literal["off", "online", "offline"] = Field(
        "off", description="send to W&B, or write for it into the run's folder (offline), by the package wandb"
    )
    wandb_project: str = Field("headway", min_length=1, description="project at W&B")
    mlflow_url: str | None = Field(None, pattern=r"^https?://", description="address of an MLflow server to send to")
    mlflow_experiment: str = Field("headway", min_length=1, description="experiment at the MLflow server")
    mlflow_token: SecretStr | None = Field(None, description="bearer token of the MLflow server")
