"""Generator, reward_service and env_service that outlive the learners which they work for."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import httpx

from tests.e2e.processes import Launched, Launcher
from tests.e2e.run_files import RunFile, RunFolder


@dataclass(frozen=True)
class LongLivedSystem:
    """The services that stay, and how a learner joins them."""

    token: ClassVar[str] = "let-me-in"

    launch: Launcher
    run_file: RunFile
    services: dict[str, Launched]

    @contextmanager
    def learner(self, name: str, *words: str) -> Iterator[tuple[Launched, RunFolder]]:
        """A learner for one run, killed at the end if it has not ended. Services that a test has ended start anew."""
        for service in [name for name, process in self.services.items() if not process.alive]:
            self.services[service] = self.launch(service, "--config", str(self.run_file.path))
        process = self.launch("learner", "--config", str(self.run_file.path), "--run.name", name, *words)
        try:
            yield process, self.run_file.run(name)
        finally:
            process.end()

    def replayed(self, name: str) -> tuple[int, str]:
        """Replays a run that has ended from its first step on; returns the exit code and the output."""
        process = self.launch("learner", "replay", str(self.run_file.run(name).path))
        return process.wait(), process.text()

    def call(self, service: str, path: str, **request: Any) -> httpx.Response:
        headers = {"Authorization": f"Bearer {self.token}", **request.pop("headers", {})}
        method = "POST" if request else "GET"
        return httpx.request(method, f"{self.run_file.url(service)}{path}", headers=headers, timeout=20, **request)

    def refusals(self, service: str) -> dict[str, float]:
        """Requests and messages that `/metrics` of a service counts as refused, by reason."""
        text = self.call(service, "/metrics").text
        found = re.findall(r'^headway_\w+_refused_(?:requests|messages)_total{reason="(\w+)"} (\S+)$', text, re.M)
        return {reason: float(count) for reason, count in found}


def generate(**changes: Any) -> dict[str, Any]:
    """A body for the generator: good, but for the changes."""
    sampling = {"max_tokens": 5, **changes.pop("sampling", {})}
    return {"request_id": "r", "prompt_token_ids": [3, 4, 13], "purpose": "train", "sampling": sampling, **changes}
