"""Training on what generators sample: the loop of the trainer's thread.

    take batch → advantages → train_step → host copy → offer to the publisher → records
      │ waits for the intake: enough groups, none too old        │ never waits: at most one publish is in flight
      │ a coroutine of the event loop, called from this thread   └ the next step trains meanwhile
      └ with training.partial_batches: begin_step, with the groups that are there already

The event loop of the process owns intake, fleet and publisher; this thread owns the trainer.
"""

import asyncio
import logging
import math
import statistics
import time
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from functools import partial
from itertools import takewhile
from typing import TypeVar, cast

from learner.algorithms.old_tokens import LEFT_OUT_OF_OLD
from learner.algorithms.preset import Preset
from learner.checkpoint_writer import CheckpointWriter
from learner.config import LearnerConfig
from learner.data.demonstrations import Demonstrations
from learner.evaluation.results import Evaluation
from learner.journal.checkpoints import Checkpoints, VersionScore
from learner.journal.journal import LoggedTeaching
from learner.lag_measurements import ComparedGroups, MeasurementPlan
from learner.leases.intake import BegunBatch, EndedEarly, Intake, NewestGroups, TakenBatch
from learner.page.store import TrajectoryStore
from learner.page.taken import SequencePlace, TakenStep
from learner.recovery import LoggedStep
from learner.releases.releases import Releases
from learner.reports.run_records import Records
from learner.reports.status import LearnerMetrics
from learner.reports.tally import LagBounds, StepRecord, Timing, step_record
from learner.snapshots import snapshots_of
from learner.taught_batches import TaughtBatch, is_taught_by_policy, taught, teaching_of
from learner.teachers.teachers import GroupScores, TeacherFailed, Teachers, TextRefused, Told
from learner.training.batch import GroupsAgain, GroupsBefore, TrainSequence, sequences_of
from learner.training.config import LoraConfig
from learner.training.guard import Guard, GuardChange
from learner.training.lag_gradients import LagReading, Moments, moments_of
from learner.training.step import StepMetrics
from learner.training.trainer import NotFinite, Trainer, stop_after_skips
from learner.trust.watch import TrustWatch
from learner.weights.fleet import IdleWatch
from learner.weights.probe import Prober
from learner.weights.published import PackedWeights
from learner.weights.publisher import Publisher
from protocol.trajectories import TrajectoryGroup
from services.config import made_with
from services.tracing import lease_ended, lease_trace

logger = logging.getLogger(__name__)
T = TypeVar("T")

_MAX_UNTAUGHT_STEPS = 3
_LAST_PUBLISH_S = 30.0
_CANDIDATE_S = 60.0
"""Longest time until a candidate is served, beyond that of a download and a commit: training waits for it meanwhile."""


