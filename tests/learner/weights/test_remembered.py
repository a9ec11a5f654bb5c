"""Memory of processes that came and went: it stays as much, however many there were."""

import pytest

from learner.weights.fleet import JoinRefused
from learner.weights.provenance import MAX_PROCESSES, InstanceMemory
from tests.learner.generators import announcement
from tests.learner.weights.test_fleet import URL, make_fleet


def test_of_more_processes_than_are_remembered_those_set_last_stay() -> None:
    remembered: InstanceMemory[int] = InstanceMemory(most=2)
    remembered["a", "1"] = 1
    remembered["a", "2"] = 2
    remembered["a", "1"] = 3
    remembered["b", "1"] = 4

    assert remembered.get(("a", "1")) == 3
    assert remembered.get(("a", "2")) is None
    assert ("b", "1") in remembered


def test_what_is_forgotten_is_as_if_it_had_never_been() -> None:
    remembered: InstanceMemory[int] = InstanceMemory()
    remembered["a", "1"] = 1
    remembered.forget(("a", "1"))
    remembered.forget(("a", "1"))

    assert ("a", "1") not in remembered
    assert remembered.get(("a", "1")) is None


def test_a_fleet_remembers_the_newest_processes_that_were_replaced_and_no_more() -> None:
    fleet = make_fleet()
    for instance in range(MAX_PROCESSES + 2):
        fleet.announce(announcement("a", URL, instance=str(instance)), now=0.0)

    with pytest.raises(JoinRefused, match="a process that started later"):
        fleet.announce(announcement("a", URL, instance="1"), now=0.0)
    fleet.announce(announcement("a", URL, instance="0"), now=0.0)


def test_a_fleet_remembers_the_newest_processes_that_were_expelled_and_no_more() -> None:
    fleet = make_fleet()
    for number in range(MAX_PROCESSES + 1):
        fleet.announce(announcement(f"g{number}", URL), now=0.0)
        fleet.expel(f"g{number}", reason="its checksum differs")

    with pytest.raises(JoinRefused, match="its checksum differs"):
        fleet.announce(announcement("g1", URL), now=0.0)
    fleet.announce(announcement("g0", URL), now=0.0)
