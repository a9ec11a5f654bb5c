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
import contextlib
import logging
import sys
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial

from learner.config import LearnerConfig, LeaseConfig
from learner.data.demonstrations import Demonstrations
from learner.event_loop import EventLoopParts, ledger_config
from learner.journal.checkpoints import Checkpoints
from learner.journal.journal import FOLDER, Journal, NoJournal, RunLog
from learner.journal.manifest import Signer
from learner.journal.run_folder import hold_run_folder, keep_template, open_run_folder
from learner.lag_measurements import MeasurementPlan
from learner.online import OnlineTraining
from learner.page.store import keep_tokenizer
from learner.recovery import changes_of_this_start, expected_signer, recover
from learner.reports.run_records import Records
from learner.reports.stalled_training import Doubts
from learner.reports.status import LearnerMetrics
from learner.reports.summary import draw_curves, still_holds, summarize, table, write_summary
from learner.reports.trackers import TrackedRun, Trackers, trackers_of
from learner.run_demonstrations import demonstrations_of
from learner.run_ranks import LearnerRanks, first_probe
from learner.training.guard import Guard
from learner.training.lag_rule import GradientRule
from learner.training.trainer import Trainer
from learner.training.trainer_thread import TrainerThread
from services.config import made_with
from services.http.client import HttpClient
from services.http.metrics import Metrics
from services.http.server import Listener
from services.http.status import recent_failures
from services.http.tls import client_tls
from services.http.waiting import QUIET_S, Waiting
from services.process import FINISH_S, Stop
from services.run_lock import RunLock
from services.standard_output import show
from services.tracing import exporting_traces
from services.zmq.keys import ServerKeys
from services.zmq.sockets import RouterSocket

logger = logging.getLogger(__name__)

_ENDING = "then come model, summary and curves; a second Ctrl-C ends at once, and the run can go on after that, too"


async def train_online(config: LearnerConfig, stop: Stop) -> None:
    """Runs the learner until its last step. A stop cancels it; its files are whole at any moment.

    First the algorithm is looked at and demonstrations are read, then the folder taken, then the ports are bound; only
    then is anything in the folder touched.
    """
    folder = config.run.folder
    _look_at_algorithm(config)
    demonstrations = demonstrations_of(config)
    async with AsyncExitStack() as stack:
        stack.enter_context(exporting_traces("learner", **config.run.traces))
        lock = stack.enter_context(await hold_run_folder(folder, resume=config.resume is True))
        settings = config.made_with()
        changes = changes_of_this_start(config, settings)
        links = await open_links(config, stack)
        incarnation = open_run_folder(lock, folder, resume=config.resume is True, journal=config.checkpoint.journal)
        made_with.write(folder, settings, changes=changes, differs=made_with.differing(config))
        keep_template(folder, config.run.template_text)
        metrics = links.metrics
        trackers = Trackers(trackers_of(**dict(config.trackers)), TrackedRun(config.run.name, folder, settings))
        metrics.trackers(stack.enter_context(trackers).dropped)
        records = stack.enter_context(
            Records(
                folder=folder,
                total_steps=config.steps,
                failed_write=metrics.failed_write,
                told=trackers.take,
                may_write=lock.check,
                doubts=Doubts(
                    compares_in_group=config.algo.compares_in_group,
                    learns_from_rewards=config.algo.learns_from_rewards,
                ),
            )
        )
        recovered = recover(
            folder, config=ledger_config(config), resume=config.resume is True, incarnation=incarnation,
            signer=expected_signer(config),
        )  # fmt: skip
        if config.resume is True:
            progress = {} if recovered.checkpoint is None else recovered.checkpoint.progress()
            records.resume(version=recovered.replayed_version, incarnation=incarnation, progress=progress)
        parts = EventLoopParts(
            config=config, registry=links.registry, metrics=metrics, incarnation=incarnation, socket=links.socket,
            client=links.client, records=records, recovered=recovered, journal=_journal(config, stack, lock, metrics),
            failures=stack.enter_context(recent_failures()),
        )  # fmt: skip
        stack.callback(parts.dead_letters.close)
        if parts.samples is not None:
            parts.samples.take_up(version=recovered.version)
            keep_tokenizer(config.model, folder)
            stack.enter_context(parts.samples)
        ranks = stack.enter_context(LearnerRanks(config, argv=sys.argv, stop=stop))
        # What the thread writes to is closed after it has ended.
        thread = await stack.enter_async_context(TrainerThread())
        await stack.enter_async_context(parts.teachers)
        loops = {**parts.loops(links.listener, stop), "run_lock": lock.watch()}
        await beside_loops(
            loops, thread, ranks, work=lambda trainer: _train(parts, trainer, thread, stop, demonstrations)
        )
    show(parts.closing_words)


@dataclass(frozen=True)
class Links:
    """Open connections of a learner to generators and env_services, and its metrics."""

    listener: Listener
    registry: Metrics
    metrics: LearnerMetrics
    socket: RouterSocket
    client: HttpClient


async def open_links(config: LearnerConfig, stack: AsyncExitStack) -> Links:
    """Opens them; `stack` closes them, in the opposite order."""
    listener = stack.enter_context(Listener(host=config.http.host, port=config.http.port, tls=config.http.tls))
    registry = Metrics("learner", run=config.run.name)
    metrics = LearnerMetrics(registry)
    return Links(
        listener=listener,
        registry=registry,
        metrics=metrics,
        socket=await stack.enter_async_context(_lease_socket(config.leases, metrics)),
        client=await stack.enter_async_context(
            HttpClient(token=config.weights.generator_token, tls=client_tls(config.http.tls))
        ),
    )


