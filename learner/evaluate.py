"""An evaluation by itself (`headway eval`): a learner that publishes one model, evaluates it, and leaves.

    load ─▶ publish as version 0 of an incarnation of its own ─▶ evaluate ─▶ evaluation.json, a table

To generators and env_services it is a learner like any other, at the learner's addresses. It grants no training lease.
What a run keeps in its folder (journal, metrics, samples) it neither reads nor writes: its own such files are in a
temporary folder.
"""

import logging
import secrets
import sys
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from learner.config import LearnerConfig
from learner.evaluation.config import EvaluationConfig
from learner.evaluation.judging import Answers, check_judge, judged, opponents_of, read_against
from learner.evaluation.results import Evaluation, EvaluationReport, compare, table, write_report
from learner.event_loop import EventLoopParts, ledger_config
from learner.journal.checkpoints import Checkpoint, checkpoints_of
from learner.journal.journal import NoJournal
from learner.recovery import recover
from learner.reports.run_records import Records
from learner.run_ranks import LearnerRanks, first_probe
from learner.service import Links, beside_loops, open_links
from learner.training.trainer import Trainer
from learner.training.trainer_thread import TrainerThread
from learner.weights.probe import Prober
from learner.weights.published import Snapshot
from services.http.status import recent_failures
from services.http.tls import TlsContext, client_tls
from services.process import Stop
from services.standard_output import show

logger = logging.getLogger(__name__)

_VERSION = 0
"""Version of a learner that has trained nothing, also where the weights are a checkpoint's."""


class EvaluationFailed(RuntimeError):
    """There is nothing to report; the text says why and what helps."""


async def evaluate_alone(config: LearnerConfig, stop: Stop) -> None:
    """Evaluates the model, or a checkpoint, on `evaluation.final_tasks` held-out tasks; writes and prints the result.

    Raises EvaluationFailed, and NotComparable for an earlier evaluation that this one cannot be compared with.
    """
    settings, trust = config.evaluation, client_tls(config.http.tls)
    # What is wrong is told of before the work.
    opponent = None if settings.against is None else read_against(settings.against)
    if settings.judge.verifier is not None:
        await check_judge(settings.judge, tls=trust)
    checkpoint = None if settings.checkpoint is None else _checkpoint(settings.checkpoint)
    evaluation = await _evaluate(config, stop, checkpoint=checkpoint)
    report, path = _report(config, evaluation), settings.output or config.run.folder / "evaluation.json"
    write_report(report, path)  # what was found is kept, also if it cannot be compared
    if settings.against is not None and opponent is not None:
        report = await _compared(report, evaluation, opponent, settings=settings, against=settings.against, tls=trust)
        write_report(report, path)
    show(f"\n{table(report, path=path)}\n")


async def _compared(
    report: EvaluationReport,
    evaluation: Evaluation,
    opponent: Answers | EvaluationReport,
    *,
    settings: EvaluationConfig,
    against: Path,
    tls: TlsContext | None = None,
) -> EvaluationReport:
    """The report with what the tasks' verifier says of both, if the opponent has rewards, and what the judge says."""
    if isinstance(opponent, EvaluationReport):
        comparison = compare(evaluation, opponent, path=against)
        report = report.model_copy(update={"comparison": comparison})
    if settings.judge.verifier is None:
        return report
    opponents = opponents_of(evaluation.tasks, opponent)
    found = await judged(evaluation.tasks, opponents, config=settings.judge, against=against, tls=tls)
    return report.model_copy(update={"judged": found})


def _report(config: LearnerConfig, evaluation: Evaluation) -> EvaluationReport:
    return EvaluationReport(
        model=config.model,
        checkpoint=config.evaluation.checkpoint,
        environment=evaluation.environment,
        temperature=config.evaluation.temperature,
        success_reward=config.evaluation.success_reward,
        result=evaluation.result,
        comparison=None,
        tasks=evaluation.tasks,
    )


