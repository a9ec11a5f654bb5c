"""The command `learner`; `learner replay RUN` trains a run that has ended again, from its journal."""

import argparse
import contextlib
import ctypes
import dataclasses
import logging
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError

from learner.changed_settings import WhatIf
from learner.config import LearnerConfig
from learner.page.child_of_page import yield_to_page
from learner.run_settings import config_of_run, settings_of_run, what_if_of
from services.config import made_with
from services.config.models import load_or_exit
from services.logs import configure_logging
from services.nccl import keep_to_interface_of
from services.own_imports import own_imports
from services.process import START_AGAIN, WRONG_SETTINGS, WrongSettings, leave, run_process
from services.standard_output import show, standard_output

if TYPE_CHECKING:
    from learner.training.ranks import Ranks

_RESTARTS = "HEADWAY_RANK_RESTARTS"
_STABLE_S = 60.0
_DESCRIPTION = """\
Trains a policy, online or from files, or serves the Tinker API (--tinker.enabled true). Beside that, with a --help of
its own: `learner replay RUN` trains a run again from its journal."""
_STDERR = 2
_GROUPS_SHOWN = 10
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # glibc's malloc.h


@standard_output()
def main() -> None:
    """Reads the config, then trains, evaluates or serves. torch is imported after the config is known to be good."""
    yield_to_page()
    again = to_replay(sys.argv[1:])
    if again is None:
        config = load_or_exit(LearnerConfig, process="learner", description=_DESCRIPTION)
        config = resumed_if_there_is_a_run(_resumed_by_torchrun(config))
    else:
        config = again.config
    configure_logging("learner", level=config.log.level, format=config.log.format)
    _tune_environment(config, replays=again is not None)
    if "RANK" in os.environ:
        with own_imports("learner"):
            from learner.training.ranks import ranks_from_environment, say_begun

        ranks = ranks_from_environment(os.environ)
        assert ranks is not None, "torchrun sets WORLD_SIZE beside RANK"
        if not ranks.leads:
            leave(_follow(config, ranks, in_turn=() if again is None else again.in_turn))
        say_begun(ranks)
    if again is not None:
        leave(_replay(again))
    with own_imports("learner"):
        if config.tinker.enabled:
            from learner.tinker import serve_tinker as train
        elif config.evaluation.only:
            from learner.evaluate import evaluate_alone as train
        elif config.learns_from_files:
            from learner.offline import train_offline as train
        else:
            from learner.service import train_online as train
    began = time.monotonic()
    code = run_process("learner", lambda stop: train(config, stop))
    if code == START_AGAIN and "RANK" not in os.environ:
        start_again(config, lived_s=time.monotonic() - began)
    leave(code)


def _follow(config: LearnerConfig, ranks: "Ranks", *, in_turn: tuple[LearnerConfig, ...]) -> int:
    with own_imports("learner"):
        if config.tinker.enabled:
            from learner.tenant_ranks import follow_tenants

            return follow_tenants(config, ranks)
        from learner.run_ranks import follow
    return follow(config, ranks, in_turn=in_turn)


@dataclasses.dataclass(frozen=True)
class ReplayOrder:
    """A replay that was asked for: the run's settings, the version to begin with, and the what-if, if it is one."""

    config: LearnerConfig
    version: int | None = None
    what_if: WhatIf | None = None

    @property
    def in_turn(self) -> tuple[LearnerConfig, ...]:
        """The settings of the trainers of a what-if, in order; empty for a plain replay."""
        return () if self.what_if is None else self.what_if.in_turn


def _replay(order: ReplayOrder) -> int:
    config, version, what_if = order.config, order.version, order.what_if
    with own_imports("learner"):
        if what_if is None:
            from learner.replay import replay

            return run_process("learner", lambda stop: replay(config, stop, version=version))
        from learner.what_if import show_what_if
    return run_process("learner", lambda stop: show_what_if(what_if, stop, version=version))


def to_replay(words: Sequence[str]) -> ReplayOrder | None:
    """The order that `learner replay` gives; None for other words. Exits for one that cannot be followed."""
    if words[:1] != ["replay"]:
        return None
    parser = argparse.ArgumentParser(
        prog="learner replay",
        description="Trains a run again from its journal and compares; with --set by other settings, as a what-if.",
    )
    parser.add_argument("run", type=Path, help="the run's folder, such as runs/addition")
    parser.add_argument("--from", dest="version", type=int, help="begin with this checkpoint; else with the oldest")
    parser.add_argument(
        "--set",
        dest="changes",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a setting of algorithm or optimizer to train by, such as algo.clip_high=0.3; may be repeated",
    )
    parser.add_argument("--to", type=Path, help="with --set: new folder for the numbers of all steps and groups")
    parser.add_argument(
        "--groups",
        type=int,
        help=f"with --set: how many groups to show whose pull changed most, {_GROUPS_SHOWN} if left out; 0 shows none, "
        "and takes half the time",
    )
    given = parser.parse_args(words[1:])
    if not given.changes and (given.to is not None or given.groups is not None):
        parser.error("--to and --groups are for a what-if: add --set KEY=VALUE, or leave them out")
    if given.groups is not None and given.groups < 0:
        parser.error(f"--groups is {given.groups}: expected 0 or more")
    try:
        if not given.changes:
            return ReplayOrder(settings_of_run(given.run), given.version)
        groups = _GROUPS_SHOWN if given.groups is None else given.groups
        what_if = what_if_of(given.run, given.changes, groups=groups, to=given.to)
        return ReplayOrder(what_if.config, given.version, what_if)
    except (WrongSettings, ValidationError) as error:
        sys.stderr.write(f"learner replay: {error}\n")
        sys.exit(WRONG_SETTINGS)


