"""A generator, wired: the engine, our routes and vLLM's, and the announcements to the learner.

Loops, and what each waits for: `http` for requests; `announce` for the clock, for news, or for the learner; `weights`
for a commit; `life` watches that the engine's process lives, and `answers` that it answers. HTTP is up before the
engine, so that health and readiness can be asked for while it starts.
"""

import asyncio
import logging
import socket
import time
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from importlib.metadata import version

from fastapi import FastAPI

from generator.adapter_sampling import AdapterSampling
from generator.adapters import AdapterSlots, fetching, fetching_client
from generator.announcer import announce, announce_leave
from generator.config import GeneratorConfig
from generator.engine.engine import Engine
from generator.engine.options import EngineOptions, in_settings
from generator.feedback import RateableAnswers, ServedLine
from generator.logprobs import LogprobScoring
from generator.openai_routes import mount_openai_routes
from generator.routes import (
    add_adapter_routes,
    add_feedback_route,
    add_token_routes,
    add_weight_routes,
    refused_while_starting,
)
from generator.serving import GeneratorMetrics, Serving
from generator.weight_sync import Puller, WeightSync
from generator.weights.tree_download import TreeDownloads, TreeSources
from generator.whole_targets import WholeTargets
from protocol.adapters import WHOLE_FILES
from protocol.fleet import PROBE_TIMEOUT_S, Announcement
from protocol.model import PROTOCOL_VERSION
from protocol.status import PeerStatus, ProgressStatus, QueueStatus, Report
from protocol.weight_tree import TREE_ROUTE
from services.http.app import create_app
from services.http.client import HttpClient
from services.http.gpu_metrics import GpuMetrics
from services.http.metrics import Metrics
from services.http.server import Listener, serve_http
from services.http.status import add_status_route, peers_at, recent_failures
from services.http.tls import client_tls
from services.http.waiting import Waiting
from services.isolation.staging import staging_folder
from services.load import LoadSample, LoadWindow
from services.model_folder import fingerprint_directory, vocabulary_size, with_size
from services.network import address_to, is_wildcard
from services.process import Stop, WrongSettings
from services.tracing import exporting_traces

logger = logging.getLogger(__name__)
_EVERY_S = 1.0
_STARTING = "vLLM loads and measures the model, which takes minutes for a large one, and longer at its first start"


class GeneratorStatus:
    """`serving` is set once the engine is up, which samples `most_sequences` at once."""

    def __init__(
        self, *, name: str, learner: str | None, client: HttpClient, most_requests: int, most_sequences: int
    ) -> None:
        self._name = name
        self._learner = learner
        self._client = client
        self._most_requests = most_requests
        self.load = LoadWindow(self._look, limit=lambda: most_sequences)
        self.serving: Serving | None = None
        self._served = False

    def report(self) -> Report:
        """The generator's part of its status."""
        if self.serving is None:
            return Report(id=self._name, peers=self._peers())
        state = self.serving.state()
        return Report(
            id=self._name,
            policy_version=state.policy_version,
            progress=ProgressStatus(unit="tokens", done=state.tokens_generated),
            load=self.load.status(),
            usage=self.load.usage,
            step_costs=self.serving.step_costs,
            peers=self._peers(),
            queues=(QueueStatus(name="requests", depth=state.running, limit=self._most_requests),),
            problems=() if self.serving.engine_is_alive else ("the engine's process has died: restart this generator",),
        )

    def _look(self) -> LoadSample:
        assert self.serving is not None, "looked at once the engine is up"
        state = self.serving.state()
        if not self._served and state.policy_version is not None:
            self.load.restart()  # before, nobody could ask it for anything
        self._served = state.policy_version is not None
        return LoadSample(done=state.tokens_generated, running=state.running, idle_s=state.idle_s)

    def _peers(self) -> tuple[PeerStatus, ...]:
        urls = () if self._learner is None else (self._learner,)
        return peers_at(urls, self._client.contacts(), kind="learner")


async def watch_life(engine: Engine) -> None:
    """Raises EngineGone when the engine's process has died."""
    while True:
        await asyncio.sleep(_EVERY_S)
        if not engine.is_alive:
            raise engine.death()


