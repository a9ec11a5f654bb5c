"""A process that has imported what an engine needs, and becomes one by a fork: the second import of vLLM, which takes
some ten seconds of a core, and half a gigabyte of memory are saved.

    generator ── imports vllm ──┬── serves HTTP, has threads and sockets
                                └── fork server: one thread, no socket but its own ── fork ──▶ engine

It is Python's own fork server (`multiprocessing.forkserver`), but begun by a fork after the imports, and not as a new
interpreter. An engine gets its arguments pickled, as if it had been spawned, and what has changed in the environment.
For engines on CPUs alone: a GPU's start is bound by other things, and was not tried with it.
"""

import gc
import importlib
import logging
import multiprocessing
import os
import pickle
import shutil
import signal
import socket
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import forkserver
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from generator.engine.socket_folder import PREFIX

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

logger = logging.getLogger(__name__)

_forked_with: dict[str, str] = {}
"""The environment of when the process was begun."""


def open_fork_server() -> None:
    """Begins the process, once. Call it from a process that has imported vllm and done nothing else yet.

    It ends when this process and the engines that it made have ended. Where its socket cannot be had engines are
    started as vLLM does it, which takes longer.
    """
    server: Any = forkserver._forkserver  # there is no public way to say where it is
    if server._forkserver_pid is not None:
        return
    # What reaches the socket is run: the folder has a name that nobody knows before, and is this user's alone.
    folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}."))
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(str(folder / "forks"))
        listener.listen()
    except OSError as error:  # the path may be too long
        listener.close()
        shutil.rmtree(folder, ignore_errors=True)
        logger.warning("the engine is started the slow way: no socket in %s: %s", folder, error)
        return
    until_closed, alive = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    gc.freeze()  # a collection in a child would copy each page
    _forked_with.update(os.environ)
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
    """Takes its socket away, if there is one, so that it makes no more engines."""
    if has_fork_server():
        address: Any = vars(forkserver._forkserver)["_forkserver_address"]
        shutil.rmtree(Path(address).parent, ignore_errors=True)


def has_fork_server() -> bool:
    """Says if engines of this process are made by forks."""
    return getattr(forkserver._forkserver, "_forkserver_pid", None) is not None


def changed_environment() -> dict[str, str]:
    """Variables of the environment that have been set since the process was begun, which engines have to be told."""
    if not has_fork_server():
        return {}
    return {name: value for name, value in os.environ.items() if _forked_with.get(name) != value}


@contextmanager
def engines_by_forks() -> Iterator[None]:
    """Within it vLLM's engines are made by the fork server, if there is one, and so is the process that vLLM has look
    at the class of a model of which it has not noted yet what it can do.
    """
    if not has_fork_server():
        yield
        return
    from vllm.model_executor.models import registry
    from vllm.v1.engine import utils

    # vLLM allows "fork", by which a child has its parent's sockets and locks, and "spawn"; on a CPU it insists on this.
    usual, usual_look = utils.get_mp_context, registry._run_in_subprocess
    utils.get_mp_context = lambda: multiprocessing.get_context("forkserver")
    registry._run_in_subprocess = _looked_at
    try:
        yield
    finally:
        utils.get_mp_context, registry._run_in_subprocess = usual, usual_look


def _looked_at(look: Callable[[], Any]) -> Any:
    """The result of `look`, which is called in a fork: vLLM's own way is a new interpreter, with all imports.

    Raises RuntimeError if it failed, as vLLM expects it.
    """
    cloudpickle: Any = importlib.import_module("cloudpickle")  # which takes closures, too
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_look, args=(cloudpickle.dumps(look), theirs))
    process.start()
    theirs.close()
    try:
        found, error = ours.recv()
    except EOFError:
        found, error = None, "the process ended and said nothing"
    finally:
        ours.close()
        process.join()
    if error:
        raise RuntimeError(f"vLLM cannot look at the class of the model: {error}")
    return found


def _look(pickled: bytes, answer: "Connection") -> None:
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    found, error = None, ""
    try:
        found = pickle.loads(pickled)()  # noqa: S301 - by whoever made this process
    except Exception:  # noqa: BLE001 - the process that asks raises it
        error = traceback.format_exc()
    answer.send((found, error))


def _serve(listener: socket.socket, until_closed: int) -> NoReturn:
    try:
        # As in a new interpreter: the threads of these handlers are the parent's, and so are the signals' meanings.
        for handler in logging.root.handlers[:]:
            logging.root.removeHandler(handler)
        logging.root.setLevel(logging.WARNING)
        Path("/proc/self/comm").write_text("fork-server", encoding="ascii")
        if os.environ.get("PYTHONWARNINGS") == "ignore":  # read by a new interpreter alone
            warnings.simplefilter("ignore")
        # It goes when the others have gone: without it nobody could tell when an engine ends.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))
        signal.signal(signal.SIGINT, signal.default_int_handler)
        forkserver.main(listener.detach(), until_closed, [])
    except SystemExit:
        os._exit(0)
    except BaseException:  # noqa: BLE001 - the process ends with it
        traceback.print_exc()
    os._exit(1)
