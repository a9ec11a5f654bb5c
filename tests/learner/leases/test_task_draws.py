"""Draws of tasks by what they teach: the same in every life, never leaving a task out, and with more to learn from."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from learner.leases.run_rows import RunRows
from learner.leases.task_draws import DrawRules, TaskDraws, TaskPlaces
from learner.leases.task_order import TaskOrder
from protocol.messages import EnvironmentInfo, LeaseGrant, TaskPart
from protocol.trajectories import TrajectoryGroup
from services.run_lock import FolderLost
from tests.learner import envs
from tests.learner.envs import learner
from tests.learner.samples import LEDGER, group, trajectory

RULES = DrawRules(candidates=8, floor=0.25, half_life_steps=4.0, ahead=4)


def rolled_out(task: int, *rewards: float) -> TrajectoryGroup:
    made = group(0, *(trajectory(0, reward=reward) for reward in rewards))
    return made.model_copy(update={"task_index": task})


def draws_of(
    folder: Path | None,
    *,
    count: int = 20,
    rules: DrawRules = RULES,
    places: TaskPlaces | None = None,
    plain: Callable[[int], int] | None = None,
    needed_from: Callable[[], int] = lambda: 0,
) -> TaskDraws:
    return TaskDraws(
        places=places or TaskPlaces(count=count),
        rules=rules,
        plain=plain or TaskOrder(count=count, seed=0).task_index,
        rows=None if folder is None else RunRows(folder / "task_draws.jsonl", run="r"),
        needed_from=needed_from,
    )


def tasks_of(draws: TaskDraws, first: int, end: int) -> list[int]:
    return [draws.task_of(lease_id) for lease_id in range(first, end)]


def fails(*_: object) -> None:
    """Stands for a call that the disk refuses."""
    raise OSError(5, "Input/output error")


def grown(draws: TaskDraws, *, first: int, end: int) -> list[int]:
    """Grants leases one by one, of which each brings a group: tasks below 5 are solved now and then."""
    drawn = []
    for lease_id in range(first, end):
        assert draws.cover(next_lease=lease_id, end=lease_id + 1, at=lease_id // 4) > lease_id
        task = draws.task_of(lease_id)
        draws.accepted(rolled_out(task, 1.0 if task < 5 else 0.0, 0.0), at=lease_id // 4)
        drawn.append(task)
    return drawn


def test_a_resume_draws_what_an_unbroken_run_draws(tmp_path: Path) -> None:
    for name in ("unbroken", "broken"):
        (tmp_path / name).mkdir()
    unbroken = grown(draws_of(tmp_path / "unbroken"), first=0, end=60)
    broken = grown(draws_of(tmp_path / "broken"), first=0, end=25)
    for first, end in ((25, 31), (31, 60)):
        broken += grown(draws_of(tmp_path / "broken"), first=first, end=end)
    assert broken == unbroken
    assert [unbroken.count(task) for task in range(20)] != [3] * 20, "they are not of the plain order"


def test_leases_have_their_tasks_in_later_lives_and_the_posterior_is_the_same_to_the_last_bit(tmp_path: Path) -> None:
    first = draws_of(tmp_path)
    drawn = grown(first, first=0, end=30)
    second = draws_of(tmp_path)
    assert tasks_of(second, 0, 30) == drawn
    ours, theirs = (draws.rates.shapes(range(20), at=9) for draws in (first, second))
    assert np.array_equal(ours, theirs)
    # A resume went back some steps: leases that were granted are granted again, as they were.
    assert second.cover(next_lease=12, end=16, at=3) >= 30
    assert tasks_of(second, 0, 30) == drawn


def test_a_draw_is_told_by_seed_lease_and_posterior_alone() -> None:
    drawn = grown(draws_of(None), first=0, end=40)
    assert grown(draws_of(None), first=0, end=40) == drawn
    assert grown(draws_of(None, rules=replace(RULES, seed=1)), first=0, end=40) != drawn
    assert grown(draws_of(None, rules=replace(RULES, ahead=1)), first=0, end=4) == drawn[:4], "nothing is known yet"


def test_a_lease_is_on_the_disk_before_it_may_be_granted_and_none_is_that_the_disk_did_not_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draws = draws_of(tmp_path)
    covered = draws.cover(next_lease=0, end=3, at=0)
    assert covered == 4, "as many as are drawn ahead"

    with monkeypatch.context() as patched:
        patched.setattr("os.fdatasync", fails)
        assert draws.cover(next_lease=2, end=6, at=0) == 4
    assert draws_of(tmp_path).cover(next_lease=0, end=0, at=0) == 4
    before = tasks_of(draws, 0, 4)
    assert draws.cover(next_lease=2, end=6, at=0) == 8
    assert tasks_of(draws_of(tmp_path), 0, 8) == [*before, *tasks_of(draws, 4, 8)]


def test_a_disk_that_takes_no_draw_is_said_once_and_so_is_that_it_works_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="learner.leases.task_draws")
    draws = draws_of(tmp_path)
    draws.cover(next_lease=0, end=4, at=0)

    for end in (8, 12):
        with monkeypatch.context() as patched:
            patched.setattr("os.fdatasync", fails)
            for _ in range(3):
                draws.cover(next_lease=end - 4, end=end, at=0)
                draws.accepted(rolled_out(1, 1.0), at=0)  # it is not synced: that it is taken proves nothing of draws
        draws.cover(next_lease=end - 4, end=end, at=0)

    no_draw = "no lease from {} on is granted while its task cannot be written down: [Errno 5] Input/output error"
    over = "tasks of leases are written down again: leases are granted"
    assert caplog.messages == [no_draw.format(4), over, no_draw.format(8), over]


def test_groups_whose_showing_is_lost_are_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="learner.leases.task_draws")
    draws = draws_of(tmp_path)
    draws.cover(next_lease=0, end=4, at=0)

    with monkeypatch.context() as patched:
        patched.setattr("services.append_file.AppendFile.append", fails)
        for lease_id in range(3):
            draws.accepted(rolled_out(1, 1.0).model_copy(update={"lease_id": lease_id}), at=0)
    draws.accepted(rolled_out(1, 1.0), at=0)

    assert caplog.messages == [
        "what groups show of their tasks is lost while it cannot be written down, from lease 0 on: "
        "[Errno 5] Input/output error",
        "what groups show of their tasks is written down again",
    ]


def test_a_file_that_cannot_be_shortened_is_said_once_and_leases_are_granted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="learner.leases.task_draws")
    monkeypatch.setattr("learner.leases.task_draws._SMALL_BYTES", 0)
    draws = draws_of(tmp_path)

    with monkeypatch.context() as patched:
        patched.setattr(RunRows, "replace", fails)
        assert [draws.cover(next_lease=end - 4, end=end, at=0) for end in (4, 8)] == [4, 8]
    assert draws.cover(next_lease=8, end=12, at=0) == 12

    assert caplog.messages == [
        "task_draws.jsonl grows while it cannot be written anew: [Errno 5] Input/output error",
        "task_draws.jsonl is written anew again: it holds what a resume needs",
    ]
    assert tasks_of(draws_of(tmp_path), 8, 12) == tasks_of(draws, 8, 12)


def test_a_learner_that_has_lost_its_folder_draws_nothing(tmp_path: Path) -> None:
    def lost() -> None:
        raise FolderLost("another learner has it")

    rows = RunRows(tmp_path / "task_draws.jsonl", run="r", may_write=lost)
    draws = TaskDraws(places=TaskPlaces(count=9), rules=RULES, plain=lambda lease_id: lease_id % 9, rows=rows)
    with pytest.raises(FolderLost):
        draws.cover(next_lease=0, end=1, at=0)


def test_a_torn_row_is_none(tmp_path: Path) -> None:
    drawn = grown(draws_of(tmp_path), first=0, end=10)
    path = tmp_path / "task_draws.jsonl"
    path.write_bytes(path.read_bytes() + b'\n{"run": "r", "first_lease": 12, "drawn": [1, 2')
    later = draws_of(tmp_path)
    assert grown(later, first=10, end=20) == tasks_of(draws_of(tmp_path), 10, 20)
    assert tasks_of(draws_of(tmp_path), 0, 10) == drawn


def test_no_task_is_left_out_for_good() -> None:
    """Task 3 is solved half of the time, and all others never are. With a floor of a quarter each of the 20 tasks has
    1/80 of the leases at least: 50 of 4,000 are expected, and fewer than 20 come about once in a million times.
    """
    rules = replace(RULES, candidates=64, half_life_steps=None, ahead=4000)
    draws = draws_of(None, rules=rules)
    draws.cover(next_lease=0, end=0, at=0)
    for task in range(20):
        draws.accepted(rolled_out(task, *([1.0, 0.0] if task == 3 else [0.0, 0.0]) * 500), at=0)
    draws.cover(next_lease=0, end=4000, at=0)
    counts = Counter(tasks_of(draws, 0, 4000))
    assert counts[3] > 0.7 * 4000
    assert min(counts[task] for task in range(20)) > 20
    assert draws.newest is not None
    assert draws.newest.effective < 2.5
    assert draws.newest.variance == pytest.approx(0.25 * (0.75 + 0.25 / 20), abs=0.02)


def test_what_is_not_rolled_out_for_long_is_tried_again() -> None:
    """Nothing is known any more of a task that was never solved, after as many half-lives as make it forgotten."""
    shares = []
    for at in (0, 400):
        draws = draws_of(None, rules=replace(RULES, floor=1e-9, ahead=2000))
        draws.cover(next_lease=0, end=0, at=0)
        for task in range(20):
            solved = [1.0, 0.0] if task < 10 else [0.0, 0.0]
            draws.accepted(rolled_out(task, *solved * 50), at=at if task < 10 else 0)
        draws.cover(next_lease=0, end=2000, at=at)
        shares.append(sum(task >= 10 for task in tasks_of(draws, 0, 2000)) / 2000)
    assert shares[0] < 0.02
    assert shares[1] > 0.05


def test_more_groups_have_something_to_learn_from() -> None:
    """Of 400 tasks 320 are never solved or always, and 80 half of the time; of the groups of 4 rollouts 7/8 of those
    80 have both. In the plain order that is 0.2 · 7/8 = 0.175 of all groups.
    """
    chance = np.random.default_rng(1)
    rates = np.concatenate([np.zeros(200), np.ones(120), np.full(80, 0.5)])
    draws = draws_of(None, count=400, rules=DrawRules(half_life_steps=64.0, ahead=16))
    spread: list[bool] = []
    for lease_id in range(4000):
        at = lease_id // 16
        draws.cover(next_lease=lease_id, end=lease_id + 1, at=at)
        task = draws.task_of(lease_id)
        rewards = (chance.random(4) < rates[task]).astype(float)
        spread.append(0 < rewards.sum() < 4)
        draws.accepted(rolled_out(task, *rewards), at=at)
    assert np.mean(spread[:400]) > 0.175
    assert np.mean(spread[2000:]) > 0.5
    seen = Counter(tasks_of(draws, 2000, 4000))
    assert len([task for task in range(320, 400) if seen[task]]) > 70, "not a few of them again and again"


def test_shares_of_a_mix_are_those_of_the_plain_order_and_tasks_that_recur_are_one() -> None:
    """A part of 6 places and 3 tasks, and one of 14; all of the first are hopeless, and those of the second are not."""
    parts = (TaskPart(places=6, tasks=3), TaskPart(places=14, tasks=14))
    places = TaskPlaces(count=20, parts=parts)
    assert [places.task_at(place) for place in range(8)] == [0, 1, 2, 0, 1, 2, 6, 7]
    order = TaskOrder(count=20, seed=0)
    draws = draws_of(None, places=places, rules=replace(RULES, ahead=400))
    draws.cover(next_lease=0, end=0, at=0)
    for task in range(20):
        draws.accepted(rolled_out(task, *([0.0] * 100 if task < 6 else [1.0, 0.0] * 50)), at=0)
    draws.cover(next_lease=0, end=400, at=0)
    for lease_id, task in enumerate(tasks_of(draws, 0, 400)):
        assert (task < 6) == (order.task_index(lease_id) < 6)
        assert task not in (3, 4, 5)
    assert set(tasks_of(draws, 0, 400)) == set(range(20)) - {3, 4, 5}
    alpha, beta = draws.rates.shapes([0, 3], at=0)
    assert (list(alpha), list(beta)) == ([1.0, 1.0], [201.0, 1.0])


def test_leases_that_were_drawn_ahead_of_a_new_level_are_drawn_again_and_no_others(tmp_path: Path) -> None:
    """Ten tasks a level; from lease 5 on it is the second one, when 8 leases are drawn and 5 granted."""
    order = TaskOrder(count=10, seed=0)
    moved = False

    def plain(lease_id: int) -> int:
        return 10 * (moved and lease_id >= 5) + order.task_index(lease_id)

    places = TaskPlaces(count=20, levels=2)
    draws = draws_of(tmp_path, places=places, plain=plain, rules=replace(RULES, ahead=8))
    draws.cover(next_lease=0, end=1, at=0)
    drawn = tasks_of(draws, 0, 8)
    assert max(drawn) < 10
    moved = True
    draws.cover(next_lease=5, end=6, at=0)
    assert tasks_of(draws, 0, 5) == drawn[:5]
    assert min(tasks_of(draws, 5, 13)) >= 10
    later = draws_of(tmp_path, places=places, plain=plain, rules=replace(RULES, ahead=8))
    assert tasks_of(later, 0, 13) == tasks_of(draws, 0, 13)


def test_where_drawing_begins_in_the_middle_of_a_run_leases_before_keep_their_tasks(tmp_path: Path) -> None:
    order = TaskOrder(count=20, seed=0)
    draws = draws_of(tmp_path)
    draws.accepted(rolled_out(3, 1.0, 1.0), at=0)  # of a lease of the plain order, before the first draw
    draws.cover(next_lease=7, end=9, at=2)
    for later in (draws, draws_of(tmp_path)):
        assert tasks_of(later, 0, 7) == [order.task_index(lease_id) for lease_id in range(7)]
    assert draws_of(tmp_path).cover(next_lease=7, end=7, at=2) == 11
    # Other tasks than those of the file: what it says is of the past.
    other = draws_of(tmp_path, count=30)
    assert other.cover(next_lease=9, end=9, at=2) == 9
    assert len(other.rates.known(at=0)) == 0


def test_leases_that_were_granted_while_drawing_was_turned_off_keep_their_tasks(tmp_path: Path) -> None:
    drawn = grown(draws_of(tmp_path), first=0, end=20)
    plain = TaskOrder(count=20, seed=0).task_index
    # A life in the plain order granted leases up to 60.
    again = draws_of(tmp_path)
    assert again.cover(next_lease=60, end=62, at=9) >= 62
    assert tasks_of(again, 0, 20) == drawn
    of_plain_order = [plain(lease_id) for lease_id in range(24, 60)]
    assert tasks_of(again, 24, 60) == of_plain_order
    assert tasks_of(draws_of(tmp_path), 24, 60) == of_plain_order


def test_the_file_does_not_grow_without_bounds_and_says_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = grown(draws_of(None), first=0, end=300)
    monkeypatch.setattr("learner.leases.task_draws._SMALL_BYTES", 4000)
    draws = draws_of(tmp_path, needed_from=lambda: 290)  # no lease before the next one is needed, till then
    assert grown(draws, first=0, end=300) == whole, "what was left out mattered to no draw"
    assert (tmp_path / "task_draws.jsonl").stat().st_size < 8000
    later = draws_of(tmp_path)
    for each in (draws, later):
        assert tasks_of(each, 290, 300) == whole[290:]
        assert len(each.rates.known(at=75)) > 10
    assert np.array_equal(later.rates.shapes(range(20), at=80), draws.rates.shapes(range(20), at=80))
    assert grown(later, first=300, end=310) == grown(draws_of(tmp_path), first=300, end=310)


@pytest.mark.parametrize("by", ["order", "signal"])
async def test_leases_are_of_the_drawn_tasks_and_their_groups_are_counted(
    tmp_path: Path, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, made = envs.options, list[TaskDraws]()

    def with_draws(**given: object) -> object:
        def make(places: TaskPlaces, order: Callable[[int], int]) -> TaskDraws:
            rows = RunRows(tmp_path / "task_draws.jsonl", run="r")
            made.append(TaskDraws(places=places, rules=replace(RULES, ahead=2), plain=order, rows=rows))
            return made[-1]

        return replace(plain(**given), make_draws=make if by == "signal" else None)  # type: ignore[arg-type]

    monkeypatch.setattr(envs, "options", with_draws)
    async with learner(tmp_path, ledger_config=replace(LEDGER, max_lag=1)) as ours, ours.env("e0") as env:
        parts = (TaskPart(places=60, tasks=60), TaskPart(places=40, tasks=10))
        info = EnvironmentInfo(name="addition", train_tasks=100, evaluation_tasks=0, parts=parts)
        await env.send(env.hello(capacity=3, environments=[info]))
        granted = (await env.next(LeaseGrant)).leases
        order = TaskOrder(count=100, seed=0)
        assert len(granted) == 3
        if by == "order":
            assert [lease.task_index for lease in granted] == [order.task_index(lease) for lease in range(3)]
            assert not (tmp_path / "task_draws.jsonl").exists()
            assert ours.intake.drawn is None
            return
        assert all(lease.task_index < 70 for lease in granted)
        later = TaskDraws(
            places=TaskPlaces(count=100, parts=parts), rules=RULES, plain=order.task_index,
            rows=RunRows(tmp_path / "task_draws.jsonl", run="r"),
        )  # fmt: skip
        assert [later.task_of(lease.lease_id) for lease in granted] == [lease.task_index for lease in granted]
        first = granted[0]
        done = group(first.lease_id, trajectory(0, reward=1.0), trajectory(0, reward=0.0), attempt=first.attempt)
        await env.finish(done.model_copy(update={"task_index": first.task_index}))
        (draws,) = made
        assert [float(shape[0]) for shape in draws.rates.shapes([first.task_index], at=0)] == [2.0, 2.0]
        assert ours.intake.drawn == draws.newest is not None


async def test_no_lease_is_granted_while_its_task_cannot_be_written_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, folder = envs.options, tmp_path / "gone"

    def with_draws(**given: object) -> object:
        rows = RunRows(folder / "task_draws.jsonl", run="r")
        make = lambda places, order: TaskDraws(places=places, rules=RULES, plain=order, rows=rows)  # noqa: E731
        return replace(plain(**given), make_draws=make)  # type: ignore[arg-type]

    monkeypatch.setattr(envs, "options", with_draws)
    async with learner(tmp_path) as ours, ours.env("e0") as env:
        await env.enter(capacity=3)
        await ours.intake.fleet_changed()
        assert ours.ledger.books().leases == 0
        folder.mkdir()
        await env.leases(3)
        assert len(list(RunRows(folder / "task_draws.jsonl", run="r").read())) == 2
