"""The standing of the service of tenants: who has how much under way, and who waits for whom. Nothing here waits.

a run ──▶ the trainer, which has its call in hand
      ──▶ its turn, behind those whose calls are in hand
      ──▶ an operation that its client has not sent
      ──▶ a generator, for completions
      ──▶ its client, who has nothing under way
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from learner.tenants.keys import Tenant
from learner.tenants.models import TrainingModel
from learner.tenants.run_records import RunRecord, shown_name
from learner.tenants.service import TenantService
from learner.tenants.work import Operation
from learner.training.client_operations import ForwardBackward
from protocol.status import PeerStatus
from protocol.tenants import MAX_WAITS_FOR_CHARS, CallAtWork, Place, TenantRunStatus, TenantsStatus, TenantStatus

MOST_LISTED = 64
_MOST_NAMES = 3
_BEHIND = "its turn, behind "
_TITLE_CHARS = 80
_OTHER = "another tenant"


@dataclass(frozen=True)
class _Samples:
    """Completions under way, and since when the first of them has waited."""

    completions: int = 0
    began: float = float("inf")

    def and_one(self, completions: int, began: float) -> "_Samples":
        return _Samples(self.completions + completions, min(self.began, began))


class TenantsStanding:
    """A look at the service now. For a `viewer`, a tenant, others have no names and no numbers."""

    def __init__(self, service: TenantService, peers: Sequence[PeerStatus] = (), *, viewer: str | None = None) -> None:
        self._service, self._peers, self._viewer = service, peers, viewer
        self._now = service.records.clock()
        self._living = {entry.session_id for entry in service.sessions.living() if self._sees(entry.owner)}
        turn = service.records.turn
        self._in_hand: Sequence[Operation] = () if turn is None else turn.operations
        self._owners = {each.model_id: service.models.by_id[each.model_id].entry.owner for each in self._in_hand}
        self._samples: dict[tuple[str, str], _Samples] = {}
        for each in service.samples.waiting.values():
            if self._sees(each.owner):
                key = each.owner, each.model_id
                self._samples[key] = self._samples.get(key, _Samples()).and_one(each.completions, each.began)

    def status(self) -> TenantsStatus:
        """All for `GET /v1/status`, of bounded size."""
        tenants, models = self._tenants(), self._models()
        busy = sorted(tenants, key=lambda each: (-each.queued - each.completions - each.refused, each.name))
        records = self._service.records
        rates = records.tokens_lately.per_s() if self._viewer is None else self._own_tokens_per_s()
        return TenantsStatus(
            base_model=self._service.base.name,
            tenants=tuple(busy[:MOST_LISTED]),
            runs=tuple(self.runs(most=MOST_LISTED)),
            tenant_count=len(tenants),
            run_count=sum(not each.entry.unloaded for each in models),
            resident=sum(each.resident for each in models),
            clients=len(self._living),
            queued=sum(each.queued for each in tenants),
            completions=sum(each.completions for each in tenants),
            tokens_per_s=rates,
            at_work=self._at_work(),
            generators=len(self._peers),
            generator_silent_s=self._generator_silent_s(),
        )

    def runs(self, *, most: int) -> Iterator[TenantRunStatus]:
        """Runs with the most to do first, then those that were used last."""
        models = self._service.models

        def order(model: TrainingModel) -> tuple[bool, int, float]:
            busy = len(model.ready) + len(model.early) + self._samples_of(model).completions
            return model.entry.unloaded, -busy - (model.entry.model_id in self._owners), models.idle_s(model)

        return (self._run(model) for model in islice(sorted(self._models(), key=order), most))

    def _sees(self, owner: str) -> bool:
        return self._viewer in (None, owner)

    def _models(self) -> list[TrainingModel]:
        return [each for each in self._service.models.by_id.values() if self._sees(each.entry.owner)]

    def _samples_of(self, model: TrainingModel) -> _Samples:
        return self._samples.get((model.entry.owner, model.entry.model_id), _Samples())

    def _run(self, model: TrainingModel) -> TenantRunStatus:
        entry, record = model.entry, self._service.records.runs.get(model.entry.model_id)
        waits_for, since_s = self._waits(model)
        return TenantRunStatus(
            name=shown_name(entry.owner, entry.model_id),
            tenant=entry.owner,
            title=self._service.sessions.title(entry.session_id)[:_TITLE_CHARS],
            rank=entry.shape.rank,
            steps=0 if record is None else record.steps,
            queued=len(model.ready) + len(model.early),
            completions=self._samples_of(model).completions,
            waits_for=waits_for,
            since_s=max(0.0, since_s),
            place=_place(model),
            rows_per_s=_rate(record, "rows_lately"),
            tokens_per_s=_rate(record, "tokens_lately"),
            loss=None if record is None else record.loss,
        )

    def _waits(self, model: TrainingModel) -> tuple[str, float]:
        """Whom the run waits for, and for how many seconds."""
        models, samples, turn = self._service.models, self._samples_of(model), self._service.records.turn
        if model.entry.unloaded:
            return "nobody: it was unloaded", models.idle_s(model)
        if turn is not None and model.entry.model_id in self._owners:
            return "the trainer, which has it in hand", self._now - turn.began
        if model.ready:
            return self._behind(self._owners.values()), models.waited_s(model)
        if model.early:
            return f"operation {model.next_seq}, which its client has not sent", models.waited_s(model)
        if samples.completions:
            return f"a generator, for {samples.completions:,} completions", self._now - samples.began
        if model.entry.session_id in self._living:
            return "its client", models.idle_s(model)
        return "nobody: its client is gone", models.idle_s(model)

    def _behind(self, owners: Collection[str]) -> str:
        """Says behind whom, with as many names as there is room for: one at least, since none is over 64 characters."""
        names = sorted({each if self._sees(each) else _OTHER for each in owners})
        if not names:
            return "its turn"
        texts = (_BEHIND + _enumerated(names, most) for most in range(_MOST_NAMES, 0, -1))
        return next(text for text in texts if len(text) <= MAX_WAITS_FOR_CHARS)

    def _tenants(self) -> list[TenantStatus]:
        runs: dict[str, int] = {}
        waited: dict[str, float] = {}
        for model in self._models():
            owner = model.entry.owner
            runs[owner] = runs.get(owner, 0) + (not model.entry.unloaded)
            waited[owner] = max(waited.get(owner, 0.0), self._service.models.waited_s(model) if model.ready else 0.0)
        known = (each for each in self._service.keys.tenants if self._sees(each.name))
        return [self._tenant(each, runs.get(each.name, 0), waited.get(each.name, 0.0)) for each in known]

    def _tenant(self, tenant: Tenant, runs: int, waits_s: float) -> TenantStatus:
        queued, record = self._service.models.queue_length(tenant.name), self._service.records.of_tenant(tenant.name)
        return TenantStatus(
            name=tenant.name,
            runs=runs,
            queued=queued.operations,
            queue_limit=tenant.max_queued_operations,
            queued_bytes=queued.size,
            bytes_limit=tenant.max_queued_bytes,
            completions=self._service.samples.count(tenant.name),
            completion_limit=tenant.max_samples,
            refused=int(record.refused_lately.sum()),
            waits_s=waits_s,
            rows_per_s=record.rows_lately.per_s(),
        )

    def _at_work(self) -> CallAtWork | None:
        turn = self._service.records.turn
        if turn is None or not turn.operations:
            return None
        largest = max(turn.operations, key=lambda each: each.tokens)
        owner = self._owners[largest.model_id]
        seen = self._sees(owner)
        return CallAtWork(
            tenant=owner if seen else _OTHER,
            run=shown_name(owner, largest.model_id) if seen else "",
            kind=largest.kind if seen else "",
            rows=_rows(largest) if seen else 0,
            tokens=largest.tokens if seen else 0,
            sharing=len(turn.operations),
            since_s=max(0.0, self._now - turn.began),
        )

    def _own_tokens_per_s(self) -> float:
        records = self._service.records.runs.values()
        return sum(each.tokens_lately.per_s() for each in records if self._sees(each.owner))

    def _generator_silent_s(self) -> float | None:
        """Completions may take long, but a generator at one is asked every few seconds whether it lives."""
        began = min((each.began for each in self._samples.values()), default=None)
        if began is None:
            return None
        heard = (peer.last_heard_s for peer in self._peers if peer.last_heard_s is not None)
        return max(0.0, min(self._now - began, *_or_never(heard)))


def _or_never(ages: Iterable[float]) -> tuple[float, ...]:
    return (*ages, float("inf"))


def _enumerated(names: Sequence[str], most: int) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _rows(operation: Operation) -> int:
    return len(operation.work.data) if isinstance(operation.work, ForwardBackward) else 0


def _place(model: TrainingModel) -> Place:
    if model.entry.unloaded:
        return "unloaded"
    return "memory" if model.resident else "disk"


def _rate(record: RunRecord | None, which: str) -> float:
    return 0.0 if record is None else float(getattr(record, which).per_s())
