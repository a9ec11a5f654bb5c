"""`headway eval`: which processes have to be started, and what each is told."""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from headway.doctor.asking import targets_of
from services.config.models import ProcessConfig
from services.config.sources import ConfigError
from services.diagnosis.asked import AskedProcess, Condition
from services.diagnosis.asking import ask

EVALUATION_OPTIONS: Mapping[str, bool] = dict.fromkeys(
    ("--model", "--checkpoint", "--tasks", "--samples", "--output", "--against", "--judge"), True
)
"""The command's own options, each with a value."""

_LEARNER = "learner"
_FLAGS = {
    "--model": "--model",
    "--checkpoint": "--evaluation.checkpoint",
    "--tasks": "--evaluation.final-tasks",
    "--samples": "--evaluation.samples",
    "--output": "--evaluation.output",
    "--against": "--evaluation.against",
    "--judge": "--evaluation.judge.verifier",
}
_WITH_A_MODEL = (_LEARNER, "generator", "env-service")


def evaluation_words(
    own: Mapping[str, Sequence[str]], overrides: Mapping[str, Sequence[str]], *, path: Path, tables: Iterable[str]
) -> dict[str, list[str]]:
    """The command line of each process: the user's overrides, then the command's own options as settings, which so go
    before those that a run was trained with.

    `tables` are those of the config file at `path`. Raises ConfigError if the learner is not among them.
    """
    known = set(tables)
    if _LEARNER not in known:
        raise ConfigError([f"{path}: no table [learner]; an evaluation needs one, for the model and the addresses"])
    words = {process: list(more) for process, more in overrides.items()}
    words.setdefault(_LEARNER, []).extend(("--evaluation.only", "true"))
    for name, values in own.items():
        takers = _WITH_A_MODEL if name == "--model" else (_LEARNER,)
        for process in known.intersection(takers):
            words.setdefault(process, []).extend((_FLAGS[name], values[-1]))
    return words


def to_be_started(configs: Mapping[str, ProcessConfig]) -> list[str]:
    """Asks at their addresses which processes of `configs` are there; returns the others. Raises ConfigError."""
    return missing(configs, asyncio.run(_ask(configs)))


def missing(names: Iterable[str], procs: Sequence[AskedProcess]) -> list[str]:
    """The `names` that none of the procs is, the learner among them.

    Raises ConfigError if somebody else is at the address of one of them, or a learner at the learner's: it is its place
    that the evaluation takes.
    """
    there = [proc for proc in procs if proc.condition is not Condition.DEAD]
    problems = [_in_the_way(proc) for proc in there if _is_in_the_way(proc)]
    if problems:
        raise ConfigError(problems)
    kinds = {proc.kind for proc in there}
    return [name for name in names if name not in kinds]


async def _ask(configs: Mapping[str, ProcessConfig]) -> list[AskedProcess]:
    async with asyncio.TaskGroup() as group:
        asked = [group.create_task(ask(target)) for target in targets_of(configs)]
    return [task.result() for task in asked]


def _is_in_the_way(proc: AskedProcess) -> bool:
    return proc.kind == _LEARNER or proc.condition is not Condition.ANSWERS


def _in_the_way(proc: AskedProcess) -> str:
    if proc.condition is not Condition.ANSWERS:
        return f"{proc.target.url} is the address of [{proc.kind}], and is taken: {proc.complaint}"
    return (
        f"a learner runs at {proc.target.url}, whose place an evaluation takes: wait until it has ended, or give "
        "all processes of the evaluation other addresses"
    )
