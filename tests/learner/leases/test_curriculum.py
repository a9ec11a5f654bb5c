"""The level of leases by how many rollouts are solved, and that a lease keeps its own."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from learner.leases.curriculum import Curriculum, CurriculumRules, LevelChange, LevelLog
from protocol.messages import EnvironmentInfo, LeaseGrant
from protocol.trajectories import TrajectoryGroup
from services.run_lock import FolderLost
from tests.learner import envs
from tests.learner.envs import learner
from tests.learner.samples import LEDGER, group, trajectory

RULES = CurriculumRules(window=3, raise_at=0.75, lower_at=0.25)


def solved(lease_id: int, *rewards: float) -> TrajectoryGroup:
    return group(lease_id, *(trajectory(0, reward=reward) for reward in rewards))


def tell(curriculum: Curriculum, first: int, *groups: tuple[float, float], next_lease: int = 100) -> None:
    for number, rewards in enumerate(groups):
        curriculum.accepted(solved(first + number, *rewards), next_lease=next_lease)


def test_the_level_rises_where_most_are_solved_and_falls_where_few_are() -> None:
    curriculum = Curriculum(levels=3, rules=RULES)
    tell(curriculum, 0, (1.0, 1.0), (1.0, 1.0))
    assert curriculum.level == 0, "the window is not full yet"
    tell(curriculum, 2, (0.5, 1.0))
    assert curriculum.level == 1, "5 of 6 are solved"
    tell(curriculum, 100, (1.0, 0.0), (1.0, 0.0), (1.0, 0.0), (1.0, 0.0), next_lease=120)
    assert curriculum.level == 1, "half of them"
    tell(curriculum, 104, (0.0, 0.0), (0.0, 0.0), (0.0, 0.0), next_lease=120)
    assert curriculum.level == 0
    assert [curriculum.level_of(lease) for lease in (0, 99, 100, 119, 120, 10**6)] == [0, 0, 1, 1, 0, 0]


def test_what_was_rolled_out_at_another_level_moves_nothing() -> None:
    curriculum = Curriculum(levels=3, rules=RULES)
    tell(curriculum, 0, *[(1.0, 1.0)] * 3, next_lease=50)
    tell(curriculum, 10, *[(1.0, 1.0)] * 9, next_lease=60)
    assert curriculum.level == 1


def test_there_is_no_level_beyond_the_first_and_the_last() -> None:
    curriculum = Curriculum(levels=2, rules=replace(RULES, start=7))
    assert curriculum.level == 1
    tell(curriculum, 0, *[(1.0, 1.0)] * 5)
    assert curriculum.level == 1
    curriculum = Curriculum(levels=2, rules=RULES)
    tell(curriculum, 0, *[(0.0, 0.0)] * 5)
    assert curriculum.level == 0


def test_a_lease_has_its_level_in_later_lives_too_and_a_torn_row_is_none(tmp_path: Path) -> None:
    path = tmp_path / "curriculum.jsonl"
    first = Curriculum(levels=3, rules=RULES, record=LevelLog(path, run="r"))
    tell(first, 0, *[(1.0, 1.0)] * 3, next_lease=40)
    path.write_text(path.read_text() + '\n{"run": "r", "fir')
    LevelLog(path, run="another").append(LevelChange(first_lease=0, level=2))

    second = Curriculum(levels=3, rules=RULES, record=LevelLog(path, run="r"))
    assert [second.level_of(lease) for lease in (0, 39, 40, 500)] == [0, 0, 1, 1]
    # It has lost some steps: leases that were granted already are so again, as they were.
    tell(second, 30, *[(0.0, 0.0)] * 5, next_lease=35)
    assert second.level == 1
    tell(second, 40, *[(1.0, 1.0)] * 3, next_lease=70)
    third = Curriculum(levels=3, rules=RULES, record=LevelLog(path, run="r"))
    assert [third.level_of(lease) for lease in (39, 40, 69, 70)] == [0, 1, 1, 2]


def test_a_lease_that_was_granted_and_is_nowhere_else_keeps_its_level_too(tmp_path: Path) -> None:
    """Nobody had it any more when the learner died, and no journal has it: the ledger counts from 35 on."""
    path = tmp_path / "curriculum.jsonl"
    former = Curriculum(levels=3, rules=RULES, record=LevelLog(path, run="r"))
    former.granting(40)
    assert former.level_of(39) == 0

    second = Curriculum(levels=3, rules=RULES, record=LevelLog(path, run="r"))
    tell(second, 0, *[(1.0, 1.0)] * 3, next_lease=35)
    assert (second.level, second.level_of(39)) == (1, 0)
    first = next(lease for lease in range(200) if second.level_of(lease) == 1)
    second.granting(first + 9)
    tell(second, first, *[(1.0, 1.0)] * 3, next_lease=first + 9)
    assert second.level == 2, "what this life has granted is known, and needs no distance"


def test_the_bound_on_granted_leases_is_written_seldom_and_again_where_the_disk_did_not_take_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "curriculum.jsonl"
    curriculum = Curriculum(levels=3, rules=RULES, record=LevelLog(path, run="r"))

    def fails(handle: int) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr("os.fdatasync", fails)
        patched.setattr("os.fsync", fails)
        curriculum.granting(1)
    assert LevelLog(path, run="r").granted_below() == 0
    for lease in range(100):
        curriculum.granting(lease + 1)
    assert LevelLog(path, run="r").granted_below() >= 100
    assert len(path.read_text().split()) < 20, "two rows of four words"


def test_a_level_that_cannot_be_written_down_is_not_taken(tmp_path: Path) -> None:
    curriculum = Curriculum(levels=3, rules=RULES, record=LevelLog(tmp_path / "gone" / "file", run="r"))
    tell(curriculum, 0, *[(1.0, 1.0)] * 3)
    assert curriculum.level == 0


def test_a_disk_that_takes_nothing_is_said_once_and_so_is_that_it_works_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    gone = tmp_path / "gone"
    curriculum = Curriculum(levels=3, rules=RULES, record=LevelLog(gone / "file", run="r"))
    for lease in range(5):
        curriculum.granting(lease + 1)
        tell(curriculum, lease, (1.0, 1.0))
    assert [message.partition(",")[0] for message in caplog.messages] == [
        "leases below 1 are granted",
        "level 1 would be next",
    ]
    caplog.clear()
    gone.mkdir()
    curriculum.granting(6)
    tell(curriculum, 5, (1.0, 1.0))
    assert caplog.messages[:2] == [
        "how far leases are granted is written down again",
        "levels are written down again",
    ]


@pytest.mark.parametrize("levels", [1, 2])
async def test_leases_are_of_tasks_of_their_level(tmp_path: Path, levels: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With 50 tasks a level; a window of one group, which is solved at once."""
    plain = envs.options

    def with_levels(**given: object) -> object:
        record = LevelLog(tmp_path / "curriculum.jsonl", run="r")
        make = lambda count: Curriculum(levels=count, rules=replace(RULES, window=1), record=record)  # noqa: E731
        return replace(plain(**given), make_curriculum=make)  # type: ignore[arg-type]

    monkeypatch.setattr(envs, "options", with_levels)
    config = replace(LEDGER, groups_per_step=2, max_lag=1)
    async with learner(tmp_path, ledger_config=config) as made, made.env("e0") as env:
        info = EnvironmentInfo(name="addition", train_tasks=50 * levels, evaluation_tasks=0, levels=levels)
        await env.send(env.hello(capacity=2, environments=[info]))
        granted = (await env.next(LeaseGrant)).leases
        assert all(lease.task_index < 50 for lease in granted)
        known = LevelLog(tmp_path / "curriculum.jsonl", run="r").granted_below()
        assert known > max(lease.lease_id for lease in granted) or levels == 1
        first = granted[0]
        good = group(first.lease_id, trajectory(0, reward=1.0), trajectory(0, reward=1.0), attempt=first.attempt)
        await env.finish(good.model_copy(update={"task_index": first.task_index}))
        (later,) = (await env.next(LeaseGrant)).leases
        assert later.task_index // 50 == levels - 1


