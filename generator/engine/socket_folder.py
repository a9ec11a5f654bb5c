"""The folder of the sockets between an engine's processes, which vLLM makes in the system's and leaves there."""

import os
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path

_VARIABLE = "VLLM_RPC_BASE_PATH"
PREFIX = "headway-engine-"
"""Of folders in the system's, before the number of the process and, of those with a name of their own, a dot."""
_OLD_S = 3600.0


def make_socket_folder() -> None:
    """Has vLLM put its sockets into a folder of this process, unless the user has named one.

    Those that processes have left which were killed are removed.
    """
    own = _own()
    if os.environ.setdefault(_VARIABLE, str(own)) != str(own):
        return
    _sweep(own.parent)
    own.mkdir(mode=0o700, exist_ok=True)


def remove_socket_folder() -> None:
    """Removes this process's folder. Connections that stand go on without it."""
    shutil.rmtree(_own(), ignore_errors=True)


def _own() -> Path:
    return Path(tempfile.gettempdir()) / f"{PREFIX}{os.getpid()}"


def _sweep(parent: Path) -> None:
    for folder in parent.glob(f"{PREFIX}*"):
        with suppress(OSError, ValueError):
            is_old = time.time() - folder.stat().st_mtime > _OLD_S  # one of another container may be beginning
            if is_old and not Path(f"/proc/{_process(folder)}").exists():
                shutil.rmtree(folder, ignore_errors=True)


def _process(folder: Path) -> int:
    return int(folder.name.removeprefix(PREFIX).partition(".")[0])
