"""The process put together.

reward services ready ─▶ hello ─▶ { receive, tick, watch_peers, serve_http, one task for each lease } until stopped

Whom an env_service waits for: the reward services, the learner, a generator.
"""

import asyncio
import os
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from importlib.metadata import version
from urllib.parse import quote, urlsplit

from fastapi import FastAPI

from env_service.agents.attempts import attempts_in
from env_service.agents.registry import AgentLimits, AgentSessions
from env_service.agents.routes import OPEN_FOLDER, add_session_routes
from env_service.checkpoints.records import LeaseRecords
from env_service.config import EnvServiceConfig
from env_service.connection import LearnerLink
from env_service.environments import catalog
from env_service.environments.interface import OfferedEnvironment
from env_service.environments.task_configs import ClassTasks, LevelTasks, MixTasks, PlacesConfig, Tasks
from env_service.environments.tokenization import ChatTemplateError, Tokenization, TokenizerError
from env_service.hosting.hosted import Hosting
from env_service.leases.outbox import Outbox
from env_service.leases.places import PlaceRule
from env_service.leases.running import RunningLeases, Slow
from env_service.rollouts.concurrency import Concurrency, ConcurrencyBounds
from env_service.rollouts.fleet import GeneratorFleet
from env_service.rollouts.generation import Generation
from env_service.rollouts.judging import GroupScoring
from env_service.rollouts.match import Opponent
from env_service.rollouts.outcomes import RolloutMetrics
from env_service.rollouts.rollout import Rollout
from env_service.runtimes.images import ImageFault
from env_service.runtimes.pool import RuntimePool, use_runtimes
from env_service.status_notes import asked_rewards, send_notes
from protocol.messages import MAX_REASON_CHARS, EnvironmentInfo, Hello, Lease, ServingGenerator, TaskPart, WaitsFor
from protocol.status import PeerStatus, QueueStatus, Report
from services.http.app import OPEN_PATHS, create_app
from services.http.backoff import Backoff
from services.http.breakers import Breakers
from services.http.client import HttpClient
from services.http.metrics import Metrics
from services.http.server import Listener, serve_http
from services.http.status import add_status_route, peers_at, recent_failures
from services.http.tls import client_tls
from services.http.waiting import QUIET_S, Waiting
from services.isolation.faults import CannotIsolate
from services.load import LoadWindow
from services.model_folder import fingerprint_directory
from services.process import Stop, WrongSettings, run_loops
from services.rewards.client import RewardClient
from services.rewards.settings import ClientSettings, HedgeSettings, RewardService
from services.run_lock import FolderTaken, RunLock, holder_of
from services.tracing import exporting_traces
from services.zmq.keys import ClientKeys
from services.zmq.sockets import DealerSocket

_POLL_S = 1.0
_SLOW: Mapping[WaitsFor, str] = {
    "rewards": "the reward service to judge tasks of",
    "environment": "the environment",
    "host": "the host of environment",
}
_NO_REWARDS = (
    "none answers there that is ready, as while a reward model loads: start it, or correct env-service.reward_urls"
)
_NO_LEARNER = (
    "it has not answered, as while it loads its model: start it, or correct env-service.learner, which is "
    "learner.leases.address there"
)
_NONE_SERVES = (
    "the learner tells of those that have its weights, and has told of none; a generator loads its model first: see "
    "its log, and that its generator.join.learner is this learner"
)
_NONE_ANSWERS = "they serve, says the learner: see whether they can be reached from here by these names"


async def reward_services_ready(client: RewardClient, waits: Waiting, *, poll_s: float = _POLL_S) -> None:
    """Return when, of the reward services for each verifier, one says that it is ready."""
    with waits.wait("the reward services", quiet_s=QUIET_S, remedy=_NO_REWARDS) as wait:
        while missing := await client.unready():
            sets = (" or ".join(urls) for urls in missing)
            wait.whom = f"the reward service at {', and the one at '.join(sets)}"
            await asyncio.sleep(poll_s)


