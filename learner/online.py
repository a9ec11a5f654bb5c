"""Training on what generators sample: the loop of the trainer's thread.

    take batch → advantages → train_step → host copy → offer to the publisher → records
      │ waits for the intake: enough groups, none too old        │ never waits: at most one publish is in flight
      └ a coroutine of the event loop, called from this thread   └ the next step trains meanwhile

The event loop of the process owns intake, fleet and publisher; this thread owns the trainer.
"""

import asyncio
import logging
import time
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from typing import TypeVar, cast

from learner.config import LearnerConfig
from learner.evaluation.results import Evaluation, EvaluationResult
from learner.guard import Guard
from learner.history.checkpoints import Checkpoints, Evaluated
from learner.intake.intake import Intake, TakenBatch
from learner.reports.measures import Measures
from learner.reports.records import Records
from learner.reports.step_record import StepRecord, Timing, step_record
from learner.sequences import Teaching, sequences_of
from learner.teachers.config import index_of
from learner.teachers.teachers import Teachers
from learner.training.batch import TrainSequence
from learner.training.metrics import StepMetrics
from learner.training.trainer import Trainer
from learner.weights.generator_watch import IdleWatch
from learner.weights.publisher import Publisher
from learner.weights.reports import Snapshot

log = logging.getLogger(__name__)
T = TypeVar("T")

_LAST_PUBLISH_S = 30.0


