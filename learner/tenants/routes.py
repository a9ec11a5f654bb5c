"""The routes of the Tinker API, below `/api/v1`, for the unmodified SDK."""

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from typing import Annotated

from fastapi import Depends, FastAPI, Request, Response
from fastapi.responses import FileResponse, JSONResponse
from pydantic import JsonValue, ValidationError

from learner.tenants.compression import unpacked_zstd
from learner.tenants.futures import INLINE_BYTES, ResultFuture
from learner.tenants.keys import PREFIX, Tenant
from learner.tenants.listings import TenantListings
from learner.tenants.refusals import QueueFull, unknown
from learner.tenants.sampling import LOST_STATUS, sequence_ids
from learner.tenants.service import TenantService
from learner.tenants.work import KINDS, LOAD_WEIGHTS
from protocol.tinker.bodies import (
    CheckpointTtl,
    CopyWeights,
    CreateCustomLoss,
    CreateModel,
    CreateSamplingSession,
    CreateSession,
    FinishSession,
    FutureBody,
    LoadWeights,
    ModelBody,
    RetrieveFuture,
    RetrieveFutures,
    SampleBody,
    SamplingSessionBody,
    SearchSessions,
    SessionBody,
    WeightsPath,
)
from services.http.bodies import json_body
from services.http.refusals import RequestRefused, refusal_of

PREFIX_PATH = "/api/v1"
_LONG_POLL_S = 30.0
MAX_BODY_BYTES = 64 << 20
_PROTOBUF = "application/x-protobuf"
Json = dict[str, JsonValue]


class TenantOfKey:
    """A FastAPI dependency: the tenant whose key a request shows."""

    def __init__(self, service: TenantService) -> None:
        self._service = service

    async def __call__(self, request: Request) -> Tenant:
        """Raises RequestRefused."""
        key = request.headers.get("x-api-key", "")
        tenant = self._service.keys.tenant(key)
        if tenant is None:
            raise _unauthorized("none" if not key else "one that is not in the keys file")
        return tenant

    def check(self, tenant: Tenant) -> None:
        """Raises RequestRefused if its key has been removed while the request waited."""
        if not self._service.keys.holds(tenant):
            raise _unauthorized("one that is no longer in the keys file")


def _unauthorized(got: str) -> RequestRefused:
    return RequestRefused(401, "unauthorized", f"X-API-Key: got {got}; expected a key of this server, {PREFIX}…")


def add_tenant_routes(
    app: FastAPI,
    service: TenantService,
    listings: TenantListings,
    *,
    long_poll_s: float = _LONG_POLL_S,
    max_body_bytes: int = MAX_BODY_BYTES,
) -> None:
    """All routes. The application leaves the paths below PREFIX_PATH open: the keys are looked at here.

    `max_body_bytes` bounds what a packed body may unpack to, as the application bounds others.
    """
    tenant_of = TenantOfKey(service)
    _add_start(app, service, tenant_of)
    _add_training(app, service, listings, tenant_of, max_body_bytes=max_body_bytes)
    _add_sampling(app, service, tenant_of)
    _add_futures(app, service, tenant_of, long_poll_s=long_poll_s)
    _add_listings(app, listings, tenant_of)
    _add_session_listings(app, listings, tenant_of)
    _add_checkpoints(app, service, listings, tenant_of)

    async def full(_: Request, error: Exception) -> Response:
        """429 with the reason in the place where the SDK looks for it."""
        assert isinstance(error, QueueFull), error
        body = {
            "error": error.problem.message,
            "queue_state": "paused_rate_limit",
            "queue_state_reason": error.problem.message,
        }
        return JSONResponse(body, 429, error.headers)

    app.add_exception_handler(QueueFull, full)


