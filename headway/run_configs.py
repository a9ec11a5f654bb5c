"""The configs of a run's processes, as its file and the command line say, and the GPUs that these processes share."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from headway.own_options import as_given, config_model, split_options
from services.config.agreements import disagreements
from services.config.devices import VISIBLE, Need, enough, shared_out, visible
from services.config.models import ProcessConfig, load_config
from services.config.options import nearest
from services.config.run_paths import import_code_beside
from services.config.sources import PROCESSES, TABLES, ConfigError, read_tables

Arguments = Mapping[str, Sequence[str]]
Configs = Mapping[str, ProcessConfig]


def load_agreeing(path: Path, arguments: Arguments, *, only: Sequence[str] = PROCESSES) -> dict[str, ProcessConfig]:
    """The configs, which fit together. Raises ConfigError with all problems."""
    configs, problems = read_each(path, arguments, only=only)
    problems = [*problems, *disagreements(configs)]
    if problems:
        raise ConfigError(problems)
    return configs


def load_separately(path: Path, arguments: Arguments) -> dict[str, ProcessConfig]:
    """The configs, each good by itself. Raises ConfigError with all problems."""
    configs, problems = read_each(path, arguments)
    if problems:
        raise ConfigError(problems)
    return configs


def run_folder(path: Path, words: Sequence[str]) -> Path:
    """The folder of the run of a config file, whose settings fit together. Raises ConfigError otherwise."""
    return next(iter(load_agreeing(path, split_options(words)).values())).run.folder


def read_each(
    path: Path, arguments: Arguments, *, only: Sequence[str] = PROCESSES
) -> tuple[dict[str, ProcessConfig], list[str]]:
    """The config of each process that the file has a table for, and what is wrong with the others."""
    tables = read_tables(path)
    import_code_beside(path)
    wanted = [name for name in PROCESSES if name in tables and name in only]
    file = ("--config", str(path))
    configs, problems = read_command_lines(
        {name: (*file, *arguments.get(name, ())) for name in wanted}, environ=os.environ
    )
    problems = [*([] if wanted else _no_process(path, tables)), *problems]
    problems += [
        f"command line: {word.replace('--', f'--{name}.', 1)}: "
        + (f"--only leaves [{name}] to another machine" if name in tables else f"{path.name} has no table [{name}]")
        for name, words in arguments.items()
        for word in words
        if name not in wanted and word.startswith("--") and not word.startswith("--run.")
    ]
    return configs, list(dict.fromkeys(problems))


def read_command_lines(
    command_lines: Arguments, *, environ: Mapping[str, str]
) -> tuple[dict[str, ProcessConfig], list[str]]:
    """The config of each process whose command line makes one, and what is wrong with the others."""
    configs, problems = dict[str, ProcessConfig](), list[str]()
    for name, argv in command_lines.items():
        try:
            configs[name] = load_config(config_model(name), process=name, argv=argv, environ=environ)
        except ConfigError as error:
            problems += [as_given(problem, name) for problem in error.problems]
    return configs, problems


def devices_of(configs: Configs, *, elsewhere: bool = False) -> dict[str, tuple[tuple[str, str], ...]]:
    """The GPUs of each process that names none itself, as variables. Raises ConfigError if they do not suffice.

    `elsewhere`: for another machine than this, which has as many as are wanted.
    """
    needs = [
        Need(process=name, count=one.gpus_wanted, devices=one.devices, collective=one.collective)
        for name, one in configs.items()
    ]
    given = shared_out(needs, seen=enough(needs) if elsewhere else visible(os.environ))
    return {name: ((VISIBLE, ",".join(gpus)),) for name, gpus in given.items() if not configs[name].devices}


def _no_process(path: Path, tables: Mapping[str, object]) -> list[str]:
    guesses = {name: nearest(name, PROCESSES) for name in tables if name not in TABLES}
    hints = [f"; did you mean [{guess}] instead of [{name}]?" for name, guess in guesses.items() if guess]
    return [f"{path}: no table of a process; expected some of [{'], ['.join(PROCESSES)}]" + "".join(hints)]
