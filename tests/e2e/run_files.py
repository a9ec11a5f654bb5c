"""A run.toml on free ports, and what a run leaves behind."""

import contextlib
import json
import random
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from learner.journal.journal import LoggedBatch, LoggedGroup, read_journal
from protocol.trajectories import TrajectoryGroup

GROUPS_PER_STEP = 8
GROUP_SIZE = 8


@dataclass(frozen=True)
class RunFile:
    """A run.toml and the ports in it. `token` is that of every HTTP service."""

    path: Path
    folder: Path
    learner: int
    leases: int
    generator: int
    reward: int
    env: int
    token: str | None

    def run(self, name: str = "e2e") -> "RunFolder":
        return RunFolder(self.folder / "runs" / name)

    def url(self, service: str) -> str:
        return f"http://127.0.0.1:{getattr(self, service)}"


def write_run_file(folder: Path, *, model: Path, token: str | None = None) -> RunFile:
    """Small steps of 64 completions each, small evaluations; what differs is set on the command line."""
    learner, leases, generator, reward, env = free_ports(5)
    path = folder / "run.toml"
    path.write_text(
        f"""
[run]
name = "e2e"
directory = "{folder / "runs"}"

[learner]
model = "{model}"
groups_per_step = {GROUPS_PER_STEP}
http = {{ port = {learner}{f', token = "{token}"' if token else ""} }}
leases = {{ address = "tcp://127.0.0.1:{leases}", heartbeat_every_s = 0.5, timeout_s = 10.0 }}
weights = {{ announce_every_s = 0.5, bucket_mb = 1{f', generator_token = "{token}"' if token else ""} }}
rollouts = {{ group_size = {GROUP_SIZE}, max_tokens = 5 }}
evaluation = {{ tasks = 40, every_steps = 10, final_tasks = 40 }}
training.optimizer = {{ learning_rate = 1e-3 }}

[generator]
model = "{model}"
http = {{ port = {generator}{f', token = "{token}"' if token else ""} }}
engine = {{ dtype = "float32", max_model_len = 64, max_num_seqs = 64, kv_cache_gb = 0.25 }}
join = {{ learner = "http://127.0.0.1:{learner}"{f', token = "{token}"' if token else ""} }}

[reward-service]
sandbox = "off"
http = {{ port = {reward}{f', token = "{token}"' if token else ""} }}

[env-service]
model = "{model}"
http = {{ port = {env}{f', token = "{token}"' if token else ""} }}
learner = "tcp://127.0.0.1:{leases}"
reward_urls = ["http://127.0.0.1:{reward}"]
{f'generator_token = "{token}"' if token else ""}
{f'reward_token = "{token}"' if token else ""}
environments = [{{ name = "addition", source = "addition" }}]
""",
        encoding="utf-8",
    )
    return RunFile(
        path=path,
        folder=folder,
        learner=learner,
        leases=leases,
        generator=generator,
        reward=reward,
        env=env,
        token=token,
    )


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now, apart from those that the system gives to connections meanwhile."""
    ports: list[int] = []
    for port in random.sample(range(20000, 32768), 1000):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            ports.append(port)
        if len(ports) == count:
            return ports
    raise AssertionError("no free ports")


@dataclass(frozen=True)
class RunFolder:
    """The files of one run; it may still be going on."""

    path: Path

    def lines(self, name: str) -> list[dict[str, Any]]:
        """The whole lines of a JSONL file; none if it is not there yet."""
        file = self.path / name
        text = file.read_text(encoding="utf-8") if file.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def metrics(self, kind: str) -> list[dict[str, Any]]:
        return [line for line in self.lines("metrics.jsonl") if line["kind"] == kind]

    def steps(self) -> list[int]:
        return [line["step"] for line in self.metrics("step")]

    def summary(self) -> dict[str, Any]:
        summary: dict[str, Any] = json.loads((self.path / "summary.json").read_text(encoding="utf-8"))
        return summary

    def batches(self) -> list[tuple[int, list[TrajectoryGroup]]]:
        """Trained batches in the journal: the version that each was taken at, and its groups."""
        records = list(read_journal(self.path / "journal"))
        groups = {record.group.lease_id: record.group for record in records if isinstance(record, LoggedGroup)}
        batches = [record for record in records if isinstance(record, LoggedBatch)]
        return [(batch.version, [groups[lease_id] for lease_id in batch.lease_ids]) for batch in batches]


def trained_versions(run: RunFolder) -> set[str]:
    """The versions stamped on tokens that were trained."""
    groups = [group for _, batch in run.batches() for group in batch]
    return {span.version for group in groups for one in group.trajectories for span in one.version_spans}


def token_lags(run: RunFolder) -> set[int]:
    """The lags of the tokens that were trained, by the journal."""
    return {
        version - int(number)
        for version, batch in run.batches()
        for group in batch
        for one in group.trajectories
        for number in set(one.token_versions()[one.loss_mask == 1].tolist())
    }
