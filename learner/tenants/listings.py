"""Listings of what a tenant has: training runs, checkpoints, sessions, samplers, and where to download weights."""

import hashlib
import hmac
import io
import tarfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlencode

from pydantic import JsonValue

from learner.tenants.catalog import ModelEntry, SessionEntry
from learner.tenants.checkpoints import CheckpointFacts
from learner.tenants.keys import Tenant
from learner.tenants.refusals import unknown
from learner.tenants.service import TenantService
from learner.training.client_operations import AdapterShape
from protocol.tinker.bodies import SearchSessions

Json = dict[str, JsonValue]
T = TypeVar("T")
_URL_S = 3600.0
_MAX_PAGE = 1000


class TenantListings:
    """Answers of the REST routes. Names of others are unknown. Methods raise RequestRefused."""

    def __init__(self, service: TenantService, *, secret: bytes) -> None:
        """`secret` signs the addresses of downloads."""
        self._service, self._secret = service, secret

    def capabilities(self) -> Json:
        """The models that are served."""
        base = self._service.base
        return {
            "supported_models": [
                {
                    "model_name": base.name,
                    "max_context_length": base.context_length,
                    "trainable": True,
                    "sampleable": True,
                }
            ]
        }

    def model_info(self, tenant: Tenant, model_id: str) -> Json:
        """The base model, tokenizer and rank of a training model."""
        model = self._service.models.find(model_id, owner=tenant.name)
        if model is None:
            raise unknown("model", model_id)
        base = self._service.base
        return {
            "model_data": {"model_name": base.name, "tokenizer_id": base.name, "arch": base.architecture},
            "model_id": model_id,
            **_lora(model.entry.shape),
        }

    def training_runs(self, tenant: Tenant, *, limit: int, offset: int) -> Json:
        """A page of training runs, the newest first."""
        runs = sorted(self._runs(tenant), key=lambda run: run.created_at, reverse=True)
        page, cursor = _page(runs, limit, offset)
        saved = _grouped(self._service.checkpoints.of(tenant.name), by=lambda facts: facts.run_id)
        return {"training_runs": [self._run(run, saved[run.model_id]) for run in page], "cursor": cursor}

    def training_run(self, tenant: Tenant, run_id: str) -> Json:
        """A training run."""
        return self._run(self._run_entry(tenant, run_id), self._service.checkpoints.of(tenant.name, run_id))

    def checkpoints(self, tenant: Tenant, run_id: str) -> Json:
        """The checkpoints of a run."""
        self._run_entry(tenant, run_id)
        found = self._service.checkpoints.of(tenant.name, run_id)
        return {"checkpoints": [_checkpoint(facts) for facts in found], "cursor": None}

    def all_checkpoints(self, tenant: Tenant, *, limit: int, offset: int) -> Json:
        """A page of all checkpoints, the newest first."""
        page, cursor = _page(self._service.checkpoints.of(tenant.name)[::-1], limit, offset)
        return {"checkpoints": [_checkpoint(facts) for facts in page], "cursor": cursor}

    def checkpoint(self, tenant: Tenant, run_id: str, checkpoint_id: str, *, own: bool = True) -> CheckpointFacts:
        """A checkpoint by its run and its id, `weights/NAME`; with `own` no other's that is public."""
        return self._by_path(tenant, f"tinker://{run_id}/{checkpoint_id}", own=own)

    def weights_info(self, tenant: Tenant, path: str) -> Json:
        """Facts of a checkpoint that a client needs before it loads it."""
        facts = self._by_path(tenant, path, own=False)
        return {
            "base_model": facts.base_model,
            **_lora(facts.shape),
            "train_unembed": facts.shape.unembed,
            "train_mlp": facts.shape.mlp,
            "train_attn": facts.shape.attention,
        }

    def sessions(self, tenant: Tenant, *, limit: int, offset: int) -> Json:
        """Names of sessions, the newest first."""
        page, _ = _page(self._sessions(tenant), limit, offset)
        return {"sessions": [entry.session_id for entry in page]}

    def session(self, tenant: Tenant, session_id: str) -> Json:
        """A session with its runs and samplers."""
        entry = self._service.sessions.get(session_id, owner=tenant.name)
        catalog = self._service.log.catalog
        return {
            "training_run_ids": [each.model_id for each in catalog.models.values() if each.session_id == session_id],
            "sampler_ids": [each.key for each in catalog.samplings.values() if each.session_id == session_id],
            "user_metadata": _texts(entry.user_metadata),
            "display_name": entry.display_name,
        }

    def search(self, tenant: Tenant, body: SearchSessions) -> Json:
        """A page of sessions that match, the newest first."""
        found = [entry for entry in self._sessions(tenant) if _matches(entry, body)]
        if body.cursor is not None:
            names = [entry.session_id for entry in found]
            last = body.cursor.last_session_id
            found = found[names.index(last) + 1 :] if last in names else []
        page = found[: body.limit]
        following: Json | None = None
        if len(found) > len(page):
            following = {"last_created_at": _time(page[-1].created_at), "last_session_id": page[-1].session_id}
        saved = _grouped(self._service.checkpoints.of(tenant.name), by=lambda facts: facts.run_id.partition(":")[0])
        return {
            "sessions": [self._summary(entry, saved[entry.session_id]) for entry in page],
            "next_cursor": following,
        }

    def sampler(self, tenant: Tenant, name: str) -> Json:
        """A sampling session."""
        entry = self._service.sampling(tenant, name)
        return {"sampler_id": name, "base_model": entry.base_model, "model_path": entry.model_path}

    def download_urls(self, facts: CheckpointFacts, *, base_url: str) -> Json:
        """Signed addresses of a checkpoint's files, which need no key for an hour."""
        expires = int(time.time() + _URL_S)
        urls: Json = {}
        for path in self._service.checkpoints.adapter_files(facts.path):
            signature = self._signature(facts.path, path.name, expires)
            query = urlencode({"path": facts.path, "expires": expires, "signature": signature})
            urls[path.name] = f"{base_url}/api/v1/headway/files/{path.name}?{query}"
        return {"urls": urls, "expires": _time(expires)}

    def signed_file(self, path: str, name: str, *, expires: int, signature: str) -> Path:
        """The file behind a signed address."""
        fits = hmac.compare_digest(signature.encode(), self._signature(path, name, expires).encode())
        facts = self._service.checkpoints.former(path)
        if not fits or expires < time.time() or facts is None or facts.deleted:
            raise unknown("file", name)
        found = {each.name: each for each in self._service.checkpoints.adapter_files(path)}
        if name not in found:
            raise unknown("file", name)
        return found[name]

    def archive(self, facts: CheckpointFacts) -> bytes:
        """A tar file of the adapter in peft's format."""
        stream = io.BytesIO()
        with tarfile.open(fileobj=stream, mode="w") as archive:
            for path in self._service.checkpoints.adapter_files(facts.path):
                archive.add(path, arcname=path.name)
        return stream.getvalue()

    def _signature(self, path: str, name: str, expires: int) -> str:
        return hmac.new(self._secret, f"{path}\n{name}\n{expires}".encode(), hashlib.sha256).hexdigest()

    def _runs(self, tenant: Tenant) -> Iterable[ModelEntry]:
        return (entry for entry in self._service.log.catalog.models.values() if entry.owner == tenant.name)

    def _run_entry(self, tenant: Tenant, run_id: str) -> ModelEntry:
        entry = self._service.log.catalog.models.get(run_id)
        if entry is None or entry.owner != tenant.name:
            raise unknown("training run", run_id)
        return entry

    def _run(self, entry: ModelEntry, mine: Iterable[CheckpointFacts]) -> Json:
        last = {facts.kind: _checkpoint(facts) for facts in mine}
        model = self._service.models.by_id.get(entry.model_id)
        used = entry.created_at if model is None else self._service.models.used_at(model)
        return {
            "training_run_id": entry.model_id,
            "base_model": entry.base_model,
            "model_owner": entry.owner,
            **_lora(entry.shape),
            "last_request_time": _time(used),
            "last_checkpoint": last.get("training"),
            "last_sampler_checkpoint": last.get("sampler"),
            "user_metadata": _texts(entry.user_metadata),
        }

    def _by_path(self, tenant: Tenant, path: str, *, own: bool) -> CheckpointFacts:
        facts = self._service.checkpoints.find(path, reader=tenant.name)
        if facts is None or facts.kind == "target" or (own and facts.owner != tenant.name):
            raise unknown("checkpoint", path)
        return facts

    def _sessions(self, tenant: Tenant) -> list[SessionEntry]:
        mine = [entry for entry in self._service.log.catalog.sessions.values() if entry.owner == tenant.name]
        return sorted(mine, key=lambda entry: entry.created_at, reverse=True)

    def _summary(self, entry: SessionEntry, mine: Sequence[CheckpointFacts]) -> Json:
        return {
            "session_id": entry.session_id,
            "created_at": _time(entry.created_at),
            "owner": entry.owner,
            "project_id": "",
            "status": {"type": "active"} if self._service.sessions.alive(entry.session_id) else None,
            "checkpoints_count": len(mine),
            "display_name": entry.display_name,
            "user_metadata": _texts(entry.user_metadata),
            "checkpoint_storage_bytes": sum(facts.size_bytes for facts in mine),
        }