async def watch_answers(engine: Engine, *, serving: Serving) -> None:
    """Takes the generator out of service while its engine does not answer within its deadline.

    Requests that run then are handed back, so that they go on elsewhere.
    """
    while True:
        answer = asyncio.ensure_future(engine.ping())
        try:
            done, _ = await asyncio.wait({answer}, timeout=engine.answer_timeout_s)
            if not done:
                logger.error(
                    "the engine has not answered for %.0f s: out of service until it does", engine.answer_timeout_s
                )
                serving.stall()
                await engine.hand_back(stopped=True)
            await answer
        finally:
            answer.cancel()
        serving.answers()
        await asyncio.sleep(_EVERY_S)


async def serve(config: GeneratorConfig, options: EngineOptions, stop: Stop) -> None:
    """Serves until a stop is requested, then drains. Raises JoinRefusedByLearner, NeverServed, EngineGone, OSError."""
    waits, registry = Waiting(start=_STARTING), Metrics("generator", run=config.run.name)
    async with AsyncExitStack() as stack:
        stack.enter_context(exporting_traces("generator", **config.run.traces))
        listener = stack.enter_context(Listener(host=config.http.host, port=config.http.port, tls=config.http.tls))
        client = await stack.enter_async_context(HttpClient(token=config.join.token, tls=client_tls(config.http.tls)))
        announcement = _announcement(config, listener=listener, instance=options.instance)
        app = create_app(
            service="generator",
            version=version("headway"),
            token=config.http.token,
            readiness=waits.readiness,
            metrics=registry,
            max_body_bytes=config.http.max_body_bytes,
        )
        learner = config.join.learner
        status = GeneratorStatus(
            name=announcement.generator_id, learner=learner, client=client, most_requests=config.max_waiting_requests,
            most_sequences=config.engine.max_num_seqs,
        )  # fmt: skip
        add_status_route(
            app, service="generator", version=version("headway"), waits=waits,
            failures=stack.enter_context(recent_failures()), stopping=lambda: stop.requested, provider=status.report,
        )  # fmt: skip
        async with asyncio.TaskGroup() as group:
            loops = [group.create_task(serve_http(app, listener), name="http")]
            with refused_while_starting(app):
                engine = await _engine_unless_stopped(options, stop)
                serving = None
                if engine is not None:
                    stack.push_async_callback(engine.shutdown)
                    serving = await _serving_with_routes(
                        app, stack, config=config, engine=engine, registry=registry, client=client, status=status,
                        announcement=announcement,
                    )  # fmt: skip
            if engine is not None and serving is not None:
                waits.started()
                works = _works(
                    learner, engine=engine, serving=serving, waits=waits, client=client, announcement=announcement
                )
                works["load"] = status.load.run(gpus=GpuMetrics(registry).show)
                loops += [group.create_task(work, name=name) for name, work in works.items()]
                await stop.wait()
                serving.leave()
                if learner is not None:
                    await announce_leave(learner=learner, client=client, announcement=announcement)
                with waits.wait("its last requests to end", quiet_s=0.5):
                    await serving.drain(timeout_s=config.drain_s)
            for loop in loops:
                loop.cancel()


async def _serving_with_routes(
    app: FastAPI,
    stack: AsyncExitStack,
    *,
    config: GeneratorConfig,
    engine: Engine,
    registry: Metrics,
    client: HttpClient,
    status: GeneratorStatus,
    announcement: Announcement,
) -> Serving:
    """The serving of an engine that is up, when `app` has all routes to it."""
    metrics = GeneratorMetrics(registry, engine=engine)
    metrics.places(config.engine.max_num_seqs)
    serving = _serving(config, engine=engine, metrics=metrics, name=announcement.generator_id)
    status.serving = serving
    scoring = _scoring(config, engine=engine, serving=serving, metrics=metrics, announcement=announcement)
    sync = await _weight_sync(stack, config, engine=engine, serving=serving, metrics=metrics, client=client)
    line = _served_line(app, stack, config=config, client=client, registry=registry)
    await _add_routes(
        app, config=config, engine=engine, serving=serving, scoring=scoring, sync=sync, line=line,
        instance=announcement.instance,
    )  # fmt: skip
    await _add_adapters(
        app, stack, config=config, engine=engine, serving=serving, metrics=metrics, registry=registry,
        name=announcement.generator_id,
    )  # fmt: skip
    return serving