async def watch_peers(link: LearnerLink, fleet: GeneratorFleet, waits: Waiting, *, learner: str) -> None:
    """Keep `waits` true to who is missing, until cancelled."""
    while True:
        if not link.welcomed:
            with waits.wait(f"the learner at {learner}", quiet_s=QUIET_S, remedy=_NO_LEARNER):
                await link.wait_for(lambda: link.welcomed)
        elif not fleet.serving:
            with waits.wait("a generator that serves", quiet_s=QUIET_S, remedy=_NONE_SERVES):
                await link.wait_for(lambda: bool(fleet.serving) or not link.welcomed)
        elif not fleet.answering:
            names = ", ".join(generator.generator_id for generator in fleet.serving)
            with waits.wait(f"generators that do not answer: {names}", quiet_s=0.5, remedy=_NONE_ANSWERS):
                await link.wait_for(lambda: fleet.answering or not (fleet.serving and link.welcomed))
        else:
            await link.wait_for(lambda: not (fleet.answering and link.welcomed))


async def watch_rollouts(
    running: RunningLeases, waits: Waiting, config: EnvServiceConfig, *, poll_s: float = 1.0, quiet_s: float = 10.0
) -> None:
    """Say for whom rollouts wait longer than usual: a verifier or an environment that hangs, until cancelled."""
    retry = config.retry
    remedies: Mapping[WaitsFor, str] = {
        "rewards": f"a verifier is slow or hangs; it has {retry.reward_timeout_s:g} s (env-service.retry."
        "reward_timeout_s), and of workers each item reward-service.workers.compute_timeout_s; the log of the "
        "reward-service names the items",
        "environment": f"its code is slow or hangs; a step has {retry.environment_timeout_s:g} s (env-service.retry."
        "environment_timeout_s)",
        "host": "openings are tried again until it is there; start it, or see why it is not reached",
    }
    async with asyncio.TaskGroup() as tasks:
        for whom, remedy in remedies.items():
            tasks.create_task(_watch_one(running, waits, whom, remedy, poll_s=poll_s, quiet_s=quiet_s))


async def _watch_one(
    running: RunningLeases, waits: Waiting, whom: WaitsFor, remedy: str, *, poll_s: float, quiet_s: float
) -> None:
    name = _SLOW[whom]
    while True:
        await asyncio.sleep(poll_s)
        slow = running.slow(whom, from_s=quiet_s)
        if slow is None:
            continue
        with waits.wait(_slow_text(name, slow, remedy), blocks_readiness=False) as wait:
            while (slow := running.slow(whom, from_s=quiet_s)) is not None:
                wait.whom = _slow_text(name, slow, remedy)
                await asyncio.sleep(poll_s)


def _slow_text(name: str, slow: Slow, remedy: str) -> str:
    said = f"{slow.said}; " if slow.said and name == _SLOW["host"] else ""
    names = ", ".join(slow.environments)
    return f"{name} {names} ({slow.leases} groups, one for {slow.oldest_s:.0f} s): {said}{remedy}"


async def run(config: EnvServiceConfig, stop: Stop) -> None:
    """Serve until `stop` is requested, then leave in good order."""
    tokenization, hosting = tokenization_of(config), hosting_of(config)
    pool = use_runtimes(RuntimePool(config.runtimes))
    environments = environments_of(config, tokenization, hosting)
    metrics, waits = Metrics("env-service", run=config.run.name), Waiting()
    counted = RolloutMetrics(metrics)
    async with AsyncExitStack() as stack:
        stack.enter_context(exporting_traces("env-service", **config.run.traces))
        failures = stack.enter_context(recent_failures())
        await stack.enter_async_context(opened_places(config, hosting, pool, metrics))
        listener = stack.enter_context(Listener(host=config.http.host, port=config.http.port, tls=config.http.tls))
        hello = hello_of(config, environments, port=listener.port)
        generators = await stack.enter_async_context(
            HttpClient(token=config.generator_token, tls=client_tls(config.http.tls))
        )
        rewards = await stack.enter_async_context(reward_client(config, metrics=metrics))
        connection = await stack.enter_async_context(connection_of(config, hello))
        fleet, outbox, sessions = GeneratorFleet(), Outbox(resend_s=config.resend_s), sessions_of(config, listener.url)
        records = await opened_records(config, stack, env_id=hello.env_id, metrics=metrics)
        link = LearnerLink(
            connection=connection, hello=hello, fleet=fleet, outbox=outbox, metrics=counted, records=records
        )
        rollout = Rollout(
            env_id=hello.env_id,
            environments=environments,
            tokenization=tokenization,
            generation=generation_of(config, http=generators, fleet=fleet, metrics=counted),
            scoring=GroupScoring(rewards),
            timeout_s=config.retry.rollout_timeout_s,
            environment_timeout_s=config.retry.environment_timeout_s,
            opening_attempts=config.retry.environment_attempts,
            backoff=_backoff(config),
            metrics=counted,
            agents=attempts_in(sessions),
            opponents=await opponents_of(config, stack, tokenization=tokenization, metrics=counted),
            records=records,
        )
        app = _application(config, waits=waits, metrics=metrics, sessions=sessions)
        async with asyncio.TaskGroup() as tasks:
            whose = partial(environment_of, environments)
            running = running_leases(config, rollout, link, whose=whose, tasks=tasks, metrics=counted)
            await go_on(running, records)
            status = EnvServiceStatus(
                config, link=link, outbox=outbox, running=running, fleet=fleet, generators=generators, rewards=rewards
            )
            tell = add_status_route(
                app, service="env-service", version=version("headway"), waits=waits, failures=failures,
                stopping=lambda: stop.requested, provider=status.report,
            )  # fmt: skip
            concurrency = concurrency_of(config, http=generators, fleet=fleet)
            notes = send_notes(link, tell, url=listener.url, rewards=asked_rewards(config))
            http = tasks.create_task(run_loops(http=serve_http(app, listener), load=status.load.run(), notes=notes))
            loops = tasks.create_task(_converse(config, link, fleet, running, waits, rewards, concurrency))
            await stop.wait()
            sessions.stop()
            running.cancel_all()
            await link.leave(stop.reason or "stopping", within_s=config.drain_s)
            loops.cancel()
            http.cancel()