class OnlineTraining:
    """The steps of one run, from `first_version` on. `run` is called in a thread of its own.

    `first_probe` are the tokens whose logprobs prove the first publish; later ones use a text of the policy's own.
    `replay` are the batches of the log that are newer than the checkpoint: trained again, in order, without generators.
    They were taken under the bound of their time, so the guard follows them, and its bound holds from there on.
    """

    def __init__(
        self,
        *,
        config: LearnerConfig,
        trainer: Trainer,
        intake: Intake,
        publisher: Publisher,
        records: Records,
        measures: Measures,
        idle: IdleWatch,
        teachers: Teachers,
        checkpoints: Checkpoints,
        guard: Guard,
        first_probe: tuple[int, ...],
        first_version: int,
        replay: Sequence[TakenBatch],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._config = config
        self._trainer = trainer
        self._intake = intake
        self._publisher = publisher
        self._records = records
        self._measures = measures
        self._idle = idle
        self._teachers = teachers
        self._checkpoints = checkpoints
        self._guard = guard
        self._version = first_version
        self._replay = replay
        self._loop = loop
        self._probe = first_probe
        self._probe_is_text = False
        self._began: float | None = None
        self._underway: list[Future[None]] = []
        self._awaited: Future[object] | None = None
        self._interrupted = False
        self.train_wall_s = 0.0

    def run(self) -> None:
        """Replays, publishes, evaluates, trains until `steps`, evaluates again, exports."""
        config = self._config
        for batch in self._replay:
            log.info("replaying the batch of step %d from the log", batch.version + 1)
            start = time.monotonic()
            metrics = self._train(batch)
            timing = Timing(time_s=0.0, wait_s=0.0, train_s=time.monotonic() - start, copy_s=0.0)
            self._records.replay(self._record(batch, timing), metrics, lag_bound=self._guard.max_lag)
            self._guard.observe(metrics, lag=max(batch.lags))
            self._call(self._intake.trained(self._version))
        self._take_up_bound()
        self._publish()
        if len(self._replay) >= config.checkpoint.every_steps:
            self._checkpoint()  # or each further death would replay it all again
        if self._version == 0:
            self._evaluate_and_wait()
        self._call(self._idle.begin())
        self._began = time.monotonic()
        while self._version < config.steps:
            self._step()
        self.train_wall_s = time.monotonic() - self._began
        self._call(self._idle.end())
        for evaluation in self._underway:
            self._wait_for(evaluation)
        self._evaluate_and_wait()
        self._call(self._last_publish())
        self._trainer.export(config.exported_model)
        log.info("the trained model is in %s", config.exported_model)

    def _step(self) -> None:
        start = time.monotonic()
        batch = self._call(self._intake.take())
        taken = time.monotonic()
        metrics = self._train(batch)
        lag_bound = self._guard.max_lag
        change = self._guard.observe(metrics, lag=max(batch.lags))
        self._call(self._intake.trained(self._version, max_lag=self._guard.max_lag))
        trained = time.monotonic()
        self._publish()
        copied = time.monotonic()
        assert self._began is not None
        timing = Timing(
            time_s=copied - self._began, wait_s=taken - start, train_s=trained - taken, copy_s=copied - trained
        )
        record = self._record(batch, timing)
        self._records.step(record, metrics, batch.groups, lag_bound=lag_bound)
        self._measures.step(record, metrics)
        if change is not None:
            self._records.guard(change, step=record.step)
            self._measures.guard(change)
        self._after_step()

    def _take_up_bound(self) -> None:
        bound = self._guard.max_lag
        if bound < self._config.max_lag:
            log.warning(
                "the guard goes on with a lag bound of %d, the configured one is %d", bound, self._config.max_lag
            )
        self._call(self._intake.bound_lag(bound))

    def _record(self, batch: TakenBatch, timing: Timing) -> StepRecord:
        success = self._config.evaluation.success_reward
        return step_record(batch.groups, version=batch.version, timing=timing, success_reward=success)

    def _train(self, batch: TakenBatch) -> StepMetrics:
        metrics = self._trainer.train_step(self._sequences(batch), version=batch.version)
        self._version = batch.version + 1
        if not self._probe_is_text:
            self._probe, self._probe_is_text = _best_text(batch, count=self._config.weights.probe_tokens), True
        return metrics

    def _sequences(self, batch: TakenBatch) -> list[TrainSequence]:
        assert batch.version == self._version, f"a batch of version {batch.version} at version {self._version}"
        return sequences_of(
            batch.groups,
            version=batch.version,
            max_lag=self._config.max_lag,
            preset=self._trainer.preset,
            teaching=self._teaching(batch) if self._config.teachers else None,
        )

    def _teaching(self, batch: TakenBatch) -> list[Teaching]:
        """Who teaches each group: what a teacher behind a URL said of it, or which model of the ranks is asked."""
        told = self._call(self._teachers.of_batch(batch.groups))
        return [
            Teaching(index=index_of(self._config.teachers, group.environment), logprobs=logprobs)
            for group, logprobs in zip(batch.groups, told, strict=True)
        ]

    def _publish(self) -> None:
        copy = self._trainer.host_copy()
        probe = self._trainer.probe_logprobs(self._probe)
        self._publisher.offer(
            Snapshot(
                version=self._version,
                tensors=[(tensor.name, tensor.value) for tensor in copy.tensors],
                probe_token_ids=self._probe,
                probe_logprobs=tuple(float(logprob) for logprob in probe),
            )
        )

    async def _last_publish(self) -> None:
        """Generators outlive the learner: they are left with its last version, if they take it in time."""
        try:
            async with asyncio.timeout(_LAST_PUBLISH_S):
                await self._publisher.wait_until_served(self._version)
        except TimeoutError:
            log.warning("not all generators took the last version %d within %g s", self._version, _LAST_PUBLISH_S)

    def _after_step(self) -> None:
        config = self._config
        if self._version % config.checkpoint.every_steps == 0:
            self._checkpoint()
        evaluation = config.evaluation
        if evaluation.tasks and self._version % evaluation.every_steps == 0 and self._version < config.steps:
            work = self._evaluate_beside(evaluation.tasks, self._version)
            self._underway.append(asyncio.run_coroutine_threadsafe(work, self._loop))

    def _checkpoint(self) -> None:
        start = time.monotonic()
        try:
            ledger = self._call(self._intake.checkpoint())
            path = self._checkpoints.write(
                version=self._version, ledger=ledger, guard=self._guard.state, save_trainer=self._trainer.save
            )
        except OSError as error:
            self._measures.failed_write("checkpoint")
            log.warning(
                "no checkpoint of version %d could be written: %s. The run goes on; the next is due in %d steps",
                self._version,
                error,
                self._config.checkpoint.every_steps,
            )
        else:
            log.info("checkpoint %s, %.1f s", path, time.monotonic() - start)

    def _evaluate_and_wait(self) -> None:
        if self._config.evaluation.final_tasks:
            evaluation = self._call(self._evaluate(self._config.evaluation.final_tasks, self._version))
            if evaluation is not None:
                self._evaluated(evaluation.result)

    async def _evaluate(self, tasks: int, version: int) -> Evaluation | None:
        await self._publisher.wait_until_served(version)
        return await self._intake.evaluated(tasks=tasks, version=version)

    async def _evaluate_beside(self, tasks: int, version: int) -> None:
        evaluation = await self._intake.evaluated(tasks=tasks, version=version)
        if evaluation is not None:
            self._evaluated(evaluation.result)

    def _evaluated(self, result: EvaluationResult) -> None:
        self._records.evaluation(result)
        try:
            self._checkpoints.evaluated(
                Evaluated(version=result.version, accuracy=result.accuracy, reward=result.reward)
            )
        except OSError as error:
            self._measures.failed_write("evaluation")
            log.warning("the evaluation of version %d could not be noted: %s", result.version, error)

    def interrupt(self) -> None:
        """From the event loop: makes `run` raise CancelledError if it waits for the loop, or as soon as it would."""
        self._interrupted = True
        if self._awaited is not None:
            self._awaited.cancel()

    def _call(self, work: Coroutine[None, None, T]) -> T:
        """Runs a coroutine in the event loop and waits for it."""
        return self._wait_for(asyncio.run_coroutine_threadsafe(work, self._loop))

    def _wait_for(self, future: Future[T]) -> T:
        self._awaited = cast("Future[object]", future)
        if self._interrupted:  # looked at after the line above, so that an interrupt falls on one side or the other
            future.cancel()
        return future.result()


def _best_text(batch: TakenBatch, *, count: int) -> tuple[int, ...]:
    """The probe from the first batch on: the beginning of its best trajectory.

    Text that the policy was made for. On other tokens a trained policy's logits grow so large that the type alone makes
    large gaps: 1e-3 nats in float32, over 1 in bfloat16 were seen on random tokens.
    """
    trajectories = (trajectory for group in batch.groups for trajectory in group.trajectories)
    best = max(trajectories, key=lambda trajectory: trajectory.reward.reward or 0.0)
    return tuple(int(token) for token in best.token_ids[:count])
