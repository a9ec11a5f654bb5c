"""Parts of a mix by the places that they hold at an env_service."""

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from learner.leases.part_turns import PartSeats, PartTurns, next_part
from learner.leases.run_rows import RunRows
from learner.leases.task_draws import DrawRules, TaskDraws, TaskPlaces
from learner.leases.task_order import TaskOrder
from protocol.messages import EnvironmentInfo, Lease, TaskPart
from tests.learner import envs
from tests.learner.envs import learner
from tests.learner.samples import LEDGER, group, trajectory

MIX = (TaskPart(places=100, tasks=100), TaskPart(places=100, tasks=50))
DURATIONS = (200, 1)
"""Of rollouts of the two parts."""


def parts(*own: dict[str, float | int]) -> tuple[TaskPart, ...]:
    return tuple(part.model_copy(update=update) for part, update in zip(MIX, own, strict=True))


def finished(given: Sequence[TaskPart], *, capacity: int, until: int = 2000) -> tuple[Counter[int], Counter[int]]:
    """Ends, and the most leases at once, by part, at an env_service of so many places, all of them always in use."""
    order, turns = TaskOrder(count=200, seed=0), PartTurns(parts=given, seed=0)
    ended, most, held = Counter[int](), Counter[int](), Counter[int]()
    running: list[tuple[int, int]] = []
    lease_id = now = 0
    while now < until:
        while len(running) < capacity:
            plain = turns.part_at(order.task_index(lease_id))
            part = next_part(given, plain=plain, held=held)
            if part is None:
                break
            assert part == plain or turns.move(lease_id, part)
            assert turns.part_at(turns.place_of(lease_id, order.task_index(lease_id))) == part
            lease_id += 1
            held[part] += 1
            most[part] = max(most[part], held[part])
            heapq.heappush(running, (now + DURATIONS[part], part))
        now, part = heapq.heappop(running)
        held[part] -= 1
        ended[part] += 1
    return ended, most


def test_in_the_plain_order_short_episodes_end_no_faster_than_long_ones() -> None:
    ended, most = finished(parts({}, {}), capacity=8)
    assert most[0] == 8
    assert ended[1] < 2 * ended[0] + 20


