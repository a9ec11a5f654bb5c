"""The command `learner`."""

import atexit
import ctypes
import logging
import os
import sys
from pathlib import Path
from typing import NoReturn

from learner.config import LearnerConfig
from services.config import load_or_exit
from services.logs import configure_logging
from services.process import run_process

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h


def main() -> None:
    """Reads the config, then trains or evaluates. torch is imported after the config is known to be good."""
    config = load_or_exit(LearnerConfig, process="learner", description="Trains a policy, online or from files.")
    configure_logging("learner", level=config.log.level, format=config.log.format)
    _tune_environment(config)
    if int(os.environ.get("RANK", "0")) > 0:
        from learner.training.ranks import ranks_from_environment
        from learner.training_setup import follow

        ranks = ranks_from_environment(os.environ)
        assert ranks is not None, "RANK is set"
        follow(config, ranks)
        return
    if config.evaluation.only:
        from learner.evaluation.standalone import evaluate_alone as train
    elif config.learns_from_files:
        from learner.offline import train_offline as train
    else:
        from learner.service import train_online as train
    leave(run_process("learner", lambda stop: train(config, stop)))


def leave(code: int) -> NoReturn:
    """Ends the process with `code`; what was written is flushed.

    The interpreter is not taken down: a thread of torch's that comes back to it meanwhile, from a process group that is
    being closed or a step that was cut off, aborts the process ("terminate called without an active exception").
    """
    atexit._run_exitfuncs()
    logging.shutdown()
    sys.stdout.flush()
    os._exit(code)


def _tune_environment(config: LearnerConfig) -> None:
    """What torch and its libraries read when they are loaded; a variable that is set already stays."""
    _keep_freed_memory()
    if not Path("/dev/nvidiactl").exists():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    # Spinning threads starve the other processes of a small machine.
    os.environ.setdefault("OMP_NUM_THREADS", str(config.threads))
    os.environ.setdefault("GOMP_SPINCOUNT", "0")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TORCH_LOGS", "-torch._library.triton")  # it says once more that a CPU has no triton
    os.environ.setdefault("TQDM_DISABLE", "1")  # transformers draws a bar for each file that it writes


def _keep_freed_memory() -> None:
    """Has glibc keep large freed blocks for the next step instead of returning them to the kernel each time."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 1 << 30)
        mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)


if __name__ == "__main__":
    main()
