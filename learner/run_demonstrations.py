"""The demonstrations of a run, from the file that its settings name."""

from pathlib import Path

from learner.config import LearnerConfig
from learner.data.demonstrations import Demonstrations
from learner.data.model_tokenizer import open_tokenizer
from services.config import made_with
from services.process import WrongSettings


def demonstrations_of(config: LearnerConfig) -> Demonstrations | None:
    """Read whole; None without any. Raises RecordError, FileNotFoundError."""
    shown, run = config.demonstrations, config.run
    if shown.path is None:
        return None
    tokenizer = open_tokenizer(config.model, template=run.template_text, told=run.chat_template_kwargs)
    return Demonstrations.read(
        shown.path, tokenizer, model=config.model, per_step=shown.sequences_per_step, seed=config.seed
    )


def check_same_demonstrations(config: LearnerConfig, folder: Path) -> None:
    """Raises WrongSettings if their file is not what it was when the run in `folder` was started last."""
    was = made_with.read(folder).get("settings", {})
    for key, now in config.demonstrations.fingerprint.items():
        if now != was.get(key):
            raise WrongSettings(
                f"{config.demonstrations.path} {'is missing' if now is None else 'is another file'}, and the run in "
                f"{folder} trained demonstrations that were in it: expected the file as it was; restore it"
            )
