"""The learner as a server of the Tinker API, wired: HTTP, the service of tenants, the trainer, and the generators.

Its socket listens from the start, and is served once the model is loaded and the journal was gone through: clients that
call earlier wait in the queue, as over a restart.
"""

import asyncio
import json
import logging
import os
import secrets
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path

import xxhash
from fastapi import FastAPI

from learner.algorithms.client_graphs import LossGraph
from learner.config import LearnerConfig
from learner.journal.files import write_atomically
from learner.page.files import PAGE_PATHS
from learner.page.tenants_page import ServedProcesses, TenantsPage
from learner.rank_group import RankGroup
from learner.reports.served_monitor import ServedMonitor
from learner.tenant_ranks import open_on_all
from learner.tenants.fleet_sampler import FleetSampler, SamplingLimits
from learner.tenants.keys import TenantKeys, make_keys_file
from learner.tenants.listings import TenantListings
from learner.tenants.load import TenantMetrics, load_of
from learner.tenants.prompt_scores import PromptScores
from learner.tenants.routes import PREFIX_PATH, add_tenant_routes
from learner.tenants.served_adapters import ServedAdapters, add_adapter_routes
from learner.tenants.service import ServedBase, TenantService, TenantSettings
from learner.tenants.standing import TenantsStanding
from learner.tenants.stopping import PollsUntilStop
from learner.training.adapter_ranks import RankedAdapters
from learner.training.adapter_trainer import AdapterTrainer
from protocol.status import ProgressStatus, QueueStatus, Readiness, Report, Status
from protocol.tinker.bodies import CreateCustomLoss
from services.append_file import make_folder
from services.diagnosis.asked import Target
from services.http.app import create_app
from services.http.client import HttpClient
from services.http.metrics import Metrics
from services.http.server import Listener, serve_http
from services.http.status import add_status_route, recent_failures
from services.http.tls import client_tls
from services.http.waiting import Waiting
from services.process import Stop, WrongSettings, run_loops
from services.run_lock import RunLock
from services.tracing import exporting_traces

logger = logging.getLogger(__name__)

FOLDER = "tinker"
"""Of the state, in the run's folder."""
_BASE_FILE = "base.json"
_SAMPLED_BYTES = 1 << 20
_MAX_ANSWER_BYTES = 1 << 28


@dataclass(frozen=True)
class _ServerParts:
    """The service with what it stands on."""

    service: TenantService
    sampler: FleetSampler
    adapters: ServedAdapters


async def serve_tinker(config: LearnerConfig, stop: Stop) -> None:
    """Serves until it is stopped; what was accepted by then is on the disk, and the next start goes on with it."""
    async with AsyncExitStack() as stack:
        stack.enter_context(exporting_traces("learner", **config.run.traces))
        lock = stack.enter_context(await RunLock.held(config.run.folder))
        listener = stack.enter_context(Listener(host=config.http.host, port=config.http.port, tls=config.http.tls))
        failures = stack.enter_context(recent_failures())
        keys_file = config.tinker.keys_path(config.run.folder)
        make_keys_file(keys_file)
        keys = TenantKeys.read(keys_file)
        group = stack.enter_context(RankGroup(config, argv=sys.argv, stop=stop))
        parts = await _parts(config, stack, group, keys=keys)
        waits = Waiting()
        app = _app(config, parts, readiness=waits.readiness)
        own = add_status_route(
            app, service="learner", version=version("headway"), waits=waits, failures=failures,
            stopping=lambda: stop.requested, provider=partial(_report, config.run.name, parts),
        )  # fmt: skip
        monitor = _add_page(app, config, parts, own=own, url=listener.url)
        waits.started()
        logger.info("serving %s with the Tinker API; its keys are in %s", parts.service.base.name, keys_file)
        polls = PollsUntilStop(app, stop=stop, prefix=f"{PREFIX_PATH}/retrieve_future")
        await run_loops(
            http=serve_http(polls, listener), tenants=group.watch.during(parts.service.run()), monitor=monitor.run(),
            run_lock=lock.watch(),
        )  # fmt: skip


async def _parts(config: LearnerConfig, stack: AsyncExitStack, group: RankGroup, *, keys: TenantKeys) -> _ServerParts:
    settings = config.tinker
    name = _name_for_clients(config)
    _check_base(config.run.folder / FOLDER, model=config.model)
    trainer = await group.watch.during(asyncio.to_thread(open_on_all, config, group, name=name))
    client = HttpClient(
        token=config.weights.generator_token, tls=client_tls(config.http.tls), max_answer_bytes=_MAX_ANSWER_BYTES
    )
    adapters = ServedAdapters()
    sampler = FleetSampler(
        settings.generators,
        client=await stack.enter_async_context(client),
        adapters=adapters,
        limits=SamplingLimits(silence_s=settings.sample_silence_s, longest_s=settings.sample_timeout_s),
    )
    service = TenantService(
        folder=config.run.folder / FOLDER,
        keys=keys,
        base=_base(config, trainer),
        trainer=trainer,
        sampler=sampler,
        parse_graph=parse_graph,
        settings=TenantSettings(
            snapshot_every=settings.snapshot_every,
            max_resident=settings.max_resident,
            round_tokens=settings.round_tokens,
            round_s=settings.round_s,
            shared_tokens=settings.shared_tokens,
            retain_targets_s=settings.retain_targets_s,
            all_weights=settings.all_weights,
        ),
    )
    await stack.enter_async_context(sampler)
    stack.push_async_callback(service.close)
    if not settings.all_weights:
        sampler.score_prompt = PromptScores(trainer, between_turns=service.training.between_turns)
    return _ServerParts(service, sampler, adapters)


