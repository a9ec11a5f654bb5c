"""Teachers in folders: what is looked at before the ranks load them."""

from collections.abc import Sequence
from pathlib import Path

from learner.teachers.config import TeacherConfig
from learner.teachers.remote import TeacherFailed
from protocol.fingerprints import fingerprint_directory


def check_tokenizers(teachers: Sequence[TeacherConfig], *, model: Path) -> None:
    """Reads the folders of teachers and of the learner's `model`.

    Raises TeacherFailed for a teacher with another tokenizer than the learner's, unless its `same_tokenizer` is false;
    FileNotFoundError for a folder without one.
    """
    folders = [(teacher, teacher.path) for teacher in teachers if teacher.path is not None and teacher.same_tokenizer]
    own = fingerprint_directory(model).tokenizer if folders else ""
    for teacher, path in folders:
        found = fingerprint_directory(path).tokenizer
        if found != own:
            raise TeacherFailed(
                f"teacher {teacher.name} in {path} has a tokenizer of fingerprint {found}, the learner's in {model} "
                f"has {own}: its logprobs would be of other text. Use a teacher of the same tokenizer, or set "
                "same_tokenizer = false for it if token ids mean the same in both"
            )