def connection_of(config: EnvServiceConfig, hello: Hello) -> DealerSocket:
    """The connection to the learner's intake, to be entered."""
    keys = ClientKeys.read(secret_key_file=config.secret_key_file, server_key_file=config.learner_key_file)
    return DealerSocket.connect(config.learner, identity=address_of(hello), keys=keys, insecure=config.insecure)


async def opened_records(
    config: EnvServiceConfig, stack: AsyncExitStack, *, env_id: str, metrics: Metrics
) -> LeaseRecords | None:
    """Records of leases, those that a former process of this name has left among them; None if none are kept. Raises
    WrongSettings if another process has their folder.
    """
    settings = config.checkpoints
    if settings.folder is None:
        return None
    folder = settings.folder / quote(env_id, safe="")
    try:
        lock = stack.enter_context(await RunLock.held(folder))
    except FolderTaken as error:
        raise WrongSettings(
            f"[env-service.checkpoints] {folder} is that of {holder_of(folder) or 'another process'}: stop it first, "
            "or give this one another env_id"
        ) from error
    records = LeaseRecords(folder, max_bytes=settings.max_mb << 20, metrics=metrics, lock=lock)
    stack.callback(records.close)
    return records


async def go_on(running: RunningLeases, records: LeaseRecords | None) -> None:
    """Begin the leases of a former process, before the learner is told which ones run here."""
    for past in () if records is None else records.past().values():
        await running.start(past.first.lease, oldest=past.oldest_version, elapsed_s=past.elapsed_s)


def running_leases(
    config: EnvServiceConfig,
    rollout: Rollout,
    link: LearnerLink,
    *,
    whose: Callable[[Lease], str],
    tasks: asyncio.TaskGroup,
    metrics: RolloutMetrics,
) -> RunningLeases:
    """Leases in as many places as configured, whose outcomes go to the learner."""
    return RunningLeases(
        run=rollout.run,
        report=link.report,
        capacity=config.capacity,
        tasks=tasks,
        metrics=metrics,
        rules=place_rules(config),
        whose=whose,
    )


def _application(config: EnvServiceConfig, *, waits: Waiting, metrics: Metrics, sessions: AgentSessions) -> FastAPI:
    app = create_app(
        service="env-service",
        version=version("headway"),
        token=config.http.token,
        readiness=waits.readiness,
        metrics=metrics,
        max_body_bytes=config.http.max_body_bytes,
        open_paths=OPEN_PATHS | {OPEN_FOLDER},
        known_as=() if config.agents.url is None else (urlsplit(config.agents.url).hostname or "",),
    )
    add_session_routes(app, sessions)
    return app


def hosting_of(config: EnvServiceConfig) -> Hosting:
    """The child processes of environments that are isolated, to be entered."""
    return Hosting(workers=config.workers, environment_timeout_s=config.retry.environment_timeout_s)


@asynccontextmanager
async def opened_places(
    config: EnvServiceConfig, hosting: Hosting, pool: RuntimePool, metrics: Metrics
) -> AsyncIterator[None]:
    """Children of isolated environments, and runtimes if an environment has said it needs them: these are tried before
    anything is rolled out. Raises WrongSettings.
    """
    async with hosting:
        try:
            pool.settle()
            pool.show(metrics)
            if pool.needed:
                _check_patience(config)
                await pool.open()
            yield
        except (CannotIsolate, ImageFault) as error:
            raise WrongSettings(str(error)) from error
        finally:
            await pool.close()


