"""The settings of a what-if: those of a run, but for some that a replay of its journal can change. Loads no torch.

    --set algo.clip_high=0.3 ─▶ a key of training? ─▶ over the run's own settings ─▶ LearnerConfig

A replay has the samples of the run. So it can change how a batch is learnt from, and nothing that decides what was
sampled, what is trained, or by how many processes.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from learner.config import FROM_FILES, LearnerConfig
from services.config import made_with
from services.config.options import OptionSchema, flag_of, schema_of
from services.config.sources import SourcedSetting, explained, from_command_line
from services.process import WrongSettings

logger = logging.getLogger(__name__)

CHANGEABLE = (
    "algo", "training.optimizer", "training.updates_per_step", "training.epochs_per_step", "training.reference",
    "training.critic.optimizer", "training.critic.warmup_steps", "training.critic.trunk_gradient", "training.router",
    "training.alignment", "demonstrations",
)  # fmt: skip
"""Keys, and groups of keys, that a what-if can change."""

_SAMPLED = "it decides what was sampled, and a replay has the samples of the run as they are"
_TRAINED = "it decides which model is trained, and a replay trains the run's"
_COMPUTED = "it says how and where numbers are computed, which a replay leaves as it was"
_REASONS = {
    **dict.fromkeys(("rollouts", "groups_per_step", "max_lag", "lag", "leases", "guard", "trust", "weights"), _SAMPLED),
    "training.temperature": "the samples were drawn at the run's temperature",
    **dict.fromkeys(
        ("model", "teachers", "training.lora", "training.critic", "training.head_seed", "tinker"), _TRAINED
    ),
    **dict.fromkeys(
        ("data", "steps", "time_limit_s", "reuse"), "a replay has the batches of the journal, all of them in order"
    ),
    **dict.fromkeys(("ranks", "threads", "devices", "seed", "training", "rank_restarts"), _COMPUTED),
    "run": "it names the run, or is the chat template that it was sampled with",
}
_REST = "it has no part in training"


@dataclass(frozen=True)
class WhatIf:
    """A run's `config`, and the `changed` one that its batches are trained by again, with what is other in it.

    The `groups` whose pull changed most are shown, so many at most; for 0 of them the run's own settings are not
    trained. The numbers of all steps and groups go `to` a new folder, if there is one.
    """

    config: LearnerConfig
    changed: LearnerConfig
    differences: Sequence[made_with.Difference]
    groups: int = 0
    to: Path | None = None

    @property
    def in_turn(self) -> tuple[LearnerConfig, ...]:
        """The settings of the trainers that it takes, in order."""
        return (self.config, self.changed) if self.groups else (self.changed,)


def changed_config(run: Mapping[str, Any], changes: Sequence[str]) -> LearnerConfig:
    """A run's settings by dotted key with the changes, words KEY=VALUE, over them.

    What the run set and the changes make useless is left out, and said. Raises WrongSettings for a key that is unknown
    or that a replay cannot change, and for values that are wrong.
    """
    schema = schema_of(LearnerConfig)
    given = _parsed(changes, schema)
    kept = {key: SourcedSetting(key, value, f"the run's {key}") for key, value in run.items()}
    type_now = given.get("algo.type")
    if type_now is not None and type_now.value != run.get("algo.type", "grpo"):
        left = sorted(key for key in kept if key.startswith("algo."))
        kept = {key: setting for key, setting in kept.items() if key not in left}
        if left := [key for key in left if key != "algo.type"]:
            logger.warning("algo.type is another one: left out is what the run set: %s", ", ".join(left))
    if type_now is not None and type_now.value in FROM_FILES:
        raise WrongSettings(f"--set algo.type: {type_now.value} learns from files, and a journal holds samples")
    return _validated({**kept, **given}, schema, asked=frozenset(given))


def differences_of(
    run: LearnerConfig, changed: LearnerConfig, *, asked: Sequence[str]
) -> tuple[made_with.Difference, ...]:
    """The settings that were changed; of another algorithm its type, and those `asked` for, words KEY=VALUE.

    Raises WrongSettings if that is nothing.
    """
    found = tuple(made_with.differences(made_with.settings_of(run), made_with.settings_of(changed)))
    if not found:
        raise WrongSettings(f"--set {', '.join(asked)}: the run has these settings already: expected another value")
    if run.algo.type == changed.algo.type:
        return found
    keys = {"algo.type", *_parsed(asked, schema_of(LearnerConfig))}
    told = [each for each in found if each.key in keys or not each.key.startswith("algo.")]
    return tuple(sorted(told, key=lambda each: each.key != "algo.type"))


def _parsed(changes: Sequence[str], schema: OptionSchema) -> dict[str, SourcedSetting]:
    found: dict[str, SourcedSetting] = {}
    for word in changes:
        key, equals, value = word.partition("=")
        key = key.strip().removeprefix("--")
        if not equals or not key:
            raise WrongSettings(f"--set {word}: expected KEY=VALUE, such as --set algo.clip_high=0.3")
        content = from_command_line([f"{flag_of(key)}={value.strip()}"], schema, process="learner")
        if content.problems:
            raise WrongSettings(f"--set {word}: {content.problems[0].removeprefix('command line: ')}")
        (setting,) = content.settings
        if (reason := _why_not(setting.key)) is not None:
            raise WrongSettings(
                f"--set {setting.key}: a replay cannot change it: {reason}. It can change {', '.join(CHANGEABLE)}"
            )
        found[setting.key] = replace(setting, origin=f"--set {setting.key}")
    return found


def _why_not(key: str) -> str | None:
    """Reason why a replay cannot change a key; None if it can."""
    if _group_in(key, CHANGEABLE) is not None:
        return None
    group = _group_in(key, sorted(_REASONS, key=len, reverse=True))
    return _REST if group is None else _REASONS[group]


def _group_in(key: str, groups: Sequence[str]) -> str | None:
    return next((group for group in groups if f"{key}.".startswith(f"{group}.")), None)


def _validated(settings: Mapping[str, SourcedSetting], schema: OptionSchema, *, asked: frozenset[str]) -> LearnerConfig:
    """Raises WrongSettings."""
    left = dict(settings)
    while True:
        try:
            return LearnerConfig.model_validate(made_with.tables_of({key: each.value for key, each in left.items()}))
        except ValidationError as error:
            useless = _useless(error, [key for key in left if key not in asked])
            if useless is None:
                raise WrongSettings("\n".join(explained(error, left, schema, "learner", known=False))) from error
            logger.warning("left out is what the run set and has no effect now: %s", useless)
            del left[useless]


def _useless(error: ValidationError, of_run: Sequence[str]) -> str | None:
    """The knob of the run that an error is about, if that is one that the changes have made useless."""
    messages = [each["msg"] for each in error.errors(include_url=False, include_context=False)]
    return next(
        (
            key
            for key in of_run
            if key.startswith("algo.")
            for message in messages
            if f"{key.removeprefix('algo.')} is set but has no effect" in message
        ),
        None,
    )