class OnlineTraining:
    """The steps of one run, from `first_version` on. `run` is called in a thread of its own.

    `first_probe` is the text whose logprobs prove the first publish; later ones use texts of the policy's own.
    `replay` are the batches of the log that are newer than the checkpoint: trained again, in order, without generators.
    They were taken under the bound of their time, so the guard follows them, and its bound holds from there on.
    `sent_alone` are the adapters, if generators are sent nothing else. `trust` tests generators by what is trained.
    `measurements` are those of gradients by lag. `releases` judge candidates by their evaluation. `demonstrations` are
    trained beside the samples.
    """

    def __init__(
        self,
        *,
        config: LearnerConfig,
        trainer: Trainer,
        intake: Intake,
        publisher: Publisher,
        records: Records,
        metrics: LearnerMetrics,
        idle: IdleWatch,
        teachers: Teachers,
        checkpoints: Checkpoints,
        guard: Guard,
        samples: TrajectoryStore | None,
        first_probe: tuple[int, ...],
        first_version: int,
        replay: Sequence[LoggedStep],
        loop: asyncio.AbstractEventLoop,
        sent_alone: LoraConfig | None = None,
        trust: TrustWatch | None = None,
        measurements: MeasurementPlan | None = None,
        releases: Releases | None = None,
        demonstrations: Demonstrations | None = None,
    ) -> None:
        self._config = config
        self._trainer = trainer
        self._intake = intake
        self._publisher = publisher
        self._records = records
        self._metrics = metrics
        self._idle = idle
        self._teachers = teachers
        self._untaught_steps = 0
        self._checkpoints = checkpoints
        self._credits = Credits(checkpoints, wanted=config.checkpoint.keep_best > 0)
        beside = config.checkpoint.beside_training
        self._writer = CheckpointWriter(
            checkpoints, trainer, beside_training=beside, written=self._kept, failed=self._no_checkpoint
        )
        self._guard = guard
        self._samples, self._trust = samples, trust
        self._measurements, self._releases = measurements, releases
        self._demonstrations = demonstrations
        self._version = self._kept_version = first_version
        self._replay = replay
        self._loop = loop
        self._prober = Prober(
            first=first_probe, tokens=config.weights.probe_tokens, logprobs=self._trainer.probe_logprobs
        )
        self._snapshots = snapshots_of(trainer, config.weights, lora=sent_alone)
        self._began: float | None = None
        self._before_s = 0.0
        self._underway: list[Future[None]] = []
        self._awaited: Future[object] | None = None
        self._may_end = self._interrupted = self._ending = False
        self.train_wall_s = 0.0
        self._computed_s = 0.0
        self._ahead = StepSequences(version=first_version, max_lag=config.max_lag, preset=trainer.preset)

    def run(self) -> None:
        """Replays, publishes, evaluates, trains until `steps`, evaluates again, exports.

        What ends early has a model and a summary, too, but for one without a single step.
        """
        try:
            self._run()
        except EndedEarly:
            logger.info("ended before the first step: there is no model to write")
        except NotFinite:
            self._writer.settle(wait=True)  # it is what one goes on from
            raise

    def _run(self) -> None:
        config = self._config
        self._replay_logged()
        self._take_up_bound()
        self._publish()
        if len(self._replay) >= config.checkpoint.every_steps:
            self._checkpoint()  # or each further death would replay it all again
        if self._version == 0:
            self._evaluate_and_wait()  # what is ended early here has trained nothing
        self._call(self._idle.begin())
        self._before_s, self._began = self._records.begin_steps(), time.monotonic()
        self._computed_s = time.thread_time()
        self._train_until_the_end()
        self.train_wall_s = time.monotonic() - self._began
        self._keep_early_end()
        self._call(self._idle.end())
        if self._version == 0:
            raise EndedEarly
        with suppress(EndedEarly):
            for evaluation in self._underway:
                self._wait_for(evaluation, may_end=True)
            self._evaluate_and_wait()
            self._call(self._last_publish(), may_end=True)
        if self._ending:
            how = "" if made_with.is_handed_over() else f"; to go on: {made_with.to_go_on()}"
            logger.info(
                "stopping early after step %d of %d; saving the model as at a normal end%s",
                self._version,
                config.steps,
                how,
            )
        self._records.may_write()
        self._trainer.export(config.exported_model)
        logger.info("the trained model is in %s", config.exported_model)
        self._writer.settle(wait=True)  # the process ends next, and would cut off what is being written beside

    def _replay_logged(self) -> None:
        """Trains the logged steps again. What a policy that teaches has not said of them yet it says with the weights
        that they begin with.
        """
        config = self._config
        of_policy = any(teacher.policy and teacher.is_remote for teacher in config.teachers)
        if of_policy and not all(logged.is_taught for logged in self._replay):
            self._publish()  # without weights no generator would serve, and all of this would wait for one
        for logged in self._replay:
            logger.info("replaying the batch of step %d from the log", logged.version + 1)
            batch = logged.read()
            start = time.monotonic()
            as_taught = self._taught(batch, noted=logged.told())
            batch, sequences = as_taught.batch, self._sequences(as_taught, logged=True)
            step_metrics = as_taught.noted_in(self._train(batch, sequences))
            self._keep(batch, sequences)
            train_s = time.monotonic() - start
            timing = Timing(time_s=self._records.passed_s(), wait_s=0.0, train_s=train_s, copy_s=0.0)
            record = self._record(batch, timing, lag_bound=self._guard.max_lag)
            self._records.replay(record, step_metrics, lag_bound=self._guard.max_lag)
            self._metrics.replayed(self._version)
            self._guard.observe(step_metrics, lag=max(batch.lags))
            self._call(self._intake.trained(self._version))

    def _train_until_the_end(self) -> None:
        """Until the last step, a stop, or the end of the time, which also ends a wait for groups."""
        config = self._config
        if config.time_limit_s is not None:
            self._loop.call_soon_threadsafe(self._loop.call_later, config.time_limit_s, self._intake.end)
        with suppress(EndedEarly):
            while self._version < config.steps and not self._out_of_time():
                self._step()
        if self._version < config.steps and not self._ending:
            how = made_with.to_go_on()
            logger.info("training ends after time_limit_s, %g s; to go on: %s", config.time_limit_s, how)

    def _keep_early_end(self) -> None:
        """A run that ends before its last step is gone on with from there, and need not train anything once more."""
        self._writer.settle(wait=True)
        if self._kept_version < self._version < self._config.steps:
            self._checkpoint()

    def _out_of_time(self) -> bool:
        limit_s = self._config.time_limit_s
        return self._began is not None and limit_s is not None and time.monotonic() - self._began >= limit_s

    def _step(self) -> None:
        start = time.monotonic()
        measures = self._measures()
        served_s = time.monotonic() - start
        # Gradients are compared by weights that nothing of the step has been computed with.
        begins = self._config.training.partial_batches and not measures
        batch, early_s = self._begin_and_take() if begins else (self._call(self._intake.take()), 0.0)
        taken = time.monotonic()
        lag_bound = self._guard.max_lag
        reading, by_gradient, compared_s = self._compare(batch, served_s=served_s) if measures else (None, None, 0.0)
        as_taught = self._taught(batch)
        batch = as_taught.batch
        sequences = self._ahead.sequences(batch.groups) if begins else self._sequences(as_taught)
        step_metrics = as_taught.noted_in(self._train(batch, sequences))
        change = self._guard.observe(step_metrics, lag=max(batch.lags))
        self._call(self._intake.trained(self._version, max_lag=self._guard.max_lag))
        trained = time.monotonic()
        self._publish(hold=self._is_candidate())
        copied = time.monotonic()
        self._keep(batch, sequences)  # now that nobody waits for this thread
        self._test_generators(batch, sequences)
        assert self._began is not None
        time_s = self._before_s + copied - self._began
        before_s, self._computed_s = self._computed_s, time.thread_time()
        timing = Timing(
            time_s=time_s,
            wait_s=taken - start + compared_s - early_s,
            train_s=trained - taken - compared_s + early_s,
            early_s=early_s if begins else None,
            copy_s=copied - trained,
            cpu_s=self._computed_s - before_s,
        )
        _trace_step(batch, seconds=copied - taken)
        record = self._record(batch, timing, lag_bound=lag_bound)
        level, drawn = self._intake.level, self._intake.drawn
        self._records.step(
            record, step_metrics, batch.fresh, lag_bound=lag_bound, level=level, drawn=drawn, by_lag=reading
        )
        self._metrics.step(record, step_metrics)
        if reading is not None:
            self._metrics.by_lag(reading)
        for each in filter(None, (by_gradient, change)):
            self._records.guard(each, step=record.step)
            self._metrics.guard(each)
        self._after_step()

    def _begin_and_take(self) -> tuple[TakenBatch, float]:
        """The next batch, and the seconds in which it was computed before it was complete. Raises EndedEarly."""
        early_s, known = 0.0, BegunBatch()
        self._ahead = StepSequences(version=self._version, max_lag=self._config.max_lag, preset=self._trainer.preset)
        try:
            while not isinstance(taken := self._call(self._intake.take_or_begin(known)), TakenBatch):
                known, began = taken, time.monotonic()
                self._trainer.begin_step(self._ahead.sequences(known.groups), version=self._version)
                early_s += time.monotonic() - began
        except EndedEarly:
            self._trainer.discard_step()
            raise
        assert taken.version == self._version, f"a batch of version {taken.version} at version {self._version}"
        return taken, early_s

    def _measures(self) -> bool:
        """True if the coming step compares gradients by lag, and what is granted from now on is of lag 0."""
        plan = self._measurements
        if plan is None or not plan.is_due(self._version):
            return False
        return self._call(self._serves_newest(plan.timeout_s), may_end=True)

    async def _serves_newest(self, timeout_s: float) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                await self._publisher.wait_until_served(self._version)
        except TimeoutError:
            logger.warning(
                "gradients are not compared by lag before step %d: not all generators serve version %d after %g s",
                self._version + 1,
                self._version,
                timeout_s,
            )
            return False
        return True

    def _compare(self, batch: TakenBatch, *, served_s: float) -> tuple[LagReading | None, GuardChange | None, float]:
        """Compares gradients by lag, by the weights before the step; nothing that trains is touched by that.

        `served_s` seconds were waited for generators already. Gives those that were waited for groups, whatever came of
        it.
        """
        plan = self._measurements
        assert plan is not None, "asked for by the caller"
        began = time.monotonic()
        newest = self._call(self._intake.newest(batch, groups=plan.groups, timeout_s=plan.timeout_s))
        compared, teaching, waited = plan.select(batch, newest.groups), None, time.monotonic()
        if self._config.teachers:
            glanced = self._call(self._teachers.glance(compared.groups, batch=batch.groups))
            compared = compared.only(glanced)
            teaching = teaching_of(
                self._trainer, compared.groups, list(glanced.values()), teachers=self._config.teachers
            )
        moments: Moments = {}
        if compared.fresh > 1:
            chosen = TakenBatch(version=batch.version, groups=compared.groups, lags=())
            sequences = self._sequences(TaughtBatch(chosen, teaching))
            unit_of = compared.units
            units = [unit_of[one.origin.group] for one in sequences if one.origin is not None]
            sketches = self._trainer.sketches(sequences, units=units, parts=compared.unit_buckets)
            moments = moments_of(sketches, compared.unit_buckets, sizes=compared.sizes)
        if not moments:
            why = _why_not(compared, newest)
            logger.warning("gradients are not compared by lag before step %d: %s", batch.version + 1, why)
            return None, None, waited - began
        reading, change = self._guard.compare(
            moments, version=batch.version, wait_s=served_s + waited - began, pass_s=time.monotonic() - waited
        )
        return reading, change, waited - began

    def _take_up_bound(self) -> None:
        bound = self._guard.max_lag
        if bound < self._config.max_lag:
            logger.warning(
                "the guard goes on with a lag bound of %d, the configured one is %d", bound, self._config.max_lag
            )
        self._call(self._intake.bound_lag(bound))

    def _record(self, batch: TakenBatch, timing: Timing, *, lag_bound: int) -> StepRecord:
        config, bounds = self._config, None
        if config.reuse.max_lag is not None:
            reused_bound = config.reused_lag if lag_bound == config.max_lag else lag_bound
            bounds = LagBounds(max_lag=config.max_lag, reused=reused_bound)
        return step_record(
            batch.fresh,
            version=batch.version,
            timing=timing,
            success_reward=config.evaluation.success_reward,
            reused=batch.reused_groups if config.reused_per_step else None,
            bounds=bounds,
        )

    def _train(self, batch: TakenBatch, sequences: Sequence[TrainSequence]) -> StepMetrics:
        shown = () if self._demonstrations is None else self._demonstrations.of_step(batch.version)
        step_metrics = self._trainer.train_step(sequences, version=batch.version, demonstrations=shown)
        if step_metrics.skipped_updates:
            self._say_skipped(batch, step_metrics)
            try:
                stop_after_skips(step_metrics, most=self._config.training.max_skipped_updates)
            except NotFinite:
                self._keep(batch, sequences)  # the caller comes no further, and this step is what one wants to see
                raise
        bounded = self._config.old_tokens is None or LEFT_OUT_OF_OLD in step_metrics.means
        assert bounded, "tokens beyond max_lag were trained without their bound"
        self._version = batch.version + 1
        self._prober.renew(batch.groups)
        return step_metrics

    def _keep(self, batch: TakenBatch, sequences: Sequence[TrainSequence]) -> None:
        if self._samples is None:
            return
        tokens, places = self._trainer.tokens, _places(sequences)
        self._samples.put(
            TakenStep(
                step=batch.version + 1,
                groups=batch.groups,
                times=batch.times,
                places=places,
                values={} if tokens is None or len(places) < len(sequences) else vars(tokens),
                spent_s=self._trainer.tokens_s,
            )
        )

    def _test_generators(self, batch: TakenBatch, sequences: Sequence[TrainSequence]) -> None:
        """Steps that are replayed are left out: those generators may be long gone."""
        if self._trust is None:
            return
        tokens, places = self._trainer.tokens, _places(sequences)
        if tokens is None or len(places) < len(sequences):
            return
        places = [place for place in places if place.group < len(batch.fresh)]  # the others were tested before
        count = sum(place.length for place in places)
        found = self._trust.step(
            batch.fresh,
            places,
            ours=tokens.learner_logprobs[:count],
            entropies=tokens.entropies[:count],
            version=batch.version,
        )
        for suspicion in found:
            self._loop.call_soon_threadsafe(self._trust.suspected, suspicion)

    def _say_skipped(self, batch: TakenBatch, step_metrics: StepMetrics) -> None:
        rewards = [one.reward for group in batch.groups for one in group.trajectories]
        given = [one.reward for one in rewards if one.reward is not None]
        logger.error(
            "step %d: %d updates had a gradient that is not finite and were left out, the weights stay as they were; "
            "its leases: %s; rewards from %g to %g by %s",
            batch.version + 1,
            step_metrics.skipped_updates,
            ", ".join(str(group.lease_id) for group in batch.groups),
            min(given, default=math.nan),
            max(given, default=math.nan),
            ", ".join(sorted({one.verifier for one in rewards})),
        )

    def _sequences(self, as_taught: TaughtBatch, *, logged: bool = False) -> list[TrainSequence]:
        """A `logged` batch was taken under the bounds of its time."""
        batch, config = as_taught.batch, self._config
        assert batch.version == self._version, f"a batch of version {batch.version} at version {self._version}"
        return sequences_of(
            batch.groups,
            version=batch.version,
            max_lag=batch.bound(config.max_lag) if logged else config.max_lag,
            again=GroupsAgain(batch.reused, batch.bound_of_reused(config.reused_lag) if logged else config.reused_lag),
            preset=self._trainer.preset,
            teaching=as_taught.teaching,
        )

    def _taught(
        self, batch: TakenBatch, *, noted: Mapping[int, GroupScores | TextRefused] | None = None
    ) -> TaughtBatch:
        """The batch as it is taught. What is `noted` by lease id is not asked for again."""
        teachers = self._config.teachers
        if not teachers:
            return TaughtBatch(batch)
        told = self._told(batch, noted or {})
        self._check_taught(told)
        for group, one in zip(batch.groups, told, strict=True):
            if isinstance(one, TextRefused):
                logger.warning("lease %d of %s is not trained: %s", group.lease_id, group.environment, one)
                self._metrics.left_out("untaught")
        return taught(self._trainer, batch, told, teachers=teachers)

    def _check_taught(self, told: Sequence[Told]) -> None:
        """Raises TeacherFailed after some steps of which nothing was taught: that is no fault of their texts."""
        refusals = [one for one in told if isinstance(one, TextRefused)]
        self._untaught_steps = self._untaught_steps + 1 if len(refusals) == len(told) else 0
        if self._untaught_steps >= _MAX_UNTAUGHT_STEPS:
            raise TeacherFailed(
                f"of {self._untaught_steps} steps in a row no text was taught, so that nothing was learned; last: "
                f"{refusals[-1]}. See the log of the teacher's generators"
            )

    def _told(self, batch: TakenBatch, noted: Mapping[int, GroupScores | TextRefused]) -> list[Told]:
        """A policy that teaches changes: what it says is in the journal before it is trained."""
        asked = [group for group in batch.groups if group.lease_id not in noted]
        answers = list(zip(asked, self._call(self._teachers.of_batch(asked)) if asked else [], strict=True))
        if new := [
            LoggedTeaching(batch.version, group.lease_id, told)
            for group, told in answers
            if told is not None and is_taught_by_policy(self._config.teachers, group.environment)
        ]:
            self._call(self._intake.taught(new))
        known: dict[int, Told] = {**noted, **{group.lease_id: told for group, told in answers}}
        return [known[group.lease_id] for group in batch.groups]

    def _publish(self, *, hold: bool = False) -> None:
        self._publisher.offer(self._snapshots.take(version=self._version, probe=self._prober.probe()), hold=hold)

    def _is_candidate(self) -> bool:
        """True for a version that is evaluated beside training to be released, to which generators are held for that.
        The last one is evaluated anyway.
        """
        releases = self._releases
        return releases is not None and self._version < self._config.steps and releases.is_candidate(self._version)

    async def _last_publish(self) -> None:
        """Generators outlive the learner: they are left with its last version, if they take it in time."""
        try:
            async with asyncio.timeout(_LAST_PUBLISH_S):
                await self._publisher.wait_until_served(self._version)
        except TimeoutError:
            logger.warning("not all generators took the last version %d within %g s", self._version, _LAST_PUBLISH_S)
        if self._releases is not None:
            await self._releases.last_put()

    def _after_step(self) -> None:
        config = self._config
        outgrown = self._checkpoints.outgrown(config.checkpoint.journal_mb << 20)
        if outgrown or self._version % config.checkpoint.every_steps == 0:
            self._checkpoint()
        self._writer.settle(wait=False)
        evaluation = config.evaluation
        is_due = evaluation.tasks and self._version % evaluation.every_steps == 0 and self._version < config.steps
        if (is_candidate := self._is_candidate()) or is_due:
            work = (
                self._evaluate_candidate(self._version)
                if is_candidate
                else self._evaluate_beside(evaluation.tasks, self._version)
            )
            self._underway = [each for each in self._underway if not each.done() or each.exception() is not None]
            self._underway.append(asyncio.run_coroutine_threadsafe(work, self._loop))
            self._forget_ended()

    def _forget_ended(self) -> None:
        for evaluation in [each for each in self._underway if each.done()]:
            evaluation.result()  # raises what ended it
            self._underway.remove(evaluation)

    def _checkpoint(self) -> None:
        try:
            ledger = self._call(self._intake.checkpoint())
        except OSError as error:
            self._no_checkpoint(self._version, error)
            return
        self._writer.begin(
            version=self._version, ledger=ledger, guard=self._guard.state, progress=self._records.progress()
        )

    def _kept(self, version: int, seconds: float) -> None:
        self._records.checkpoint(version=version, seconds=seconds)
        self._kept_version = version

    def _no_checkpoint(self, version: int, error: OSError) -> None:
        if self._interrupted:  # the files are closed by now, and nobody goes on
            return
        self._metrics.failed_write("checkpoint")
        logger.warning(
            "no checkpoint of version %d could be written: %s. The run goes on; the next is due in %d steps",
            version,
            error,
            self._config.checkpoint.every_steps,
        )

    def _evaluate_and_wait(self) -> None:
        tasks, releases = self._config.evaluation.final_tasks, self._releases
        if releases is not None:
            tasks = max(tasks, self._config.release.tasks)
        if tasks:
            evaluation = self._call(self._evaluate(tasks, self._version), may_end=True)
            if evaluation is not None:
                self._records.evaluation(evaluation.result)
                self._credit(evaluation)
            if evaluation is not None and releases is not None:
                self._call(self._judge(releases, evaluation))

    async def _evaluate(self, tasks: int, version: int) -> Evaluation | None:
        await self._publisher.wait_until_served(version)
        return await self._intake.evaluated(tasks=tasks, version=version)

    async def _evaluate_candidate(self, version: int) -> None:
        """All of the answers are of this version: no newer one is published until the last of them is there."""
        releases = self._releases
        assert releases is not None, "asked for by the caller"
        try:
            weights = self._config.weights
            wait_s = weights.pull_timeout_s + (weights.commit_timeout_s or 0.0) + _CANDIDATE_S
            if not await self._publisher.served_in_time(version, wait_s=wait_s):
                logger.warning(
                    "version %d is no candidate for a release: not all generators served it within %.0f s, and newer "
                    "ones do not wait for it longer", version, wait_s,
                )  # fmt: skip
                return
            evaluation = await self._intake.evaluated(tasks=self._config.release.tasks, version=version, beside=True)
            packed = self._publisher.newest
        finally:
            self._publisher.let_go(version)
        if evaluation is not None:
            self._records.evaluation(evaluation.result)
            await asyncio.to_thread(self._credit, evaluation)
            await self._judge(releases, evaluation, packed)

    async def _judge(self, releases: Releases, evaluation: Evaluation, packed: PackedWeights | None = None) -> None:
        packed = packed or self._publisher.newest
        if packed is not None and packed.version.number == evaluation.result.version:
            await releases.judge(evaluation, packed)

    async def _evaluate_beside(self, tasks: int, version: int) -> None:
        evaluation = await self._intake.evaluated(tasks=tasks, version=version, beside=True)
        if evaluation is not None:
            self._records.evaluation(evaluation.result)
            # It waits for the disk, and for a lock that is held while checkpoints are removed.
            await asyncio.to_thread(self._credit, evaluation)

    def _credit(self, evaluation: Evaluation) -> None:
        try:
            self._credits.note(evaluation)
        except OSError as error:
            self._metrics.failed_write("evaluation")
            logger.warning("the evaluation of version %d could not be noted: %s", evaluation.result.version, error)

    def interrupt(self) -> None:
        """From the event loop: makes `run` raise CancelledError if it waits for the loop, or as soon as it would."""
        self._interrupted = True
        if self._awaited is not None:
            self._awaited.cancel()

    def end_early(self) -> None:
        """From the event loop: has `run` end as after the last step, once the present one is done, if there was one."""
        self._ending = True
        self._intake.end()
        if self._awaited is not None and self._may_end:
            self._awaited.cancel()

    def _call(self, work: Coroutine[None, None, T], *, may_end: bool = False) -> T:
        """Runs a coroutine in the event loop and waits for it. `may_end`: an early end need not wait for it."""
        return self._wait_for(asyncio.run_coroutine_threadsafe(work, self._loop), may_end=may_end)

    def _wait_for(self, future: Future[T], *, may_end: bool = False) -> T:
        """Raises EndedEarly for a wait that an early end has cut off."""
        self._awaited, self._may_end = cast("Future[object]", future), may_end
        # Looked at after the line above, so that an interrupt falls on one side or the other.
        if self._interrupted or (self._ending and may_end):
            future.cancel()
        try:
            return future.result()
        except CancelledError:
            if self._ending and may_end and not self._interrupted:
                raise EndedEarly from None
            raise


