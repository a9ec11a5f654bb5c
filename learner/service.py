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

from learner.config import LearnerConfig, LeaseConfig
from learner.history.checkpoints import Checkpoints
from learner.history.journal import FOLDER, Journal, NoJournal, RunLog
from learner.history.run_folder import open_run_folder
from learner.history.run_name import run_name
from learner.intake.admission import GroupRules
from learner.intake.evaluation import Evaluator
from learner.intake.failures import DeadLetters
from learner.intake.granting import LeaseTerms
from learner.intake.intake import Intake
from learner.intake.options import IntakeOptions
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
from learner.weights.options import PublisherOptions
from learner.weights.publisher import Publisher
from learner.weights.reports import JoinReport, PublishReport
from learner.weights.routes import add_routes
from learner.weights.shelf import Shelf
from protocol.fingerprints import fingerprint_directory
from protocol.generation import Sampling
from services.http_app import create_app
from services.http_client import HttpClient
from services.http_server import Listener, serve_http
from services.keys import ServerKeys
from services.metrics import Metrics
from services.process import Stop
from services.sockets import RouterSocket
from services.status import RecentFailures, add_status_route, recent_failures
from services.waiting import Waiting

log = logging.getLogger(__name__)

_SILENCE_TICK_S = 1.0
_PROBE_TOLERANCES = {"float32": 1e-3, "bfloat16": 1.5}
"""Nats. Two implementations of one model differed by up to 1e-4 and 0.6; a wrong load, by several at some token."""


async def train_online(config: LearnerConfig, stop: Stop) -> None:
    """Runs the learner until its last step. A stop cancels it; its files are whole at any moment."""
    incarnation = open_run_folder(config.run.folder, resume=config.resume)
    async with AsyncExitStack() as stack:
        listener = stack.enter_context(Listener(host=config.http.host, port=config.http.port))
        metrics = Metrics("learner")
        measures = Measures(metrics)
        socket = await stack.enter_async_context(_lease_socket(config.leases, measures))
        thread = await stack.enter_async_context(TrainerThread())
        client = await stack.enter_async_context(HttpClient(token=config.weights.generator_token))
        records = stack.enter_context(
            Records(folder=config.run.folder, total_steps=config.steps, failed_write=measures.failed_write)
        )
        recovered = recover(
            config.run.folder, config=_ledger_config(config), resume=config.resume, incarnation=incarnation
        )
        if config.resume:
            records.take_up(version=recovered.replayed_version, incarnation=incarnation)
        journal = _journal(config, stack)
        parts = _Parts(
            config=config, metrics=metrics, measures=measures, incarnation=incarnation, socket=socket, client=client,
            records=records, recovered=recovered, journal=journal, failures=stack.enter_context(recent_failures()),
        )  # fmt: skip
        stack.callback(parts.dead_letters.close)
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
        checkpoints=Checkpoints(
            config.run.folder,
            keep=config.checkpoint.keep,
            keep_best=config.checkpoint.keep_best,
            best_by=config.checkpoint.best_by,
            journal=parts.journal,
        ),
        first_probe=first_probe(config.model, count=config.weights.probe_tokens),
        first_version=recovered.version,
        replay=recovered.batches,
        loop=asyncio.get_running_loop(),
    )
    thread.on_stop(training.interrupt)
    parts.waits.started()
    await thread.run(training.run)
    if len(parts.records.steps) == parts.records.former_steps and (config.run.folder / "summary.json").exists():
        log.info("no step was left to train: the summary of the run's former start still holds")
        return
    summary = summarize(
        parts.records,
        books=parts.intake.books(),
        max_lag=config.max_lag,
        train_wall_s=parts.records.former_s + training.train_wall_s,
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
        journal: RunLog,
        failures: RecentFailures,
    ) -> None:
        self.config = config
        self.journal = journal
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
        self.shelf = Shelf()
        self.idle = IdleWatch(fleet=self.fleet, client=client)
        self.publisher = Publisher(
            fleet=self.fleet,
            client=client,
            options=_publisher_options(config, incarnation),
            shelf=self.shelf,
            waits=self.waits,
            published=self._published,
            joined=self._joined,
        )
        self.dead_letters = DeadLetters(
            config.run.folder / "dead_letters.jsonl",
            largest_share=config.leases.max_dead_letter_share,
            failed=measures.failed_write,
        )
        self.intake = Intake(
            socket=socket,
            ledger=recovered.ledger,
            journal=journal,
            fleet=self.fleet,
            evaluator=_evaluator(config, incarnation),
            terms=_lease_terms(config),
            dead_letters=self.dead_letters,
            waits=self.waits,
            options=_intake_options(config, incarnation, self.fleet),
            refused=measures.refused,
            belongs=recovered.history.contains,
            left_out=measures.left_out,
        )
        measures.books(self.intake.books)
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
        add_routes(app, fleet=self.fleet, shelf=self.shelf)
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

    def _joined(self, report: JoinReport) -> None:
        self.records.join(report)
        log.info(
            "generator %s has caught up with version %d in %.1f s, probe gap %.2g nats",
            report.generator_id, report.version, report.seconds, report.probe_gap,
        )  # fmt: skip

    async def _watch_fleet(self) -> None:
        while True:
            await self._fleet_stirred.wait()
            self._fleet_stirred.clear()
            self.publisher.fleet_changed()
            await self.intake.fleet_changed()

    async def _drop_silent(self) -> None:
        while True:
            began = time.monotonic()
            await asyncio.sleep(_SILENCE_TICK_S)
            away_s = time.monotonic() - began - _SILENCE_TICK_S
            if away_s > _SILENCE_TICK_S:  # this process stood still: what others said meanwhile is unread
                self.fleet.stood_still(away_s)
            for name in self.fleet.expire(now=time.monotonic()):
                log.warning("generator %s is silent for %.0f s and leaves", name, self.config.weights.silence_s)


def _lease_socket(config: LeaseConfig, measures: Measures) -> RouterSocket:
    return RouterSocket.bind(
        config.address,
        keys=ServerKeys.read(secret_key_file=config.secret_key_file, authorized_keys=config.authorized_keys),
        insecure=config.insecure,
        on_garbage=lambda _, error: measures.refused(error.reason),
    )


def _journal(config: LearnerConfig, stack: AsyncExitStack) -> RunLog:
    if not config.checkpoint.journal:
        log.warning("checkpoint.journal is false: nothing of this run can be resumed")
        return NoJournal()
    return stack.enter_context(Journal.open(config.run.folder / FOLDER))


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
        pull_timeout_s=weights.pull_timeout_s,
        probe_tolerance=weights.probe_tolerance or _PROBE_TOLERANCES[config.training.publish_dtype],
    )


def _evaluator(config: LearnerConfig, incarnation: int) -> Evaluator:
    return Evaluator(
        config=config.evaluation,
        max_tokens=config.rollouts.max_tokens,
        timeout_s=config.leases.timeout_s,
        incarnation=incarnation,
    )


def _intake_options(config: LearnerConfig, incarnation: int, fleet: Fleet) -> IntakeOptions:
    rollouts = config.rollouts
    return IntakeOptions(
        run=run_name(config.run.folder),
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