def test_a_row_that_the_disk_did_not_keep_gives_no_lease_another_level_in_a_later_life(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "curriculum.jsonl"
    curriculum = Curriculum(levels=3, rules=RULES, record=LevelLog(path, run="r"))
    tell(curriculum, 0, *[(1.0, 1.0)] * 3, next_lease=40)

    def fails(handle: int) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr("os.fdatasync", fails)
        patched.setattr("os.fsync", fails)
        tell(curriculum, 40, *[(1.0, 1.0)] * 3, next_lease=70)
    assert curriculum.level_of(70) == 1, "it was not taken"
    later = Curriculum(levels=3, rules=RULES, record=LevelLog(path, run="r"))
    assert later.level_of(70) == 1


def test_the_name_of_the_file_is_on_the_disk_before_a_lease_of_the_level_is_granted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []

    def sync(handle: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{handle}"))

    for name in ("fsync", "fdatasync"):
        monkeypatch.setattr(f"os.{name}", sync)
    LevelLog(tmp_path / "curriculum.jsonl", run="r").append(LevelChange(first_lease=4, level=1))
    assert synced == [str(tmp_path / "curriculum.jsonl"), str(tmp_path)]


def test_a_learner_that_has_lost_its_folder_changes_no_level_of_the_one_that_has_it(tmp_path: Path) -> None:
    def lost() -> None:
        raise FolderLost("another learner has it")

    record = LevelLog(tmp_path / "curriculum.jsonl", run="r", may_write=lost)
    curriculum = Curriculum(levels=3, rules=RULES, record=record)
    with pytest.raises(FolderLost):
        tell(curriculum, 0, *[(1.0, 1.0)] * 3, next_lease=40)
    assert not (tmp_path / "curriculum.jsonl").exists()


def test_garbage_of_a_power_loss_is_no_row(tmp_path: Path) -> None:
    path = tmp_path / "curriculum.jsonl"
    record = LevelLog(path, run="r")
    record.append(LevelChange(first_lease=4, level=1))
    path.write_bytes(path.read_bytes() + b'\n\xff\x00{"run"')
    assert record.read() == [LevelChange(first_lease=4, level=1)]
