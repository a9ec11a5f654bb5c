"""A process that has imported what an engine needs, and becomes one by a fork: the second import of vLLM, which takes
some ten seconds of a core, and half a gigabyte of memory are saved.

    generator ── imports vllm ──┬── serves HTTP, has threads and sockets
                                └── fork server: one thread, no socket but its own ── fork ──▶ engine

It is Python's own fork server (`multiprocessing.forkserver`), but begun by a fork after the imports, and not as a new
interpreter. An engine gets its arguments pickled, as if it had been spawned, and the environment of when it is begun.
For engines on CPUs alone: a GPU's start is bound by other things, and was not tried with it.
"""

import gc
import logging
import multiprocessing
import os
import signal
import socket
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from generator.engine.socket_folder import make_own_folder, remove_socket_folder

_FOLDER = "forks"


def open_fork_server() -> None:
    """Begins the process, once. Call it from a process that has imported vllm and done nothing else yet.

    It ends when this process and the engines that it made have ended.
    """
    server: Any = forkserver._forkserver  # there is no public way to say where it is
    if server._forkserver_pid is not None:
        return
    folder = make_own_folder(_FOLDER)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder / "socket"))
    listener.listen()
    until_closed, alive = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    gc.freeze()  # a collection in a child would copy each page
    pid = os.fork()
    if pid == 0:
        os.close(alive)
        _serve(listener, until_closed)
    gc.unfreeze()
    address = listener.getsockname()
    listener.close()
    os.close(until_closed)
    server._forkserver_address, server._forkserver_alive_fd, server._forkserver_pid = address, alive, pid


def close_fork_server() -> None:
    """Takes its socket away, so that it makes no more engines."""
    remove_socket_folder(_FOLDER)


def _serve(listener: socket.socket, until_closed: int) -> None:
    """Never returns."""
    try:
        # As in a new interpreter: the threads of these handlers are the parent's, and so are the signals' meanings.
        for handler in logging.root.handlers[:]:
            logging.root.removeHandler(handler)
        logging.root.setLevel(logging.WARNING)
        Path("/proc/self/comm").write_text("fork-server", encoding="ascii")
        if os.environ.get("PYTHONWARNINGS") == "ignore":  # read by a new interpreter alone
            warnings.simplefilter("ignore")
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        forkserver.main(listener.detach(), until_closed, [])
    finally:
        os._exit(0)


def has_fork_server() -> bool:
    """Says if engines of this process are made by forks."""
    return getattr(forkserver._forkserver, "_forkserver_pid", None) is not None


@contextmanager
def engines_by_forks() -> Iterator[None]:
    """Within it vLLM's engines are made by the fork server, if there is one."""
    if not has_fork_server():
        yield
        return
    from vllm.v1.engine import utils

    # vLLM allows "fork", by which a child has its parent's sockets and locks, and "spawn"; on a CPU it insists on this.
    usual = utils.get_mp_context
    utils.get_mp_context = lambda: multiprocessing.get_context("forkserver")
    try:
        yield
    finally:
        utils.get_mp_context = usual
