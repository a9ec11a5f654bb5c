"""The clock, the order of callbacks, and the network, by themselves."""

import asyncio
import contextlib
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from simulation.actors.engine import EngineScript
from simulation.world import disk as disk_calls
from simulation.world.clock import ProcessKilled, Stuck, World
from simulation.world.cores import Cores
from simulation.world.disk import Disk, DiskStrike, simulated_sync, simulated_write
from simulation.world.network import LinkRates, Network, Pipe
from simulation.world.process import Process
from simulation.world.threads import SimulatedLock, SimulatedThread, current_thread


@pytest.fixture
def world() -> World:
    return World(seed=7)


@pytest.fixture
def network(world: World) -> Network:
    return Network(world, LinkRates(delay_s=0.1, jitter_s=0.5))


def _process(world: World, name: str) -> Process:
    return Process(world, name=name, host=name, ended=lambda process, code: None)


def test_time_jumps_from_one_event_to_the_next(world: World) -> None:
    seen: list[float] = []
    world.at(3600.0, lambda: seen.append(world.now))
    world.at(5.0, lambda: seen.append(world.now))
    world.run(until=lambda: len(seen) == 2)
    assert seen == [5.0, 3600.0]


def test_a_world_in_which_nothing_will_ever_happen_says_so(world: World) -> None:
    with pytest.raises(Stuck, match="nothing is due"):
        world.run(until=lambda: False)


def test_a_killed_process_runs_nothing_more(world: World) -> None:
    World.active = world
    try:
        process, ticks = _process(world, "one"), list[float]()

        async def tick() -> None:
            while True:
                ticks.append(world.now)
                await asyncio.sleep(1.0)

        process.start(lambda stop: tick())
        world.at(2.5, process.kill)
        over = list[bool]()
        world.at(10.0, lambda: over.append(True))
        world.run(until=lambda: bool(over))
    finally:
        World.active = None
    assert ticks == [0.0, 1.0, 2.0]


def test_a_process_that_stands_still_goes_on_later(world: World) -> None:
    World.active = world
    try:
        process, ended = _process(world, "one"), list[float]()

        async def sleep() -> None:
            await asyncio.sleep(1.0)
            ended.append(world.now)

        process.start(lambda stop: sleep())
        world.at(0.5, process.stand_still)
        world.at(9.0, process.go_on)
        world.run(until=lambda: bool(ended))
    finally:
        World.active = None
    assert ended == [9.0]


def test_messages_of_one_connection_stay_in_order(world: World, network: Network) -> None:
    pipe, arrived = Pipe(network, "a", "b"), list[int]()
    for number in range(50):
        pipe.send(lambda number=number: arrived.append(number))  # type: ignore[misc]
    world.run(until=lambda: len(arrived) == 50)
    assert arrived == sorted(arrived)


def test_a_lost_packet_holds_up_its_connection_and_no_other(world: World, network: Network) -> None:
    network.lost = 0.3
    pipes, arrived = [Pipe(network, "a", "b") for _ in range(2)], list[tuple[int, int]]()
    for number in range(50):
        for which, pipe in enumerate(pipes):
            pipe.send(lambda number=number, which=which: arrived.append((which, number)))  # type: ignore[misc]
    world.run(until=lambda: len(arrived) == 100)
    for which in range(2):
        numbers = [number for one, number in arrived if one == which]
        assert numbers == sorted(numbers)
    assert [number for _, number in arrived] != sorted(number for _, number in arrived)


def test_what_is_sent_over_a_cut_link_arrives_when_it_is_mended(world: World, network: Network) -> None:
    pipe, arrived = Pipe(network, "a", "b"), list[float]()
    network.cut("a", "b")
    pipe.send(lambda: arrived.append(world.now))
    world.at(100.0, lambda: network.mend("a", "b"))
    world.run(until=lambda: bool(arrived))
    assert arrived[0] > 100.0


def test_what_a_cut_link_held_stays_in_order_with_what_was_sent_later(world: World, network: Network) -> None:
    pipe, arrived = Pipe(network, "a", "b"), list[int]()

    def send(number: int) -> None:
        pipe.send(lambda: arrived.append(number))

    network.cut("a", "b")
    world.at(5.0, lambda: network.mend("a", "b"))
    for number in range(60):
        world.at(number / 10, lambda number=number: send(number))  # type: ignore[misc]
    world.run(until=lambda: len(arrived) == 60)
    assert arrived == sorted(arrived)


