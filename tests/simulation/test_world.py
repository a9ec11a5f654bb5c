"""The clock, the order of callbacks, and the network, by themselves."""

import asyncio
import random
from pathlib import Path

import pytest

from headway.simulation.world.clock import Stuck, World
from headway.simulation.world.disk import Disk
from headway.simulation.world.network import LinkRates, Network, Pipe
from headway.simulation.world.process import Process


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
    for path in names:
        path.with_suffix(".new").write_text("new")
        path.write_text("old")
        disk.synced.update({each.stat().st_ino: 3 for each in (path, path.with_suffix(".new"))})
        disk.renamed(path.with_suffix(".new"), path)
        path.with_suffix(".new").replace(path)
        if path.name == "kept":
            disk.names_synced(folder)
    lost = [each for each in disk.lose_unsynced(folder) if each.startswith("the name")]
    texts = [path.read_text() for path in names]
    assert disk.renames == []
    assert len(lost) == texts.count("old") <= 3
    assert texts == sorted(texts), "the last ones are lost"
