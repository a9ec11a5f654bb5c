"""The keys file: who may use the service, how much, and with what weight beside others. It holds no key, only hashes.

{"keys": [{"name": "alice", "sha256": "...", "weight": 2}]}
"""

import hashlib
import json
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from protocol.codec import describe
from services.process import WrongSettings
from services.secret_files import SecretFileError, check_only_ours, write_secret

PREFIX = "tml-"
"""Of every key: clients refuse others."""
_FIRST = "first"
"""The tenant of a keys file that was made."""


class Tenant(BaseModel):
    """The owner of a key, with the bounds of what it may have at once.

    `weight`: its share of the trainer beside those of others that also wait.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9._-]+$")]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    weight: float = Field(default=1.0, gt=0, le=1000)
    max_models: int = Field(default=1024, ge=1)
    max_queued_operations: int = Field(default=4096, ge=1)
    max_queued_bytes: int = Field(default=1 << 30, ge=1)
    max_samples: int = Field(default=2048, ge=1)


class _KeysFile(BaseModel):
    model_config = ConfigDict(extra="forbid")

    keys: tuple[Tenant, ...]


class TenantKeysError(ValueError, WrongSettings):
    """The keys file cannot be used. The text names it, and what to do."""


def new_key() -> str:
    """A key with 256 random bits."""
    return PREFIX + secrets.token_urlsafe(32)


def first_key_path(keys_file: Path) -> Path:
    """The place of the key that `make_keys_file` makes, beside the file."""
    return keys_file.with_suffix(".key")


def make_keys_file(path: Path) -> None:
    """Write a keys file with one tenant, and its key beside it, both for their owner's eyes; an old file is kept.

    Raises TenantKeysError.
    """
    if path.exists():
        return
    key = new_key()
    tenant = {"name": _FIRST, "sha256": hash_of(key)}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_secret(first_key_path(path), key)  # before its hash: a key that nobody knows would stay
        write_secret(path, json.dumps({"keys": [tenant]}))
    except OSError as error:
        raise TenantKeysError(f"cannot make the keys file {path}: {error.strerror}; set tinker.keys_file") from error


def hash_of(key: str) -> str:
    """The hash by which the keys file knows a key. Keys are random, so that no slow hash is needed."""
    return hashlib.sha256(key.encode()).hexdigest()


class TenantKeys:
    """The tenants by key."""

    def __init__(self, tenants: Iterable[Tenant]) -> None:
        """Raises TenantKeysError for a name or a key that stands twice."""
        known = tuple(tenants)
        self._by_hash = {tenant.sha256: tenant for tenant in known}
        if len(self._by_hash) < len(known) or len({tenant.name for tenant in known}) < len(known):
            raise TenantKeysError("the keys file has a name or a key twice; give each tenant one line of its own")
        self.tenants = known

    @classmethod
    def read(cls, path: Path) -> Self:
        """The tenants of the file. Raises TenantKeysError."""
        try:
            check_only_ours(path)
            return cls(_KeysFile.model_validate_json(path.read_bytes()).keys)
        except SecretFileError as error:
            raise TenantKeysError(str(error)) from error
        except ValidationError as error:
            raise TenantKeysError(f"{path} is no keys file: {describe(error)}") from error

    def tenant(self, key: str) -> Tenant | None:
        """The owner of the key; None if it is nobody's."""
        return self._by_hash.get(hash_of(key))
