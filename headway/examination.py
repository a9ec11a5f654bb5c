"""The examination of what a run's settings name, before a start: here, or in a child of its own."""

import gc
import json
import logging
import os
import select
import signal
import time
from typing import TYPE_CHECKING, NoReturn

from headway.run_configs import Configs, devices_of
from services.config.agreements import on_one_machine
from services.config.sources import ConfigError
from services.process import signal_name

if TYPE_CHECKING:
    from headway.checking import Examination

logger = logging.getLogger(__name__)

_QUIET_S = 10.0
"""An examination that takes longer says what it is at."""
_PORT_S = 8.0
"""Ports that a run which was killed just now still holds are free after so long."""
_UNCHECKED = "what the settings name could not be checked"


def examined(configs: Configs, *, port_wait_s: float = 0.0, elsewhere: bool = False) -> "Examination":
    """Problems that a start would find beyond the settings themselves.

    Ports that are taken are looked at again for `port_wait_s` seconds. `elsewhere`: for another machine than this.
    """
    # Deferred: what it loads is not wanted in a supervisor, nor for --help.
    from headway.checking import examine

    found = examine(configs, port_wait_s=port_wait_s, elsewhere=elsewhere)
    try:
        if not elsewhere or on_one_machine(configs):
            devices_of(configs, elsewhere=elsewhere)
    except ConfigError as error:
        found.faults += error.problems
    return found


def examined_apart(configs: Configs, *, limit_s: float = 60.0) -> None:
    """Run `examined` in a child, so that what user code imports does not stay here.

    Raises ConfigError with its faults; logs its notes; after `limit_s`, or if the child dies, the start goes on
    unchecked, which is logged.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        _examine_in_child(configs, writer)
    os.close(writer)
    text = _report_of_child(reader, limit_s=limit_s)
    if text is None:
        os.kill(child, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if not text or code != 0:
        how = f"took more than {limit_s:g} s" if text is None else _ended(code)
        logger.warning("%s: the check %s: starting all the same", _UNCHECKED, how)
        return
    said = json.loads(text)
    for note in said["notes"]:
        logger.warning("%s", note)
    if said["faults"]:
        raise ConfigError(said["faults"])


def _ended(code: int) -> str:
    """The end of a child in words, by its exit code as Python gives it, where a signal is negative."""
    return f"was ended by {signal_name(-code)}" if code < 0 else f"ended early, with exit code {code}"


def _examine_in_child(configs: Configs, writer: int) -> NoReturn:
    code = 1
    gc.freeze()  # what the parent has is not the child's to end: of some of it, threads are missing here
    try:
        found = examined(configs, port_wait_s=_PORT_S)
        with os.fdopen(writer, "w") as pipe:
            json.dump({"faults": found.faults, "notes": found.notes}, pipe)
        code = 0
    except (Exception, SystemExit):
        logger.exception(_UNCHECKED)
    finally:
        os._exit(code)


def _report_of_child(reader: int, *, limit_s: float) -> str | None:
    """The child's JSON; None after `limit_s`. Logs once if it takes more than `_QUIET_S`."""
    data, began = b"", time.monotonic()
    with os.fdopen(reader, "rb") as pipe:
        said = False
        while (left := began + limit_s - time.monotonic()) > 0:
            if select.select([pipe], [], [], min(left, _QUIET_S))[0]:
                part = os.read(reader, 1 << 16)
                if not part:
                    return data.decode()
                data += part
            elif not said:
                logger.info("reading the tasks and importing the code that the settings name: more than %g s", _QUIET_S)
                said = True
    return None