@pytest.mark.parametrize(("weights", "long"), [((1.0, 1.0), 4), ((1.0, 3.0), 2), ((3.0, 1.0), 6), ((1.0, 100.0), 1)])
def test_places_are_shared_by_weight(weights: tuple[float, float], long: int) -> None:
    ended, most = finished(parts(*({"weight": weight} for weight in weights)), capacity=8)
    assert most == {0: long, 1: 8 - long}
    assert ended[0] >= long * (2000 // 200 - 1)
    assert ended[1] >= (7 - long) * 2000


def test_a_limit_is_never_exceeded_and_the_other_part_has_the_rest() -> None:
    ended, most = finished(parts({"most_leases": 3}, {}), capacity=8)
    assert most[0] == 3
    assert ended[1] > 2000 * 4
    assert next_part(parts({"most_leases": 1}, {"most_leases": 2}), plain=0, held={0: 1, 1: 2}) is None


def turns_in(folder: Path) -> PartTurns:
    return PartTurns(parts=MIX, seed=0, rows=RunRows(folder / "part_turns.jsonl", run="r"))


def test_a_lease_keeps_its_task_in_a_later_life_whether_it_was_moved_or_not(tmp_path: Path) -> None:
    former = turns_in(tmp_path)
    assert former.cover(3) >= 3
    assert former.move(1, 0)
    assert former.move(2, 1)
    later = turns_in(tmp_path)
    places = [former.place_of(lease_id, 150) for lease_id in range(3)]
    assert [later.place_of(lease_id, 150) for lease_id in range(3)] == places
    assert (places[0], former.part_at(places[1]), former.part_at(places[2])) == (150, 0, 1)
    assert not any(later.may_move(lease_id) for lease_id in range(3))
    assert later.may_move(100)


def test_what_the_disk_does_not_take_stays_in_its_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    turns = turns_in(tmp_path)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(RunRows, "append", full)
    assert not turns.move(0, 0)
    assert turns.place_of(0, 150) == 150
    assert turns.cover(1) == 0, "a later life would take the lease for a new one"
    seats = PartSeats(turns=turns, parts=MIX, held={}, plain=lambda lease_id: 150, may_move=lambda lease_id: True)
    assert not seats.admits(0)


def test_what_was_written_of_other_parts_says_nothing(tmp_path: Path) -> None:
    former = PartTurns(
        parts=(MIX[0], TaskPart(places=900, tasks=900)), seed=0, rows=RunRows(tmp_path / "part_turns.jsonl", run="r")
    )
    assert former.cover(8)
    assert former.move(1, 1)
    later = turns_in(tmp_path)
    assert (later.place_of(1, 7), later.granted_below, later.may_move(1)) == (7, 0, True)
    assert later.cover(8)
    assert later.move(2, 1)
    again = turns_in(tmp_path)
    assert (again.place_of(1, 7), again.place_of(2, 7), again.may_move(3)) == (7, later.place_of(2, 7), False)


def test_the_file_holds_what_a_resume_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("learner.leases.part_turns._SMALL_BYTES", 2000)
    rows = RunRows(tmp_path / "part_turns.jsonl", run="r")
    turns = PartTurns(parts=MIX, seed=0, rows=rows, needed_from=lambda: 900)
    for lease_id in range(1000):
        assert turns.cover(lease_id + 1)
        assert turns.move(lease_id, lease_id % 2)
    assert rows.size() < 8000
    later = turns_in(tmp_path)
    assert [later.place_of(lease_id, -1) for lease_id in range(900, 1000)] == [
        turns.place_of(lease_id, -1) for lease_id in range(900, 1000)
    ]


async def test_an_env_service_is_granted_leases_of_the_parts_that_have_room_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a mix whose first part may have two leases at once, at an env_service with eight places."""
    plain = envs.options
    monkeypatch.setattr(
        envs,
        "options",
        lambda **given: replace(plain(**given), make_turns=lambda of: PartTurns(parts=of, seed=0)),
    )
    info = EnvironmentInfo(
        name="addition", train_tasks=200, evaluation_tasks=0, parts=parts({"most_leases": 2}, {"weight": 1.0})
    )
    config = replace(LEDGER, groups_per_step=8, max_lag=8)
    async with learner(tmp_path, ledger_config=config) as ours, ours.env("e") as env:
        await env.send(env.hello(capacity=8, environments=(info,)))
        running = {lease.lease_id: lease for lease in await env.leases(8)}
        assert by_part(running.values()) == {0: 2, 1: 6}
        for _ in range(8):
            done = next(lease for lease in running.values() if lease.task_index >= 100)
            del running[done.lease_id]
            await env.finish(group(done.lease_id, trajectory(0, reward=1.0), trajectory(0, reward=0.0)))
            (lease,) = await env.leases(1)
            running[lease.lease_id] = lease
            assert by_part(running.values()) == {0: 2, 1: 6}


@pytest.mark.parametrize("drawn", [False, True], ids=["a former life granted them", "tasks are drawn"])
async def test_leases_that_may_not_move_wait_for_room_of_their_part_and_take_none_of_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drawn: bool
) -> None:
    plain, rows = envs.options, RunRows(tmp_path / "part_turns.jsonl", run="r")
    if not drawn:
        PartTurns(parts=MIX, seed=0, rows=rows).cover(200)

    def draws(places: TaskPlaces, order: Callable[[int], int]) -> TaskDraws:
        return TaskDraws(places=places, rules=DrawRules(), plain=order)

    monkeypatch.setattr(
        envs,
        "options",
        lambda **given: replace(
            plain(**given),
            make_draws=draws if drawn else None,
            make_turns=lambda of: PartTurns(parts=of, seed=0, rows=rows),
        ),
    )
    info = EnvironmentInfo(name="addition", train_tasks=200, evaluation_tasks=0, parts=parts({"most_leases": 2}, {}))
    config = replace(LEDGER, groups_per_step=8, max_lag=8)
    async with learner(tmp_path, ledger_config=config) as ours, ours.env("e") as env:
        await env.send(env.hello(capacity=8, environments=(info,)))
        leases = await env.leases(8)
        assert by_part(leases) == {0: 2, 1: 6}
        ids = [lease.lease_id for lease in leases]
        assert len(set(range(max(ids))) - set(ids)) == ours.intake.books().pending > 0
        done = next(lease for lease in leases if lease.task_index < 100)
        await env.finish(group(done.lease_id, trajectory(0, reward=1.0), trajectory(0, reward=0.0)))
        (lease,) = await env.leases(1)
        assert lease.task_index < 100
        assert lease.lease_id == min(set(range(max(ids))) - set(ids)), "the oldest of those that were passed over"


def by_part(leases: Iterable[Lease]) -> Counter[int]:
    return Counter(int(lease.task_index >= 100) for lease in leases)
