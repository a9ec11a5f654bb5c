"""The command `headway`: all four processes on one machine, and checks of their one config file.

    headway up RUN.toml      starts what RUN.toml has a table for, and stops it all when the learner has ended
    headway check RUN.toml   reads it as the processes would, and starts nothing

Nothing that it does is needed when the processes are deployed one by one.
"""

import importlib
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path

from services.config import ProcessConfig, load_config
from services.config_sources import PROCESSES, ConfigError, read_tables
from services.logs import configure_logging
from services.supervisor import Supervisor

USAGE = """\
usage: headway up RUN.toml [--PROCESS.OPTION VALUE ...]
       headway check RUN.toml

up     start the processes that RUN.toml has a table for, and stop them all when the learner has ended
check  read RUN.toml as each process would, and start nothing

PROCESS is learner, generator, reward-service or env-service; its --help lists its options.
"""


def main() -> None:
    """Parses the command line and exits with the command's code."""
    match sys.argv[1:]:
        case ["up", path, *overrides]:
            sys.exit(up(Path(path), overrides))
        case ["check", path]:
            sys.exit(check(Path(path)))
        case ["--help" | "-h", *_]:
            sys.stdout.write(USAGE)
        case _:
            sys.stderr.write(USAGE)
            sys.exit(2)


def check(path: Path) -> int:
    """Prints every problem of a config file; 0 if there is none, 2 otherwise."""
    try:
        configs = _load_all(path, {})
    except ConfigError as error:
        sys.stderr.write("".join(f"{problem}\n" for problem in error.problems))
        return 2
    sys.stdout.write(f"{path}: good for {', '.join(configs)}\n")
    return 0


def up(path: Path, overrides: Sequence[str]) -> int:
    """Runs the processes until the learner has ended or a signal comes; the exit code is the learner's."""
    try:
        arguments = _split(overrides)
        configs = _load_all(path, arguments)
    except ConfigError as error:
        sys.stderr.write("".join(f"{problem}\n" for problem in error.problems))
        return 2
    configure_logging("headway")
    commands = {name: [*_command(name), "--config", str(path), *arguments.get(name, [])] for name in configs}
    leader = "learner" if "learner" in commands else None
    return Supervisor(commands, leader=leader).run()


def _command(process: str) -> list[str]:
    """The console script beside this interpreter."""
    return [str(Path(sys.executable).with_name(process))]


def _split(overrides: Sequence[str]) -> dict[str, list[str]]:
    """`--learner.max-lag 0` becomes `--max-lag 0` of the learner. Raises ConfigError."""
    arguments: dict[str, list[str]] = {}
    current: list[str] | None = None
    for word in overrides:
        if word.startswith("--"):
            process, _, option = word.removeprefix("--").partition(".")
            if process not in (*PROCESSES, "run") or not option:
                names = ", ".join(("run", *PROCESSES))
                raise ConfigError([f"command line: {word}: expected --PROCESS.OPTION, PROCESS being one of {names}"])
            targets = PROCESSES if process == "run" else (process,)
            flag = f"--run.{option}" if process == "run" else f"--{option}"
            for target in targets:
                arguments.setdefault(target, []).append(flag)
            current = [*targets]
        elif current is None:
            raise ConfigError([f"command line: {word!r} follows no option"])
        else:
            for target in current:
                arguments[target].append(word)
    return arguments


def _load_all(path: Path, arguments: Mapping[str, Sequence[str]]) -> dict[str, ProcessConfig]:
    """The config of each process that the file has a table for. Raises ConfigError with all problems."""
    tables = read_tables(path)
    wanted = [name for name in PROCESSES if name in tables]
    if not wanted:
        raise ConfigError([f"{path}: no table of a process; expected some of [{'], ['.join(PROCESSES)}]"])
    configs: dict[str, ProcessConfig] = {}
    problems: list[str] = []
    for name in wanted:
        argv = ["--config", str(path), *arguments.get(name, [])]
        try:
            configs[name] = load_config(_config_model(name), process=name, argv=argv, environ=os.environ)
        except ConfigError as error:
            problems += error.problems
    problems = [*dict.fromkeys(problems), *_clashes(configs)]
    if problems:
        raise ConfigError(problems)
    return configs


def _config_model(process: str) -> type[ProcessConfig]:
    """Found by entry point, so that this package imports none of the processes."""
    (entry,) = entry_points(group="headway.process", name=process)
    model: type[ProcessConfig] = getattr(importlib.import_module(entry.module), entry.attr)
    return model


def _clashes(configs: Mapping[str, ProcessConfig]) -> Iterable[str]:
    """What is wrong between processes that are each right: one port for two, model folders that are not there."""
    ports: dict[int, str] = {}
    problems = []
    for name, config in configs.items():
        port = getattr(getattr(config, "http", None), "port", 0)
        if port and port in ports:
            problems.append(f"[{ports[port]}] and [{name}] both have http.port {port}: give each its own")
        ports[port] = name
        model = getattr(config, "model", None)
        if isinstance(model, Path) and not model.is_dir():
            problems.append(f"[{name}] model: {model} is not a folder; expected a Hugging Face model directory")
    return problems


if __name__ == "__main__":
    main()
