"""The settings of a run as it was started last, read from its folder: to train it again, or to export it.

    made_with.json ─▶ settings of the run ─┬──────────────▶ LearnerConfig
                              --set, a form ┴▶ WhatIf ─────▶ the same, but for the changes

Loads no torch.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from learner.changed_settings import WhatIf, changed_config, differences_of
from learner.config import LearnerConfig
from learner.teachers.config import TeacherConfig
from services.config import made_with
from services.config.devices import visible
from services.process import WrongSettings

_FINGERPRINTS = ("model_fingerprint", "template_fingerprint", "demonstrations_fingerprint")
_NEEDED = ("model", "algo.type", "algo.path", "algo.components", "algo.teacher_weight", "data.path", "teachers")


def what_if_of(folder: Path, changes: Sequence[str], *, groups: int = 0, to: Path | None = None) -> WhatIf:
    """A what-if of the run by `changes`, words KEY=VALUE; `groups` and `to` are those of WhatIf.

    Raises WrongSettings and ValidationError as `settings_of_run` does, and WrongSettings for changes that change
    nothing.
    """
    config = settings_of_run(folder)
    changed = settings_of_run(folder, changes=changes)
    return WhatIf(config, changed, differences=differences_of(config, changed, asked=changes), groups=groups, to=to)


def refuse_beside(folder: Path, *, environ: Mapping[str, str] = os.environ) -> None:
    """Raises WrongSettings where a what-if of a run that goes on would train on a GPU: its learner may need it."""
    if gpus := visible(environ):
        raise WrongSettings(
            f"the run in {folder} goes on, and a what-if would train on a GPU of this machine ({', '.join(gpus)}), "
            "which its learner may need: wait for its end, or replay a copy of it where a GPU is free"
        )


def settings_of_run(folder: Path, *, changes: Sequence[str] = ()) -> LearnerConfig:
    """As the run was started last, to replay it; with `changes`, words KEY=VALUE, as a what-if of it.

    Raises WrongSettings where that is not known, for what needs more than the folder, and for changes that a replay
    cannot make.
    """
    config = config_of_run(folder, changes=changes)
    if config.learns_from_files:
        raise WrongSettings(f"the run in {folder} learnt from files ({config.algo.type}): it has no journal to replay")
    if not config.checkpoint.journal:
        raise WrongSettings(
            f"the run in {folder} kept no journal (checkpoint.journal = false): there is nothing to replay"
        )
    asked_elsewhere = [url for each in config.teachers for url in each.urls]
    if asked_elsewhere:
        raise WrongSettings(f"a teacher at {asked_elsewhere[0]} taught this run, and its words are not in the journal")
    return config.model_copy(
        # The optimizer's own weights, whatever is published.
        update={"training": config.training.model_copy(update={"publish_dtype": "float32"})}
    )


def config_of_run(folder: Path, *, changes: Sequence[str] = ()) -> LearnerConfig:
    """As the run was started last, but for the changes; its folder is where it is now.

    Secrets are not known, and `http` is as by default: nothing is served, and an address may need a token. Raises
    WrongSettings where the settings are not known, and for changes that a replay cannot make; ValidationError for
    settings that are wrong, or of another release.
    """
    settings = made_with.read(folder).get("settings")
    if not isinstance(settings, dict):
        raise WrongSettings(f"{folder / made_with.FILE} is missing or cannot be read: expected the folder of a run")
    known = {
        key: value
        for key, value in settings.items()
        if value != made_with.SECRET and key not in _FINGERPRINTS and not key.startswith("http.")
    }
    if known.get("data.epochs") is not None:
        known.pop("steps", None)  # those that the epochs came to
    usual = {name: info.default for name, info in TeacherConfig.model_fields.items()}
    known["teachers"] = [
        {key: value for key, value in each.items() if value not in (usual.get(key), None, [])}
        for each in known.get("teachers", ())
    ]
    # A setting that counts for nothing beside others is refused if it is given, also as its default.
    least = {key: value for key, value in known.items() if key in _NEEDED}
    defaults = made_with.settings_of(LearnerConfig.model_validate(made_with.tables_of(least)))
    given = {key: value for key, value in known.items() if key in least or value != defaults.get(key)}
    config = LearnerConfig.model_validate(made_with.tables_of(given)) if not changes else changed_config(given, changes)
    kept = {} if config.run.chat_template is None else {"chat_template": folder / made_with.TEMPLATE}
    run = config.run.model_copy(update={"directory": folder.resolve().parent, "name": folder.resolve().name, **kept})
    return config.model_copy(update={"run": run})
