"""The learner of an online algorithm, wired: HTTP, intake, fleet, publisher, and the trainer's thread.

    event loop                                        trainer's thread
    ──────────                                        ────────────────
    http       ◀─ announcements of generators         OnlineTraining.run
    fleet_watch  waits for a change of the fleet,       │ intake.take()   (waits for a batch)
                 tells intake and publisher             │ train_step
    silence      waits for the clock                    │ publisher.offer() (never waits)
    intake       waits for an env_service               │ intake.trained()
    tick         waits for the clock
    publisher    waits for an offer or a new member

Nothing in the event loop waits for the trainer's thread, so no cycle of waits can close.
"""

import asyncio
import logging
import sys
import time
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from functools import partial
from importlib.metadata import version

from learner.config import LearnerConfig
from learner.history.checkpoints import Checkpoints
from learner.history.journal import Journal
from learner.history.run_folder import open_run_folder
from learner.intake.admission import GroupRules
from learner.intake.evaluation import Evaluator
from learner.intake.failures import DeadLetters
from learner.intake.granting import LeaseTerms
from learner.intake.intake import Intake, IntakeOptions
from learner.ledger import LedgerConfig
from learner.online import OnlineTraining
from learner.recovery import Recovered, recover
from learner.reports.curves import draw_curves
from learner.reports.measures import Measures
from learner.reports.records import Records
from learner.reports.status import LearnerStatus
from learner.reports.summary import summarize, table, write_summary
from learner.trainer_thread import TrainerThread
from learner.training_setup import OpenTrainer, first_probe, open_trainer, vocabulary_size
from learner.weights.fleet import Fleet
from learner.weights.generator_watch import IdleWatch
from learner.weights.publisher import Publisher, PublisherOptions, PublishReport
from learner.weights.routes import add_routes
from protocol.fingerprints import fingerprint_directory
from protocol.generation import Sampling
from services.http_app import create_app
from services.http_client import HttpClient
from services.http_server import Listener, serve_http
from services.metrics import Metrics
from services.process import Stop
from services.sockets import RouterSocket
from services.status import RecentFailures, add_status_route, recent_failures
from services.waiting import Waiting

log = logging.getLogger(__name__)

_PROBE_TOLERANCES = {"float32": 1e-3, "bfloat16": 1.5}
"""Nats. Two implementations of one model differed by up to 1e-4 and 0.6; a wrong load, by several at some token."""


async def train_online(config: LearnerConfig, stop: Stop) -> None:
    """Runs the learner until its last step. A stop cancels it; its files are whole at any moment."""
    incarnation = open_run_folder(config.run.folder, resume=config.resume)
    async with AsyncExitStack() as stack:
        listener = stack.enter_context(Listener(host=config.http.host, port=config.http.port))
        metrics = Metrics("learner")
        measures = Measures(metrics)
        socket = await stack.enter_async_context(
            RouterSocket.bind(config.leases.address, on_garbage=lambda _, error: measures.refused(error.reason))
        )
        thread = await stack.enter_async_context(TrainerThread())
        client = await stack.enter_async_context(HttpClient(token=config.weights.generator_token))
        records = stack.enter_context(Records(folder=config.run.folder, total_steps=config.steps))
        recovered = recover(config.run.folder, config=_ledger_config(config), resume=config.resume)
        journal = stack.enter_context(Journal.open(config.run.folder / "journal.log"))
        parts = _Parts(
            config=config, metrics=metrics, measures=measures, incarnation=incarnation, socket=socket, client=client,
            records=records, recovered=recovered, journal=journal, failures=stack.enter_context(recent_failures()),
        )  # fmt: skip
        async with asyncio.TaskGroup() as group:
            loops = [group.create_task(loop, name=name) for name, loop in parts.loops(listener, stop).items()]
            opened = await thread.run(partial(open_trainer, config, argv=sys.argv, should_stop=thread.stopping))
            stack.callback(opened.close)
            await _train(parts, opened, thread)
            for loop in loops:
                loop.cancel()
    sys.stdout.write(parts.closing_words)


async def _train(parts: "_Parts", opened: OpenTrainer, thread: TrainerThread) -> None:
    """The trainer's thread from its first publish to the exported model, then the summary."""
    config, recovered = parts.config, parts.recovered
    if recovered.trainer_folder is not None:
        await thread.run(partial(opened.trainer.load, recovered.trainer_folder))
    training = OnlineTraining(
        config=config,
        trainer=opened.trainer,
        intake=parts.intake,
        publisher=parts.publisher,
        records=parts.records,
        measures=parts.measures,
        idle=parts.idle,
        checkpoints=Checkpoints(config.run.folder, keep=config.checkpoint.keep),
        first_probe=first_probe(config.model, count=config.weights.probe_tokens),
        first_version=recovered.version,
        replay=recovered.batches,
        loop=asyncio.get_running_loop(),
    )
    thread.on_stop(training.interrupt)
    parts.waits.started()
    await thread.run(training.run)
    if not parts.records.steps:
        log.info("no step was left to train: the summary of the run's former start still holds")
        return
    summary = summarize(
        parts.records,
        books=parts.intake.books(),
        max_lag=config.max_lag,
        train_wall_s=training.train_wall_s,
        generator_idle_share=parts.idle.share,
    )
    folder = config.run.folder
    write_summary(summary, folder)
    draw_curves(
        parts.records,
        title=f"{config.run.name}: {config.algo.type}, max_lag {config.max_lag}",
        path=folder / "curves.png",
    )
    parts.closing_words = f"\n{table(summary, folder=folder)}\n"


