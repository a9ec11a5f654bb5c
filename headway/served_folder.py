"""Addresses of the processes that `headway serve` has started, kept in the run's folder for `headway status` and
`headway doctor`: their tokens are made at each start, and nobody could tell them otherwise.

    <folder>/serve.json   url, token and CA of each process, for its owner's eyes
"""

from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, SecretStr, TypeAdapter, ValidationError, field_serializer

from protocol.status import Kind
from services.config.sources import ConfigError
from services.diagnosis.asked import Target
from services.http.tls import TlsFiles
from services.secret_files import SecretFileError, check_only_ours, write_secret

SERVED_FILE = "serve.json"


class _ServedAddress(BaseModel):
    model_config = ConfigDict(extra="forbid")

    kind: Kind
    url: str
    token: SecretStr | None = None
    ca: Path | None = None

    @field_serializer("token")
    def _shown(self, token: SecretStr | None) -> str | None:
        return None if token is None else token.get_secret_value()


_ADDRESSES: TypeAdapter[tuple[_ServedAddress, ...]] = TypeAdapter(tuple[_ServedAddress, ...])


def note_targets(folder: Path, targets: Sequence[Target]) -> None:
    """Writes where the processes of the folder answer. Raises OSError."""
    told = tuple(_ServedAddress(kind=one.kind, url=one.url, token=one.token, ca=one.tls.ca) for one in targets)
    write_secret(folder / SERVED_FILE, _ADDRESSES.dump_json(told).decode())


def noted_targets(folder: Path) -> tuple[Target, ...]:
    """The processes of the folder, as its last start noted them. Raises ConfigError."""
    path = folder / SERVED_FILE
    try:
        check_only_ours(path)
        found = _ADDRESSES.validate_json(path.read_bytes())
    except (SecretFileError, ValidationError) as error:
        expected = "expected a RUN.toml, or the folder of a server that headway serve has started"
        got = f"{path} cannot be read: {error}" if path.exists() else f"{folder} is a folder without {SERVED_FILE}"
        raise ConfigError([f"command line: {got}; {expected}"]) from error
    return tuple(Target(kind=one.kind, url=one.url, token=one.token, tls=TlsFiles(ca=one.ca)) for one in found)