def _add_start(app: FastAPI, service: TenantService, tenant_of: TenantOfKey) -> None:
    @app.post(f"{PREFIX_PATH}/client/config")
    async def client_config(_: Annotated[Tenant, Depends(tenant_of)]) -> Json:
        """Settings of the SDK's behavior."""
        return {
            "pjwt_auth_enabled": False,
            "proto_compress_fwdbwd": True,
            "sample_use_retrieve_futures": True,
            "sample_join_sampling_session": True,
            "custom_loss_server_side": True,
        }

    @app.post(f"{PREFIX_PATH}/client/dynamic_config")
    async def dynamic_config(_: Annotated[Tenant, Depends(tenant_of)]) -> Json:
        """Settings that the SDK asks for again while it runs."""
        return {"sample_cancel_enabled": True}

    @app.get(f"{PREFIX_PATH}/healthz")
    async def healthz() -> Json:
        """Answers as long as the process lives."""
        return {"status": "ok"}

    @app.post(f"{PREFIX_PATH}/telemetry")
    async def telemetry(_: Annotated[Tenant, Depends(tenant_of)]) -> Json:
        """Taken and thrown away."""
        return {"status": "accepted"}

    @app.post(f"{PREFIX_PATH}/create_session")
    async def create_session(
        tenant: Annotated[Tenant, Depends(tenant_of)], body: Annotated[CreateSession, Depends(json_body(CreateSession))]
    ) -> Json:
        """Open a session."""
        return {"session_id": await service.sessions.create(tenant.name, body), "type": "create_session"}

    @app.post(f"{PREFIX_PATH}/session_heartbeat")
    async def session_heartbeat(
        tenant: Annotated[Tenant, Depends(tenant_of)], body: Annotated[SessionBody, Depends(json_body(SessionBody))]
    ) -> Json:
        """Keep a session alive."""
        service.sessions.beat(body.session_id, owner=tenant.name)
        return {"type": "session_heartbeat"}

    @app.post(f"{PREFIX_PATH}/sessions/{{session_id}}/finish")
    async def finish_session(
        session_id: str,
        tenant: Annotated[Tenant, Depends(tenant_of)],
        body: Annotated[FinishSession, Depends(json_body(FinishSession))],
    ) -> Json:
        """End a session."""
        await service.sessions.finish(session_id, body, owner=tenant.name)
        return {}


def _add_training(
    app: FastAPI, service: TenantService, listings: TenantListings, tenant_of: TenantOfKey, *, max_body_bytes: int
) -> None:
    @app.post(f"{PREFIX_PATH}/create_model")
    async def create_model(
        tenant: Annotated[Tenant, Depends(tenant_of)], body: Annotated[CreateModel, Depends(json_body(CreateModel))]
    ) -> Json:
        """Make a training model."""
        return {"request_id": await service.create_model(tenant, body)}

    @app.post(f"{PREFIX_PATH}/get_info")
    async def get_info(
        tenant: Annotated[Tenant, Depends(tenant_of)], body: Annotated[ModelBody, Depends(json_body(ModelBody))]
    ) -> Json:
        """Facts of a training model."""
        return listings.model_info(tenant, body.model_id)

    @app.post(f"{PREFIX_PATH}/unload_model")
    async def unload_model(
        tenant: Annotated[Tenant, Depends(tenant_of)], body: Annotated[ModelBody, Depends(json_body(ModelBody))]
    ) -> Json:
        """Give a training model back."""
        await service.unload_model(tenant, body.model_id)
        return {"model_id": body.model_id, "type": "unload_model"}

    @app.post(f"{PREFIX_PATH}/create_custom_loss")
    async def create_custom_loss(
        tenant: Annotated[Tenant, Depends(tenant_of)],
        body: Annotated[CreateCustomLoss, Depends(json_body(CreateCustomLoss))],
    ) -> Json:
        """Take a loss as a graph."""
        return {"request_id": await service.create_custom_loss(tenant, body)}

    @app.post(f"{PREFIX_PATH}/copy_weights")
    async def copy_weights(
        request: Request,
        tenant: Annotated[Tenant, Depends(tenant_of)],
        body: Annotated[CopyWeights, Depends(json_body(CopyWeights))],
    ) -> Json:
        """Copy a checkpoint."""
        key = request.headers.get("x-idempotency-key") or secrets.token_hex()
        return {"tinker_path": await service.copy_weights(tenant, body, key=key)}

    for kind in KINDS:
        handler = _operation(kind, service, tenant_of, max_body_bytes=max_body_bytes)
        app.add_api_route(f"{PREFIX_PATH}/{kind}", handler, methods=["POST"], name=kind)