def _app(config: LearnerConfig, parts: _ServerParts, *, readiness: Callable[[], Readiness]) -> FastAPI:
    service, registry = parts.service, Metrics("learner", run=config.run.name)
    TenantMetrics(registry, read=lambda: load_of(service))
    app = create_app(
        service="learner",
        version=version("headway"),
        token=config.http.token,
        readiness=readiness,
        metrics=registry,
        max_body_bytes=config.http.max_body_bytes,
        open_paths=PAGE_PATHS | {f"{PREFIX_PATH}/"},
    )
    listings = TenantListings(service, secret=secrets.token_bytes(32))
    add_tenant_routes(app, service, listings, max_body_bytes=config.http.max_body_bytes)
    add_adapter_routes(app, parts.adapters)
    return app


def _add_page(
    app: FastAPI, config: LearnerConfig, parts: _ServerParts, *, own: Callable[[], Status], url: str
) -> ServedMonitor:
    """The page of tenants, and who looks at the processes for it."""
    token, trust = config.weights.generator_token, config.http.tls
    generators = [Target("generator", each.rstrip("/"), token, trust) for each in config.tinker.generators]
    monitor = ServedMonitor(own=own, url=url, generators=generators)

    def processes() -> ServedProcesses:
        return ServedProcesses(parts.sampler.peers(), monitor.procs, monitor.verdict)

    assert config.http.token is not None, "the settings want one"
    TenantsPage(parts.service, name=config.run.name, token=config.http.token, processes=processes).add_routes(app)
    return monitor


def _report(name: str, parts: _ServerParts) -> Report:
    peers = parts.sampler.peers()
    tenants = TenantsStanding(parts.service, peers).status()
    queues = (
        QueueStatus(name="operations", depth=tenants.queued),
        QueueStatus(name="completions", depth=tenants.completions),
    )
    done = ProgressStatus(unit="operations", done=parts.service.records.operations)
    return Report(id=name, peers=peers, queues=queues, progress=done, tenants=tenants)


def _check_base(folder: Path, *, model: Path) -> None:
    """Raises WrongSettings if the state in the folder is of another base model: its adapters mean nothing on this one.

    Notes the model where there is no state yet.
    """
    own = _sampled_digest(model)
    note = folder / _BASE_FILE
    if not note.exists():
        make_folder(folder)
        write_atomically(note, json.dumps({"folder": str(model.absolute()), "weights": own}))
    former = json.loads(note.read_bytes())
    if former["weights"] != own:
        raise WrongSettings(
            f"[learner] model: the adapters in {folder} are of the model that was in {former['folder']}, and {model} "
            "is another one; name that model, or another run.name"
        )


def _sampled_digest(model: Path) -> str:
    """Of the first and the last MiB of each file of weights: all of them would take minutes for a large model."""
    digest = xxhash.xxh3_128()
    for path in sorted(model.glob("*.safetensors")):
        with path.open("rb") as file:
            digest.update(file.read(_SAMPLED_BYTES))
            file.seek(-min(_SAMPLED_BYTES, path.stat().st_size), os.SEEK_END)
            digest.update(file.read())
    return str(digest.hexdigest())


def _base(config: LearnerConfig, trainer: AdapterTrainer | RankedAdapters) -> ServedBase:
    kind = json.loads((config.model / "config.json").read_bytes()).get("model_type", "")
    most = min(trainer.base.context_length, config.tinker.context_tokens or trainer.base.context_length)
    return ServedBase(trainer.base.name, most, str(kind))


def _name_for_clients(config: LearnerConfig) -> str:
    name = config.tinker.base_model or str(config.model.absolute())
    if name.count("/") == 2:
        raise WrongSettings(
            f"[learner] tinker.base_model: clients cut {name}, which has two slashes, to two parts, and find no "
            "tokenizer by that; expected a name of one slash, or a deeper folder"
        )
    return name


def parse_graph(body: CreateCustomLoss) -> LossGraph:
    """The graph of a client's loss. Raises ValueError."""
    inputs = [each.model_dump() for each in body.inputs]
    return LossGraph.parse(name=body.name, inputs=inputs, graph=body.graph)
