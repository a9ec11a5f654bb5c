"""The real process of the reward service on a port that the system chooses."""

import os
import re
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import httpx

COMMAND = (sys.executable, "-c", "from reward_service.command import main; main()")


@contextmanager
def real_service(
    folder: Path, config: str, *, environment: Mapping[str, str] | None = None, trust: ssl.SSLContext | None = None
) -> Iterator[tuple[subprocess.Popen[str], httpx.Client]]:
    """The process with this configuration, and a client of it, which believes `trust`. It is killed at the end."""
    file = folder / "run.toml"
    file.write_text(config)
    words = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **(environment or {})}
    command = [*COMMAND, "--config", str(file)]
    with subprocess.Popen(command, env=words, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        log = process.stderr
        try:
            url = next(found.group() for line in log if (found := re.search(r"https?://\S+", line)))
            # A full pipe would stop the service.
            threading.Thread(target=log.read, daemon=True).start()
            transport = httpx.HTTPTransport(retries=5, verify=trust or True)
            with httpx.Client(base_url=url, timeout=240, transport=transport) as client:
                yield process, client
        finally:
            process.kill()