def _operation(
    kind: str, service: TenantService, tenant_of: TenantOfKey, *, max_body_bytes: int
) -> Callable[[Request, Tenant], Awaitable[Json]]:
    """The handler of a kind of operations."""

    async def accept(request: Request, tenant: Annotated[Tenant, Depends(tenant_of)]) -> Json:
        """Accept an operation of a training model."""
        body = await _body(request, max_bytes=max_body_bytes)
        if kind == LOAD_WEIGHTS:
            into = _load_weights(body)
            if into.session_id is not None:
                request_id = await service.load_into_new(tenant, into)
                return {"request_id": request_id, "model_id": request_id.rpartition(":")[0]}
        request_id = await service.submit(tenant, kind, body)
        return {"request_id": request_id, "model_id": request_id.rpartition(":")[0]}

    return accept


def _load_weights(body: bytes) -> LoadWeights:
    try:
        return LoadWeights.model_validate_json(body)
    except ValidationError as error:
        raise refusal_of(error.errors(include_url=False, include_context=False), LoadWeights) from error


async def _body(request: Request, *, max_bytes: int) -> bytes:
    body = await request.body()
    if request.headers.get("content-encoding") != "zstd":
        return body
    if len(body) < INLINE_BYTES // 16:
        return unpacked_zstd(body, max_bytes=max_bytes)
    return await asyncio.to_thread(unpacked_zstd, body, max_bytes=max_bytes)


def _add_sampling(app: FastAPI, service: TenantService, tenant_of: TenantOfKey) -> None:
    @app.post(f"{PREFIX_PATH}/create_sampling_session")
    async def create_sampling_session(
        tenant: Annotated[Tenant, Depends(tenant_of)],
        body: Annotated[CreateSamplingSession, Depends(json_body(CreateSamplingSession))],
    ) -> Json:
        """Open a sampling session on a checkpoint or the base model."""
        name = await service.create_sampling_session(tenant, body)
        return {"sampling_session_id": name, "type": "create_sampling_session"}

    @app.post(f"{PREFIX_PATH}/join_sampling_session")
    async def join_sampling_session(
        tenant: Annotated[Tenant, Depends(tenant_of)],
        body: Annotated[SamplingSessionBody, Depends(json_body(SamplingSessionBody))],
    ) -> Json:
        """Number one more client of a sampling session."""
        number = await service.join_sampling_session(tenant, body.sampling_session_id)
        return {"client_counter": number, "type": "join_sampling_session"}

    @app.post(f"{PREFIX_PATH}/asample")
    async def asample(
        tenant: Annotated[Tenant, Depends(tenant_of)], body: Annotated[SampleBody, Depends(json_body(SampleBody))]
    ) -> Json:
        """Accept a sample."""
        request_id = await service.sample(tenant, body)
        return {"request_id": request_id, "sample_sequence_ids": [*sequence_ids(request_id, body.num_samples)]}

    @app.post(f"{PREFIX_PATH}/cancel_future", status_code=204)
    async def cancel_future(
        tenant: Annotated[Tenant, Depends(tenant_of)], body: Annotated[FutureBody, Depends(json_body(FutureBody))]
    ) -> None:
        """Stop a sample whose client has given it up."""
        if service.futures.get(body.request_id, owner=tenant.name) is not None:
            service.samples.cancel(body.request_id)


def _add_futures(app: FastAPI, service: TenantService, tenant_of: TenantOfKey, *, long_poll_s: float) -> None:
    @app.post(f"{PREFIX_PATH}/retrieve_future")
    async def retrieve_future(
        tenant: Annotated[Tenant, Depends(tenant_of)],
        body: Annotated[RetrieveFuture, Depends(json_body(RetrieveFuture))],
    ) -> Response:
        """The result of a request, waited for; 408 if there is none yet."""
        future = service.futures.get(body.request_id, owner=tenant.name)
        if future is None:
            return _without_future(service, tenant, body.request_id)
        try:
            async with asyncio.timeout(long_poll_s):
                await future.done.wait()
            tenant_of.check(tenant)
        except TimeoutError:
            tenant_of.check(tenant)
            state = {"type": "try_again", "queue_state": "active", "queue_state_reason": service.queue_reason(future)}
            return JSONResponse(state, 408)
        return _result(service, future, announce=body.allow_metadata_only)

    @app.post(f"{PREFIX_PATH}/retrieve_futures")
    async def retrieve_futures(
        tenant: Annotated[Tenant, Depends(tenant_of)],
        body: Annotated[RetrieveFutures, Depends(json_body(RetrieveFutures))],
    ) -> Json:
        """Samples of a client that have ended since its last call, waited for."""
        session = body.target.sampling_session_id
        service.sampling(tenant, session)
        for request_id in body.retrieved_request_ids:
            future = service.futures.get(request_id, owner=tenant.name)
            if future is not None and future.payload is not None:
                service.futures.retrieved(future)
        wait_s = long_poll_s if body.timeout is None else min(body.timeout, long_poll_s)
        found, cursor = await service.samples.completions(
            session, body.target.cloned_sampler_id, body.prev_cursor, wait_s
        )
        tenant_of.check(tenant)
        return {"completions": list(found), "cursor": cursor}


