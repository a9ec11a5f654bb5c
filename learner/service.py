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
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial

from learner.config import LearnerConfig, LeaseConfig
from learner.event_loop import Parts
from learner.guard import Guard
from learner.history.checkpoints import Checkpoints
from learner.history.journal import FOLDER, Journal, NoJournal, RunLog
from learner.history.run_folder import open_run_folder
from learner.online import OnlineTraining
from learner.recovery import recover
from learner.reports.curves import draw_curves
from learner.reports.measures import Measures
from learner.reports.records import Records
from learner.reports.summary import summarize, table, write_summary
from learner.terms import ledger_config
from learner.trainer_thread import TrainerThread
from learner.training_setup import OpenTrainer, first_probe, open_trainer
from services.http_client import HttpClient
from services.http_server import Listener
from services.keys import ServerKeys
from services.metrics import Metrics
from services.process import Stop
from services.sockets import RouterSocket
from services.status import recent_failures

log = logging.getLogger(__name__)


async def train_online(config: LearnerConfig, stop: Stop) -> None:
    """Runs the learner until its last step. A stop cancels it; its files are whole at any moment."""
    incarnation = open_run_folder(config.run.folder, resume=config.resume)
    async with AsyncExitStack() as stack:
        links = await open_links(config, stack)
        measures = links.measures
        records = stack.enter_context(
            Records(folder=config.run.folder, total_steps=config.steps, failed_write=measures.failed_write)
        )
        recovered = recover(
            config.run.folder, config=ledger_config(config), resume=config.resume, incarnation=incarnation
        )
        if config.resume:
            records.take_up(version=recovered.replayed_version, incarnation=incarnation)
        journal = _journal(config, stack)
        parts = Parts(
            config=config, metrics=links.metrics, measures=measures, incarnation=incarnation, socket=links.socket,
            client=links.client,
            records=records, recovered=recovered, journal=journal, failures=stack.enter_context(recent_failures()),
        )  # fmt: skip
        stack.callback(parts.dead_letters.close)
        await stack.enter_async_context(parts.teachers)
        await beside_loops(parts, links, stack, stop, work=lambda opened: _train(parts, opened, links.thread))
    sys.stdout.write(parts.closing_words)


@dataclass(frozen=True)
class Links:
    """What a learner has open towards generators and env_services, its trainer's thread, and its measures."""

    listener: Listener
    metrics: Metrics
    measures: Measures
    socket: RouterSocket
    thread: TrainerThread
    client: HttpClient


async def open_links(config: LearnerConfig, stack: AsyncExitStack) -> Links:
    """Opens them; `stack` closes them, in the opposite order."""
    listener = stack.enter_context(Listener(host=config.http.host, port=config.http.port))
    metrics = Metrics("learner")
    measures = Measures(metrics)
    return Links(
        listener=listener,
        metrics=metrics,
        measures=measures,
        socket=await stack.enter_async_context(_lease_socket(config.leases, measures)),
        thread=await stack.enter_async_context(TrainerThread()),
        client=await stack.enter_async_context(HttpClient(token=config.weights.generator_token)),
    )


async def beside_loops(
    parts: Parts,
    links: Links,
    stack: AsyncExitStack,
    stop: Stop,
    *,
    work: Callable[[OpenTrainer], Awaitable[None]],
) -> None:
    """Runs the loops of the event loop until the trainer is open and `work` with it is done."""
    async with asyncio.TaskGroup() as group:
        loops = [group.create_task(loop, name=name) for name, loop in parts.loops(links.listener, stop).items()]
        opening = partial(open_trainer, parts.config, argv=sys.argv, should_stop=links.thread.stopping)
        opened = await links.thread.run(opening)
        stack.callback(opened.close)
        await work(opened)
        for loop in loops:
            loop.cancel()


async def _train(parts: Parts, opened: OpenTrainer, thread: TrainerThread) -> None:
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
        teachers=parts.teachers,
        checkpoints=Checkpoints(
            config.run.folder,
            keep=config.checkpoint.keep,
            keep_best=config.checkpoint.keep_best,
            best_by=config.checkpoint.best_by,
            journal=parts.journal,
        ),
        guard=Guard(config.guard, max_lag=config.max_lag, state=recovered.guard),
        first_probe=first_probe(config.model, count=config.weights.probe_tokens),
        first_version=recovered.version,
        replay=recovered.batches,
        loop=asyncio.get_running_loop(),
    )
    thread.on_stop(training.interrupt)
    parts.waits.started()
    await thread.run(training.run)
    _close(parts, train_wall_s=training.train_wall_s)


def _close(parts: Parts, *, train_wall_s: float) -> None:
    """Summary and curves of the whole run, over all starts of the learner."""
    config, records = parts.config, parts.records
    folder = config.run.folder
    if len(records.steps) == records.former_steps and (folder / "summary.json").exists():
        log.info("no step was left to train: the summary of the run's former start still holds")
        return
    summary = summarize(
        records,
        books=parts.intake.books(),
        max_lag=config.max_lag,
        train_wall_s=records.former_s + train_wall_s,
        generator_idle_share=parts.idle.share,
    )
    write_summary(summary, folder)
    title = f"{config.run.name}: {config.algo.type}, max_lag {config.max_lag}"
    draw_curves(records, title=title, path=folder / "curves.png")
    parts.closing_words = f"\n{table(summary, folder=folder)}\n"


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
