"""The records of a run, as they are written: `metrics.jsonl`, `samples.jsonl`, the line of progress.

`metrics.jsonl` holds one object a line, told apart by `kind`: `step`, `replay` (a step that was trained again, from the
batch log, with the same fields), `publish`, `join` (a generator that caught up), `leave` (a generator that is gone),
`suspicion` (a generator that samples otherwise than it says), `checkpoint`, `evaluation`, `verdict` (how the run is
from here on, and what bounds it), `load` (what generators did in the seconds before), `guard` (the guard has moved the
lag bound: after which step, and what was beyond its limit), and `resume`, which says up to which version the lines
before it belong to the run.

All have `unix_s`, when it was, in seconds since 1970. `lag_bound` is the bound under which the step's batch was taken;
`level`: the curriculum level of new leases at the step's end, null without a curriculum and in a replay;
`tasks_effective` and `tasks_variance` are of the newest draws of tasks, and missing where none are drawn. The numbers
`gradient_…` are of steps that compared gradients by lag, and missing in all others.
"""

import dataclasses
import logging
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from learner.evaluation.results import EvaluationResult
from learner.journal.files import LineFile, anyone, ignore
from learner.leases.task_draws import DrawnTasks
from learner.reports.past_records import began_unix_s, read_past, trained_again_s
from learner.reports.run_monitor import GeneratorsLoad
from learner.reports.stalled_training import Doubts
from learner.reports.tally import RewardsSeen, StepRecord, Tally
from learner.training.guard import GuardChange
from learner.training.lag_gradients import LagReading
from learner.training.step import StepMetrics
from learner.trust.evidence import Suspicion
from learner.weights.published import JoinReport, PublishReport
from protocol.trajectories import Trajectory, TrajectoryGroup
from services.diagnosis.verdict import RunVerdict
from services.durations import clock_text

logger = logging.getLogger(__name__)
_PROGRESS_EVERY_S = 5.0
_SAMPLES_PER_STEP = 3
_NOTHING: Mapping[str, object] = {}


