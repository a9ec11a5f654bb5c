"""The numbers of steps and runs, worked by hand, and what is written of them."""

import dataclasses
import json
import re
import resource
import time
from pathlib import Path
from typing import Any

import pytest

from learner.evaluation.results import EvaluationResult
from learner.leases.partial_credit import credited_from
from learner.leases.task_draws import DrawnTasks
from learner.ledger import Books
from learner.reports.history import CURVES
from learner.reports.run_monitor import GeneratorsLoad
from learner.reports.run_records import Records
from learner.reports.summary import draw_curves, summarize, table, write_summary
from learner.reports.tally import LagBounds, RewardsSeen, StepRecord, Tally, Timing, step_record
from learner.training.guard import GuardChange, MeasureReading
from learner.training.lag_gradients import BucketMoments, reading_of
from learner.training.step import StepMetrics
from learner.trust.evidence import Suspicion
from learner.weights.published import JoinReport, PublishReport
from protocol.trajectories import Trajectory, TrajectoryGroup
from services.diagnosis.verdict import RunVerdict
from tests.learner.page.made_run import compared
from tests.learner.samples import group, trajectory

TIMING = Timing(time_s=9.0, wait_s=0.5, train_s=1.0, copy_s=0.25)


def two_groups() -> list[TrajectoryGroup]:
    return [
        group(0, trajectory(0, 0, 1, reward=1.0), trajectory(1, reward=0.0, finish="length")),
        group(1, trajectory(1, 1, reward=1.0), trajectory(1, 1, reward=1.0)),
    ]


def record(step: int = 3, **changes: Any) -> StepRecord:
    made = step_record(two_groups(), version=2, timing=TIMING, success_reward=1.0)
    return dataclasses.replace(made, step=step, **changes)


def step_metrics() -> StepMetrics:
    values: dict[str, Any] = {each.name: 1 for each in dataclasses.fields(StepMetrics)}
    return StepMetrics(**values)


def published(total_s: float, pause_s: float, gap: float) -> PublishReport:
    return PublishReport(
        version=1, members=1, total_s=total_s, prepare_s=total_s, commit_s=0.0, pause_s=pause_s, probe_gap=gap
    )


def evaluated(version: int, accuracy: float, *, reward: float | None = None) -> EvaluationResult:
    return EvaluationResult(
        version=version,
        tasks=10,
        failed=0,
        accuracy=accuracy,
        reward=accuracy if reward is None else reward,
        oldest_version=version,
        newest_version=version,
        truncated_share=0.0,
        samples=40,
        pass_at_k={1: accuracy, 4: min(1.0, 2 * accuracy)},
        cons_at_k={1: accuracy, 4: accuracy},
    )