def _works(
    learner: str | None,
    *,
    engine: Engine,
    serving: Serving,
    waits: Waiting,
    client: HttpClient,
    announcement: Announcement,
) -> dict[str, Coroutine[None, None, None]]:
    """Loops beside HTTP, by name. A generator that serves alone has weights already."""
    works = {
        "life": watch_life(engine),
        "answers": watch_answers(engine, serving=serving),
        "weights": serving.watch_weights(waits),
    }
    if learner is None:
        serving.holds(engine.version)
        return works
    told = announcement.model_copy(update={"kind": engine.kind, "dtype": engine.dtype})
    announcing = announce(learner=learner, client=client, announcement=told, serving=serving, waits=waits)
    return {**works, "announce": announcing}


async def _engine_unless_stopped(options: EngineOptions, stop: Stop) -> Engine | None:
    """The engine, or None if a stop is requested before it is up."""
    starting = asyncio.ensure_future(Engine.start(options=options))
    stopping = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        return starting.result() if starting.done() else None
    except Exception as error:
        meant = in_settings(error, options)
        if meant is not None:
            raise WrongSettings(meant) from error
        raise
    finally:
        stopping.cancel()
        if not starting.done():
            starting.cancel()
            await asyncio.wait([starting])


def _scoring(
    config: GeneratorConfig, *, engine: Engine, serving: Serving, metrics: GeneratorMetrics, announcement: Announcement
) -> LogprobScoring:
    return LogprobScoring(
        engine=engine,
        serving=serving,
        metrics=metrics,
        generator_id=announcement.generator_id,
        instance=announcement.instance,
        tokenizer=announcement.fingerprints.tokenizer,
        vocabulary_size=vocabulary_size(config.model),
        max_model_len=config.context_tokens,
    )


def _serving(config: GeneratorConfig, *, engine: Engine, metrics: GeneratorMetrics, name: str) -> Serving:
    return Serving(
        engine=engine,
        generator_id=name,
        vocabulary_size=vocabulary_size(config.model),
        max_model_len=config.context_tokens,
        max_waiting_requests=config.max_waiting_requests,
        metrics=metrics,
    )


async def _add_adapters(
    app: FastAPI,
    stack: AsyncExitStack,
    *,
    config: GeneratorConfig,
    engine: Engine,
    serving: Serving,
    metrics: GeneratorMetrics,
    registry: Metrics,
    name: str,
) -> None:
    """Nothing for a generator that takes none."""
    settings = config.adapters
    if not settings.are_taken or settings.source is None:
        return
    client = await stack.enter_async_context(fetching_client(token=settings.token, tls=client_tls(config.http.tls)))
    slots: AdapterSlots | WholeTargets
    if settings.whole:
        fetch = fetching(client, settings.source, names=WHOLE_FILES)
        slots = WholeTargets(engine=engine, fetch=fetch, base=config.model, serving=serving, metrics=registry)
    else:
        slots = AdapterSlots(
            engine=engine,
            fetch=fetching(client, settings.source),
            slots=settings.slots,
            max_rank=settings.max_rank,
            metrics=registry,
        )
    stack.callback(slots.close)
    sampling = AdapterSampling(engine=engine, serving=serving, slots=slots, metrics=metrics, generator_id=name)
    add_adapter_routes(app, sampling=sampling)


async def _weight_sync(
    stack: AsyncExitStack,
    config: GeneratorConfig,
    *,
    engine: Engine,
    serving: Serving,
    metrics: GeneratorMetrics,
    client: HttpClient,
) -> WeightSync | None:
    """None for a generator that serves alone: nobody changes its weights."""
    learner = config.join.learner
    if learner is None:
        return None
    puller = Puller(client=client, learner=learner)
    folder = config.join.download_folder
    return WeightSync(
        engine=engine,
        serving=serving,
        metrics=metrics,
        puller=puller,
        folder=folder,
        probe_s=with_size(PROBE_TIMEOUT_S, config.model),
        tree=await _tree_downloads(stack, config, puller=puller, metrics=metrics, client=client),
    )