def test_a_closed_connection_loses_what_is_under_way(world: World, network: Network) -> None:
    pipe, arrived, over = Pipe(network, "a", "b"), list[float](), list[bool]()
    pipe.send(lambda: arrived.append(world.now))
    pipe.close()
    world.at(100.0, lambda: over.append(True))
    world.run(until=lambda: bool(over))
    assert not arrived


def test_bulk_data_of_one_host_is_sent_one_after_the_other(world: World) -> None:
    network = Network(world, LinkRates(bulk_bytes_per_s=100.0))
    assert [network.bulk_s("a", 100) for _ in range(3)] == [1.0, 2.0, 3.0]


def test_chance_is_the_worlds_own() -> None:
    random.seed(1)
    assert World(seed=3).hexadecimal(16) == World(seed=3).hexadecimal(16) != World(seed=4).hexadecimal(16)


def test_a_host_that_goes_down_loses_the_last_names_that_were_not_synced(tmp_path: Path, world: World) -> None:
    (tmp_path / "tmp").mkdir()
    folder = tmp_path / "run"
    folder.mkdir()
    disk = Disk(tmp_path, world, host="one")
    world.current = _process(world, "one")
    names = [folder / name for name in ("kept", "a", "b", "c")]
    told: list[str] = []
    disk.expecting = [("k", lambda: told.append("k")), ("a", lambda: told.append("a"))]
    for path in names:
        path.with_suffix(".new").write_text("new")
        path.write_text("old")
        disk.synced.update({each.stat().st_ino: 3 for each in (path, path.with_suffix(".new"))})
        disk.renamed(path.with_suffix(".new"), path)
        path.with_suffix(".new").replace(path)
        if path.name == "kept":
            disk.names_synced(folder, among=disk.renames)
    lost = [each for each in disk.lose_unsynced(folder) if each.startswith("the name")]
    texts = [path.read_text() for path in names]
    assert told == ["k"], "what is not on the disk is not told of"
    assert disk.renames == []
    assert len(lost) == texts.count("old") <= 3
    assert texts == sorted(texts), "the last ones are lost"


def _ticks(world: World, process: Process, ticks: list[float]) -> None:
    def tick() -> None:
        ticks.append(world.now)
        process.loop.call_later(1.0, tick)

    process.loop.call_soon(tick)


def test_an_event_loop_in_a_long_callback_stands_still_and_its_threads_go_on(world: World) -> None:
    World.active = world
    try:
        process, ticks, turns = _process(world, "one"), list[float](), list[float]()
        _ticks(world, process, ticks)
        world.at(2.5, lambda: process.block_until(9.5))

        def work() -> None:
            thread = current_thread()
            assert thread is not None
            for _ in range(3):
                thread.sleep(2.0)
                turns.append(world.now)

        process.loop.call_soon(lambda: SimulatedThread(target=work).start())
        world.run(until=lambda: len(ticks) == 5)
    finally:
        World.active = None
    assert ticks == [0.0, 1.0, 2.0, 9.5, 10.5]
    assert turns == [2.0, 4.0, 6.0]


def test_a_loop_that_wants_the_lock_of_a_thread_is_as_late_as_if_it_had_waited(world: World) -> None:
    World.active = world
    try:
        process, ticks, lock, held = _process(world, "one"), list[float](), SimulatedLock(), list[str]()
        _ticks(world, process, ticks)

        def work() -> None:
            thread = current_thread()
            assert thread is not None
            with lock:
                thread.sleep(5.0)
                held.append("thread")

        def want() -> None:
            with lock:
                held.append("loop")

        process.loop.call_soon(lambda: SimulatedThread(target=work).start())
        process.loop.call_later(2.5, want)
        world.run(until=lambda: len(ticks) == 5)
    finally:
        World.active = None
    assert held == ["thread", "loop"]
    assert ticks == [0.0, 1.0, 2.0, 5.0, 6.0]


