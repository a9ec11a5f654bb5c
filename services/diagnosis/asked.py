"""Processes that were asked how they are."""

from dataclasses import dataclass, field
from enum import StrEnum
from urllib.parse import urlsplit

from pydantic import SecretStr

from protocol.status import AskedPeer, Kind, Status
from services.http.tls import TlsFiles
from services.local_processes import LocalProcess, is_here


class Condition(StrEnum):
    """The outcome of asking."""

    ANSWERS = "answers"
    DEAD = "dead"
    """Nobody accepts a connection there."""
    HANGS = "hangs"
    """A connection was accepted, and no answer came."""
    STRANGE = "strange"
    """Something answered, but not what was asked for."""


@dataclass(frozen=True)
class Target:
    """A process to be asked."""

    kind: Kind
    url: str
    token: SecretStr | None = None
    tls: TlsFiles = field(default_factory=TlsFiles)

    @property
    def place(self) -> str:
        """Host and port, the same for all names of this machine."""
        return place_of(self.url)


def place_of(url: str) -> str:
    """Host and port of an address, the same for all names of this machine."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    return f"{'localhost' if is_here(host) else host}:{parts.port}"


@dataclass(frozen=True)
class AskedProcess:
    """A process that was asked. `complaint` is what went wrong; `process` is who listens there, if on this machine."""

    target: Target
    condition: Condition
    status: Status | None = None
    complaint: str = ""
    process: LocalProcess | None = None

    @classmethod
    def told(cls, peer: AskedPeer) -> "AskedProcess":
        """A process that somebody else has asked."""
        known = peer.pid is not None
        return cls(
            target=Target(kind=peer.kind, url=peer.url),
            condition=Condition(peer.condition),
            status=peer.status,
            complaint=peer.complaint,
            process=LocalProcess(peer.pid or 0, peer.command, peer.is_stopped) if known else None,
        )

    def to_tell(self) -> AskedPeer:
        """The same for somebody else; of its failures the newest ones."""
        status, process = self.status, self.process
        return AskedPeer(
            kind=self.kind,
            url=self.target.url,
            condition=self.condition.value,
            complaint=self.complaint[:2000],
            status=None if status is None else status.model_copy(update={"failures": status.failures[:2]}),
            pid=None if process is None else process.pid,
            command="" if process is None else process.command,
            is_stopped=process is not None and process.is_stopped,
        )

    @property
    def kind(self) -> Kind:
        return self.target.kind

    @property
    def name(self) -> str:
        """Its kind and what tells it from others of the kind."""
        return f"{self.kind} {self.target.place}"
