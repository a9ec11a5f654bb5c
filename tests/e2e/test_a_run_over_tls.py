"""A whole run over TLS, with the certificates, the tokens and the keys that `headway keys` makes, as it prints them."""

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from services.http.tls import TlsFiles, client_tls
from tests.e2e.processes import Launched, Launcher
from tests.e2e.run_files import GROUPS_PER_STEP, RunFile, RunFolder, write_run_file

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

STEPS = 3
SERVICES = {"generator": "generator", "reward": "reward-service", "env": "env-service"}
"""As the run file names their ports, and their processes."""


@dataclass(frozen=True)
class EndedTlsRun:
    """The run, after the learner has ended and while the others live on."""

    run: RunFolder
    run_file: RunFile
    keys: Path
    exit_code: int
    output: str

    def answer(self, service: str, *, scheme: str = "https", shows: str | None = "learner") -> httpx.Response:
        """Asks whether it is ready. `shows`: whose certificate the caller has."""
        tls = self.keys / "tls"
        pair = {} if shows is None else {"cert": tls / f"{shows}.pem", "key": tls / f"{shows}.key"}
        trust = client_tls(TlsFiles(ca=tls / "ca.pem", **pair))
        assert trust is not None
        url = f"{scheme}://127.0.0.1:{getattr(self.run_file, service)}/readyz"
        return httpx.get(url, verify=trust.current(), timeout=20)


@pytest.fixture(scope="module")
def ended(launcher: Launcher, model: Path, tmp_path_factory: pytest.TempPathFactory) -> EndedTlsRun:
    folder = tmp_path_factory.mktemp("run")
    run_file = write_run_file(folder, model=model)
    run_file.path.write_text(run_file.path.read_text().replace("http://", "https://"))
    settings = made_keys(launcher, folder / "keys")
    launched = {name: start(launcher, name, run_file, settings) for name in SERVICES.values()}
    words = ("--steps", str(STEPS), "--evaluation.tasks", "0", "--evaluation.final-tasks", "0")
    learner = start(launcher, "learner", run_file, settings, *words)
    exit_code = learner.wait(timeout_s=400)
    assert [name for name, service in launched.items() if not service.alive] == []
    return EndedTlsRun(
        run=run_file.run(), run_file=run_file, keys=folder / "keys", exit_code=exit_code, output=learner.text()
    )


def made_keys(launch: Launcher, folder: Path) -> Mapping[str, object]:
    """Settings that `headway keys` prints for the run file."""
    command = launch("headway", "keys", str(folder), "--host", "127.0.0.1")
    assert command.wait() == 0, command.text()
    return tomllib.loads(command.text())


def start(launch: Launcher, process: str, run_file: RunFile, settings: Mapping[str, object], *words: str) -> Launched:
    table = settings[process]
    assert isinstance(table, Mapping)
    return launch(process, "--config", str(run_file.path), *options(table), *words)


def options(table: Mapping[str, object], prefix: str = "--") -> Iterator[str]:
    """The settings of a table as words of a command line."""
    for key, value in table.items():
        name = prefix + key.replace("_", "-")
        if isinstance(value, Mapping):
            yield from options(value, f"{name}.")
        else:
            yield from (name, str(value))


def test_it_trains_every_step(ended: EndedTlsRun) -> None:
    assert ended.exit_code == 0, ended.output
    assert ended.run.steps() == list(range(1, STEPS + 1))
    assert ended.run.summary()["groups_trained"] == STEPS * GROUPS_PER_STEP


def test_the_generator_takes_every_version_over_it_and_proves_it(ended: EndedTlsRun) -> None:
    published = ended.run.metrics("publish")
    assert published[-1]["version"] == STEPS
    assert all(line["probe_gap"] < 1e-3 for line in published)


@pytest.mark.parametrize("service", SERVICES)
def test_each_process_answers_those_with_a_certificate_of_the_ca_alone(ended: EndedTlsRun, service: str) -> None:
    assert ended.answer(service).status_code in (200, 503)
    with pytest.raises(httpx.TransportError):
        ended.answer(service, shows=None)
    with pytest.raises(httpx.TransportError):
        ended.answer(service, scheme="http")