def test_a_slow_sync_does_not_cover_what_is_appended_meanwhile(tmp_path: Path, world: World) -> None:
    disk = Disk(tmp_path, world, host="one", sync_s=1.0)
    World.active = world
    world.add(disk)
    path = tmp_path / "file"
    path.write_text("old")
    try:
        process, synced = _process(world, "one"), list[bool]()

        def work() -> None:
            with path.open("rb") as file:
                simulated_sync("fdatasync")(file.fileno())
            synced.append(True)

        process.loop.call_soon(lambda: SimulatedThread(target=work).start())
        world.at(0.001, lambda: path.write_text("old and new"))
        world.run(until=lambda: bool(synced))
    finally:
        World.active = None
    assert disk.synced == {path.stat().st_ino: 3}


@pytest.fixture
def disk(tmp_path: Path, world: World) -> Iterator[Disk]:
    disk = Disk(tmp_path, world, host="one")
    World.active = world
    world.add(disk)
    (tmp_path / "tmp").mkdir()
    yield disk
    World.active = None


@pytest.mark.parametrize("in_a_thread", [True, False])
def test_a_process_dies_between_two_operations_of_its_disk(disk: Disk, *, in_a_thread: bool) -> None:
    world, done = disk.world, list[int]()
    process, path = _process(world, "one"), disk.root / "file"
    path.write_text("text")

    def work() -> None:
        for number in range(5):
            with path.open("rb") as file:
                simulated_sync("fsync")(file.fileno())
            done.append(number)

    disk.strikes.append(DiskStrike(process.kill, count=2, since="sync"))
    process.loop.call_soon((lambda: SimulatedThread(target=work).start()) if in_a_thread else work)
    world.run(until=lambda: not process.alive)
    assert done == [0, 1]


def test_the_end_of_a_process_closes_its_handles_and_what_it_does_after_that_none_of_others(disk: Disk) -> None:
    process = disk.world.current = _process(disk.world, "one")
    path = disk.root / "file"
    path.write_text("text")
    handle = disk_calls._open(path, os.O_RDONLY)
    copy = disk_calls._dup(handle)
    process.kill()
    disk.release(process)
    for each in (handle, copy):
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(each)
    of_another = os.open(path, os.O_RDONLY)
    with pytest.raises(ProcessKilled):
        disk_calls._close(of_another)
    os.close(of_another)


@pytest.mark.parametrize("written_again", [True, False])
def test_what_a_sync_has_given_up_is_on_the_disk_only_if_it_was_written_again(
    disk: Disk, *, written_again: bool
) -> None:
    disk.world.current = _process(disk.world, "one")
    path = disk.root / "run" / "file"
    path.parent.mkdir()
    with path.open("wb+") as file:
        write = simulated_write("pwrite")
        write(file.fileno(), b"kept", 0)
        simulated_sync("fsync")(file.fileno())
        write(file.fileno(), b" and more", 4)
        disk.failing = True
        with pytest.raises(OSError, match="Input/output error"):
            simulated_sync("fsync")(file.fileno())
        disk.failing = False
        if written_again:
            write(file.fileno(), b" and more", 4)
        simulated_sync("fsync")(file.fileno())
    disk.lose_unsynced(path.parent)
    assert (path.read_text() == "kept and more") == written_again


def test_a_disk_without_room_takes_a_part_of_some_writes(disk: Disk) -> None:
    disk.world.current, disk.full = _process(disk.world, "one"), True
    write, taken = simulated_write("pwritev"), set[int]()
    with (disk.root / "file").open("wb+", buffering=0) as file:
        for _ in range(40):
            with contextlib.suppress(OSError):
                taken.add(write(file.fileno(), [b"some", b"bytes"], 0))
                with pytest.raises(OSError, match="No space left"):
                    write(file.fileno(), [b"bytes"], 0)
    assert taken
    assert all(0 < size < 9 for size in taken)


def test_names_in_one_folder_may_be_lost_and_those_in_another_kept(disk: Disk) -> None:
    disk.world.current = _process(disk.world, "one")
    found = set[tuple[bool, bool]]()
    for number in range(20):
        folders = [disk.root / "run" / f"{name}-{number}" for name in ("one", "other")]
        for folder in folders:
            folder.mkdir(parents=True)
            (folder / "draft").write_text("")
            disk.renamed(folder / "draft", folder / "name")
            (folder / "draft").rename(folder / "name")
        disk.lose_unsynced(disk.root / "run")
        first, second = ((folder / "name").exists() for folder in folders)
        found.add((first, second))
    assert found == {(True, True), (True, False), (False, True), (False, False)}


