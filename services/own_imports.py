"""Imports of what a process is made of, which come after its config has been read."""

import gc
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)

_WRONG_SETTINGS = 78  # as services.process has it, which may be what cannot be imported


@contextmanager
def own_imports(process: str) -> Iterator[None]:
    """Ends the process for good, with a sentence, if the body cannot import something: another start would not help.

    Meanwhile the garbage collector has a pause: what is imported stays, and need not be looked through again and again.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    except ImportError as error:
        logger.critical(
            "stopped by an error: %s cannot be loaded: %s: a package is missing, or is not of the version that this "
            "release is made for; install those of requirements/cpu.lock or gpu.lock",
            process,
            error,
        )
        logging.shutdown()
        sys.exit(_WRONG_SETTINGS)
    finally:
        if collects:
            gc.enable()
