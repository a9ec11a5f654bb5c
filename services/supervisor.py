"""Child processes started together and stopped together, with nothing left behind."""

import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from types import FrameType

from services.process import parent_death_signal

log = logging.getLogger(__name__)

_POLL_S = 0.2
_STOP_S = 7.0
_RESTARTS = 3
_BAD_CONFIG = 2


class Supervisor:
    """Runs `commands` by name until `leader` has ended, a signal comes, or a child cannot be kept alive.

    A child other than the leader that dies is started again, three times at most. A child that finds its configuration
    wrong (exit code 2) ends all.
    """

    def __init__(self, commands: Mapping[str, Sequence[str]], *, leader: str | None) -> None:
        self._commands = commands
        self._leader = leader
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._restarts: dict[str, int] = {}
        self._signal: signal.Signals | None = None

    def run(self) -> int:
        """Blocks until everything has ended; the leader's exit code, or 0 after a signal."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)
        try:
            for name in self._commands:
                self._start(name)
            return self._watch()
        finally:
            self._stop_all()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signal = signal.Signals(number)

    def _start(self, name: str) -> None:
        # A session of its own: a Ctrl-C at the terminal reaches the supervisor alone, which then stops in good order.
        self._children[name] = subprocess.Popen(
            list(self._commands[name]), start_new_session=True, preexec_fn=parent_death_signal
        )

    def _watch(self) -> int:
        while True:
            if self._signal is not None:
                log.info("stopping: %s", self._signal.name)
                return 0
            for name, child in list(self._children.items()):
                code = child.poll()
                if code is not None and (verdict := self._ended(name, code)) is not None:
                    return verdict
            time.sleep(_POLL_S)

    def _ended(self, name: str, code: int) -> int | None:
        """What the end of a child means: an exit code for all, or None to go on."""
        del self._children[name]
        if name == self._leader or code == _BAD_CONFIG:
            return code
        self._restarts[name] = self._restarts.get(name, 0) + 1
        if self._restarts[name] > _RESTARTS:
            log.error("%s has ended with code %d once more: giving up", name, code)
            return 1
        log.warning("%s has ended with code %d and is started again", name, code)
        self._start(name)
        return None

    def _stop_all(self) -> None:
        for child in self._children.values():
            child.terminate()
        deadline = time.monotonic() + _STOP_S
        for name, child in self._children.items():
            try:
                child.wait(timeout=max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                log.warning("%s does not stop and is killed", name)
            self._kill_session(child)

    def _kill_session(self, child: "subprocess.Popen[bytes]") -> None:
        """Whatever the child, or a child of it, has left running."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        sys.stdout.flush()