def _grouped(
    found: Iterable[CheckpointFacts], *, by: Callable[[CheckpointFacts], str]
) -> Mapping[str, list[CheckpointFacts]]:
    """By run, or by session: all are gone through once, and not for each entry of a page."""
    groups: dict[str, list[CheckpointFacts]] = defaultdict(list)
    for facts in found:
        groups[by(facts)].append(facts)
    return groups


def _lora(shape: AdapterShape) -> Json:
    """All weights of a model are no adapter, and have no rank."""
    return {"is_lora": shape.rank > 0, "lora_rank": shape.rank or None}


def _checkpoint(facts: CheckpointFacts) -> Json:
    return {
        "checkpoint_id": facts.path.partition(f"{facts.run_id}/")[2],
        "checkpoint_type": facts.kind,
        "time": _time(facts.created_at),
        "tinker_path": facts.path,
        "size_bytes": facts.size_bytes,
        "public": facts.public,
        "user_metadata": dict(facts.user_metadata) if facts.user_metadata else None,
        "expires_at": None if facts.expires_at is None else _time(facts.expires_at),
    }


def _matches(entry: SessionEntry, body: SearchSessions) -> bool:
    metadata = _texts(entry.user_metadata) or {}
    if any(metadata.get(name) != value for name, value in body.user_metadata.items()):
        return False
    if body.session_id is None and body.display_name is None:
        return True
    name = (entry.display_name or "").lower()
    words = (body.display_name or "").lower().split()
    return entry.session_id == body.session_id or (bool(words) and all(word in name for word in words))


def _page(found: Sequence[T], limit: int, offset: int) -> tuple[Sequence[T], Json]:
    limit, offset = max(0, min(limit, _MAX_PAGE)), max(0, offset)
    return found[offset : offset + limit], {"offset": offset, "limit": limit, "total_count": len(found)}


def _texts(metadata: dict[str, JsonValue] | None) -> Json | None:
    return None if metadata is None else {name: str(value) for name, value in metadata.items()}


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()