def _computing(world: World, number: float, threads: dict[str, list[float]]) -> dict[str, float]:
    """When threads of a machine with so many cores are done, that compute these seconds one after the other."""
    World.active = world
    try:
        cores, process, done = Cores(world, number), _process(world, "one"), dict[str, float]()

        async def compute(name: str, pieces: list[float]) -> None:
            await asyncio.gather(*(cores.compute(name, seconds) for seconds in pieces))
            done[name] = world.now

        async def all_of_them() -> None:
            await asyncio.gather(*(compute(*each) for each in threads.items()))

        process.start(lambda stop: all_of_them())
        world.run(until=lambda: len(done) == len(threads))
    finally:
        World.active = None
    return done


def test_threads_share_the_cores_evenly_and_have_one_each_at_most(world: World) -> None:
    """With three threads on two cores each has two thirds of one: after 1.5 s the first is done, and the others have
    had 1 s each; then each has a core of its own.
    """
    done = _computing(world, 2, {"short": [1.0], "long": [3.0], "longer": [4.0]})
    assert done == {"short": pytest.approx(1.5), "long": pytest.approx(3.5), "longer": pytest.approx(4.5)}


def test_a_thread_does_one_thing_after_the_other_and_counts_once(world: World) -> None:
    done = _computing(world, 2, {"in turn": [1.0, 1.0, 1.0], "beside": [3.0]})
    assert done == {"in turn": pytest.approx(3.0), "beside": pytest.approx(3.0)}


def test_a_part_of_a_core_takes_as_much_longer(world: World) -> None:
    assert _computing(world, 0.25, {"alone": [1.0]}) == {"alone": pytest.approx(4.0)}


def test_an_engine_with_several_requests_is_one_thread_beside_a_trainer(world: World) -> None:
    """Of one core: the engine has two requests at hand of 1 s each, at the same time, and the trainer 2 s to compute.
    Both have half of the core until the engine is done at 2 s, with 1 s left to the trainer.
    """
    World.active = world
    try:
        process, done = _process(world, "one"), dict[str, float]()
        cores = Cores(world, 1)
        world.add(cores)
        script = EngineScript(core="engine")

        async def request(name: str) -> None:
            await script.enter(1)
            await script.work(1.0)
            script.leave(1)
            done[name] = world.now

        def train() -> None:
            thread = current_thread()
            assert thread is not None
            cores.block(thread, 2.0)
            done["trainer"] = world.now

        async def both() -> None:
            SimulatedThread(target=train, name="trainer").start()
            await asyncio.gather(request("a"), request("b"))
            await asyncio.sleep(10.0)

        process.start(lambda stop: both())
        world.run(until=lambda: len(done) == 3)
    finally:
        World.active = None
    assert done == {"a": pytest.approx(2.0), "b": pytest.approx(2.0), "trainer": pytest.approx(3.0)}


def test_all_that_run_in_an_engine_wait_for_the_prompts_of_those_that_begin(world: World) -> None:
    """A sequence's prompt takes 0.5 s. One of 1 s is alone for 1.5 s; beside one that begins 0.9 s later it takes 2 s.
    That one waits for its own prompt alone, and takes 1.5 s.
    """
    World.active = world
    try:
        process, done = _process(world, "one"), dict[str, float]()
        script = EngineScript(begin_s=0.5)

        async def request(name: str, at_s: float) -> None:
            await asyncio.sleep(at_s)
            await script.enter(1)
            begun_s = script.begun_s - script.begin_s
            await script.work(1.0)
            await script.catch_up(begun_s)
            script.leave(1)
            done[name] = world.now

        async def all_three() -> None:
            await request("alone", 0.0)
            await asyncio.gather(request("first", 0.0), request("second", 0.9))

        process.start(lambda stop: all_three())
        world.run(until=lambda: len(done) == 3)
    finally:
        World.active = None
    assert done == {"alone": pytest.approx(1.5), "first": pytest.approx(3.5), "second": pytest.approx(3.9)}