class StepSequences:
    """The sequences of a step's groups, each made once, however often they are asked for while its batch grows."""

    def __init__(self, *, version: int, max_lag: int, preset: Preset) -> None:
        """As for `sequences_of`."""
        self._make = partial(sequences_of, version=version, max_lag=max_lag, preset=preset)
        self._groups: list[tuple[TrajectoryGroup, list[TrainSequence]]] = []

    def sequences(self, groups: Sequence[TrajectoryGroup]) -> list[TrainSequence]:
        """Of these groups, in this order. Raises as `sequences_of` does."""
        known = sum(1 for _ in takewhile(lambda pair: pair[0][0] is pair[1], zip(self._groups, groups, strict=False)))
        del self._groups[known:]
        made = [sequence for _, of_group in self._groups for sequence in of_group]
        for number, group in enumerate(groups[known:], start=known):
            self._groups.append((group, self._make([group], before=GroupsBefore.of(number, made))))
            made += self._groups[-1][1]
        return made


def _why_not(compared: ComparedGroups, newest: NewestGroups) -> str:
    if compared.fresh > 1:
        return "the gradient of lag 0 is 0, or not finite"
    return f"{compared.fresh} groups of lag 0 were there, expected 2 at least: {newest.why}"


def _places(sequences: Sequence[TrainSequence]) -> list[SequencePlace]:
    """Places of the sequences that were sampled."""
    origins = [(one.origin, len(one.token_ids)) for one in sequences]
    return [SequencePlace(at.group, at.trajectory, at.start, count) for at, count in origins if at is not None]