def _check_patience(config: EnvServiceConfig) -> None:
    """Raises WrongSettings where waiting for a runtime would count as a task that hangs."""
    runtimes, most_s = config.runtimes, config.retry.environment_timeout_s
    longest_s = runtimes.patience_s + runtimes.limits.command_s
    if longest_s >= most_s:
        raise WrongSettings(
            f"[env-service.runtimes] a step may wait {runtimes.patience_s:g} s for room (patience_s) and "
            f"{runtimes.limits.command_s:g} s for a command (limits.command_s), and retry.environment_timeout_s, after "
            f"which its task is at fault, is {most_s:g} s: make it more than {longest_s:g} s, or the others less"
        )


def environments_of(
    config: EnvServiceConfig, tokenization: Tokenization, hosting: Hosting
) -> Mapping[str, OfferedEnvironment]:
    """Environments on offer, by name. Raises WrongSettings for a class that cannot be used, or not with this model."""
    try:
        environments = catalog.build(config.environments, elsewhere=hosting.offered)
        catalog.check_templates(environments, tokenization)
        catalog.check_opponents(config.environments, environments, tokenization)
    except ValueError as error:  # of a class, a file of tasks, or a dataset
        raise WrongSettings(str(error)) from error
    return environments


def tokenization_of(config: EnvServiceConfig) -> Tokenization:
    """Of the model, with the run's chat template if one is given. Raises WrongSettings."""
    told = config.run.chat_template_kwargs
    try:
        tokenization = Tokenization(config.model, chat_template=config.run.chat_template, arguments=told)
    except (FileNotFoundError, TokenizerError) as error:
        raise WrongSettings(f"model: {error}") from error
    except ChatTemplateError as error:
        raise WrongSettings(f"[run] chat_template: {error}") from error
    try:
        if told:
            tokenization.template.check_arguments(told)
    except ChatTemplateError as error:
        raise WrongSettings(f"[run] chat_template_kwargs: {error}") from error
    return tokenization


def sessions_of(config: EnvServiceConfig, url: str) -> AgentSessions:
    """The sessions of agents, which reach this process at `url` if nothing else is configured."""
    given = config.agents
    limits = AgentLimits(
        body_bytes=given.body_bytes,
        messages=given.messages,
        calls_at_once=given.calls_at_once,
        idle_s=given.idle_s,
        other_sampling=given.other_sampling,
    )
    return AgentSessions(url=given.url or url, limits=limits)


def hello_of(config: EnvServiceConfig, environments: Mapping[str, OfferedEnvironment], *, port: int) -> Hello:
    """Introduction of this process to the learner. Raises FileNotFoundError for an incomplete model directory.

    A name of host and port is the same after a restart: the learner then gives away at once what the former one held.
    """
    run = config.run
    fingerprints = fingerprint_directory(config.model, run.chat_template, run.chat_template_kwargs)
    host = socket.gethostname()
    return Hello(
        env_id=config.env_id or f"{host}:{port}",
        instance=secrets.token_hex(8),
        capacity=config.capacity,
        environments=tuple(
            EnvironmentInfo(
                name=name,
                train_tasks=offered.tasks.train_tasks,
                evaluation_tasks=offered.tasks.evaluation_tasks,
                levels=offered.levels,
                parts=_parts_of(config, given, offered),
                most_leases=None if isinstance(given, MixTasks | LevelTasks) else given.places.most,
                chat_template=_template_of(config, offered),
                no_greedy_answer=offered.no_greedy_answer[:MAX_REASON_CHARS],
                teacher_hint=offered.has_teacher_hint,
            )
            for given, (name, offered) in zip(config.environments, environments.items(), strict=True)
        ),
        tokenizer=fingerprints.tokenizer,
        chat_template=fingerprints.chat_template,
        address=f"{host}:{port}, process {os.getpid()}",
    )


def place_rules(config: EnvServiceConfig) -> Mapping[str, PlaceRule]:
    """Limits and weights of environments, by the name of those that have some."""
    given = {entry.name: entry.places for entry in config.environments if not isinstance(entry, MixTasks | LevelTasks)}
    return {
        name: PlaceRule(most=places.most, weight=places.weight)
        for name, places in given.items()
        if places != PlacesConfig()
    }


