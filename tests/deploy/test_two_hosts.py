"""A run over two hosts with keys and certificates, whose link is cut for a minute; and ranks on both, one host lost.

They take minutes each, and are run by `make machines-test`.
"""

import json
import signal
import time
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.conftest import launching
from tests.deploy.hosts import ADDRESSES, MODEL, Hosts, Kind, hosts, why_not
from tests.e2e.processes import Launched, Launcher, script, until
from tests.e2e.run_files import RunFolder, token_lags

A, B = ADDRESSES["a"], ADDRESSES["b"]
MAX_LAG = 4
CUT_S = 60.0

pytestmark = [pytest.mark.machines, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module", autouse=True)
def _possible() -> None:
    if reason := why_not():
        pytest.skip(reason)
    if not (MODEL / ".complete").exists():
        pytest.skip(f"needs {MODEL}: make machines-test makes it")


@pytest.fixture
def launch(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Launcher]:
    with launching(request.config, tmp_path) as launcher:
        yield launcher


@pytest.mark.parametrize("kind", ["veth", "wire"])
def test_a_run_over_two_hosts_goes_on_after_a_minute_without_their_link(
    kind: Kind, launch: Launcher, tmp_path: Path
) -> None:
    """With certificates: all of HTTP is HTTPS, and nothing but names and files is set."""
    config = _run_file(tmp_path, made=_keys(launch, tmp_path / "keys", "--host", A, B))
    run = RunFolder(tmp_path / "runs/two")
    with hosts(tmp_path, kind) as two:
        processes = _others(two, launch, config)
        learner = two.process(launch, "a", "learner", config)
        everybody = [*processes, learner]
        _reaches(run, 5, everybody)

        two.cut()
        _stays_cut(CUT_S, everybody)
        two.restore()
        before = len(run.steps())
        _reaches(run, before + 5, everybody)

        _all_end_well(everybody)
    assert run.steps() == list(range(1, len(run.steps()) + 1))
    assert max(token_lags(run)) <= MAX_LAG
    assert "no heartbeat from" in learner.text(), "nobody noticed the cut"


def test_ranks_on_two_hosts_go_on_when_a_lost_host_is_back(launch: Launcher, tmp_path: Path) -> None:
    """Each host starts its rank again until it ends well, as a service manager or a kubelet does."""
    config = _run_file(tmp_path, made=_keys(launch, tmp_path / "keys"), steps=25)
    run = RunFolder(tmp_path / "runs/two")
    with hosts(tmp_path, "veth") as two:
        _reward_and_env(two, launch, config)
        two.process(launch, "a", "generator", config, "--http.host", A, "--join.url", f"http://{A}:7310")
        first, second = _rank(two, launch, "a", 0, config), _rank(two, launch, "b", 1, config)
        _reaches(run, 5, [first, second])

        two.lose("b")
        until(lambda: "rank 1 is silent for" in first.text(), what="rank 0 to miss rank 1", timeout_s=240)
        two.restore()
        second = _rank(two, launch, "b", 1, config)

        assert first.wait(timeout_s=900) == 0, first.text()[-4000:]
        assert second.wait(timeout_s=120) == 0, second.text()[-4000:]
    assert run.steps() == list(range(1, 26))
    assert run.summary()["steps"] == 25


def _keys(launch: Launcher, folder: Path, *words: str) -> Mapping[str, dict[str, object]]:
    """Settings that `headway keys` prints for the run file."""
    made = launch("headway", "keys", str(folder), "--env-service", "east", *words)
    assert made.wait(timeout_s=120) == 0, made.text()
    return tomllib.loads(made.text())


def _run_file(folder: Path, *, made: Mapping[str, dict[str, object]], steps: int = 100_000) -> Path:
    """Writes a file for both hosts. Their addresses are in the reference of settings; the rest is what was made."""
    scheme = "https" if "tls_cert_file" in made["learner"]["http"] else "http"  # type: ignore[operator]
    ours: dict[str, dict[str, object]] = {
        "run": {"name": "two", "directory": str(folder / "runs")},
        "learner": {
            "model": str(MODEL), "steps": steps, "groups_per_step": 8, "max_lag": MAX_LAG, "resume": "auto",
            "http.host": A, "leases.address": f"tcp://{A}:7301", "leases.timeout_s": 60.0,
            "weights.generator_hosts": [A, B], "training.rank_silence_s": 10.0, "checkpoint.every_steps": 5,
            "rollouts.group_size": 8, "rollouts.max_tokens": 5, "evaluation.tasks": 0, "evaluation.final_tasks": 0,
            "training.optimizer.learning_rate": 1e-3,
        },
        "generator": {
            "model": str(MODEL), "http.host": B, "join.learner": f"{scheme}://{A}:7300",
            "engine.dtype": "float32", "engine.max_model_len": 64, "engine.max_num_seqs": 64,
            "engine.kv_cache_gb": 0.25,
        },
        "reward-service": {"sandbox": "off", "http.host": A},
        "env-service": {
            "model": str(MODEL), "env_id": "east", "learner": f"tcp://{A}:7301", "http.host": B,
            "reward_urls": [f"{scheme}://{A}:7320"], "environments": [{"name": "addition", "source": "addition"}],
        },
    }  # fmt: skip
    path = folder / "run.toml"
    lines: list[str] = []
    for table, values in ours.items():
        lines += [f"[{table}]", *(f"{key} = {_toml(value)}" for key, value in values.items())]
        lines += [f"{key} = {_toml(value)}" for key, value in _flat(made.get(table, {}))]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def _flat(table: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _toml(value: object) -> str:
    if isinstance(value, list):
        return f"[{', '.join(_toml(one) for one in value)}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_toml(one)}" for key, one in value.items()) + "}"
    return json.dumps(value)


def _others(two: Hosts, launch: Launcher, config: Path) -> list[Launched]:
    """All but the learner: rewards are beside it, generator and environments are on the other host."""
    return [
        two.process(launch, "a", "reward-service", config),
        two.process(launch, "b", "generator", config),
        two.process(launch, "b", "env-service", config),
    ]


def _reward_and_env(two: Hosts, launch: Launcher, config: Path) -> None:
    """On the host that is not lost."""
    two.process(launch, "a", "reward-service", config)
    two.process(launch, "a", "env-service", config, "--http.host", A)


def _rank(two: Hosts, launch: Launcher, host: str, rank: int, config: Path) -> Launched:
    torchrun = (
        f"{script('torchrun')} --nnodes 2 --nproc-per-node 1 --node-rank {rank} --master-addr {A} --master-port 29500 "
        f"--max-restarts 0 --no-python {script('learner')} --config {config}"
    )
    return two.start(launch, host, f"rank{rank}", ["sh", "-c", f"until {torchrun}; do sleep 1; done"])


def _reaches(run: RunFolder, steps: int, during: list[Launched]) -> None:
    until(lambda: len(run.steps()) >= steps, what=f"step {steps}", timeout_s=1200, during=during)


def _stays_cut(seconds: float, during: list[Launched]) -> None:
    """Nobody ends meanwhile: each waits for the other side."""
    over = time.monotonic() + seconds
    until(lambda: time.monotonic() > over, what="the end of the cut", timeout_s=seconds + 60, during=during)


def _all_end_well(processes: list[Launched]) -> None:
    for process in processes:
        process.send(signal.SIGTERM)
    for process in processes:
        assert process.wait(timeout_s=120) == 0, (process.name, process.text()[-3000:])