class Records:
    """The run's open files, and what is remembered of its steps; a context manager.

    A line that cannot be written is lost: the first one is said, `failed_write` is told the file's name for each.
    """

    def __init__(
        self,
        *,
        folder: Path,
        total_steps: int,
        failed_write: Callable[[str], None] = ignore,
        told: Callable[[Mapping[str, object]], None] = ignore,
        may_write: Callable[[], None] = anyone,
        doubts: Doubts | None = None,
    ) -> None:
        """`told` gets each line of `metrics.jsonl`; `may_write` raises once the folder is another process's.

        `doubts` are those of the run's algorithm; of one that compares rewards within a group if left out.
        """
        self.may_write = may_write
        self._total_steps = total_steps
        self._metrics = LineFile(folder / "metrics.jsonl", failed=failed_write, told=told, may_write=may_write)
        self._samples = LineFile(folder / "samples.jsonl", failed=failed_write, may_write=may_write)
        self._folder = folder
        self._said_at = 0.0
        self._unsaid: list[StepRecord] = []
        self._lock = threading.Lock()  # steps come from the trainer's thread, publishes from the event loop
        self.tally = Tally()
        self.rewards_seen = RewardsSeen()
        self.former_s = 0.0
        """Seconds that the run's former lives trained, and this one on steps of which nothing else is known."""
        self.former_steps = 0
        self._doubts = doubts or Doubts()
        self._startup_wait_s: float | None = None
        """Wait of this life's first step, mostly for the others' start, which no other step waits for: not yet taken
        out of an ETA. 0 once it is.
        """

    def __enter__(self) -> "Records":
        return self

    def __exit__(self, *_: object) -> None:
        self._metrics.close()
        self._samples.close()

    def resume(self, *, version: int, incarnation: int, progress: Mapping[str, object] = _NOTHING) -> None:
        """Go on with the records of former lives, of which those up to `version` belong to this run.

        `progress` is what `progress` gave to the checkpoint: only the lines after it are read.
        """
        known = progress.get("records")
        self.tally = Tally() if known is None else Tally.model_validate(known)
        at = int(str(progress.get("metrics_bytes", 0)))
        former = read_past(
            self._folder / "metrics.jsonl",
            up_to_version=version,
            from_byte=at,
            after_step=self.tally.last_step,
            last_time_s=self.tally.life_s,
        )
        for record in former.steps:
            self.tally.step(record)
        for report in former.publishes:
            self.tally.publish(report)
        for result in former.evaluations:
            self.tally.evaluations.add(result)
        self.tally.wall_s += former.wall_s
        self.tally.life_s = former.steps[-1].time_s if former.steps else self.tally.life_s
        if self.tally.began_unix_s is None:
            self.tally.began_unix_s = began_unix_s(self._folder / "metrics.jsonl")
        self.former_s, self.former_steps = self.tally.wall_s, self.tally.steps
        self._event("resume", version=version, incarnation=incarnation)

    def begin_steps(self) -> float:
        """Start the clock at the first step; return the run's seconds so far."""
        with self._lock:
            if self.tally.began_unix_s is None:
                self.tally.began_unix_s = time.time()
            self.tally.life_s = self._passed_s()
            return self.tally.life_s

    def passed_s(self) -> float:
        """Seconds since the run's first step began, with the time in which no learner ran; 0 before that."""
        with self._lock:
            return self._passed_s()

    def _passed_s(self) -> float:
        began = self.tally.began_unix_s
        passed_s = 0.0 if began is None else time.time() - began
        return max(passed_s, self.tally.life_s)  # a clock that was set back

    def progress(self) -> dict[str, object]:
        """For a checkpoint: what is remembered, and up to which byte of `metrics.jsonl`."""
        with self._lock:
            return {"records": self.tally.model_dump(mode="json"), "metrics_bytes": self._metrics.end}

    def step(
        self,
        record: StepRecord,
        metrics: StepMetrics,
        groups: Sequence[TrajectoryGroup],
        *,
        lag_bound: int | None = None,
        level: int | None = None,
        drawn: DrawnTasks | None = None,
        by_lag: LagReading | None = None,
    ) -> None:
        """Record a step: its numbers, and a few of its trajectories."""
        with self._lock:
            self.tally.step(record)
            self.tally.timed(record.time_s)
            self._write_step("step", record, metrics, lag_bound=lag_bound, level=level, drawn=drawn, by_lag=by_lag)
        self.rewards_seen.saw(groups, step=record.step)
        for group in groups[:_SAMPLES_PER_STEP]:
            self._samples.write(_sample(group, step=record.step))
        for doubt in self._doubts.step(record):
            logger.warning("%s", doubt)
        self._unsaid.append(record)
        if self._startup_wait_s is None:
            self._startup_wait_s = record.wait_s
        if time.monotonic() - self._said_at >= _PROGRESS_EVERY_S or record.step == self._total_steps:
            self._say_progress()

    def replay(self, record: StepRecord, metrics: StepMetrics, *, lag_bound: int | None = None) -> None:
        """Record a step that was trained again, from the batch log. Its `wait_s` is 0, its `time_s` that of now."""
        with self._lock:
            if self.tally.last_step < record.step:  # the life that logged it died before it noted it
                self.tally.step(record)
                self.tally.wall_s += trained_again_s(dataclasses.asdict(record))
                self.former_s = self.tally.wall_s
            self._write_step("replay", record, metrics, lag_bound=lag_bound, level=None)

    def _write_step(
        self,
        kind: str,
        record: StepRecord,
        metrics: StepMetrics,
        *,
        lag_bound: int | None,
        level: int | None,
        drawn: DrawnTasks | None = None,
        by_lag: LagReading | None = None,
    ) -> None:
        numbers = {**dataclasses.asdict(metrics), **dataclasses.asdict(record)}
        if drawn is not None:
            numbers |= {"tasks_effective": drawn.effective, "tasks_variance": drawn.variance}
        if by_lag is not None:
            numbers |= _by_lag(by_lag)
        self._event(kind, **numbers, lag_bound=lag_bound, level=level)

    def _event(self, kind: str, **values: object) -> None:
        self._metrics.write({"kind": kind, **values, "unix_s": round(time.time(), 3)})

    def guard(self, change: GuardChange, *, step: int) -> None:
        """Record and log what the guard did after a step."""
        logger.log(
            logging.INFO if change.kind == "loosened" else logging.WARNING, "guard: step %d: %s", step, change.text
        )
        reading = change.reading
        self._event(
            "guard",
            step=step,
            change=change.kind,
            before=change.before,
            after=change.after,
            steps=change.steps,
            measure=None if reading is None else reading.measure,
            value=None if reading is None else reading.value,
            limit=None if reading is None else reading.limit,
        )

    def suspicion(self, found: Suspicion, *, version: int, quarantined: bool) -> None:
        """Record and log that a generator is not believed any more."""
        logger.warning(
            "%s (%.3g nats of evidence after %d of its tokens; %s)",
            found.text,
            found.evidence,
            found.tokens,
            "it leaves the fleet until it is restarted" if quarantined else "learner.trust.quarantine would expel it",
        )
        self._event("suspicion", version=version, quarantined=quarantined, **found.shown())

    def publish(self, report: PublishReport) -> None:
        """Record a publish."""
        with self._lock:
            self.tally.publish(report)
            self._event("publish", **dataclasses.asdict(report))

    def join(self, report: JoinReport) -> None:
        """Record a generator that caught up."""
        self._event("join", **dataclasses.asdict(report))

    def leave(self, generator_id: str, *, version: int, expelled: str | None = None) -> None:
        """Record a generator that died, said goodbye or was expelled, and why then; the learner was at `version`."""
        self._event("leave", generator_id=generator_id, version=version, expelled=expelled)

    def checkpoint(self, *, version: int, seconds: float) -> None:
        """Record a checkpoint that was written."""
        self._event("checkpoint", version=version, seconds=seconds)

    def evaluation(self, result: EvaluationResult) -> None:
        """Record and log an evaluation."""
        with self._lock:
            self.tally.evaluations.add(result)
            self._event("evaluation", **dataclasses.asdict(result))
        logger.info(
            "evaluation of version %d: accuracy %.3f (%.3f to %.3f), reward %.3f on %d held-out tasks%s%s",
            result.version,
            result.accuracy,
            result.accuracy_low,
            result.accuracy_high,
            result.reward,
            result.tasks,
            "".join(f", pass@{k} {share:.3f}" for k, share in result.pass_at_k.items() if k > 1),
            _by_verifier(result.accuracy_by_verifier),
        )

    def load(self, load: GeneratorsLoad, *, version: int) -> None:
        """Record what generators did in the last seconds."""
        self._event("load", version=version, **dataclasses.asdict(load))

    def verdict(self, verdict: RunVerdict, *, version: int) -> None:
        """Record that the verdict on the run is another one from here on."""
        self._event("verdict", version=version, **dataclasses.asdict(verdict))
        level = logging.WARNING if verdict.state == "sick" else logging.INFO
        logger.log(level, "verdict: %s", verdict.text)

    def _say_progress(self) -> None:
        recent, self._unsaid, self._said_at = self._unsaid, [], time.monotonic()
        last = recent[-1]
        elapsed_s = sum(record.wait_s + record.train_s + record.copy_s for record in recent)
        usual_s = max(0.0, elapsed_s - (self._startup_wait_s or 0.0))
        left_s = (self._total_steps - last.step) * usual_s / len(recent)
        self._startup_wait_s = 0.0
        logger.info(
            "step %d/%d  reward %.3f%s  lag %.1f (max %d)  %.0f tokens/s  learner waits %.0f %%  ETA %s",
            last.step,
            self._total_steps,
            statistics.fmean(record.reward_mean for record in recent),
            _by_verifier(last.reward_by_verifier),
            statistics.fmean(record.lag_mean for record in recent),
            max(record.lag_max for record in recent),
            sum(record.sampled_tokens for record in recent) / max(elapsed_s, 1e-9),
            100 * sum(record.wait_s for record in recent) / max(elapsed_s, 1e-9),
            clock_text(left_s),
        )