async def beside_loops(
    loops: Mapping[str, Coroutine[object, object, None]],
    thread: TrainerThread,
    ranks: LearnerRanks,
    *,
    work: Callable[[Trainer], Awaitable[None]],
) -> None:
    """Runs the loops of the event loop until the trainer is open and `work` with it is done. Raises RankLost."""

    async def with_trainer() -> None:
        await work(await thread.run(partial(ranks.open_trainer, should_stop=thread.stopping)))

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(loop, name=name) for name, loop in loops.items()]
        await ranks.watch.during(with_trainer())
        for task in tasks:
            task.cancel()


async def _train(
    parts: EventLoopParts, trainer: Trainer, thread: TrainerThread, stop: Stop, demonstrations: Demonstrations | None
) -> None:
    """The trainer's thread from its first publish to the exported model, then the summary; so too after a stop."""
    config, recovered = parts.config, parts.recovered
    if recovered.trainer_folder is not None:
        await thread.run(partial(trainer.load, recovered.trainer_folder))
    if trainer.replays_routers:
        parts.intake.ask_for_routed_experts()
    training = OnlineTraining(
        config=config,
        trainer=trainer,
        intake=parts.intake,
        publisher=parts.publisher,
        records=parts.records,
        metrics=parts.metrics,
        idle=parts.idle,
        teachers=parts.teachers,
        checkpoints=Checkpoints(
            config.run.folder,
            keep=config.checkpoint.keep,
            keep_best=config.checkpoint.keep_best,
            best_by=config.checkpoint.best_by,
            journal=parts.journal,
            whole_journal=config.checkpoint.whole_journal,
            signer=Signer.read(config.leases.secret_key_file),
            may_write=parts.records.may_write,
        ),
        samples=parts.samples,
        trust=parts.trust,
        releases=parts.releases,
        guard=Guard(
            config.guard,
            max_lag=config.max_lag,
            state=recovered.guard,
            rule=GradientRule(adapts=config.lag.adapt == "gradient", min_cosine=config.lag.min_cosine),
            reused_lag=config.reuse.max_lag or 0,
        ),
        measurements=MeasurementPlan(
            every=config.lag.measure_every,
            groups=min(config.lag.measure_groups, config.fresh_per_step),
            timeout_s=config.lag.straggler_timeout_s,
        ),
        first_probe=first_probe(config.model, count=config.weights.probe_tokens),
        first_version=recovered.version,
        replay=recovered.batches,
        loop=asyncio.get_running_loop(),
        sent_alone=config.sent_alone,
        demonstrations=demonstrations,
    )
    thread.on_stop(training.interrupt)
    parts.waits.started()
    await _ended_early_on(stop, training, thread, parts.waits)
    _close(parts, train_wall_s=training.train_wall_s)


async def _ended_early_on(stop: Stop, training: OnlineTraining, thread: TrainerThread, waits: Waiting) -> None:
    async def end() -> None:
        await stop.wait()
        training.end_early()
        with (
            waits.wait("the end of the present step", quiet_s=QUIET_S, remedy=_ENDING, blocks_readiness=False),
            contextlib.suppress(asyncio.CancelledError),
        ):
            await asyncio.Event().wait()  # the step is at its end when this is cancelled

    stop.finish_s = FINISH_S
    ending = asyncio.create_task(end(), name="ending")  # in no group: what the thread raises is told by its type
    try:
        await thread.run(training.run, kept="its batch")
    finally:
        ending.cancel()


def _close(parts: EventLoopParts, *, train_wall_s: float) -> None:
    """Summary and curves of the whole run, over all starts of the learner."""
    config, records = parts.config, parts.records
    folder = config.run.folder
    if records.tally.steps == 0:  # ended before the first one
        return
    if records.tally.steps == records.former_steps and still_holds(folder, records.tally):
        logger.info("no step was left to train: the summary of the run's former start still holds")
        return
    summary = summarize(
        records,
        books=parts.intake.books(),
        max_lag=config.max_lag,
        train_wall_s=records.former_s + train_wall_s,
        generator_idle_share=parts.idle.share,
        success_reward=config.evaluation.success_reward,
        max_lag_of_reused=config.reuse.max_lag,
    )
    records.may_write()
    write_summary(summary, folder)
    title = f"{config.run.name}: {config.algo.type}, max_lag {config.max_lag}"
    draw_curves(folder, title=title)
    parts.closing_words = f"\n{table(summary, folder=folder)}\n"


def _look_at_algorithm(config: LearnerConfig) -> None:
    """Raises ConfigError for a loss of the user's own that cannot be had; warns of tokens too old for the algorithm."""
    config.preset()
    if config.doubt_of_age:
        logger.warning("%s", config.doubt_of_age)


def _lease_socket(config: LeaseConfig, metrics: LearnerMetrics) -> RouterSocket:
    return RouterSocket.bind(
        config.address,
        keys=ServerKeys.read(secret_key_file=config.secret_key_file, authorized_keys=config.authorized_keys),
        insecure=config.insecure,
        on_garbage=lambda _, error: metrics.refused(error.reason),
    )


def _journal(config: LearnerConfig, stack: AsyncExitStack, lock: RunLock, metrics: LearnerMetrics) -> RunLog:
    if not config.checkpoint.journal:
        logger.warning("checkpoint.journal is false: nothing of this run can be resumed")
        return NoJournal()
    return stack.enter_context(Journal.open(config.run.folder / FOLDER, may_write=lock.check, synced=metrics.synced))
