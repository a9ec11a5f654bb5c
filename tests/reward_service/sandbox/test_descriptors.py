"""Owners of pipes: a worker that holds the end of a sandbox's pipe keeps its program waiting, or reads it."""

import os
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path

import httpx
import pytest

from tests.process_ends import children_of
from tests.reward_service.models.tiny_encoder import LONGEST, write_encoder
from tests.reward_service.models.tiny_reward_model import PLAIN, write_reward_model
from tests.reward_service.real_service import real_service

pytestmark = pytest.mark.e2e

CONFIG = """
[reward-service]
http = {{ port = 0 }}
execution = {{ cgroup = "off", concurrency = 3, spare = 1 }}
workers = {{ count = 2 }}

[[reward-service.verifiers]]
name = "custom"
function = "sample_verifiers:contains"

[[reward-service.reward_models]]
name = "helpful"
path = "{model}"

[[reward-service.encoders]]
name = "close"
path = "{encoder}"
max_tokens = {longest}
"""
PLACES = 4
LAST = "import sys; print(len(sys.stdin.read()))"
ADD = "```python\ndef add(a, b):\n    return a + b\n```"
FILES = {"test_add.py": "from solution import add\ndef test_add(): assert add(1, 2) == 3\n"}
TESTS: tuple[dict[str, object], ...] = (
    {"kind": "call", "entry_point": "add", "cases": [{"arguments": [1, 2], "expected": 3}]},
    {"kind": "assert", "cases": [{"code": "assert add(1, 2) == 3"}]},
    {"kind": "check", "entry_point": "add", "cases": [{"code": "def check(f): assert f(1, 2) == 3"}]},
    {"kind": "pytest", "files": FILES},
)


def code(completion: str, tests: Mapping[str, object]) -> dict[str, object]:
    limits = {"timeout_s": 20.0, "total_timeout_s": 60.0}
    return {"verifier": "code", "completion": completion, "arguments": {"tests": tests, **limits}}


# It waits for the end of its input, which does not come while anybody else holds the other end.
READS_TO_THE_END = code(f"```python\n{LAST}\n```", {"kind": "stdio", "cases": [{"stdin": "x" * 9, "stdout": "9"}]})
PROGRAMS = [READS_TO_THE_END, *(code(ADD, tests) for tests in TESTS)]
OTHERS: list[dict[str, object]] = [
    {"verifier": "math", "completion": "The answer is 4.", "arguments": {"answer": "4"}},
    {"verifier": "custom", "completion": "a word", "arguments": {"word": "word"}},
    {"verifier": "close", "completion": "no way", "arguments": {"references": ["no way"]}},
]
MODEL: dict[str, object] = {"verifier": "helpful", "prompt": "hi", "completion": "no way"}


def rewards(client: httpx.Client, items: list[dict[str, object]]) -> list[float]:
    """Each item's; an error is none."""
    numbered = [{"id": str(number), **item} for number, item in enumerate(items)]
    results = client.post("/v1/score", json={"items": numbered, "deadline_s": 200}).json()["results"]
    assert not [result["error"] for result in results if result["error"]]
    return [result["reward"] for result in results]


def exclusive(pid: int) -> set[str]:
    """The pipes, sockets and memory files that a process has open, but for its standard error."""
    found = set()
    for handle in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = os.readlink(handle)
        except FileNotFoundError:  # closed since it was listed
            continue
        if target.startswith(("pipe:", "socket:", "/memfd:")):
            found.add(target)
    return found - {os.readlink(f"/proc/{pid}/fd/2")}


def families(service: int) -> Iterator[tuple[str, set[str]]]:
    """Each child of the service with its descendants, by its command, and what they have open together."""
    for child in children_of(service):
        command = Path(f"/proc/{child}/cmdline").read_bytes().replace(b"\0", b" ").decode()[:200]
        family = [child]
        for member in family:
            family += children_of(member)
        yield f"{child}: {command}", set().union(*map(exclusive, family))


def check_nobody_holds_anothers(service: int) -> int:
    """Checks that no two families share a descriptor; returns the number of families. Raises AssertionError."""
    found = list(families(service))
    own = exclusive(service)
    for number, (command, held) in enumerate(found):
        for other, theirs in found[:number]:
            assert not held & theirs, f"{command} and {other} share {held & theirs}"
        stdio = {os.readlink(f"/proc/{command.partition(':')[0]}/fd/{handle}") for handle in (0, 1)}
        if "sandbox.supervisor" not in command:
            assert held & own <= stdio, f"{command} has what is the service's: {held & own - stdio}"
    return len(found)


def kill_workers(service: int) -> int:
    """Kill all children but keepers."""
    workers = [
        child
        for child in children_of(service)
        if b"sandbox.supervisor" not in Path(f"/proc/{child}/cmdline").read_bytes()
    ]
    for worker in workers:
        os.kill(worker, signal.SIGKILL)
    return len(workers)


def test_no_descriptor_of_a_sandbox_is_in_a_worker_and_right_programs_score_one(tmp_path: Path) -> None:
    model, encoder = write_reward_model(tmp_path / "model", given=PLAIN), write_encoder(tmp_path / "encoder")
    with real_service(tmp_path, CONFIG.format(model=model, encoder=encoder, longest=LONGEST)) as (process, client):
        sandboxes = check_nobody_holds_anothers(process.pid)
        assert sandboxes >= PLACES
        # Every place has a sandbox that waits, and each worker is started beside them.
        assert rewards(client, OTHERS) == pytest.approx([1.0] * len(OTHERS))
        before = rewards(client, [MODEL])
        assert check_nobody_holds_anothers(process.pid) >= PLACES + 4
        assert rewards(client, PROGRAMS * 2) == [1.0] * len(PROGRAMS) * 2
        for _ in range(2):
            assert kill_workers(process.pid) >= 4
            mixed = rewards(client, [*OTHERS, MODEL, *PROGRAMS, *OTHERS])
            assert mixed == pytest.approx(
                [*[1.0] * len(OTHERS), *before, *[1.0] * (len(PROGRAMS) + len(OTHERS))], abs=1e-5
            )
            check_nobody_holds_anothers(process.pid)