async def _evaluate(config: LearnerConfig, stop: Stop, *, checkpoint: Checkpoint | None) -> Evaluation:
    found: list[Evaluation] = []
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="headway-evaluation-")))
        links = await open_links(config, stack)
        parts = _parts(config, links, stack, folder=folder)
        ranks = stack.enter_context(LearnerRanks(config, argv=sys.argv, stop=stop))
        thread = await stack.enter_async_context(TrainerThread())

        async def work(trainer: Trainer) -> None:
            found.append(await _evaluation(parts, thread, trainer, checkpoint=checkpoint))

        await beside_loops(parts.loops(links.listener, stop), thread, ranks, work=work)
    (evaluation,) = found
    return evaluation


def _parts(config: LearnerConfig, links: Links, stack: AsyncExitStack, *, folder: Path) -> EventLoopParts:
    """The learner's event loop, with its files in `folder`."""
    run = config.run.model_copy(update={"directory": folder})
    run.folder.mkdir()
    # Drawn, since no run may have the same: generators and env_services tell the work of two learners apart by it.
    incarnation = 10**8 + secrets.randbelow(9 * 10**8)
    parts = EventLoopParts(
        config=config.model_copy(update={"run": run}),
        registry=links.registry,
        metrics=links.metrics,
        incarnation=incarnation,
        socket=links.socket,
        client=links.client,
        records=stack.enter_context(Records(folder=run.folder, total_steps=1)),
        recovered=recover(run.folder, config=ledger_config(config), resume=False, incarnation=incarnation),
        journal=NoJournal(),
        failures=stack.enter_context(recent_failures()),
    )
    stack.callback(parts.dead_letters.close)
    return parts


async def _evaluation(
    parts: EventLoopParts, thread: TrainerThread, trainer: Trainer, *, checkpoint: Checkpoint | None
) -> Evaluation:
    config = parts.config
    if checkpoint is not None:
        await thread.run(partial(trainer.load, checkpoint.trainer))
    probe = first_probe(config.model, count=config.weights.probe_tokens)
    bucket_bytes = config.weights.bucket_mb << 20
    parts.publisher.offer(await thread.run(partial(_snapshot, trainer, probe=probe, bucket_bytes=bucket_bytes)))
    parts.waits.started()
    await parts.publisher.wait_until_served(_VERSION)
    evaluation = await parts.intake.evaluated(tasks=config.evaluation.final_tasks, version=_VERSION)
    await parts.intake.leave("its evaluation has ended")
    return _checked(evaluation, config.evaluation)


def _snapshot(trainer: Trainer, *, probe: tuple[int, ...], bucket_bytes: int) -> Snapshot:
    copy = trainer.host_copy(bucket_bytes=bucket_bytes)
    prober = Prober(first=probe, tokens=len(probe), logprobs=trainer.probe_logprobs)
    return Snapshot(version=_VERSION, buckets=copy.buckets, probe=prober.probe())


def _checked(evaluation: Evaluation | None, settings: EvaluationConfig) -> Evaluation:
    if evaluation is None:
        raise EvaluationFailed(
            "the environment has no held-out tasks: give it some (evaluation_file of jsonl, evaluation_tasks of "
            "reasoning_gym), or name another one in rollouts.environment"
        )
    if not evaluation.tasks:
        raise EvaluationFailed(
            f"none of {evaluation.result.failed} held-out tasks could be evaluated; the reasons are in the log above"
        )
    if evaluation.result.tasks < settings.final_tasks:
        logger.info("%d tasks were evaluated, %d were asked for", evaluation.result.tasks, settings.final_tasks)
    return evaluation


def _checkpoint(path: Path) -> Checkpoint:
    found = next((each for each in checkpoints_of(path.parent) if each.path == path), None)
    if found is None:
        raise EvaluationFailed(
            f"evaluation.checkpoint: {path} is no checkpoint; expected a folder checkpoint-<version> of a run"
        )
    if fault := found.fault():
        raise EvaluationFailed(f"evaluation.checkpoint: {path} cannot be used: {fault}; name another checkpoint")
    return found
