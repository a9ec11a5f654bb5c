"""The keys file: who may use the service, how much, and with what weight beside others. It holds no key, only hashes.

{"keys": [{"name": "alice", "sha256": "...", "weight": 2}]}
"""

import hashlib
import json
import logging
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from protocol.codec import describe
from services.process import WrongSettings
from services.secret_files import SecretFileError, check_only_ours, write_secret
from services.watched_files import WatchedFiles

logger = logging.getLogger(__name__)

PREFIX = "tml-"
"""Of every key: clients refuse others."""
_FIRST = "first"
"""The tenant of a keys file that was made."""


class Tenant(BaseModel):
    """The owner of a key, with the bounds of what it may have at once.

    `weight`: its share of the trainer beside those of others that also wait. `max_result_bytes`: of results that it has
    not retrieved.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9._-]+$")]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    weight: float = Field(default=1.0, gt=0, le=1000)
    max_models: int = Field(default=1024, ge=1)
    max_queued_operations: int = Field(default=4096, ge=1)
    max_queued_bytes: int = Field(default=1 << 30, ge=1)
    max_samples: int = Field(default=2048, ge=1)
    max_result_bytes: int = Field(default=1 << 32, ge=1)


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


@dataclass(frozen=True)
class _KeyTable:
    """The tenants of a keys file as it was read."""

    tenants: tuple[Tenant, ...]

    def __post_init__(self) -> None:
        """Raises TenantKeysError for a name or a key that stands twice."""
        count = len(self.tenants)
        if len(self.by_hash) < count or len(self.by_name) < count:
            raise TenantKeysError("the keys file has a name or a key twice; give each tenant one line of its own")

    @cached_property
    def by_hash(self) -> Mapping[str, Tenant]:
        return {tenant.sha256: tenant for tenant in self.tenants}

    @cached_property
    def by_name(self) -> Mapping[str, Tenant]:
        return {tenant.name: tenant for tenant in self.tenants}


class TenantKeys:
    """The tenants by key. Those of a file follow it: a key that is added, exchanged or removed there counts at once."""

    def __init__(self, tenants: Iterable[Tenant]) -> None:
        """Tenants of no file. Raises TenantKeysError for a name or a key that stands twice."""
        table = _KeyTable(tuple(tenants))
        self._table: Callable[[], _KeyTable] = lambda: table

    @classmethod
    def read(cls, path: Path) -> Self:
        """The tenants of the file, which is read again once it has changed; a change that cannot be used is logged, and
        what was read before stays in force. Raises TenantKeysError.
        """
        keys = cls(())
        watched = WatchedFiles(
            (path,),
            lambda _: _read(path),
            fault=TenantKeysError,
            refused="the changed keys of tenants cannot be used, those read before stay in force",
            changed=partial(_tell, path),
        )
        keys._table = watched.current
        return keys

    @property
    def tenants(self) -> tuple[Tenant, ...]:
        """All of them now."""
        return self._table().tenants

    @property
    def by_name(self) -> Mapping[str, Tenant]:
        """All of them now, by name."""
        return self._table().by_name

    def tenant(self, key: str) -> Tenant | None:
        """The owner of the key; None if it is nobody's."""
        return self._table().by_hash.get(hash_of(key))

    def holds(self, tenant: Tenant) -> bool:
        """True if the key by which this tenant was found is still one."""
        return tenant.sha256 in self._table().by_hash


def _read(path: Path) -> _KeyTable:
    try:
        check_only_ours(path)
        return _KeyTable(_KeysFile.model_validate_json(path.read_bytes()).keys)
    except SecretFileError as error:
        raise TenantKeysError(str(error)) from error
    except OSError as error:
        raise TenantKeysError(f"cannot read {path}: {error.strerror}") from error
    except ValidationError as error:
        raise TenantKeysError(f"{path} is no keys file: {describe(error)}") from error


def _tell(path: Path, before: _KeyTable, after: _KeyTable) -> None:
    both = before.by_name.keys() & after.by_name.keys()
    news = {
        "added": after.by_name.keys() - both,
        "removed": before.by_name.keys() - both,
        "with a new key": {name for name in both if before.by_name[name].sha256 != after.by_name[name].sha256},
    }
    told = "; ".join(f"{what}: {', '.join(sorted(names))}" for what, names in news.items() if names)
    logger.info("%s has changed, and is in use%s", path, f" ({told})" if told else "")