def _by_verifier(values: Mapping[str, float]) -> str:
    """As a line says it; nothing where one verifier judged all."""
    if len(values) < 2:
        return ""
    return f" ({', '.join(f'{verifier} {value:.3f}' for verifier, value in values.items())})"


def _by_lag(reading: LagReading) -> dict[str, object]:
    """As a step's line holds it."""
    return {
        "gradient_cosine": reading.cosines,
        "gradient_cosine_error": reading.errors,
        "gradient_norm_ratio": reading.norm_ratios,
        "gradient_wait_s": reading.wait_s,
        "gradient_pass_s": reading.pass_s,
    }


def _sample(group: TrajectoryGroup, *, step: int) -> dict[str, object]:
    """The group's worst and best trajectory, as a person reads them, and the reward that they are compared with."""
    ranked = sorted(group.trajectories, key=lambda trajectory: trajectory.reward.reward or 0.0)
    greedy = {} if group.greedy_baseline is None else {"greedy_reward": group.greedy_reward}
    return {
        "step": step,
        "lease_id": group.lease_id,
        "environment": group.environment,
        "task_index": group.task_index,
        "prompt": group.prompt_text,
        **greedy,
        "completions": [_completion(trajectory) for trajectory in _ends(ranked)],
    }


def _ends(ranked: Sequence[Trajectory]) -> list[Trajectory]:
    return [ranked[0]] if len(ranked) == 1 else [ranked[0], ranked[-1]]


def _completion(trajectory: Trajectory) -> dict[str, object]:
    return {
        "text": trajectory.completion_text,
        "reward": trajectory.reward.reward,
        "verifier": trajectory.reward.verifier,
        "components": trajectory.reward.components,
        "explanation": trajectory.reward.explanation,
        "tokens": int(trajectory.loss_mask.sum()),
        "finish_reason": trajectory.stop_reason or trajectory.turns[-1].finish_reason,
        "versions": sorted(trajectory.versions),
    }
