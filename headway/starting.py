"""The start of a run's processes, as far as `headway up`, `eval` and `serve` have it in common."""

import os
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType

from headway.examination import examined_apart
from headway.run_configs import Configs, devices_of
from headway.supervisor import ProcessCommand, RestartPolicy
from services.config.sources import ConfigError
from services.logs import configure_logging
from services.process import huge_pages
from services.run_lock import holder_of, taken_text

LEADER = "learner"
# Stopped after the env-service, which first gives its unfinished leases back.
_STOPPED_LAST = ("generator", "reward-service")


def prepared(configs: Configs) -> dict[str, dict[str, str]]:
    """Sees that these processes can be started, and begins to log as they do; returns the GPUs of each, as variables.

    Raises ConfigError with every problem, or if the run lives already.
    """
    if LEADER in configs and (holder := holder_of(configs[LEADER].run.folder)) is not None:
        raise ConfigError([taken_text(configs[LEADER].run.folder, holder)])
    log_as(configs)
    examined_apart(configs)
    return {name: dict(variables) for name, variables in devices_of(configs).items()}


def log_as(configs: Configs) -> None:
    """Has this process log as the first of these."""
    log = next(iter(configs.values())).log
    configure_logging("headway", level=log.level, format=log.format)


def restart_policy(own: Mapping[str, Sequence[str]]) -> RestartPolicy:
    """The policy by a command's own options, of which `--restarts` is one. Raises ConfigError."""
    if "--restarts" not in own:
        return RestartPolicy()
    text = own["--restarts"][-1]
    if not text.isdecimal():
        raise ConfigError([f"command line: --restarts: got {text!r}: expected a number, 0 for none"])
    return RestartPolicy(most=int(text))


def process_command(
    process: str,
    arguments: Sequence[str],
    *,
    run_folder: Path | None = None,
    environment: Mapping[str, str] = MappingProxyType({}),
    is_leader: bool = False,
) -> ProcessCommand:
    """The console script beside this interpreter.

    With `run_folder`, a learner that a signal has ended goes on with its own run there.
    """
    words = (str(Path(sys.executable).with_name(process)), *arguments)
    is_learner = process == LEADER
    again = None
    if is_learner and run_folder is not None:
        marker = run_folder / "incarnation"
        again = partial(_resumed, words, marker, _written_at(marker))
    return ProcessCommand(
        name=process,
        arguments=words,
        stop_stage=1 if process in _STOPPED_LAST else 0,
        is_leader=is_leader,
        again=again,
        environment=(*environment.items(), *(huge_pages(os.environ).items() if is_learner else ())),
    )


def _resumed(words: tuple[str, ...], marker: Path, before: int | None) -> tuple[str, ...]:
    """With `--resume true` if the run's marker is not the one that was there before the first start."""
    return words if _written_at(marker) in (None, before) else (*words, "--resume", "true")


def _written_at(path: Path) -> int | None:
    return path.stat().st_mtime_ns if path.exists() else None