def _parts_of(config: EnvServiceConfig, given: Tasks, offered: OfferedEnvironment) -> tuple[TaskPart, ...]:
    """The parts of an entry, those of a mix with their limits and weights."""
    parts = catalog.parts_of(offered.tasks)
    if not isinstance(given, MixTasks):
        return parts
    rules = place_rules(config)
    named = [rules.get(part.environment, PlaceRule()) for part in given.parts]
    return tuple(
        part.model_copy(update={"most_leases": rule.most, "weight": rule.weight})
        for part, rule in zip(parts, named, strict=True)
    )


def environment_of(environments: Mapping[str, OfferedEnvironment], lease: Lease) -> str:
    """The environment that has a lease's task, where several are offered as one; the lease's own if nobody knows it."""
    offered = environments.get(lease.environment)
    if offered is None or offered.parts is None or lease.task_index >= offered.task_count(lease.purpose):
        return lease.environment
    return offered.at(lease.purpose, lease.task_index)[0].name


def _template_of(config: EnvServiceConfig, offered: OfferedEnvironment) -> str:
    """The fingerprint of the chat template as an environment has it told; empty if it tells it nothing of its own."""
    if not offered.template_arguments:
        return ""
    told = {**config.run.chat_template_kwargs, **offered.template_arguments}
    return fingerprint_directory(config.model, config.run.chat_template, told).chat_template


def address_of(hello: Hello) -> str:
    """Its name on the socket: another one in each process, or ZeroMQ would let a namesake take the connection over."""
    return f"{hello.env_id[:180]}/{hello.instance}"


def generation_of(
    config: EnvServiceConfig, *, http: HttpClient, fleet: GeneratorFleet, metrics: RolloutMetrics
) -> Generation:
    """The generators' client as configured."""
    return Generation(
        http=http,
        fleet=fleet,
        attempts=config.retry.generator_attempts,
        silence_s=config.retry.generator_silence_s,
        deadline_s=config.retry.rollout_timeout_s,
        backoff=_backoff(config),
        metrics=metrics,
    )


def concurrency_of(config: EnvServiceConfig, *, http: HttpClient, fleet: GeneratorFleet) -> Concurrency | None:
    """The bound of completions outstanding at generators, if one is wanted."""
    settings = config.concurrency
    bounds = ConcurrencyBounds(least=settings.least, most=settings.most, queue_share=settings.queue_share)
    return Concurrency(http=http, fleet=fleet, bounds=bounds, poll_s=settings.poll_s) if settings.adaptive else None


async def opponents_of(
    config: EnvServiceConfig, stack: AsyncExitStack, *, tokenization: Tokenization, metrics: RolloutMetrics
) -> Mapping[str, Opponent]:
    """Opponents of the policy, by environment; their clients are closed with the stack."""
    found: dict[str, Opponent] = {}
    for entry in config.environments:
        if not isinstance(entry, ClassTasks) or (given := entry.opponent) is None:
            continue
        http = HttpClient(token=given.token or config.generator_token, tls=client_tls(config.http.tls))
        fleet = GeneratorFleet(breakers=Breakers("opponent"))
        fleet.replace([ServingGenerator(generator_id=url, url=url, policy_version="0.0") for url in given.urls])
        generation = generation_of(config, http=await stack.enter_async_context(http), fleet=fleet, metrics=metrics)
        found[entry.name] = Opponent(
            plays=given.plays,
            tokenization=catalog.opponent_tokenization(entry, tokenization),
            sample=generation.sample,
            temperature=given.temperature,
        )
    return found


def _backoff(config: EnvServiceConfig) -> Backoff:
    return Backoff(first_s=config.retry.backoff_s, max_s=config.retry.backoff_max_s, sleep=asyncio.sleep)


async def _converse(
    config: EnvServiceConfig,
    link: LearnerLink,
    fleet: GeneratorFleet,
    running: RunningLeases,
    waits: Waiting,
    rewards: RewardClient,
    concurrency: Concurrency | None,
) -> None:
    """Greets the learner only when rollouts that verifiers judge can be scored: leases granted before would wait. One
    of an environment that may give all rewards itself waits when it has something to be judged.

    From the start on one wait follows the other without a pause in which this process would be called ready.
    """
    waits.started()
    if config.needs_rewards:
        await reward_services_ready(rewards, waits)
    async with asyncio.TaskGroup() as tasks:
        loops = run_loops(
            receive=link.receive(running),
            tick=link.tick(running),
            watch_rewards=rewards.watch(waits),
            watch_rollouts=watch_rollouts(running, waits, config),
            **({"adapt": concurrency.watch()} if concurrency else {}),
        )
        tasks.create_task(loops)
        await watch_peers(link, fleet, waits, learner=config.learner)