def _without_future(service: TenantService, tenant: Tenant, request_id: str) -> Response:
    answer = service.derived(tenant, request_id)
    if answer is not None:
        return JSONResponse(answer)
    session, _, _ = request_id.rpartition(":")
    if ":sample:" in session:
        service.sampling(tenant, session)
        service.samples.heard_of(session, request_id)
        message = f"{request_id} was lost when the learner was started again; sample again"
        raise RequestRefused(LOST_STATUS, "lost", message)
    raise unknown("request", request_id)


def _result(service: TenantService, future: ResultFuture, *, announce: bool) -> Response:
    payload = future.payload
    if not isinstance(payload, bytes):
        service.futures.retrieved(future)
        return JSONResponse(payload)
    if announce and len(payload) > INLINE_BYTES:
        return JSONResponse({"status": "complete_metadata", "response_payload_size": len(payload)})
    service.futures.retrieved(future)
    return Response(payload, media_type=_PROTOBUF)


def _add_listings(app: FastAPI, listings: TenantListings, tenant_of: TenantOfKey) -> None:
    @app.get(f"{PREFIX_PATH}/get_server_capabilities")
    async def get_server_capabilities(_: Annotated[Tenant, Depends(tenant_of)]) -> Json:
        """The models that are served."""
        return listings.capabilities()

    @app.get(f"{PREFIX_PATH}/auth/apikey/me")
    async def whoami(tenant: Annotated[Tenant, Depends(tenant_of)]) -> Json:
        """The tenant of the key."""
        return {"user_urn": f"urn:headway:{tenant.name}", "org_urn": "urn:headway", "name": tenant.name}

    @app.get(f"{PREFIX_PATH}/training_runs")
    async def training_runs(tenant: Annotated[Tenant, Depends(tenant_of)], limit: int = 20, offset: int = 0) -> Json:
        """A page of training runs."""
        return listings.training_runs(tenant, limit=limit, offset=offset)

    @app.get(f"{PREFIX_PATH}/training_runs/{{run_id}}")
    async def training_run(run_id: str, tenant: Annotated[Tenant, Depends(tenant_of)]) -> Json:
        """A training run."""
        return listings.training_run(tenant, run_id)

    @app.get(f"{PREFIX_PATH}/checkpoints")
    async def all_checkpoints(tenant: Annotated[Tenant, Depends(tenant_of)], limit: int = 100, offset: int = 0) -> Json:
        """A page of all checkpoints."""
        return listings.all_checkpoints(tenant, limit=limit, offset=offset)


