"""What is wrong with the files of keys that a config names, and where those of two processes do not belong together.

learner_key_file: Annotated[Path | None, KeyFile("public"), PublicKeyOf("learner", "leases.secret_key_file")]
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from services.keys import CurveKeys, read_authorized, read_public_key, shown
from services.secret_files import SecretFileError

_REMEDY = "`headway keys FOLDER` makes the files and prints the settings of both sides"


@dataclass(frozen=True)
class KeyFile:
    """Marks a file of a key, or the list of those that are authorized."""

    holds: Literal["secret", "public", "authorized"]


@dataclass(frozen=True)
class PublicKeyOf:
    """Marks the file of a public key: that of the secret key in the file that `key` of `process` names."""

    process: str
    key: str


@dataclass(frozen=True)
class AuthorizedBy:
    """Marks the file of a secret key whose public one has to be in the list that `key` of `process` names."""

    process: str
    key: str


def unreadable_key(place: str, path: Path | None, mark: KeyFile) -> Iterator[str]:
    """The problem with the file itself."""
    if path is None:
        return
    try:
        if mark.holds == "secret":
            CurveKeys.read(path)
        elif mark.holds == "public":
            read_public_key(path)
        else:
            read_authorized(path)
    except SecretFileError as error:
        yield f"{place}: {error}"


def unlike_keys(
    place: str, path: Path | None, other: str, theirs: Path | None, mark: PublicKeyOf | AuthorizedBy
) -> Iterator[str]:
    """The problem between the files of two processes; none while one of them cannot be read, which is one by itself."""
    if (path is None) != (theirs is None):
        has, lacks = (place, other) if theirs is None else (other, place)
        yield f"{has} is set, but {lacks} is not: keys are for both sides or for neither; {_REMEDY}"
    if path is None or theirs is None:
        return
    try:
        if isinstance(mark, PublicKeyOf):
            yield from _another_public_key(place, read_public_key(path), other, CurveKeys.read(theirs).public)
        else:
            yield from _not_authorized(place, CurveKeys.read(path).public, other, theirs)
    except SecretFileError:
        return


def _another_public_key(place: str, ours: str, other: str, theirs: str) -> Iterator[str]:
    if ours != theirs:
        yield (
            f"{place} holds the public key {shown(ours)}, but that of the secret key in {other} is {shown(theirs)}: "
            "copy the learner's public key there"
        )


def _not_authorized(place: str, ours: str, other: str, list_of_keys: Path) -> Iterator[str]:
    if ours not in read_authorized(list_of_keys):
        yield f"{place} has the public key {shown(ours)}, which is not in {other} ({list_of_keys}): add it there"