def reward_client(config: EnvServiceConfig, *, metrics: Metrics) -> RewardClient:
    """A client of all reward services that the configuration names, those for certain verifiers among them."""
    return RewardClient(
        config.reward_urls,
        services=[
            RewardService(url=given.url, verifiers=given.verifiers, token=given.token) for given in config.rewards
        ],
        token=config.reward_token,
        settings=client_settings(config),
        metrics=metrics,
        tls=client_tls(config.http.tls),
    )


def client_settings(config: EnvServiceConfig) -> ClientSettings:
    """Limits of the reward client. There is no end to its patience: a rollout has a deadline of its own."""
    retry, scoring = config.retry, config.scoring
    return ClientSettings(
        deadline_s=retry.reward_timeout_s,
        patience_s=None,
        attempts=retry.reward_attempts,
        item_attempts=retry.reward_item_attempts,
        batch_items=scoring.batch_items,
        batch_wait_s=scoring.batch_wait_s,
        requests=4 * config.capacity,
        hedging=_hedging(config),
        backoff=Backoff(first_s=retry.backoff_s, max_s=retry.backoff_max_s, sleep=asyncio.sleep),
    )


def _hedging(config: EnvServiceConfig) -> HedgeSettings | None:
    scoring = config.scoring
    if scoring.hedge_share == 0:
        return None
    return HedgeSettings(after_s=scoring.hedge_after_s, percentile=scoring.hedge_percentile, share=scoring.hedge_share)


class EnvServiceStatus:
    """Reads the conversation with the learner, the fleet, and how calls went."""

    def __init__(
        self,
        config: EnvServiceConfig,
        *,
        link: LearnerLink,
        outbox: Outbox,
        running: RunningLeases,
        fleet: GeneratorFleet,
        generators: HttpClient,
        rewards: RewardClient,
    ) -> None:
        self.load = LoadWindow(running.look, limit=lambda: config.capacity)
        self._name = link.name
        self._learner = config.learner
        self._link = link
        self._outbox = outbox
        self._running = running
        self._capacity = config.capacity
        self._fleet = fleet
        self._generators = generators
        self._rewards = rewards
        self._needs_rewards = config.needs_rewards

    def report(self) -> Report:
        """The env_service's part of its status."""
        return Report(
            id=self._name,
            load=self.load.status(),
            usage=self.load.usage,
            peers=(
                self._learner_peer(),
                *self._generators_heard(),
                *self._reward_services(),
            ),
            queues=(
                QueueStatus(name="running leases", depth=len(self._running.report_progress()), limit=self._capacity),
                QueueStatus(name="unacknowledged groups", depth=len(self._outbox)),
                *(
                    QueueStatus(name=f"leases of {each.environment}", depth=each.running, limit=each.most)
                    for each in self._running.limited()
                ),
            ),
        )

    def _reward_services(self) -> tuple[PeerStatus, ...]:
        """None, as long as nothing was to be judged that had to be."""
        contacts = self._rewards.contacts()
        urls = self._rewards.urls if self._needs_rewards or contacts else ()
        return peers_at(urls, contacts, kind="reward-service")

    def _learner_peer(self) -> PeerStatus:
        return PeerStatus(
            name=self._learner,
            kind="learner",
            last_heard_s=self._link.silence_s,
            state=self._learner_state(),
        )

    def _learner_state(self) -> str:
        if self._link.welcomed:
            return "has welcomed this process"
        return f"refuses this process: {self._link.refusal}" if self._link.refusal else "has not answered a hello"

    def _generators_heard(self) -> tuple[PeerStatus, ...]:
        serving = tuple(self._fleet.serving)
        peers = peers_at([each.url for each in serving], self._generators.contacts(), kind="generator")
        return tuple(self._generator(each, peer) for each, peer in zip(serving, peers, strict=True))

    def _generator(self, generator: ServingGenerator, peer: PeerStatus) -> PeerStatus:
        outstanding = self._fleet.outstanding.get(generator.generator_id, 0)
        return peer.model_copy(
            update={
                "name": generator.generator_id,
                "serving_version": generator.policy_version,
                "state": f"{peer.state}, {outstanding} completions outstanding",
            }
        )