def export_of_run(source: Path, destination: Path, *, merged: bool, model: Path | None = None) -> str:
    """`headway export`: writes a checkpoint, or the newest of a run, as a Hugging Face folder; returns what to say.

    `model` is where the initial model is now, if it was moved. Raises WrongSettings.
    """
    folder = source if (source / made_with.FILE).exists() else source.parent
    try:
        config = config_of_run(folder)
    except ValidationError as error:
        raise WrongSettings(_not_taken(folder, error)) from error
    if model is not None:
        config = config.model_copy(update={"model": model})
    _tune_libraries(config)
    from learner.export import behind, export

    checkpoint, kind = export(config, source, destination, merged=merged)
    return f"{checkpoint} is in {destination}, as a {kind} of Hugging Face\n{behind(source, checkpoint)}"


def _not_taken(folder: Path, error: ValidationError) -> str:
    """Reason why the settings of a run are none for this release."""
    first = error.errors(include_url=False, include_input=False)[0]
    place = ".".join(str(part) for part in first["loc"])
    why = f"{place}: {first['msg']}" if place else first["msg"]
    then = made_with.read(folder).get("versions", {}).get("headway")
    now = made_with.here()["versions"].get("headway")
    if then is None or then == now:
        return f"{folder / made_with.FILE} cannot be taken: {why}"
    return f"{folder / made_with.FILE} is of another release, headway {then}, and here is {now}: {why}"


def start_again(config: LearnerConfig, *, lived_s: float) -> None:
    """Becomes a new learner that resumes the run, in the same process, as its own ranks end with it.

    Returns if that has happened `rank_restarts` times without a minute of life in between: whoever started this process
    may know better, and reads it from the exit code.
    """
    in_row = 0 if lived_s >= _STABLE_S else int(os.environ.get(_RESTARTS, "0"))
    if in_row >= config.rank_restarts or not config.checkpoint.journal:
        return
    how = "" if config.tinker.enabled else " with --resume"
    logging.getLogger("learner").warning("starting again%s (%d of %d)", how, in_row + 1, config.rank_restarts)
    os.environ[_RESTARTS] = str(in_row + 1)
    goes_on = config.resume or config.evaluation.only or config.tinker.enabled
    resumed = [] if goes_on else ["--resume", "true"]
    logging.shutdown()
    show()
    for descriptor in os.listdir("/proc/self/fd") if sys.platform == "linux" else ():
        with contextlib.suppress(OSError):  # the folder's own
            os.set_inheritable(int(descriptor), int(descriptor) <= _STDERR)
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:], *resumed])


def resumed_if_there_is_a_run(config: LearnerConfig) -> LearnerConfig:
    """Decided once: containers are started again with the command line of their first start."""
    if config.resume != "auto":
        return config
    return config.model_copy(update={"resume": config.run.folder.exists() and not config.evaluation.only})


def _resumed_by_torchrun(config: LearnerConfig) -> LearnerConfig:
    """torchrun starts lost ranks again with the command line of their first start."""
    again = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    if again and config.checkpoint.journal and (config.run.folder / "incarnation").exists():
        return config.model_copy(update={"resume": True})
    return config


def _tune_environment(config: LearnerConfig, *, replays: bool) -> None:
    keep_freed_memory()
    if config.collective == "nccl" and not replays:
        # Before any generator is known: they come by the interface on which they announce themselves.
        keep_to_interface_of(config.http.host if config.weights.host == "auto" else config.weights.host)
    _tune_libraries(config)


def _tune_libraries(config: LearnerConfig) -> None:
    """Sets variables that torch and its libraries read when they are loaded; a variable that is set already stays."""
    if not Path("/dev/nvidiactl").exists():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    # Spinning threads starve the other processes of a small machine.
    os.environ.setdefault("OMP_NUM_THREADS", str(config.threads_of_rank))
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("GOMP_SPINCOUNT", "0")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TORCH_LOGS", "-torch._library.triton")  # it says once more that a CPU has no triton
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # c10d's sockets warn of every peer that is not there yet
    os.environ.setdefault("TQDM_DISABLE", "1")  # transformers draws a bar for each file that it writes


def keep_freed_memory() -> None:
    """Has glibc keep what is freed for the next step instead of returning it to the kernel each time.

    To be called before any other thread runs. The thresholds hold for one arena only, that of the main thread: without
    a bound, the trainer's thread would get an arena of its own, which is unmapped and faulted in again at every step.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 1)
        for threshold in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD):
            mallopt(threshold, -1)  # read as the largest size there is: a step frees more than an int can say


if __name__ == "__main__":
    main()
