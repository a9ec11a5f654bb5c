"""Runs every attack in a sandbox: `attacker.py AT_ONCE CGROUP`. Prints, in JSON, what went wrong by attack.

A process of its own, so that it can run as any user, with a secret in its environment and a descriptor left open.
"""

import asyncio
import json
import os
import platform
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack

import uvloop

import reward_service.verifier
from headway.supervisor import children
from reward_service.sandbox.pool import open_sandboxes
from reward_service.verifier.program import ExecutionConfig, Program, RunEnd, Sandbox
from services.isolation.seccomp import ARCHITECTURES
from tests.reward_service.sandbox.attacks import ATTACKS, SECRET, Attack


async def attack_all(*, at_once: int, cgroup: str) -> dict[str, list[str]]:
    """Gains of each attack, or its end if it was not the expected one; also all that is left behind."""
    config = ExecutionConfig(concurrency=at_once, cgroup=cgroup, packages=(), max_sessions=0)
    found: dict[str, list[str]] = {}
    with ExitStack() as stack:
        host = _Host(stack)
        async with open_sandboxes(kind="required", config=config) as sandboxes:
            assert sandboxes is not None
            for name, attack in ATTACKS.items():
                print(name, file=sys.stderr, flush=True)
                found[name] = await _attack(attack, sandbox=sandboxes.programs, host=host, at_once=at_once)
        found["what is left"] = host.left()
    return found


class _Host:
    """Targets of attacks on the host."""

    def __init__(self, stack: ExitStack) -> None:
        self._tcp = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        self._udp = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        self._udp.bind(("127.0.0.1", 0))
        self._abstract = stack.enter_context(socket.socket(socket.AF_UNIX))
        self._abstract.bind(f"\0headway-attack-{os.getpid()}")
        self._abstract.listen()
        self._victim = stack.enter_context(subprocess.Popen(["sleep", "3600"]))
        stack.callback(self._victim.kill)
        secret, secret_file = tempfile.mkstemp(dir="/tmp")
        stack.callback(os.unlink, secret_file)
        stack.callback(os.close, secret)
        os.write(secret, SECRET.encode())
        os.chmod(secret_file, 0o644)
        os.set_inheritable(secret, True)
        os.environ["SECRET"] = SECRET
        self._mounts = _mounts()
        self._children = _children()
        self.environment = {
            "TCP": str(self._tcp.getsockname()[1]),
            "UDP": str(self._udp.getsockname()[1]),
            "ABSTRACT": f"headway-attack-{os.getpid()}",
            "SECRET_FILE": secret_file,
            "SERVICE_FILE": str(reward_service.verifier.__file__),
            "VICTIM": str(self._victim.pid),
            "CALLS": json.dumps(dict(ARCHITECTURES[platform.machine()].calls)),
        }

    def reached(self) -> list[str]:
        """Effects outside of the sandbox."""
        found = [] if self._victim.poll() is None else ["the victim was killed"]
        for name, heard in (("tcp", self._tcp), ("udp", self._udp), ("abstract", self._abstract)):
            heard.setblocking(False)
            try:
                heard.recv(1) if name == "udp" else heard.accept()
            except BlockingIOError:
                continue
            found.append(f"{name} was reached")
        return found

    def left(self) -> list[str]:
        """Processes, mounts and temporary files that were not there before; TMPDIR is this process's own."""
        found = [f"process {pid}" for pid in _children() - self._children]
        found += [f"mount {line}" for line in _mounts() - self._mounts]
        return found + [f"file {name}" for name in os.listdir(tempfile.gettempdir())]


async def _attack(attack: Attack, *, sandbox: Sandbox, host: _Host, at_once: int) -> list[str]:
    program = Program(
        argv=("python", "attack.py"),
        files={"attack.py": attack.program},
        environment=host.environment,
        limits=attack.limits,
    )
    ends: Sequence[RunEnd] = await asyncio.gather(*(sandbox.run(program) for _ in range(at_once)))
    return [repr(ended)[:2000] for ended in ends if not attack.fails(ended)] + host.reached()


def _children() -> set[int]:
    return {child.pid for child in children()}


def _mounts() -> set[str]:
    with open("/proc/self/mountinfo") as file:
        return set(file)


if __name__ == "__main__":
    print(json.dumps(uvloop.run(attack_all(at_once=int(sys.argv[1]), cgroup=sys.argv[2]))))
