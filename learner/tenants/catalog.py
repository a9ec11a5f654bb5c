"""The catalog: all sessions, training models, sampling sessions and custom losses there are, and who owns them.

It is written to the journal entry by entry, and as a whole at the head of each of its files.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, TypeAdapter

from learner.training.client_operations import AdapterShape
from protocol.tinker.bodies import CreateCustomLoss


class CatalogEntry(BaseModel):
    """An entry. `owner` is the tenant's name, `created_at` seconds since 1970."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    owner: str
    session_id: str
    created_at: float


class SessionEntry(CatalogEntry):
    """A session. `finished`: what its client said at its end. A `dropped` one is taken out of the catalog."""

    type: Literal["session"] = "session"
    user_metadata: dict[str, JsonValue] | None = None
    display_name: str | None = None
    finished: JsonValue = None
    dropped: bool = False

    @property
    def key(self) -> str:
        """The name of the entry among those of its kind."""
        return self.session_id


class ModelEntry(CatalogEntry):
    """A training model. `loads`: the checkpoint that operation 0 loads, for one that is made of a checkpoint."""

    type: Literal["model"] = "model"
    model_id: str
    base_model: str
    shape: AdapterShape
    user_metadata: dict[str, JsonValue] | None = None
    loads: str | None = None
    unloaded: bool = False

    @property
    def key(self) -> str:
        """The name of the entry among those of its kind."""
        return self.model_id


class SamplingEntry(CatalogEntry):
    """A sampling session on a target: weights that stay, those of an inflight model, or the base model, None.

    A `dropped` one is taken out of the catalog.
    """

    type: Literal["sampling"] = "sampling"
    sampling_session_id: str
    base_model: str
    model_path: str | None = None
    target_id: str | None = None
    clones: int = 0
    dropped: bool = False

    @property
    def key(self) -> str:
        """The name of the entry among those of its kind."""
        return self.sampling_session_id


class LossEntry(CatalogEntry):
    """A custom loss. A `dropped` one is taken out of the catalog."""

    type: Literal["loss"] = "loss"
    loss_id: str
    body: CreateCustomLoss
    dropped: bool = False

    @property
    def key(self) -> str:
        """The name of the entry among those of its kind."""
        return self.loss_id


AnyEntry = Annotated[SessionEntry | ModelEntry | SamplingEntry | LossEntry, Field(discriminator="type")]
_ENTRY: TypeAdapter[SessionEntry | ModelEntry | SamplingEntry | LossEntry] = TypeAdapter(AnyEntry)
_ENTRIES: TypeAdapter[tuple[SessionEntry | ModelEntry | SamplingEntry | LossEntry, ...]] = TypeAdapter(
    tuple[AnyEntry, ...]
)


class Catalog:
    """All entries, by kind and name."""

    def __init__(self) -> None:
        self.sessions: dict[str, SessionEntry] = {}
        self.models: dict[str, ModelEntry] = {}
        self.samplings: dict[str, SamplingEntry] = {}
        self.losses: dict[str, LossEntry] = {}

    def put(self, entry: SessionEntry | ModelEntry | SamplingEntry | LossEntry) -> None:
        """Add the entry, or replace the one of its name."""
        match entry:
            case SessionEntry(dropped=True):
                self.sessions.pop(entry.key, None)
            case SessionEntry():
                self.sessions[entry.key] = entry
            case ModelEntry():
                self.models[entry.key] = entry
            case SamplingEntry(dropped=True):
                self.samplings.pop(entry.key, None)
            case SamplingEntry():
                former = self.samplings.get(entry.key)
                counted = entry.clones if former is None else max(entry.clones, former.clones)
                self.samplings[entry.key] = entry.model_copy(update={"clones": counted})  # a later one may be known
            case LossEntry(dropped=True):
                self.losses.pop(entry.key, None)
            case LossEntry():
                self.losses[entry.key] = entry

    def sessions_in_use(self) -> set[str]:
        """Sessions with a model, a sampling session or a custom loss."""
        return {entry.session_id for kind in (self.models, self.samplings, self.losses) for entry in kind.values()}

    def dump(self) -> bytes:
        """All entries as they stand at the head of a file of the journal."""
        entries = (self.sessions, self.models, self.samplings, self.losses)
        return _ENTRIES.dump_json(tuple(entry for kind in entries for entry in kind.values()))

    def load(self, dumped: bytes) -> None:
        """Be what a `dump` has: what it lacks was dropped before it, and a former file may have it still."""
        for kind in (self.sessions, self.models, self.samplings, self.losses):
            kind.clear()
        for entry in _ENTRIES.validate_json(dumped):
            self.put(entry)


def entry_of(dumped: bytes) -> SessionEntry | ModelEntry | SamplingEntry | LossEntry:
    """The entry of a record."""
    return _ENTRY.validate_json(dumped)