class WallClock:
    """A clock that a test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1_790_000_000.0
        monkeypatch.setattr(time, "time", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> WallClock:
    return WallClock(monkeypatch)


BOOKS = Books(
    leases=9, trained=4, filtered=1, dead_lettered=2, buffered=1, running=1, pending=0,
    attempts=12, accepted=6, failed=2, expired=0, dropped=3,
)  # fmt: skip


def test_tokens_that_were_too_old_for_the_loss_count_to_the_length() -> None:
    groups = [credited_from(group, version=1).group for group in two_groups()]
    assert not groups[0].trajectories[0].loss_mask.all()
    assert step_record(groups, version=2, timing=TIMING, success_reward=1.0).length_mean == 2.0


def test_a_step_by_hand() -> None:
    made = step_record(two_groups(), version=2, timing=TIMING, success_reward=1.0)
    assert made.lease_ids == (0, 1)
    assert (made.step, made.groups, made.trajectories, made.sampled_tokens) == (3, 2, 4, 8)
    assert (made.reward_mean, made.solved_share, made.uniform_groups_share) == (0.75, 0.75, 0.5)
    assert made.reward_std == pytest.approx(0.4330127)
    assert (made.length_mean, made.truncated_share, made.end_token_share) == (2.0, 0.25, 0.75)
    assert (made.lag_mean, made.lag_max, made.lag_counts) == (1.25, 2, {1: 3, 2: 1})
    assert made.token_lag_counts == {1: 6, 2: 2}
    assert made.mixed_version_share == 0.25
    assert (made.time_s, made.wait_s, made.train_s, made.copy_s) == (9.0, 0.5, 1.0, 0.25)


def judged_by(verifier: str, trajectory: Trajectory) -> Trajectory:
    reward = trajectory.reward.model_copy(update={"verifier": verifier})
    return trajectory.model_copy(update={"reward": reward})


def test_an_evaluation_is_said_with_its_reward_which_moves_before_anything_is_solved(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    found = EvaluationResult(
        version=20, tasks=8, failed=0, accuracy=0.0, reward=0.44, oldest_version=20, newest_version=21,
        truncated_share=0.0, accuracy_high=0.3,
    )  # fmt: skip
    with caplog.at_level("INFO"), Records(folder=tmp_path, total_steps=3) as records:
        records.evaluation(found)
    assert "evaluation of version 20: accuracy 0.000 (0.000 to 0.300), reward 0.440 on 8 held-out tasks" in caplog.text


def test_where_groups_trained_again_have_a_bound_of_their_own_their_lags_are_told_apart() -> None:
    old = [group(7, trajectory(0, 3), trajectory(2, 3))]
    bounds = LagBounds(max_lag=4, reused=8)
    made = step_record(
        [group(0, trajectory(5))], version=6, timing=TIMING, success_reward=1.0, reused=old, bounds=bounds
    )

    assert (made.lag_max, made.reused_lag_max, made.reused_lag_bound) == (1, 6, 8)
    assert made.tokens_beyond_max_lag == 1, "of lags 6, 3, 4 and 3"
    usual = step_record([group(0, trajectory(5))], version=6, timing=TIMING, success_reward=1.0, reused=old)
    assert (usual.lag_max, usual.reused_lag_max, usual.tokens_beyond_max_lag) == (6, None, None)


def test_a_step_has_the_mean_reward_of_each_verifier(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    groups = [
        group(0, judged_by("math", trajectory(0, reward=1.0)), judged_by("math", trajectory(0, reward=0.0))),
        group(1, judged_by("code", trajectory(0, reward=0.25)), judged_by("code", trajectory(0, reward=0.25))),
    ]
    made = step_record(groups, version=2, timing=TIMING, success_reward=1.0)

    assert made.reward_by_verifier == {"code": 0.25, "math": 0.5}
    with caplog.at_level("INFO"), Records(folder=tmp_path, total_steps=3) as records:
        records.step(made, step_metrics(), groups)
    assert "reward 0.375 (code 0.250, math 0.500)" in caplog.text


def test_a_step_has_the_mean_reward_of_each_environment_and_of_each_component(tmp_path: Path) -> None:
    def with_components(reward: float, **components: float) -> Trajectory:
        made = trajectory(0, reward=reward)
        return made.model_copy(update={"reward": made.reward.model_copy(update={"components": components})})

    sums = group(0, with_components(1.0, right=1.0, form=0.5), with_components(0.0, right=0.0))
    words = group(1, with_components(0.5), with_components(0.25)).model_copy(update={"environment": "words"})
    made = step_record([sums, words], version=2, timing=TIMING, success_reward=1.0)

    assert made.reward_by_environment == {sums.environment: 0.5, "words": 0.375}
    assert made.reward_by_component == {"form": 0.5, "right": 0.5}


def judged_at(service: str, latency_s: float) -> TrajectoryGroup:
    one = trajectory(1)
    reward = one.reward.model_copy(update={"service_id": service, "latency_s": latency_s})
    return group(0, one.model_copy(update={"reward": reward}))


def test_the_reward_services_are_those_that_judged_what_was_trained_by_name() -> None:
    seen = RewardsSeen()
    before = seen.shown()

    seen.saw([judged_at("second", 2.0), judged_at("first", 1.0)], step=4)
    seen.saw([judged_at("first", 2.0)], step=5)

    assert before == []
    assert [(one["name"], one["step"]) for one in seen.shown()] == [("first", 5), ("second", 4)]
    assert [one["latency_s"] for one in seen.shown()] == pytest.approx([1.02, 2.0])


def test_of_too_many_reward_services_those_that_judged_last_are_kept() -> None:
    seen = RewardsSeen()
    for step in range(40):
        seen.saw([judged_at(f"pod-{step:02}", 1.0)], step=step)

    assert [one["step"] for one in seen.shown()] == list(range(8, 40))


def run_of_two_steps(records: Records) -> None:
    first = record(step=1, reward_mean=0.25, lag_max=0, lag_counts={0: 4}, token_lag_counts={0: 8})
    records.publish(published(9.0, 1.0, 3e-6))
    records.evaluation(evaluated(0, 0.125))
    records.step(first, step_metrics(), two_groups())
    records.publish(published(0.1, 0.01, 1e-6))
    records.evaluation(evaluated(1, 0.5))
    records.step(record(step=2, wait_s=1.5, train_s=3.0), step_metrics(), two_groups())
    records.publish(published(0.3, 0.03, 2e-6))
    records.evaluation(evaluated(2, 0.875))


def test_steps_of_which_a_power_loss_took_all_records_took_the_time_of_their_replay(tmp_path: Path) -> None:
    """A run that ends with them would have trained them in no time."""
    with Records(folder=tmp_path, total_steps=2) as records:
        records.resume(version=2, incarnation=2)
        assert records.former_s == 0
        for step in (1, 2):
            records.replay(record(step=step), step_metrics())
        kept = records.progress()
        summary = summarize(records, books=BOOKS, max_lag=4, train_wall_s=records.former_s, generator_idle_share=None)
    assert (summary.steps, summary.train_wall_s) == (2, 2.5)
    for progress in ({}, kept):  # of the next life: from its lines, and from a checkpoint
        with Records(folder=tmp_path, total_steps=2) as records:
            records.resume(version=2, incarnation=3, progress=progress)
            assert records.former_s == 2.5
    unknown = summarize(records, books=BOOKS, max_lag=4, train_wall_s=0.0, generator_idle_share=None)
    assert (unknown.completions_per_s, unknown.tokens_per_s, unknown.learner_wait_share) == (0, 0, 0)


def test_an_accuracy_of_nothing_beside_rewards_says_what_would_be_right(tmp_path: Path) -> None:
    with Records(folder=tmp_path, total_steps=2) as records:
        run_of_two_steps(records)
        records.evaluation(evaluated(0, 0.0, reward=0.2))
        records.evaluation(evaluated(2, 0.0, reward=0.8))
        summary = summarize(
            records, books=BOOKS, max_lag=4, train_wall_s=10.0, generator_idle_share=0.5, success_reward=2.5
        )

    assert "0.0% before, 0.0% after  (right: a reward of at least 2.5, which none had: if a good answer" in table(
        summary, folder=tmp_path
    )


def test_a_run_by_hand(tmp_path: Path) -> None:
    with Records(folder=tmp_path, total_steps=2) as records:
        run_of_two_steps(records)
        summary = summarize(records, books=BOOKS, max_lag=4, train_wall_s=10.0, generator_idle_share=0.5)
    assert (summary.accuracy_before, summary.accuracy_after) == (0.125, 0.875)
    assert (summary.evaluation_before, summary.evaluation_after) == (evaluated(0, 0.125), evaluated(2, 0.875))
    assert (summary.reward_first, summary.reward_last, summary.steps) == (0.25, 0.75, 2)
    assert (summary.completions_per_s, summary.tokens_per_s) == (0.8, 1.6)
    assert summary.lag_histogram == {0: 4, 1: 3, 2: 1}
    assert summary.token_lag_histogram == {0: 8, 1: 6, 2: 2}
    assert (summary.max_lag, summary.max_lag_seen) == (4, 2)
    assert summary.learner_wait_share == pytest.approx(0.2)
    assert summary.train_step_s_median == 2.0
    assert summary.publish_s_median == pytest.approx(0.2), "the first publish, which waits for generators, is left out"
    assert summary.publish_s_max == 0.3
    assert summary.pause_s_median == pytest.approx(0.02)
    assert summary.probe_gap_max == 3e-6
    assert (summary.groups_trained, summary.groups_dropped, summary.groups_filtered) == (4, 3, 1)
    assert summary.groups_dead_lettered == 2

    write_summary(summary, tmp_path)
    written = json.loads((tmp_path / "summary.json").read_text())
    assert written["token_lag_histogram"] == {"0": 8, "1": 6, "2": 2}
    assert written["evaluation_after"]["pass_at_k"] == {"1": 0.875, "4": 1.0}
    text = table(summary, folder=Path("runs/x"))
    for row in (
        "held-out accuracy       12.5% before, 87.5% after  (right: a reward of at least 1)",
        "held-out pass@4         25.0% before, 100.0% after",
        "reward                  0.250 in the first steps, 0.750 in the last",
        "lag of trajectories     0: 50%  1: 38%  2: 12%  (the bound is 4)",
        "learner waited          20% of the time",
        "generator idle          50.0% of the time",
        "publish                 200 ms median, 20 ms of it with serving paused",
        "logprob gap at publish  3.0e-06 nats at most",
        "groups                  4 trained, 3 dropped, 2 given up",
    ):
        assert f"  {row}\n" in f"{text}\n"
    assert "held-out reward" not in text, "it is the accuracy"


def test_the_bound_of_each_step_and_what_the_guard_did_are_in_metrics_jsonl(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    reading = MeasureReading(measure="behavior_kl", value=1.5, limit=1.0, beyond=True, well_within=False)
    change = GuardChange(kind="tightened", before=4, after=2, configured=4, steps=3, reading=reading)
    began = time.time()
    with Records(folder=tmp_path, total_steps=2) as records:
        records.step(record(step=1), step_metrics(), two_groups(), lag_bound=4)
        records.guard(change, step=1)
        records.guard(GuardChange(kind="loosened", before=2, after=3, configured=4, steps=20), step=2)
    step, tightened, loosened = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert (step["kind"], step["lag_bound"]) == ("step", 4)
    assert began - 0.001 <= tightened.pop("unix_s") <= loosened["unix_s"] <= time.time() + 0.001
    assert tightened == {
        "kind": "guard", "step": 1, "change": "tightened", "before": 4, "after": 2, "steps": 3,
        "measure": "behavior_kl", "value": 1.5, "limit": 1.0,
    }  # fmt: skip
    assert (loosened["change"], loosened["after"], loosened["measure"]) == ("loosened", 3, None)
    assert f"guard: step 1: {change.text}" in caplog.messages


@pytest.mark.parametrize(("quarantined", "said"), [(False, "quarantine would expel it"), (True, "it leaves the fleet")])
def test_a_generator_that_is_not_believed_is_in_metrics_jsonl_and_in_the_log(
    quarantined: bool, said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = Suspicion("g", "g-1", "tail", 17.5, 800, 0.02, 0.003)
    with Records(folder=tmp_path, total_steps=3) as records:
        records.suspicion(found, version=4, quarantined=quarantined)
    (line,) = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    line.pop("unix_s")

    assert line == {
        "kind": "suspicion", "version": 4, "quarantined": quarantined, "generator_id": "g", "instance": "g-1",
        "test": "tail", "evidence": 17.5, "tokens": 800, "level": 0.02, "expected": 0.003,
    }  # fmt: skip
    (message,) = caplog.messages
    assert message.startswith(f"{found.text} (17.5 nats of evidence after 800 of its tokens; ")
    assert said in message


def test_the_level_of_each_step_is_in_metrics_jsonl(tmp_path: Path) -> None:
    with Records(folder=tmp_path, total_steps=3) as records:
        records.step(record(step=1), step_metrics(), two_groups(), level=2)
        records.step(record(step=2), step_metrics(), two_groups())
        records.replay(record(step=3), step_metrics())
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["level"] for line in lines] == [2, None, None]


def test_what_was_drawn_is_in_metrics_jsonl_where_tasks_are_drawn(tmp_path: Path) -> None:
    with Records(folder=tmp_path, total_steps=2) as records:
        records.step(record(step=1), step_metrics(), two_groups(), drawn=DrawnTasks(effective=12.5, variance=0.2))
        records.step(record(step=2), step_metrics(), two_groups())
    drawn, plain = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert (drawn["tasks_effective"], drawn["tasks_variance"]) == (12.5, 0.2)
    assert drawn.keys() - plain.keys() == {"tasks_effective", "tasks_variance"}


def test_a_comparison_of_gradients_by_lag_is_in_the_line_of_its_step(tmp_path: Path) -> None:
    moments = {bucket: BucketMoments(units=2, own=0.5, pairs=0.5, cross=1 - bucket / 8) for bucket in (0, 4)}
    reading = reading_of([moments] * 3, version=0, wait_s=1.5, pass_s=0.5)
    with Records(folder=tmp_path, total_steps=2) as records:
        records.step(record(step=1), step_metrics(), two_groups(), by_lag=reading)
        records.step(record(step=2), step_metrics(), two_groups())
    measured, plain = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert {name: measured[name] for name in measured.keys() - plain.keys()} == {
        "gradient_cosine": {"lag 5-8": 0.5, "halves of lag 0": 1.0},
        "gradient_cosine_error": {"lag 5-8": 0.0},
        "gradient_norm_ratio": {"lag 5-8": 1.0},
        "gradient_wait_s": 1.5,
        "gradient_pass_s": 0.5,
    }


def test_a_resumed_run_has_no_accuracy_before_and_may_have_published_nothing(tmp_path: Path) -> None:
    with Records(folder=tmp_path, total_steps=7) as records:
        records.step(record(step=7), step_metrics(), two_groups())
        records.evaluation(evaluated(7, 0.5))
        summary = summarize(records, books=BOOKS, max_lag=4, train_wall_s=1.0, generator_idle_share=None)
    assert (summary.accuracy_before, summary.accuracy_after) == (None, 0.5)
    assert (summary.publish_s_median, summary.probe_gap_max) == (None, None)
    assert "held-out accuracy       not measured before, 50.0% after" in table(summary, folder=tmp_path)


def test_the_table_has_the_held_out_reward_where_it_is_not_the_accuracy(tmp_path: Path) -> None:
    """A reward with steps in between moves long before anything is solved."""
    with Records(folder=tmp_path, total_steps=1) as records:
        records.evaluation(evaluated(0, 0.0, reward=0.175))
        records.step(record(1), step_metrics(), two_groups())
        records.evaluation(evaluated(1, 0.0, reward=-0.66))
        summary = summarize(records, books=BOOKS, max_lag=4, train_wall_s=1.0, generator_idle_share=None)
    assert "  held-out reward         0.175 before, -0.660 after\n" in table(summary, folder=tmp_path)


def test_every_entry_is_a_line_of_json_that_says_its_kind(tmp_path: Path) -> None:
    with Records(folder=tmp_path, total_steps=2) as records:
        run_of_two_steps(records)
    entries = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [entry["kind"] for entry in entries] == [
        "publish", "evaluation", "step", "publish", "evaluation", "step", "publish", "evaluation",
    ]  # fmt: skip
    assert entries[2]["sampled_tokens"] == 8
    assert entries[2]["grad_norm"] == 1
    shared = {each.name for each in dataclasses.fields(StepMetrics)} & {f.name for f in dataclasses.fields(StepRecord)}
    assert shared == set(), "one would overwrite the other in the file"


@pytest.mark.parametrize(
    ("kind", "written"),
    [("publish", PublishReport), ("join", JoinReport), ("verdict", RunVerdict), ("load", GeneratorsLoad)],
)
def test_the_documented_fields_of_a_line_are_those_that_are_written(kind: str, written: Any) -> None:
    page = Path(__file__).parents[3] / "docs" / "run-files.md"
    (row,) = re.findall(rf"^\| `{kind}`[^|]*\|(.*)\|$", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", row)) == {"version", *(each.name for each in dataclasses.fields(written))}


def test_samples_hold_the_best_and_the_worst_completion_of_a_group(tmp_path: Path) -> None:
    with Records(folder=tmp_path, total_steps=2) as records:
        records.step(record(), step_metrics(), two_groups())
    first, second = (json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines())
    assert (first["step"], first["lease_id"], first["prompt"]) == (3, 0, "2 + 2")
    assert [(one["reward"], one["tokens"], one["finish_reason"]) for one in first["completions"]] == [
        (0.0, 1, "length"),
        (1.0, 3, "stop"),
    ]
    assert first["completions"][1]["versions"] == ["3.0", "3.1"]
    assert first["task_index"] == two_groups()[0].task_index
    judged = two_groups()[0].trajectories[0].reward
    assert {one["verifier"] for one in first["completions"]} == {judged.verifier}
    assert all(isinstance(one["components"], dict) for one in first["completions"])
    assert {one["explanation"] for one in first["completions"]} == {judged.explanation}
    assert len(second["completions"]) == 2
    assert "greedy_reward" not in first


def test_samples_hold_the_reward_of_a_greedy_answer(tmp_path: Path) -> None:
    with Records(folder=tmp_path, total_steps=2) as records:
        records.step(record(), step_metrics(), [compared(one, 0.25) for one in two_groups()])
    first, *_ = (json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines())
    assert first["greedy_reward"] == 0.25
    assert len(first["completions"]) == 2


def test_progress_is_said_with_rates_and_the_time_that_is_left(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    with Records(folder=tmp_path, total_steps=103) as records:
        records.step(record(step=3), step_metrics(), two_groups())
    (line,) = [entry.getMessage() for entry in caplog.records if entry.name == "learner.reports.run_records"]
    assert line.startswith("step 3/103  reward 0.750  lag 1.2 (max 2)  5 tokens/s  learner waits 29 %  ETA 2m05s")


@pytest.mark.parametrize("steps", [1, 60])
def test_curves_are_drawn(tmp_path: Path, steps: int) -> None:
    with Records(folder=tmp_path, total_steps=steps) as records:
        for step in range(1, steps + 1):
            records.step(record(step=step, reward_mean=-1.0 + step / steps), step_metrics(), two_groups())
        records.evaluation(evaluated(steps, 0.5))
        draw_curves(tmp_path, title="a run")
    data = (tmp_path / "curves.png").read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    assert len(data) > 10_000


def test_every_curve_that_a_run_may_have_is_drawn(tmp_path: Path) -> None:
    parts = {f"name {n}": 0.5 for n in range(12)}
    numbers = {curve.name: parts if curve.by_name else 0.5 for curve in CURVES}
    lines = [{"kind": "step", "step": step, **numbers} for step in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    draw_curves(tmp_path, title="a run")
    assert (tmp_path / "curves.png").stat().st_size > 10_000


def test_a_checkpoint_of_an_earlier_version_may_hold_more() -> None:
    kept = Tally().model_dump(mode="json")
    kept["curve"] = {"width": 1, "points": [{"last": 1, "steps": 1, "reward": 0.5, "lag": 1.0}]}

    assert Tally.model_validate(kept) == Tally()


def entries_in(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_resumed_run_knows_the_records_of_its_former_lives(tmp_path: Path) -> None:
    with Records(folder=tmp_path, total_steps=4) as records:
        run_of_two_steps(records)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "step", "step": 3, "rewa')
    with Records(folder=tmp_path, total_steps=4) as records:
        records.resume(version=3, incarnation=2)
        records.replay(record(step=2), step_metrics())
        records.replay(record(step=3), step_metrics())
        records.step(record(step=4), step_metrics(), two_groups())
        summary = summarize(records, books=BOOKS, max_lag=4, train_wall_s=records.former_s, generator_idle_share=None)
        assert (records.tally.steps, len(records.tally.reward.values)) == (4, 4)
        assert records.former_steps == 2
        assert records.former_s == 10.25, "and that of step 3, which was trained again"
    assert (summary.accuracy_before, summary.steps) == (0.125, 4)
    assert summary.lag_histogram == {0: 4, 1: 9, 2: 3}
    steps = [(entry["kind"], entry["step"]) for entry in entries_in(tmp_path) if entry["kind"] in ("step", "replay")]
    assert steps == [("step", 1), ("step", 2), ("replay", 2), ("replay", 3), ("step", 4)], "the torn line is gone"
    replayed = next(entry for entry in entries_in(tmp_path) if entry["kind"] == "replay")
    assert (replayed["loss"], replayed["lease_ids"]) == (1, [0, 1])

    with Records(folder=tmp_path, total_steps=4) as records:
        records.resume(version=4, incarnation=3)
        assert (records.tally.steps, records.tally.reward.values[0]) == (4, 0.25)


def test_steps_of_versions_that_are_lost_do_not_count(tmp_path: Path) -> None:
    with Records(folder=tmp_path, total_steps=4) as records:
        run_of_two_steps(records)
    with Records(folder=tmp_path, total_steps=4) as records:
        records.resume(version=1, incarnation=2)
        assert records.tally.reward.values == [0.25]
        assert records.tally.evaluations.newest == evaluated(1, 0.5)
        records.step(record(step=2, reward_mean=0.5), step_metrics(), two_groups())
    with Records(folder=tmp_path, total_steps=4) as records:
        records.resume(version=2, incarnation=3)
        assert (records.tally.last_step, records.tally.reward.values) == (2, [0.25, 0.5])


def test_an_evaluation_that_was_noted_with_fewer_numbers_is_read_back(tmp_path: Path) -> None:
    few = {
        "kind": "evaluation", "version": 0, "tasks": 10, "failed": 0, "accuracy": 0.5, "reward": 0.5,
        "oldest_version": 0, "newest_version": 0, "truncated_share": 0.0,
    }  # fmt: skip
    (tmp_path / "metrics.jsonl").write_text(json.dumps(few) + "\n")
    with Records(folder=tmp_path, total_steps=4) as records:
        records.resume(version=0, incarnation=2)
        first = records.tally.evaluations.before
    assert first is not None
    assert (first.accuracy, first.samples, first.pass_at_k) == (0.5, 0, {})


def test_a_full_disk_costs_lines_and_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    failed: list[str] = []
    with Records(folder=tmp_path, total_steps=9, failed_write=failed.append) as records:
        records.step(record(step=1), step_metrics(), two_groups())
        former = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, former[1]))
        try:
            for step in (2, 3):
                records.step(record(step=step), step_metrics(), two_groups())
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, former)
        records.step(record(step=4), step_metrics(), two_groups())
    assert [entry["step"] for entry in entries_in(tmp_path)] == [1, 4]
    assert failed.count("metrics.jsonl") == 2
    said = [entry for entry in caplog.records if "metrics.jsonl cannot be written" in entry.getMessage()]
    assert len(said) == 1


def many_steps(tally: Tally, steps: range) -> None:
    for step in steps:
        tally.step(record(step, reward_mean=step / 20_000, lag_max=step % 3, train_s=float(step % 7)))
        tally.publish(published(float(step % 5), 0.1, step * 1e-9))
        if step % 50 == 0:
            tally.evaluations.add(evaluated(step, 0.5))


def test_what_is_remembered_does_not_grow_with_the_length_of_a_run() -> None:
    tally = Tally()
    kept = []
    for first in range(0, 20_000, 5_000):
        many_steps(tally, range(first + 1, first + 5_001))
        kept.append(len(tally.model_dump_json()))
    assert max(kept) < 2 * kept[0], "bytes after 5000, 10000, 15000 and 20000 steps"
    assert (tally.steps, tally.last_step, tally.reward.count) == (20_000, 20_000, 20_000)
    assert tally.reward.ends() == pytest.approx((0.025, 0.975), abs=0.001)
    assert (tally.train_s.median(), tally.train_s.largest) == (3.0, 6.0)
    assert tally.publish_times() == (2.0, 4.0, 0.1)
    assert Tally.model_validate(json.loads(tally.model_dump_json())) == tally


def test_a_resume_reads_only_what_was_written_since_its_checkpoint(tmp_path: Path, clock: WallClock) -> None:
    with Records(folder=tmp_path, total_steps=4) as records:
        records.begin_steps()
        run_of_two_steps(records)
        progress = json.loads(json.dumps(records.progress()))
        records.publish(published(0.2, 0.02, 5e-6))
        records.step(record(step=3, time_s=11.0), step_metrics(), two_groups())
        records.evaluation(evaluated(3, 0.75))
        whole = records.tally
    lines = (tmp_path / "metrics.jsonl").read_bytes()
    (tmp_path / "metrics.jsonl").write_bytes(b" " * progress["metrics_bytes"] + lines[progress["metrics_bytes"] :])
    with Records(folder=tmp_path, total_steps=4) as records:
        records.resume(version=3, incarnation=2, progress=progress)
        assert records.tally == whole
        assert (records.former_steps, records.former_s) == (3, 11.0)
    with Records(folder=tmp_path, total_steps=4) as records:
        records.resume(version=2, incarnation=3, progress=progress)
        assert (records.tally.last_step, records.tally.steps) == (2, 2), "the third step is lost"


def a_life(folder: Path, clock: WallClock, *, steps: range, resume: bool, known: Any = None) -> Any:
    """Each step takes 2 s; returns what its checkpoint after the first one keeps."""
    kept = None
    with Records(folder=folder, total_steps=9) as records:
        if resume:
            records.resume(version=steps.start - 1, incarnation=2, progress=known or {})
        clock.now += 1.0
        began, before_s = clock.now, records.begin_steps()
        for step in steps:
            clock.now += 2.0
            timing = {"time_s": before_s + clock.now - began, "wait_s": 0.5, "train_s": 1.25, "copy_s": 0.25}
            records.step(record(step=step, **timing), step_metrics(), two_groups())
            kept = kept or json.loads(json.dumps(records.progress()))
    return kept


@pytest.mark.parametrize("checkpointed", [False, True])
def test_the_time_of_a_step_goes_on_over_resumes_and_what_lay_between_was_no_training(
    tmp_path: Path, clock: WallClock, checkpointed: bool
) -> None:
    kept = a_life(tmp_path, clock, steps=range(1, 4), resume=False)
    clock.now += 100.0
    a_life(tmp_path, clock, steps=range(3, 5), resume=True, known=kept if checkpointed else None)
    clock.now += 10.0
    with Records(folder=tmp_path, total_steps=9) as records:
        records.resume(version=4, incarnation=3, progress=kept if checkpointed else {})
        clock.now += 1.0
        assert records.former_s == 10.0, "of three steps and two"
        assert records.begin_steps() == 122.0

    steps = [entry for entry in entries_in(tmp_path) if entry["kind"] == "step"]
    assert [(each["step"], each["time_s"]) for each in steps] == [(1, 2), (2, 4), (3, 6), (3, 109), (4, 111)]
    assert [each["unix_s"] - steps[0]["unix_s"] for each in steps] == [0, 2, 4, 107, 109]


def test_a_clock_that_is_set_back_takes_no_time_back(tmp_path: Path, clock: WallClock) -> None:
    a_life(tmp_path, clock, steps=range(1, 4), resume=False)
    clock.now -= 3600.0
    with Records(folder=tmp_path, total_steps=9) as records:
        records.resume(version=3, incarnation=2)
        assert records.begin_steps() == 6.0
        assert records.passed_s() == 6.0


def test_a_generator_that_has_gone_is_noted_with_the_reason_if_it_was_expelled(tmp_path: Path) -> None:
    with Records(folder=tmp_path, total_steps=2) as records:
        records.leave("g0", version=3)
        records.leave("g1", version=4, expelled="it serves other weights")
    entries = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]

    assert [(entry["kind"], entry["generator_id"], entry["version"], entry["expelled"]) for entry in entries] == [
        ("leave", "g0", 3, None), ("leave", "g1", 4, "it serves other weights"),
    ]  # fmt: skip