def _served_line(
    app: FastAPI, stack: AsyncExitStack, *, config: GeneratorConfig, client: HttpClient, registry: Metrics
) -> ServedLine | None:
    """Answers of users on their way to the learner, for as long as the stack is open; None if they are not told of."""
    learner = config.join.learner
    if learner is None or not config.join.feedback:
        return None
    add_feedback_route(app, learner=learner, client=client)
    line = ServedLine(learner=learner, client=client, metrics=registry)
    telling = asyncio.create_task(line.run(), name="served answers")
    stack.callback(telling.cancel)
    return line


async def _tree_downloads(
    stack: AsyncExitStack, config: GeneratorConfig, *, puller: Puller, metrics: GeneratorMetrics, client: HttpClient
) -> TreeDownloads | None:
    """None for a generator that does not pull. What it holds is deleted with the `stack`."""
    join = config.join
    if join.weights != "pull":
        return None
    # Of its own: the learner's token is nobody else's.
    relay_client = await stack.enter_async_context(HttpClient(token=join.relay_token, tls=client_tls(config.http.tls)))
    sources = TreeSources(
        relays=join.relays, relay_client=relay_client, learner=f"{puller.learner}{TREE_ROUTE}", client=client,
        patience_s=join.relay_patience_s, received=metrics.pulled,
    )  # fmt: skip
    held = stack.enter_context(staging_folder("headway-held-", within=join.download_folder))
    return TreeDownloads(sources=sources, folder=held, dense=puller.bucket, healed=metrics.healed)


async def _add_routes(
    app: FastAPI,
    *,
    config: GeneratorConfig,
    engine: Engine,
    serving: Serving,
    scoring: LogprobScoring,
    sync: WeightSync | None,
    line: ServedLine | None = None,
    instance: str,
) -> None:
    add_token_routes(app, serving=serving, scoring=scoring)
    if sync is not None:
        add_weight_routes(app, sync=sync, instance=instance)
    if config.openai:
        await mount_openai_routes(
            app,
            engine=engine,
            served_model_name=config.served_model_name,
            check_ready=serving.check_ready,
            occupied=serving.occupied,
            tool_parser=config.tool_parser,
            reasoning_parser=config.reasoning_parser,
            chat_template=config.run.template_text or None,
            chat_template_kwargs=config.run.chat_template_kwargs,
            around=lambda openai: (
                openai if line is None else RateableAnswers(openai, version=lambda: serving.version, told=line.put)
            ),
        )


def _announced_url(config: GeneratorConfig, listener: Listener) -> str:
    """URL at which the learner finds this generator: of this machine's addresses, the one that is on the way to it.

    A certificate is for names, so with one the machine's name stays.
    """
    if not is_wildcard(listener.host) or listener.tls is not None or config.join.learner is None:
        return listener.url
    address = address_to(config.join.learner)
    return (
        listener.url if address is None else f"http://{f'[{address}]' if ':' in address else address}:{listener.port}"
    )


def _announcement(config: GeneratorConfig, *, listener: Listener, instance: str) -> Announcement:
    """The announcement of this generator to the learner. Raises FileNotFoundError for an incomplete model directory."""
    return Announcement(
        generator_id=config.id or f"{socket.gethostname()}:{listener.port}",
        instance=instance,
        started_at=time.time(),
        url=config.join.url or _announced_url(config, listener),
        protocol_version=PROTOCOL_VERSION,
        fingerprints=fingerprint_directory(config.model, config.run.chat_template, config.run.chat_template_kwargs),
        world_size=config.engine.tensor_parallel_size,
        backend=config.join.backend,
        channel=config.join.channel,
        staging=config.staging == "staging",
        weights=config.join.weights,
        relayed=bool(config.join.relays),
        max_model_len=config.context_tokens,
        serving_version=None,
    )
