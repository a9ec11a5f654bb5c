"""The soak's verdict on its measurements: growth is found where there is some, and only there."""

import random
from collections.abc import Callable

import pytest

from benchmarks.soak.measurements import MIB, Strike, SystemSample
from benchmarks.soak.report import SoakLines, findings, text_of
from benchmarks.soak.soaking import SoakEnd, SoakPlan
from benchmarks.soak.system import LEARNER, NAMES
from benchmarks.soak.verdict import growth_of, resumes_of, tasks_once_an_epoch
from protocol.model import PolicyVersion
from tests.chaos.history import AcceptedGroup, Stamp, SystemHistory, TrainedBatch
from tests.chaos.lease_tap import AttemptKey

LIFE_STEPS = 4000
BASE_MIB = 200.0


def flat(step: int, age: int) -> float:
    return 0.0


def samples(
    grown: Callable[[int, int], float], *, journal: Callable[[int], float] = lambda step: 1.0
) -> list[SystemSample]:
    """20,000 steps in lives of four thousand; `grown` says by how many MiB, of the step and the steps in the life."""
    noise = random.Random(0)
    return [
        SystemSample(
            kind="sample",
            at_s=float(step),
            step=step,
            rss_mib={name: BASE_MIB + grown(step, step % LIFE_STEPS) + noise.uniform(-0.02, 0.02) for name in NAMES},
            life=dict.fromkeys(NAMES, step // LIFE_STEPS + 1),
            born=dict.fromkeys(NAMES, step // LIFE_STEPS * LIFE_STEPS),
            age_s=dict.fromkeys(NAMES, 60.0),
            disk_bytes={"journal": int(MIB * journal(step)), "metrics.jsonl": 1300 * step},
        )
        for step in range(0, 20_000, 50)
    ]


def lines(found: list[SystemSample], *, resumes: list[float], broken: list[str] | None = None) -> SoakLines:
    strikes = [
        Strike(kind="fault", at_s=0.0, step=0, process=LEARNER, how="killed", lasted_s=0.5, next_step_s=seconds)
        for seconds in resumes
    ]
    end = SoakEnd(kind="end", at_s=1000.0, steps=20_000, learner_starts=len(strikes) + 1, well=True)
    plan = SoakPlan(kind="plan", steps=20_000, faults_every_steps=200.0, seed=0)
    return SoakLines(plan, found, strikes, [], end, broken or [])


def found_in(told: SoakLines) -> list[str]:
    return findings(told, {name: growth_of(told.samples, name) for name in NAMES})


def test_a_soak_in_which_nothing_grows_has_no_findings() -> None:
    told = lines(samples(flat), resumes=[5.0] * 20)

    assert found_in(told) == []
    assert "Nothing grew and nothing broke" in text_of(
        told, {name: growth_of(told.samples, name) for name in NAMES}, []
    )


def test_a_leak_within_lives_is_told_from_what_grows_with_the_run() -> None:
    leak = growth_of(samples(lambda step, age: 8.0 * age / 10_000), LEARNER)
    longer = growth_of(samples(lambda step, age: 8.0 * (step - age) / 10_000), LEARNER)

    assert leak.within.value == pytest.approx(8.0, abs=0.2)
    assert not leak.across.grows
    assert longer.across.value == pytest.approx(8.0, abs=0.2)
    assert not longer.within.grows


def test_growth_of_memory_disk_and_resumes_is_found() -> None:
    found = found_in(
        lines(
            samples(lambda step, age: 8.0 * age / 10_000, journal=lambda step: 1.0 + step / 1000),
            resumes=[5.0] * 10 + [9.0] * 10,
            broken=["lease 3 is in 2 batches"],
        )
    )

    assert found[0] == "lease 3 is in 2 batches"
    for name in NAMES:
        assert any(text.startswith(f"memory of {name} grows within a life") for text in found)
    assert any(text.startswith("disk of journal grows") for text in found)
    assert found[-1] == "resumes take longer: 5.0 s at first, 9.0 s at last"


def test_what_is_meant_to_grow_is_no_finding() -> None:
    told = lines(samples(flat), resumes=[])

    assert not any("metrics.jsonl" in text for text in found_in(told))
    assert "| metrics.jsonl | " in text_of(told, {name: growth_of(told.samples, name) for name in NAMES}, [])


def test_a_resume_is_a_start_of_the_learner_and_not_a_pause() -> None:
    hung = Strike(kind="fault", at_s=0.0, step=0, process=LEARNER, how="hung", lasted_s=2.0, next_step_s=0.1)

    assert resumes_of([hung]).count == 0


def history(*tasks: int) -> SystemHistory:
    """Leases from 0 on, with these tasks, two to a batch."""
    stamp = Stamp("a", PolicyVersion.parse("1.0"))
    groups = tuple(
        AcceptedGroup(at=lease, key=AttemptKey(1, lease, 0), task_index=task, stamps=frozenset({stamp}))
        for lease, task in enumerate(tasks)
    )
    batches = tuple(
        TrainedBatch(at=100 + at, version=at, lease_ids=(2 * at, 2 * at + 1)) for at in range(len(tasks) // 2)
    )  # fmt: skip
    return SystemHistory(groups, batches, (), (), (), (), (), frozenset(), ())


def test_each_task_is_trained_once_an_epoch() -> None:
    assert tasks_once_an_epoch(history(1, 0, 0, 1, 1, 0, 0, 1), tasks=2) == []
    assert tasks_once_an_epoch(history(0, 1, 1, 1, 0, 1), tasks=2) == ["epoch 1: task 1 was trained 2 times"]