def _trace_step(batch: TakenBatch, *, seconds: float) -> None:
    """Ends the traces of a step's leases, with what came of them."""
    for group, lag in zip(batch.fresh, batch.lags, strict=False):
        trace = lease_trace(group.incarnation, group.lease_id)
        if not trace:
            continue
        end = partial(
            lease_ended,
            trace,
            step=batch.version + 1,
            lag=lag,
            tokens=sum(one.sampled_tokens for one in group.trajectories),
            reward_mean=statistics.fmean(one.reward.reward or 0.0 for one in group.trajectories),
        )
        end(at="step", began_ns=time.time_ns() - int(1e9 * seconds))
        end(lease_id=group.lease_id, environment=group.environment)


class Credits:
    """Results of evaluations of checkpoints, by which the best are kept; `wanted` if any are kept for that.

    Beside training most answers may come of later versions, in each evaluation of a run that is well: said once.
    """

    def __init__(self, checkpoints: Checkpoints, *, wanted: bool) -> None:
        self._checkpoints = checkpoints
        self._silent = not wanted

    def note(self, evaluation: Evaluation) -> None:
        """Writes it beside the checkpoint of its version, if that one sampled enough of it. Raises OSError."""
        credit = _credit(evaluation)
        if credit is not None:
            self._checkpoints.evaluated(credit)
            return
        checkpoint = self._checkpoints.at(evaluation.result.version)
        if checkpoint is None or self._silent:
            return
        self._silent = True
        logger.info(
            "the evaluation of version %d does not count for checkpoint.keep_best: training went on beside it, and "
            "later versions sampled more than half of its answers. Its numbers are in metrics.jsonl all the same; to "
            "measure a checkpoint by itself: headway eval RUN.toml --checkpoint %s (not said again of later ones)",
            checkpoint.version,
            checkpoint.path,
        )


def _credit(evaluation: Evaluation) -> VersionScore | None:
    """The evaluation's result for its version by that one's own samples, if they answer at least half of the tasks."""
    own = evaluation.own
    if own is None or 2 * own.tasks < evaluation.result.tasks:
        return None
    return VersionScore(version=own.version, accuracy=own.accuracy, reward=own.reward)
