"""The part of a status that a server of training loops adds: its tenants, their training runs, and who waits for whom.

Runs go by a name made for showing, `TENANT/1f3a90c2`: nothing in it lets anybody reach the run. Ages are in seconds.
"""

from typing import Literal

from pydantic import Field

from protocol.model import WireModel

Place = Literal["memory", "disk", "unloaded"]
MAX_WAITS_FOR_CHARS = 200


class TenantStatus(WireModel):
    """A tenant now, with the bounds of what it may have at once. `refused`: its calls of the last minute that were
    turned away since it had too much under way; `waits_s`: how long the first of its operations has waited.
    """

    name: str = Field(max_length=64)
    runs: int = Field(ge=0)
    queued: int = Field(ge=0)
    queue_limit: int = Field(ge=1)
    queued_bytes: int = Field(ge=0)
    bytes_limit: int = Field(ge=1)
    completions: int = Field(ge=0)
    completion_limit: int = Field(ge=1)
    refused: int = Field(ge=0)
    waits_s: float = Field(ge=0)
    rows_per_s: float = Field(ge=0)


class TenantRunStatus(WireModel):
    """A training run: its adapter, what it has done, and whom it waits for since `since_s`.

    `steps` are its optimizer steps; rates are of the last minute; `loss` is the newest, a row.
    """

    name: str = Field(max_length=80)
    tenant: str = Field(max_length=64)
    title: str = Field(default="", max_length=80)
    rank: int = Field(ge=1)
    steps: int = Field(ge=0)
    queued: int = Field(ge=0)
    completions: int = Field(ge=0)
    waits_for: str = Field(max_length=MAX_WAITS_FOR_CHARS)
    since_s: float = Field(ge=0)
    place: Place
    rows_per_s: float = Field(ge=0)
    tokens_per_s: float = Field(ge=0)
    loss: float | None = None


class CallAtWork(WireModel):
    """The operations that the trainer has in hand: the largest one by name, and how many share its turn."""

    tenant: str
    run: str
    kind: str
    rows: int = Field(ge=0)
    tokens: int = Field(ge=0)
    sharing: int = Field(ge=1)
    since_s: float = Field(ge=0)


class TenantsStatus(WireModel):
    """All of it. Of many tenants and runs those with the most to do are listed; the counts are of all.

    `clients`: sessions whose client was heard of late. `generator_silent_s`: for how long completions have waited
    without a word of any generator; None where none waits.
    """

    base_model: str
    tenants: tuple[TenantStatus, ...] = Field((), max_length=64)
    runs: tuple[TenantRunStatus, ...] = Field((), max_length=64)
    tenant_count: int = Field(ge=0)
    run_count: int = Field(ge=0)
    resident: int = Field(ge=0)
    clients: int = Field(ge=0)
    queued: int = Field(ge=0)
    completions: int = Field(ge=0)
    tokens_per_s: float = Field(ge=0)
    at_work: CallAtWork | None = None
    generators: int = Field(ge=0)
    generator_silent_s: float | None = None
