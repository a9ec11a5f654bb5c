"""The form of a what-if: the settings of a run that a replay can change, with what stands there and what may."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import ValidationError

from learner.changed_settings import CHANGEABLE
from learner.config import FROM_FILES, LearnerConfig
from learner.run_settings import refuse_beside, settings_of_run, what_if_of
from services.config import made_with
from services.config.options import REQUIRED, Option, OptionSchema, schema_of
from services.process import WrongSettings
from services.run_lock import life_in

_TYPE = "algo.type"
_OF_CODE = ("custom",)
"""Algorithms that are code of a user's own, whose place a page may not name."""
_FIRST = ("algo", "training.optimizer", "training.updates_per_step", "training.epochs_per_step")
"""Groups that most what-ifs are about; the others are folded."""


@dataclass(frozen=True)
class SettingField:
    """A setting: its `value` in the run and its `default`, as the command line spells them, and its meaning in words.

    `choices` are all values that it may have, if they can be listed. `usual` says that it is among the first.
    """

    key: str
    value: str
    default: str
    help: str
    choices: tuple[str, ...] = ()
    usual: bool = False


def form_of(folder: Path) -> dict[str, Any]:
    """The fields for a run, and why no what-if of it can be trained now (`refused`, empty if one can). For JSON."""
    try:
        config = settings_of_run(folder)
    except (WrongSettings, ValidationError) as error:
        return {"fields": [], "refused": str(error)}
    refused = ""
    try:
        _refuse_now(folder)
    except WrongSettings as error:
        refused = str(error)
    return {"fields": [asdict(each) for each in fields_of(config)], "refused": refused}


def checked(folder: Path, changes: Sequence[str]) -> list[str]:
    """The settings that a form's changes change, in words.

    Raises WrongSettings and ValidationError with what the command line says, and WrongSettings for what cannot be
    trained now, or not from a page.
    """
    asked = what_if_of(folder, changes)
    before, after = asked.config.algo.model_dump(), asked.changed.algo.model_dump()
    if after["type"] in _OF_CODE and (before["type"], before.get("path")) != (after["type"], after.get("path")):
        raise WrongSettings(
            "--set algo.path: a page cannot name code that is to run on this machine: use `learner replay` there"
        )
    _refuse_now(folder)
    return [str(each) for each in asked.differences]


def fields_of(config: LearnerConfig) -> list[SettingField]:
    """The settings of a run that a replay can change: those of its own algorithm, and of how it is trained by it."""
    schema, kind, values = _schema(), config.algo.type, made_with.settings_of(config)
    found = []
    for key, option in schema.options.items():
        if _group_of(key, CHANGEABLE) is None or (option.variants and kind not in option.variants) or key not in values:
            continue
        if key.removeprefix("algo.") == "path":
            continue
        own = replace(option, annotation=option.kinds.get(kind, option.annotation))
        found.append(
            SettingField(
                key=key,
                value=spelled(values[key]),
                default=spelled(option.variants.get(kind, option.default)),
                help=option.texts.get(kind, option.description),
                choices=_choices(key, own, kind),
                usual=_group_of(key, _FIRST) is not None,
            )
        )
    return sorted(found, key=lambda each: CHANGEABLE.index(_group_of(each.key, CHANGEABLE) or ""))


def spelled(value: object) -> str:
    """A value as a command line takes it; empty for that of a setting that has no default."""
    if value is None:
        return "none"
    if value is REQUIRED:
        return ""
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _refuse_now(folder: Path) -> None:
    """Raises WrongSettings while a GPU would be needed twice."""
    if life_in(folder) == "goes on":
        refuse_beside(folder)


def _choices(key: str, option: Option, kind: str) -> tuple[str, ...]:
    if key == _TYPE:
        all_types = _schema().choices["algo"].variants
        return tuple(each for each in all_types if each == kind or each not in (*FROM_FILES, *_OF_CODE))
    listed = ("true", "false") if option.is_bool else _literals(option.annotation)
    return ("none", *listed) if listed and option.is_optional else listed


def _literals(annotation: object) -> tuple[str, ...]:
    """The values of a type that has listed values alone, and perhaps none; empty for another type."""
    if get_origin(annotation) is Annotated:
        return _literals(get_args(annotation)[0])
    is_union = get_origin(annotation) in (Union, UnionType)
    parts = [part for part in (get_args(annotation) if is_union else (annotation,)) if part is not NoneType]
    listed = all(get_origin(part) is Literal for part in parts)
    return tuple(str(value) for part in parts for value in get_args(part)) if listed else ()


def _group_of(key: str, groups: tuple[str, ...]) -> str | None:
    return next((group for group in groups if f"{key}.".startswith(f"{group}.")), None)


@cache
def _schema() -> OptionSchema:
    return schema_of(LearnerConfig)
