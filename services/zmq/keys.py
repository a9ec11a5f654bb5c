"""CURVE keys: who may speak with whom over ZeroMQ. A key is 40 characters of Z85, alone in its file.

The learner is the server: it has a secret key and a list of the public keys that may connect. An env_service has a
secret key and the learner's public key. `headway keys` makes all of them.

learner_key_file: Annotated[Path | None, KeyFile("public"), PublicKeyOf("learner", "leases.secret_key_file")]
"""

import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Self

from services.secret_files import SecretFileError, read_public, read_secret

logger = logging.getLogger(__name__)

_Z85 = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")
_SHOWN = 8
_MAX_LIST = 1 << 20
_REMEDY = "`headway keys FOLDER` makes the files and prints the settings of both sides"


@dataclass(frozen=True)
class CurveKeys:
    """A pair of keys."""

    public: str
    secret: str = field(repr=False)

    @classmethod
    def new(cls) -> Self:
        """A random pair."""
        import zmq  # deferred, here and below: configs that only name key files are read without ZeroMQ

        public, secret = zmq.curve_keypair()
        return cls(public=public.decode("ascii"), secret=secret.decode("ascii"))

    @classmethod
    def read(cls, path: Path) -> Self:
        """The pair whose secret key is in a file that nobody else can read. Raises SecretFileError."""
        import zmq

        secret = _checked(read_secret(path), path)
        return cls(public=zmq.curve_public(secret.encode("ascii")).decode("ascii"), secret=secret)


class AuthorizedKeys:
    """The public keys that may connect, in a folder of `NAME.pub` files, or in a file of lines `KEY NAME`.

    Looked at anew for each connection: a key that is added or removed counts from the next connection on.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known = read_authorized(path)

    def name_of(self, public_key: str) -> str | None:
        """The name beside the key, None if it may not connect. An unreadable list leaves the last one in force."""
        try:
            self._known = read_authorized(self._path)
        except SecretFileError as error:
            logger.error("the authorized keys cannot be read, those read before stay in force: %s", error)
        return self._known.get(public_key)


@dataclass(frozen=True)
class ServerKeys:
    """Keys of the listening side."""

    own: CurveKeys
    authorized: AuthorizedKeys

    @classmethod
    def read(cls, *, secret_key_file: Path | None, authorized_keys: Path | None) -> Self | None:
        """None without files. Raises SecretFileError."""
        if secret_key_file is None or authorized_keys is None:
            return None
        return cls(own=CurveKeys.read(secret_key_file), authorized=AuthorizedKeys(authorized_keys))


@dataclass(frozen=True)
class ClientKeys:
    """Keys of the connecting side: its own pair, and the public key of the server."""

    own: CurveKeys
    server: str

    @classmethod
    def read(cls, *, secret_key_file: Path | None, server_key_file: Path | None) -> Self | None:
        """None without files. Raises SecretFileError."""
        if secret_key_file is None or server_key_file is None:
            return None
        return cls(own=CurveKeys.read(secret_key_file), server=read_public_key(server_key_file))


def read_public_key(path: Path) -> str:
    """Raises SecretFileError."""
    return _checked(read_public(path), path)


def read_authorized(path: Path) -> dict[str, str]:
    """The names of the keys in a folder's `.pub` files or in the lines of a file. Raises SecretFileError."""
    if path.is_dir():
        return {read_public_key(file): file.stem for file in sorted(path.glob("*.pub"))}
    return dict(_authorized_lines(path))


def shown(public_key: str) -> str:
    """The first characters, by which people tell keys apart."""
    return f"{public_key[:_SHOWN]}..."


def _authorized_lines(path: Path) -> list[tuple[str, str]]:
    try:
        with path.open(encoding="utf-8") as file:
            lines = file.read(_MAX_LIST).splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SecretFileError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    keys = []
    for number, line in enumerate(lines, 1):
        key, _, name = line.strip().partition(" ")
        if key and key != "#":  # a comment has a space after its mark: keys, too, may begin with it
            keys.append((_checked(key, path, line=number), name.strip() or shown(key)))
    return keys


def _checked(text: str, path: Path, *, line: int | None = None) -> str:
    if not _Z85.fullmatch(text):
        where = path if line is None else f"{path}, line {line},"
        raise SecretFileError(
            f"{where} is no CURVE key: expected 40 characters of Z85 as `headway keys` writes them, got {len(text)}"
        )
    return text


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
