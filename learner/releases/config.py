"""The settings of releases. Loads no torch."""

from typing import Literal, Self

from pydantic import Field, model_validator

from services.config.models import ConfigModel


class ReleaseConfig(ConfigModel):
    """Releases: versions for users, beside the newest ones that rollouts get."""

    enabled: bool = Field(
        False,
        description="keep a released version for generators whose join.channel is released or canary; false: none",
    )
    every_steps: int = Field(
        50,
        ge=1,
        description="steps between candidates; generators stay at a candidate while it is evaluated on held-out tasks, "
        "so that all answers are its own, and training goes on as far as max_lag lets it",
    )
    tasks: int = Field(500, ge=10, description="held-out tasks in the evaluation of a candidate")
    metric: Literal["accuracy", "reward"] = Field(
        "accuracy", description="what must be better: the share of solved samples of each task, or its mean reward"
    )
    standard_errors: float = Field(
        3.0,
        gt=0,
        le=10,
        description="a candidate is released if it is better than the released version by so many standard errors of "
        "the difference, over the same tasks",
    )
    canary_rewards: int = Field(
        0,
        ge=0,
        description="rewards of users that a candidate, on generators whose join.channel is canary, and the released "
        "version need each before the candidate is released; 2 or more, or 0: none",
    )
    canary_margin: float = Field(
        0.1,
        gt=0,
        description="a candidate is refused unless its users' mean reward is shown, by standard_errors, to be less "
        "than this below that of the released version",
    )
    canary_timeout_s: float = Field(
        86400.0,
        gt=0,
        description="a candidate that has too few rewards of users after so many seconds is refused; each start of the "
        "learner counts anew",
    )
    keep: int = Field(
        3, ge=1, description="how many of the versions that were released before the present one are kept to go back to"
    )

    feedback_mb: int = Field(
        256,
        ge=1,
        description="room on the disk, in MiB, for answers to users that may still be rated; the oldest go first",
    )

    @model_validator(mode="after")
    def _counts(self) -> Self:
        fields = type(self).model_fields
        idle = [name for name in fields if name != "enabled" and getattr(self, name) != fields[name].default]
        if not self.enabled and idle:
            raise ValueError(f"{', '.join(idle)} set and enabled is false: set enabled to true, or leave it out")
        if self.canary_rewards == 1:
            raise ValueError(
                "canary_rewards is 1: a single reward has no standard error, so that no candidate could be released: "
                "set it to 500, say, to 2 at least, or to 0 for no trial with users"
            )
        canary = [name for name in ("canary_margin", "canary_timeout_s") if name in idle]
        if canary and not self.canary_rewards:
            raise ValueError(
                f"{', '.join(canary)} set and canary_rewards is 0, so that no candidate waits for users: set "
                "canary_rewards to 500, say, or leave it out"
            )
        return self
