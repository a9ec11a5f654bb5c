"""Alerts of `deploy/prometheus` in a scenario: a real Prometheus scrapes the nodes, past their links.

Its time goes SPEED times as fast: every duration of the rules is divided by it, so that a minute is an hour, and what
would last for five minutes fires after five seconds. Nodes are scraped, and rules evaluated, once a second.
"""

import json
import re
import shutil
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from tests.chaos.system import ChaosSystem
from tests.e2e.processes import ROOT, Launched, until
from tests.e2e.run_files import free_ports

PROMETHEUS = shutil.which("prometheus")
RULES = ROOT / "deploy/prometheus/rules.yml"
SPEED = 60
_SECONDS = {"m": 60, "h": 3600}
_STARTS_WITHIN_S = 30.0
_FIRED = 'count by (alertname) (max_over_time(ALERTS{alertstate="firing"}[1d]))'


def hurried(rules: str) -> str:
    """The rules with their durations divided by SPEED: those of ranges and of `for`, and bare numbers of seconds."""

    def shorter(found: re.Match[str]) -> str:
        return f"{found[1]}{int(found[2]) * _SECONDS[found[3]] // SPEED}s"

    rules = re.sub(r"(\[|for: )(\d+)([mh])\b", shorter, rules)
    return re.sub(r"\b(?:3600|900)\b", lambda found: str(int(found[0]) // SPEED), rules)


class Alerts:
    """Alerts that fired since the watch began."""

    def __init__(self, url: str) -> None:
        self._url = url

    def fired(self) -> set[str]:
        """Names of alerts that fired at some time."""
        answer = httpx.get(f"{self._url}/api/v1/query", params={"query": _FIRED}, timeout=20).raise_for_status()
        return {one["metric"]["alertname"] for one in answer.json()["data"]["result"]}

    def wait_for(self, names: Collection[str], *, patience_s: float) -> set[str]:
        """Waits until all these have fired, or for so long; returns all that have."""
        deadline = time.monotonic() + patience_s
        while not (fired := self.fired()) >= set(names) and time.monotonic() < deadline:
            time.sleep(0.5)
        return fired


@contextmanager
def alerts_watched(system: ChaosSystem) -> Iterator[Alerts | None]:
    """Alerts of all nodes from now on; None where Prometheus is not installed."""
    if PROMETHEUS is None:
        yield None
        return
    folder = system.folder / "prometheus"
    folder.mkdir()
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    words = [
        PROMETHEUS, f"--config.file={_config(system, folder)}", f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn",
    ]  # fmt: skip
    process = Launched("prometheus", words, folder=system.folder, mark=system.launch.mark)
    try:
        until(lambda: _ready(url), what="Prometheus to be ready", timeout_s=_STARTS_WITHIN_S, during=[process])
        yield Alerts(url)
    finally:
        process.end()


def _config(system: ChaosSystem, folder: Path) -> Path:
    """As deploy/prometheus/prometheus.yml, whose addresses are names of containers. JSON is YAML."""
    (folder / "rules.yml").write_text(hurried(RULES.read_text(encoding="utf-8")), encoding="utf-8")
    jobs: dict[str, list[str]] = {}
    for node in system.nodes.values():
        jobs.setdefault(node.command, []).append(f"127.0.0.1:{node.port}")
    config = {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
        "rule_files": ["rules.yml"],
        "scrape_configs": [
            {"job_name": job, "static_configs": [{"targets": targets}]} for job, targets in jobs.items()
        ],
    }
    path = folder / "prometheus.yml"
    path.write_text(json.dumps(config), encoding="utf-8")
    return path


def _ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/-/ready", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False