class _Parts:
    """The objects of the event loop, made in the order of who needs whom."""

    def __init__(
        self,
        *,
        config: LearnerConfig,
        metrics: Metrics,
        measures: Measures,
        incarnation: int,
        socket: RouterSocket,
        client: HttpClient,
        records: Records,
        recovered: Recovered,
        journal: Journal,
        failures: RecentFailures,
    ) -> None:
        self.config = config
        self.failures = failures
        self.records = records
        self.recovered = recovered
        self.metrics = metrics
        self.measures = measures
        self.waits = Waiting(on_waited=self.measures.waited)
        self.closing_words = ""
        self._fleet_stirred = asyncio.Event()
        self.fleet = Fleet(
            fingerprints=fingerprint_directory(config.model),
            incarnation=incarnation,
            announce_every_s=config.weights.announce_every_s,
            silence_s=config.weights.silence_s,
            changed=self._fleet_stirred.set,
        )
        self.idle = IdleWatch(fleet=self.fleet, client=client)
        self.publisher = Publisher(
            fleet=self.fleet,
            client=client,
            options=_publisher_options(config, incarnation),
            waits=self.waits,
            published=self._published,
        )
        self.intake = Intake(
            socket=socket,
            ledger=recovered.ledger,
            journal=journal,
            fleet=self.fleet,
            evaluator=_evaluator(config, incarnation),
            terms=_lease_terms(config),
            dead_letters=DeadLetters(
                config.run.folder / "dead_letters.jsonl", largest_share=config.leases.max_dead_letter_share
            ),
            waits=self.waits,
            options=_intake_options(config, incarnation, self.fleet),
            refused=measures.refused,
        )
        self.intake.readmit(recovered.spare_groups)
        self.status = LearnerStatus(
            name=config.run.name,
            folder=config.run.folder,
            total_steps=config.steps,
            incarnation=incarnation,
            ledger=recovered.ledger,
            fleet=self.fleet,
            env_services=self.intake.env_services,
            measures=measures,
        )

    def loops(self, listener: Listener, stop: Stop) -> dict[str, Coroutine[object, object, None]]:
        """What runs beside the trainer's thread."""
        http = self.config.http
        app = create_app(
            service="learner",
            version="1",
            token=http.token,
            readiness=self.waits.readiness,
            metrics=self.metrics,
            max_body_bytes=http.max_body_bytes,
        )
        add_routes(app, fleet=self.fleet)
        add_status_route(
            app, service="learner", version=version("headway"), waits=self.waits, failures=self.failures,
            stopping=lambda: stop.requested, provider=self.status.report,
        )  # fmt: skip
        return {
            "http": serve_http(app, listener),
            "intake": self.intake.receive(),
            "tick": self.intake.tick(),
            "publisher": self.publisher.run(),
            "fleet_watch": self._watch_fleet(),
            "silence": self._drop_silent(),
            "idle": self.idle.run(),
        }

    def _published(self, report: PublishReport) -> None:
        self.records.publish(report)
        self.measures.published(report)

    async def _watch_fleet(self) -> None:
        while True:
            await self._fleet_stirred.wait()
            self._fleet_stirred.clear()
            self.publisher.fleet_changed()
            await self.intake.fleet_changed()

    async def _drop_silent(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            for name in self.fleet.expire(now=time.monotonic()):
                log.warning("generator %s is silent for %.0f s and leaves", name, self.config.weights.silence_s)


def _ledger_config(config: LearnerConfig) -> LedgerConfig:
    return LedgerConfig(
        groups_per_step=config.groups_per_step,
        max_lag=config.max_lag,
        on_lag=config.lag.on_lag,
        straggler_timeout_s=config.lag.straggler_timeout_s,
        max_drops_per_lease=config.lag.max_drops_per_lease,
        lease_timeout_s=config.leases.timeout_s,
        infrastructure_retries=config.leases.infrastructure_retries,
        data_retries=config.leases.data_retries,
    )


def _publisher_options(config: LearnerConfig, incarnation: int) -> PublisherOptions:
    weights = config.weights
    return PublisherOptions(
        incarnation=incarnation,
        backend=weights.backend,
        host=weights.host,
        bucket_bytes=weights.bucket_mb << 20,
        bucket_timeout_s=weights.bucket_timeout_s,
        meet_timeout_s=weights.meet_timeout_s,
        commit_timeout_s=weights.commit_timeout_s,
        probe_tolerance=weights.probe_tolerance or _PROBE_TOLERANCES[config.training.publish_dtype],
    )


def _evaluator(config: LearnerConfig, incarnation: int) -> Evaluator:
    return Evaluator(
        config=config.evaluation,
        max_tokens=config.rollouts.max_tokens,
        timeout_s=config.leases.timeout_s,
        first_lease_id=incarnation << 32,
    )


def _intake_options(config: LearnerConfig, incarnation: int, fleet: Fleet) -> IntakeOptions:
    rollouts = config.rollouts
    return IntakeOptions(
        incarnation=incarnation,
        environment=rollouts.environment,
        heartbeat_every_s=config.leases.heartbeat_every_s,
        lease_timeout_s=config.leases.timeout_s,
        tokenizer=fleet.fingerprints.tokenizer,
        chat_template=fleet.fingerprints.chat_template,
        rules=GroupRules(
            vocabulary_size=vocabulary_size(config.model),
            min_group_size=rollouts.min_group_size,
            drop_uniform_groups=rollouts.drop_uniform_groups,
        ),
    )


def _lease_terms(config: LearnerConfig) -> LeaseTerms:
    rollouts = config.rollouts
    return LeaseTerms(
        group_size=rollouts.group_size,
        sampling=Sampling(
            temperature=config.training.temperature,
            max_tokens=rollouts.max_tokens,
            stop_token_ids=rollouts.stop_token_ids,
        ),
        seed=rollouts.seed,
        timeout_s=config.leases.timeout_s,
        total_groups=config.steps * config.groups_per_step,
    )
