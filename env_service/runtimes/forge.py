"""Forks keepers of runtimes: a process of the service that has loaded all that they need, so that none has to start
an interpreter of its own. For each message it forks one, which has the descriptors that came with it: its end of the
service's socket, and a snapshot if there is one. It dies with the service, and keepers die with it.
"""

import ctypes
import json
import os
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress

from env_service.runtimes.keeper import MOST_MESSAGE, RuntimeKeeperSettings, keep
from services.isolation.keeping import become, close_all, close_all_but, raised, received


def main() -> None:
    """Fork keepers until the service goes. Its arguments are the service's process and a descriptor."""
    parent, control = int(sys.argv[1]), raised(int(sys.argv[2]))
    close_all_but(control)
    libc = ctypes.CDLL(None, use_errno=True)
    become(libc, None)
    if os.getppid() != parent:
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # keepers that end leave nothing
    with socket.socket(fileno=control) as service:
        while True:
            message, handles = received(service, most_bytes=MOST_MESSAGE, most_handles=2)
            if not message:
                return
            settings = RuntimeKeeperSettings(**json.loads(message))._replace(parent=os.getpid())
            if forked(handles):
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                service.close()
                keep(settings, handles)
                os._exit(0)
            close_all(handles)


def forked(handles: Sequence[int]) -> bool:
    """True in a new process; one that cannot be is told to the service by the first of the handles, and that is all:
    with the forge all keepers would go.
    """
    try:
        return os.fork() == 0
    except OSError as error:
        for handle in handles[:1]:
            with socket.socket(fileno=os.dup(handle)) as told, suppress(OSError):
                told.send(json.dumps({"failed": f"no process can be made: {error.strerror}"}).encode())
        return False