def _add_session_listings(app: FastAPI, listings: TenantListings, tenant_of: TenantOfKey) -> None:
    @app.get(f"{PREFIX_PATH}/sessions")
    async def sessions(tenant: Annotated[Tenant, Depends(tenant_of)], limit: int = 20, offset: int = 0) -> Json:
        """A page of sessions."""
        return listings.sessions(tenant, limit=limit, offset=offset)

    @app.post(f"{PREFIX_PATH}/sessions/search")
    async def search_sessions(
        tenant: Annotated[Tenant, Depends(tenant_of)],
        body: Annotated[SearchSessions, Depends(json_body(SearchSessions))],
    ) -> Json:
        """Sessions that match."""
        return listings.search(tenant, body)

    @app.get(f"{PREFIX_PATH}/sessions/{{session_id}}")
    async def session(session_id: str, tenant: Annotated[Tenant, Depends(tenant_of)]) -> Json:
        """A session."""
        return listings.session(tenant, session_id)

    @app.get(f"{PREFIX_PATH}/samplers/{{name}}")
    async def sampler(name: str, tenant: Annotated[Tenant, Depends(tenant_of)]) -> Json:
        """A sampling session."""
        return listings.sampler(tenant, name)

    @app.post(f"{PREFIX_PATH}/weights_info")
    async def weights_info(
        tenant: Annotated[Tenant, Depends(tenant_of)], body: Annotated[WeightsPath, Depends(json_body(WeightsPath))]
    ) -> Json:
        """Facts of a checkpoint."""
        return listings.weights_info(tenant, body.tinker_path)


def _add_checkpoints(app: FastAPI, service: TenantService, listings: TenantListings, tenant_of: TenantOfKey) -> None:
    run = f"{PREFIX_PATH}/training_runs/{{run_id}}/checkpoints"
    one = f"{run}/{{folder}}/{{name}}"

    @app.get(run)
    async def run_checkpoints(run_id: str, tenant: Annotated[Tenant, Depends(tenant_of)]) -> Json:
        """The checkpoints of a run."""
        return listings.checkpoints(tenant, run_id)

    @app.delete(one, status_code=204)
    async def delete_checkpoint(
        run_id: str, folder: str, name: str, tenant: Annotated[Tenant, Depends(tenant_of)]
    ) -> None:
        """Delete a checkpoint."""
        facts = listings.checkpoint(tenant, run_id, f"{folder}/{name}")
        await asyncio.to_thread(service.checkpoints.delete, facts)

    @app.post(f"{one}/publish", status_code=204)
    async def publish(run_id: str, folder: str, name: str, tenant: Annotated[Tenant, Depends(tenant_of)]) -> None:
        """Let every tenant read a checkpoint."""
        facts = listings.checkpoint(tenant, run_id, f"{folder}/{name}")
        await asyncio.to_thread(service.checkpoints.change, facts, public=True)

    @app.delete(f"{one}/publish", status_code=204)
    async def unpublish(run_id: str, folder: str, name: str, tenant: Annotated[Tenant, Depends(tenant_of)]) -> None:
        """Let its owner alone read a checkpoint."""
        facts = listings.checkpoint(tenant, run_id, f"{folder}/{name}")
        await asyncio.to_thread(service.checkpoints.change, facts, public=False)

    @app.put(f"{one}/ttl", status_code=204)
    async def ttl(
        run_id: str,
        folder: str,
        name: str,
        tenant: Annotated[Tenant, Depends(tenant_of)],
        body: Annotated[CheckpointTtl, Depends(json_body(CheckpointTtl))],
    ) -> None:
        """Say when a checkpoint goes."""
        facts = listings.checkpoint(tenant, run_id, f"{folder}/{name}")
        await asyncio.to_thread(service.checkpoints.expire_in, facts, body.ttl_seconds)

    @app.get(f"{one}/external_weights_urls")
    async def external_weights_urls(
        run_id: str, folder: str, name: str, request: Request, tenant: Annotated[Tenant, Depends(tenant_of)]
    ) -> Json:
        """Addresses at which a checkpoint is downloaded without a key."""
        facts = listings.checkpoint(tenant, run_id, f"{folder}/{name}", own=False)
        return listings.download_urls(facts, base_url=str(request.base_url).rstrip("/"))

    @app.get(f"{one}/archive")
    async def archive(run_id: str, folder: str, name: str, tenant: Annotated[Tenant, Depends(tenant_of)]) -> Response:
        """A checkpoint in peft's format, as a tar file."""
        facts = listings.checkpoint(tenant, run_id, f"{folder}/{name}", own=False)
        content = await asyncio.to_thread(listings.archive, facts)
        return Response(content, media_type="application/x-tar")

    @app.get(f"{PREFIX_PATH}/headway/files/{{name}}")
    async def signed_file(name: str, path: str, expires: int, signature: str) -> Response:
        """A file of a checkpoint, for whoever has its signed address."""
        return FileResponse(listings.signed_file(path, name, expires=expires, signature=signature))
