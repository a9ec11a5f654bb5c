"""The learner's metrics as a scrape sees them."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import generate_latest

from learner.journal.journal import FOLDER, Journal
from learner.ledger import ATTEMPT_OUTCOMES, LEASE_STATES, Ledger
from learner.reports.run_records import Records
from learner.reports.status import LearnerMetrics, LearnerStatus
from learner.reports.tally import Timing, step_record
from learner.training.guard import GuardChange, MeasureReading
from learner.training.lag_gradients import BucketMoments, LagReading, reading_of
from learner.training.step import StepMetrics
from learner.weights.fleet import FleetMembers
from learner.weights.published import PublishReport
from protocol.model import PolicyVersion
from services.http.metrics import Metrics
from services.http.waiting import Waiting
from tests.learner.generators import FINGERPRINTS, announcement
from tests.learner.samples import LEDGER, group, trajectory


def test_the_books_are_shown_as_they_are_when_somebody_looks_and_they_balance() -> None:
    scraped, ledger = Metrics("learner"), Ledger(LEDGER)
    LearnerMetrics(scraped).books(ledger.books)
    ledger.served_changed(0)
    ledger.grant(now=0.0, holder="a", room=3)
    ledger.accept(lease_id=0, attempt=0, oldest_version=0, size=1)
    shown = generate_latest(scraped.registry).decode()
    assert 'headway_learner_leases{state="buffered"} 1.0' in shown
    assert 'headway_learner_leases{state="running"} 2.0' in shown
    assert 'headway_learner_attempts{outcome="accepted"} 1.0' in shown
    assert 'headway_learner_ended_attempts_total{outcome="accepted"} 1.0' in shown
    assert 'headway_learner_ended_leases_total{state="dead_lettered"} 0.0' in shown, "there before the first one"
    assert 'headway_learner_left_out_groups_total{reason="untaught"} 0.0' in shown


def test_the_bound_in_use_and_what_the_guard_did_are_shown() -> None:
    scraped, ledger = Metrics("learner"), Ledger(LEDGER)
    metrics = LearnerMetrics(scraped)
    metrics.lag_bound(lambda: ledger.max_lag, configured=LEDGER.max_lag)
    ledger.bound_lag(0)
    reading = MeasureReading(measure="behavior_kl", value=1.5, limit=1.0, beyond=True, well_within=False)
    metrics.guard(GuardChange(kind="tightened", before=1, after=0, configured=1, steps=3, reading=reading))
    metrics.guard(GuardChange(kind="loosened", before=0, after=1, configured=1, steps=20))
    shown = generate_latest(scraped.registry).decode()
    assert "headway_learner_lag_bound_versions 0.0" in shown
    assert "headway_learner_lag_bound_configured_versions 1.0" in shown
    assert 'headway_learner_guard_changes_total{change="tightened",measure="behavior_kl"} 1.0' in shown
    assert 'headway_learner_guard_changes_total{change="loosened",measure="none"} 1.0' in shown


def test_the_level_is_shown_as_it_is_when_somebody_looks() -> None:
    scraped, levels = Metrics("learner"), [None, 2]
    LearnerMetrics(scraped).level(lambda: levels.pop(0))
    shown = [generate_latest(scraped.registry).decode() for _ in range(2)]
    assert "headway_learner_curriculum_level 0.0" in shown[0], "no levels are one"
    assert "headway_learner_curriculum_level 2.0" in shown[1]


def test_the_exported_states_and_outcomes_are_all_there_are() -> None:
    ledger = Ledger(LEDGER)
    ledger.served_changed(0)
    ledger.grant(now=0.0, holder="a", room=3)
    ledger.fail(now=0.0, lease_id=0, attempt=0, kind="data", reason="r")
    ledger.filter(lease_id=1, attempt=0)
    ledger.expire(now=1e9)
    books = ledger.books()
    assert sum(getattr(books, state) for state in LEASE_STATES) == books.leases
    assert sum(getattr(books, outcome) for outcome in ATTEMPT_OUTCOMES) == books.attempts


def value(scraped: Metrics, name: str, **labels: str) -> float:
    found = scraped.registry.get_sample_value(f"headway_learner_{name}", labels)
    assert found is not None, f"{name} {labels} is not shown"
    return float(found)


def step_metrics(step: int) -> StepMetrics:
    """Each field has a value of its own in each step."""
    names = [each.name for each in dataclasses.fields(StepMetrics)]
    values: dict[str, Any] = {name: 100 * step + place for place, name in enumerate(names, start=1)}
    return StepMetrics(**{**values, "means": {}})


SCRAPED_OF_THE_NEWEST_STEP = {
    "policy_version": "step",
    "reward_mean": "reward_mean",
    "lag_max_versions": "lag_max",
    "effective_sample_share": "effective_sample_share",
    "mismatch_kl_nats": "mismatch_kl",
    "behavior_kl_nats": "behavior_kl",
    "importance_ratio_mean": "importance_ratio_mean",
    "importance_ratio_max": "importance_ratio_max",
    "entropy_nats": "entropy",
}
SCRAPED_OF_ALL_PUBLISHES = {
    "publish": "total_s",
    "publish_prepare": "prepare_s",
    "publish_commit": "commit_s",
    "publish_pause": "pause_s",
}


def test_what_is_scraped_agrees_with_what_metrics_jsonl_holds(tmp_path: Path) -> None:
    scraped = Metrics("learner")
    metrics = LearnerMetrics(scraped)
    with Records(folder=tmp_path, total_steps=3) as records:
        for step in range(3):
            groups = [group(2 * step, trajectory(0, step, reward=0.5), trajectory(step)), group(2 * step + 1)]
            timing = Timing(time_s=step + 1.0, wait_s=0.25 * step, train_s=0.5, copy_s=0.125)
            record = step_record(groups, version=step + 1, timing=timing, success_reward=1.0)
            records.step(record, step_metrics(step), groups)
            metrics.step(record, step_metrics(step))
            publish = PublishReport(
                version=step + 1,
                members=1,
                total_s=0.5 + step,
                prepare_s=0.25 + step,
                commit_s=0.125 + step,
                pause_s=0.0625 + step,
                probe_gap=1e-6 * (step + 1),
            )
            records.publish(publish)
            metrics.published(publish)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "step"]
    publishes = [line for line in lines if line["kind"] == "publish"]

    def total(name: str) -> float:
        return float(sum(step[name] for step in steps))

    assert value(scraped, "steps_total") == len(steps) == value(scraped, "step_seconds_count")
    newest = {field: value(scraped, name) for name, field in SCRAPED_OF_THE_NEWEST_STEP.items()}
    assert newest == {field: steps[-1][field] for field in newest}
    assert value(scraped, "skipped_updates_total") == total("skipped_updates")
    for name, field in (("train", "train_s"), ("batch_wait", "wait_s"), ("copy", "copy_s")):
        assert value(scraped, f"{name}_seconds_total") == pytest.approx(total(field))
    whole = total("train_s") + total("wait_s") + total("copy_s")
    assert value(scraped, "step_seconds_sum") == pytest.approx(whole)
    assert value(scraped, "trained_tokens_total") == total("sampled_tokens")
    assert value(scraped, "trained_token_lag_versions_count") == total("sampled_tokens")
    assert value(scraped, "trained_trajectories_total") == total("trajectories")
    for name, field in (("token", "token_lag_counts"), ("trajectory", "lag_counts")):
        lags = sum(int(lag) * count for step in steps for lag, count in step[field].items())
        assert value(scraped, f"trained_{name}_lag_versions_sum") == lags > 0
    assert value(scraped, "probe_gap_nats") == publishes[-1]["probe_gap"]
    for name, field in SCRAPED_OF_ALL_PUBLISHES.items():
        assert value(scraped, f"{name}_seconds_sum") == sum(each[field] for each in publishes)
        assert value(scraped, f"{name}_seconds_count") == len(publishes)


def test_a_number_of_the_newest_step_has_no_series_before_the_first_step_of_this_process() -> None:
    """After a restart 0 would look as if the policy had lost its rewards, and its version."""
    scraped = Metrics("learner")
    metrics = LearnerMetrics(scraped)
    metrics.begins(7, last_step=20)
    first = generate_latest(scraped.registry).decode()
    timing = Timing(time_s=1.0, wait_s=0.25, train_s=0.5, copy_s=0.25)
    metrics.step(step_record([group(0)], version=7, timing=timing, success_reward=1.0), step_metrics(8))

    assert "headway_learner_policy_version 7.0" in first
    newest = [
        f"headway_learner_{name} " for name in (*SCRAPED_OF_THE_NEWEST_STEP, "probe_gap_nats") if name[:6] != "policy"
    ]
    assert [name for name in newest if f"\n{name}" in first] == []
    assert value(scraped, "policy_version") == 8
    assert value(scraped, "usual_step_time") == 1.0


def test_the_time_without_a_step_is_that_since_the_newest_one_and_none_once_all_are_done() -> None:
    scraped, now = Metrics("learner"), [100.0]
    metrics = LearnerMetrics(scraped, clock=lambda: now[0])
    now[0] = 130.0
    assert value(scraped, "step_age") == 30.0, "since the start of this process"
    metrics.begins(5, last_step=7)
    now[0] = 140.0
    assert value(scraped, "step_age") == 10.0
    metrics.replayed(6)
    assert value(scraped, "step_age") == 0.0
    now[0] = 5000.0
    assert value(scraped, "step_age") == 4860.0
    timing = Timing(time_s=1.0, wait_s=0.25, train_s=0.5, copy_s=0.25)
    metrics.step(step_record([group(0)], version=6, timing=timing, success_reward=1.0), step_metrics(7))
    now[0] = 9000.0
    assert value(scraped, "step_age") == 0.0, "what is left is to evaluate and to save"


def test_the_disk_and_the_journal_are_shown_and_each_sync_is_timed(tmp_path: Path) -> None:
    scraped = Metrics("learner")
    metrics = LearnerMetrics(scraped)
    metrics.folder(tmp_path, unseen=lambda: 17)
    assert value(scraped, "samples_left_out_total") == 17
    with Journal.open(tmp_path / FOLDER, synced=metrics.synced) as journal:
        journal.append_group(group(0))
        journal.append_batch(version=0, lease_ids=(0,))

    assert value(scraped, "journal_sync_seconds_count") == 1
    assert value(scraped, "journal_bytes") == sum(path.stat().st_size for path in (tmp_path / FOLDER).iterdir()) > 0
    assert 0 < value(scraped, "disk_free_bytes") < value(scraped, "disk_size_bytes")
    metrics.folder(tmp_path / "gone", unseen=int)
    assert value(scraped, "disk_free_bytes") != value(scraped, "disk_free_bytes"), "no number, and no failed scrape"


def test_generators_and_expulsions_are_shown_as_they_are_when_somebody_looks() -> None:
    scraped, expulsions = Metrics("learner"), [0, 1]
    metrics = LearnerMetrics(scraped)
    metrics.fleet(lambda: ("serving", "serving", "behind"), expulsions=lambda: expulsions.pop(0))
    metrics.env_services(lambda: 3)

    assert value(scraped, "generators", state="serving") == 2
    assert value(scraped, "generators", state="joining") == 0
    assert value(scraped, "env_services") == 3
    assert value(scraped, "expelled_generators_total") == 0
    assert value(scraped, "expelled_generators_total") == 1


def test_the_evidence_is_shown_by_generator_as_long_as_there_is_any() -> None:
    scraped = Metrics("learner")
    metrics = LearnerMetrics(scraped)
    metrics.distrust({"a": 0.5, "b": 17.0})
    assert value(scraped, "distrust_nats", generator="b") == 17.0

    metrics.distrust({"a": 1.5})

    assert value(scraped, "distrust_nats", generator="a") == 1.5
    assert scraped.registry.get_sample_value("headway_learner_distrust_nats", {"generator": "b"}) is None


def test_generators_that_are_not_believed_are_in_the_notes_of_the_status(tmp_path: Path) -> None:
    fleet = FleetMembers(
        fingerprints=FINGERPRINTS, incarnation=1, announce_every_s=2.0, silence_s=15.0, changed=lambda: None
    )
    shown = LearnerStatus(
        name="run", folder=tmp_path, total_steps=9, incarnation=1, ledger=Ledger(LEDGER), fleet=fleet,
        env_services=tuple, metrics=LearnerMetrics(Metrics("learner")), waits=Waiting(),
        distrusted=lambda: ("generator g lies",),
    )  # fmt: skip

    assert shown.report().notes == ("generator g lies",)


def test_a_folder_that_is_gone_is_told_with_all_the_rest(tmp_path: Path) -> None:
    fleet = FleetMembers(
        fingerprints=FINGERPRINTS, incarnation=1, announce_every_s=2.0, silence_s=15.0, changed=lambda: None
    )
    shown = LearnerStatus(
        name="run", folder=tmp_path / "gone", total_steps=9, incarnation=1, ledger=Ledger(LEDGER), fleet=fleet,
        env_services=tuple, metrics=LearnerMetrics(Metrics("learner")), waits=Waiting(),
    ).report()  # fmt: skip

    (problem,) = shown.problems
    assert f"{tmp_path / 'gone'} cannot be reached: No such file or directory" in problem
    assert (shown.id, shown.disks) == ("run", ())


def by_lag(cosine: float, *, own: float = 0.5) -> LagReading:
    """Three measurements, of lag 0 and 5 to 8; without noise unless more is `own` than 0.5."""
    moments = {bucket: BucketMoments(units=2, own=own, pairs=0.5, cross=1.0) for bucket in (0, 4)}
    moments[4] = dataclasses.replace(moments[4], cross=cosine)
    return reading_of([moments] * 3, version=9, wait_s=1.5, pass_s=0.5)


def test_gradients_by_lag_are_scraped_and_are_a_note_that_says_what_to_do_where_they_turn_away(tmp_path: Path) -> None:
    scraped = Metrics("learner")
    metrics = LearnerMetrics(scraped)
    fleet = FleetMembers(
        fingerprints=FINGERPRINTS, incarnation=1, announce_every_s=2.0, silence_s=15.0, changed=lambda: None
    )
    shown = LearnerStatus(
        name="run", folder=tmp_path, total_steps=9, incarnation=1, ledger=Ledger(LEDGER), fleet=fleet,
        env_services=tuple, metrics=metrics, waits=Waiting(), min_cosine=0.7,
    )  # fmt: skip
    assert shown.report().notes == ()
    metrics.by_lag(by_lag(0.75))
    fine = "cosine of gradients to that of lag 0, before step 10: 0.75 ± 0.00 at lag 5-8 (halves of lag 0: 1.00)"
    assert shown.report().notes == (fine,)
    metrics.by_lag(by_lag(0.5))
    (note,) = shown.report().notes
    assert note.startswith(f"{fine.replace('0.75', '0.50')}; groups of lag 5-8 pull elsewhere than new ones: ")
    assert 'lag.adapt = "gradient"' in note
    metrics.by_lag(by_lag(0.5, own=5.0))
    (noisy,) = shown.report().notes
    assert noisy.endswith("(halves of lag 0: 0.10); that is too noisy to conclude from: raise lag.measure_groups")
    assert value(scraped, "gradient_cosine", lag="5-8") == 0.5
    assert value(scraped, "gradient_norm_ratio", lag="5-8") == 1.0
    assert value(scraped, "gradient_comparison_seconds_total") == 6.0


def test_nobody_is_behind_between_a_step_and_its_publish(tmp_path: Path) -> None:
    ledger, metrics = Ledger(LEDGER), LearnerMetrics(Metrics("learner"))
    fleet = FleetMembers(
        fingerprints=FINGERPRINTS, incarnation=1, announce_every_s=2.0, silence_s=15.0, changed=lambda: None
    )
    shown = LearnerStatus(
        name="run", folder=tmp_path, total_steps=9, incarnation=1, ledger=ledger, fleet=fleet, env_services=tuple,
        metrics=metrics, waits=Waiting(),
    )  # fmt: skip
    for name, number in (("a", 0), ("b", 0)):
        fleet.announce(announcement(name, "http://127.0.0.1:1"), now=0.0)
        fleet.committed(name, version=PolicyVersion(1, number), fingerprint="f")
    publish = PublishReport(version=0, members=2, prepare_s=0.1, commit_s=0.1, pause_s=0.0, total_s=0.2, probe_gap=0.0)
    metrics.published(publish)
    ledger.served_changed(0)
    for lease in ledger.grant(now=0.0, holder="e", room=LEDGER.groups_per_step):
        ledger.accept(lease_id=lease.lease_id, attempt=0, oldest_version=0, size=1)
    ledger.take(now=0.0)
    ledger.trained(1)
    assert ledger.version == 1, "a step has ended"

    assert list(shown.generator_states()) == ["serving", "serving"]
    fleet.committed("a", version=PolicyVersion(1, 1), fingerprint="f")
    metrics.published(dataclasses.replace(publish, version=1))
    assert list(shown.generator_states()) == ["serving", "behind"], "it missed a publish"


def test_the_labels_of_waits_are_few_whatever_is_waited_for() -> None:
    scraped = Metrics("learner")
    metrics = LearnerMetrics(scraped)
    for whom in ("groups: 1 of 2 are there", "a generator that serves version 3", "room on the disk of /runs", "Ada"):
        metrics.waited(whom, 2.0)

    assert value(scraped, "waited_seconds_total", whom="groups") == 2
    assert value(scraped, "waited_seconds_total", whom="generator") == 2
    assert value(scraped, "waited_seconds_total", whom="room") == 2
    assert value(scraped, "waited_seconds_total", whom="others") == 2
    assert value(scraped, "waited_seconds_total", whom="evaluation") == 0
