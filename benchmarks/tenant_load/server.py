"""A learner that serves the Tinker API on a random tiny model, as a process of its own; and what it costs."""

import hashlib
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks import cpu_time
from benchmarks.tenants import written_model
from headway.serve_command import free_port
from services.config.options import environment_name_of
from services.process import parent_death_signal

MODEL = "tiny"
_UP_S = 180.0
_METRIC = re.compile(r"^headway_learner_(tenant_\w+?)(?:_total)? ([\d.e+]+)$", re.MULTILINE)


@dataclass(frozen=True)
class TenantServer:
    """A server that is ready."""

    process: subprocess.Popen[bytes]
    url: str

    @property
    def cpu_s(self) -> float:
        """CPU seconds of all its threads so far."""
        return cpu_time.of_process(self.process.pid)

    @property
    def memory_mb(self) -> float:
        """Resident memory."""
        status = Path(f"/proc/{self.process.pid}/status").read_text(encoding="utf-8")
        return int(status.partition("VmRSS:")[2].split()[0]) / 1024

    def counts(self) -> dict[str, float]:
        """Metrics of all tenants together, by their names without `headway_learner_`."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as answer:
            return {name: float(value) for name, value in _METRIC.findall(answer.read().decode())}


def key_of(name: str) -> str:
    """The key of a tenant."""
    return f"tml-{name}"


@contextmanager
def serving(folder: Path, tenants: Sequence[str]) -> Iterator[TenantServer]:
    """A server for these tenants, its state in the folder; no generator, so that nothing can be sampled."""
    model = folder / "model"
    model.mkdir()
    written_model(model)
    entries = [{"name": each, "sha256": hashlib.sha256(key_of(each).encode()).hexdigest()} for each in tenants]
    keys = folder / "keys.json"
    keys.touch(mode=0o600)
    keys.write_text(json.dumps({"keys": entries}), encoding="utf-8")
    url = f"http://127.0.0.1:{(port := free_port())}"
    command = [
        str(Path(sys.executable).with_name("learner")), "--model", str(model), "--run.directory", str(folder / "runs"),
        "--run.name", "tenants", "--http.port", str(port), "--tinker.enabled", "true", "--tinker.base-model", MODEL,
        "--tinker.keys-file", str(keys),
    ]  # fmt: skip
    with (folder / "server.log").open("wb") as log:
        environment = {**os.environ, environment_name_of("http.token", process="learner"): secrets.token_urlsafe(32)}
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, preexec_fn=parent_death_signal)
    try:
        _wait_until_ready(process, url, folder / "server.log")
        yield TenantServer(process, url)
    finally:
        end_server(process)


def end_server(process: subprocess.Popen[bytes]) -> None:
    """Interrupts a server, and kills it if it does not end by that."""
    process.send_signal(signal.SIGINT)
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _wait_until_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    end = time.monotonic() + _UP_S
    while time.monotonic() < end and process.poll() is None:
        try:
            urllib.request.urlopen(f"{url}/readyz", timeout=2).close()
        except OSError:
            time.sleep(0.2)
        else:
            return
    sys.exit(f"error: the learner did not get ready\n{log.read_text(encoding='utf-8')[-3000:]}")
