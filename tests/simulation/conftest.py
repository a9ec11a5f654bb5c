"""Processes for simulations, each of which begins with a copy of one that has loaded the product."""

from collections.abc import Iterator

import pytest

from tests.simulation.simulating import Simulator


@pytest.fixture(scope="session")
def simulator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Simulator]:
    """For all simulations but those that need another hash seed, or take hold by themselves."""
    simulator = Simulator(tmp_path_factory.mktemp("simulated"), hash_seed=1)
    yield simulator
    simulator.close()


@pytest.fixture(scope="session")
def other_simulator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Simulator]:
    """With another hash seed than `simulator`."""
    simulator = Simulator(tmp_path_factory.mktemp("simulated"), hash_seed=2)
    yield simulator
    simulator.close()
