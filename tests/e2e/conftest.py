"""A system that outlives the learners which work with it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import launching
from tests.e2e.long_lived_system import LongLivedSystem
from tests.e2e.run_files import write_run_file


@pytest.fixture(scope="session")
def system(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LongLivedSystem]:
    """All but a learner, started in an odd order."""
    folder = tmp_path_factory.mktemp("system")
    run_file = write_run_file(folder, model=model, token=LongLivedSystem.token)
    with launching(request.config, folder) as launch:
        names = ("env-service", "generator", "reward-service")
        services = {name: launch(name, "--config", str(run_file.path)) for name in names}
        yield LongLivedSystem(launch=launch, run_file=run_file, services=services)
