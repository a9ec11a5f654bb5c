"""Runs of the addition demo's model with other settings, for `benchmarks.planner`: made, or taken from a folder.

Each has four real processes and more generators on free ports. All of its trajectories are kept, since the times of
their turns say how an engine's step grows with its sequences.
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from services.process import parent_death_signal
from tests.e2e.run_files import free_ports

ROOT = Path(__file__).resolve().parents[1]
MAX_SEQUENCES = 256
"""Of all generators of a run."""
_LOOK_S = 0.5
_END_S = 60.0
_LAST_LINES = 30


@dataclass(frozen=True)
class PlannedRun:
    """A run by its settings: the demo's where nothing else stands. `what` says how it differs from that."""

    name: str
    what: str
    steps: int
    groups: int = 64
    group_size: int = 4
    max_tokens: int = 5
    max_lag: int = 1
    capacity: int = 32
    generators: int = 1
    model: str = "models/addition"


BASE = PlannedRun("base", "the demo", steps=250)
"""The one by which the others are planned: longer, for the processes tell of their cores every 20 s."""
CHANGED: Sequence[PlannedRun] = (
    PlannedRun("groups-of-8", "groups of 8 completions", steps=100, group_size=8),
    PlannedRun("groups-of-2", "groups of 2 completions", steps=200, group_size=2),
    PlannedRun("starved", "2 groups in flight", steps=60, capacity=2),
    PlannedRun("shorter", "3 tokens at most", steps=150, max_tokens=3),
    PlannedRun(
        "longer", "the untrained model, 16 tokens at most", steps=80, max_tokens=16, model="models/addition-init"
    ),
    PlannedRun("two-generators", "two generators", steps=150, generators=2),
    PlannedRun("more-lag", "max_lag 4", steps=150, max_lag=4),
)


def run_file(run: PlannedRun, folder: Path, ports: Sequence[int]) -> str:
    """In TOML. `ports` are those of the learner, its leases, the reward service, the env_service and the generators."""
    learner, leases, reward, env, *_ = ports
    model, most = ROOT / run.model, MAX_SEQUENCES // run.generators
    return f"""
[run]
name = "{run.name}"
directory = "{folder}"
[learner]
model = "{model}"
steps = {run.steps}
groups_per_step = {run.groups}
max_lag = {run.max_lag}
http = {{ port = {learner} }}
leases = {{ address = "tcp://127.0.0.1:{leases}" }}
rollouts = {{ group_size = {run.group_size}, max_tokens = {run.max_tokens} }}
algo = {{ type = "grpo", divergence_limit = 0.1, correction_cap = 1.0 }}
evaluation = {{ tasks = 0, final_tasks = 0 }}
samples = {{ time_share = 1.0 }}
training = {{ updates_per_step = 2, epochs_per_step = 2, optimizer = {{ learning_rate = 1e-5 }} }}
[generator]
model = "{model}"
http = {{ port = 0 }}
engine = {{ dtype = "float32", max_model_len = 64, max_num_seqs = {most}, kv_cache_gb = 0.25 }}
join = {{ learner = "http://127.0.0.1:{learner}" }}
[reward-service]
sandbox = "off"
http = {{ port = {reward} }}
[env-service]
model = "{model}"
capacity = {run.capacity}
http = {{ port = {env} }}
learner = "tcp://127.0.0.1:{leases}"
reward_urls = ["http://127.0.0.1:{reward}"]
[[env-service.environments]]
name = "addition"
source = "addition"
"""


def recorded(run: PlannedRun, folder: Path) -> Path:
    """The run's folder in this one; the run is made if it is not there, and SystemExit raised if it ends badly."""
    found = folder / run.name
    if (found / "summary.json").exists():
        return found
    ports = free_ports(4 + run.generators)
    path = folder / f"{run.name}.toml"
    path.write_text(run_file(run, folder, ports), encoding="utf-8")
    sys.stderr.write(f"{run.name}: {run.what}, {run.steps} steps\n")
    began = time.monotonic()
    with ExitStack() as stack:
        stack.enter_context(_process("reward-service", config=path))
        stack.enter_context(_process("env-service", config=path))
        for port in ports[4:]:
            stack.enter_context(_process("generator", "--http.port", str(port), config=path))
        with _process("learner", config=path) as learner:
            while learner.poll() is None:
                time.sleep(_LOOK_S)
    if learner.returncode:
        log = path.with_suffix(".learner.log").read_text(encoding="utf-8", errors="replace")
        last = "\n".join(log.splitlines()[-_LAST_LINES:])
        raise SystemExit(f"the learner of {path} ended with {learner.returncode}:\n{last}")
    sys.stderr.write(f"{run.name}: {time.monotonic() - began:.0f} s\n")
    return found


@contextmanager
def _process(name: str, *more: str, config: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """A console script of ours with a log beside the config, until the body ends."""
    log = config.with_suffix(f".{name}.log")
    words = [str(Path(sys.executable).with_name(name)), "--config", str(config), *more]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with log.open("ab") as output:
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=ROOT, env=environment,
            preexec_fn=parent_death_signal,
        )  # fmt: skip
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
