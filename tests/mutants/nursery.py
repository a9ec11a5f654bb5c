"""`python -m tests.mutants.nursery`: pytest in children of a process that has loaded the heavy packages of others.

To load them anew for each fault would take most of the time. Of this tree's own code it loads nothing but this file: a
child finds what is there when it begins. Each line of stdin is a JSON object: `arguments` of pytest, the file for what
it prints as `said`, and `timeout_s`. The answer is a line with the exit code; null for one that had to be ended.
"""

import contextlib
import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Sequence

_HEAVY = (
    "torch", "torch.distributed", "transformers", "peft", "deepspeed", "safetensors", "numpy", "fastapi", "uvicorn",
    "aiohttp", "zmq", "msgpack", "xxhash", "pydantic", "prometheus_client", "cryptography", "hypothesis",
    "pytest_asyncio", "xdist",
)  # fmt: skip
_LOOK_S = 0.05


def main() -> None:
    """Answers until stdin ends."""
    answers = os.dup(1)
    os.dup2(2, 1)  # some of these packages greet
    for name in _HEAVY:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    for line in sys.stdin:
        code = _run(**json.loads(line))
        os.write(answers, (json.dumps(code) + "\n").encode())


def _run(*, arguments: Sequence[str], said: str, timeout_s: float) -> int | None:
    child = os.fork()
    if child == 0:
        _become_pytest(arguments, said)
    ends_at = time.monotonic() + timeout_s
    while time.monotonic() < ends_at:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            _end_others(child)
            return os.waitstatus_to_exitcode(status)
        time.sleep(_LOOK_S)
    _end_others(child)
    os.waitpid(child, 0)
    return None


def _become_pytest(arguments: Sequence[str], said: str) -> None:
    """Never returns."""
    os.setsid()
    handle = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    code = 3
    try:
        import pytest

        code = int(pytest.main([*arguments, "-W", "ignore::pytest.PytestAssertRewriteWarning"]))
    finally:
        sys.stdout.flush()
        os._exit(code)


def _end_others(child: int) -> None:
    """Kills all that a test has started and left behind, and the child itself if it still runs."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)


if __name__ == "__main__":
    main()
