"""The options of the umbrella command itself, told apart from those that it passes on to the processes."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from services.config.options import nearest
from services.config.sources import PROCESSES, TABLES, ConfigError, read_tables


def own_options(words: Sequence[str], known: Mapping[str, bool]) -> tuple[dict[str, list[str]], list[str]]:
    """The values of the `known` options, which are by name whether they take one, and all other words in their order.

    Raises ConfigError for an option that lacks its value, or has one and should not.
    """
    found: dict[str, list[str]] = {}
    others: list[str] = []
    rest = list(words)
    while rest:
        name, equals, value = rest.pop(0).partition("=")
        if name not in known:
            others.append(f"{name}{equals}{value}")
            continue
        if not known[name] and equals:
            raise ConfigError([f"command line: {name} takes no value, got {value!r}"])
        if known[name] and not equals:
            if not rest or rest[0].startswith("--"):
                raise ConfigError([f"command line: {name} needs a value"])
            value = rest.pop(0)
        found.setdefault(name, []).append(value)
    return found, others


def split_options(overrides: Sequence[str]) -> dict[str, list[str]]:
    """`--learner.max-lag 0` becomes `--max-lag 0` of the learner; `--run.name x` goes to all. Raises ConfigError."""
    arguments: dict[str, list[str]] = {}
    targets: Sequence[str] = ()
    for word in overrides:
        if word.startswith("--"):
            table, _, option = word.removeprefix("--").partition(".")
            if table not in TABLES or not option:
                raise ConfigError([_unknown_table(word, table, option)])
            targets = PROCESSES if table == "run" else (table,)
            word = f"--run.{option}" if table == "run" else f"--{option}"
        elif not targets:
            raise ConfigError([f"command line: {word!r} follows no option; expected --PROCESS.OPTION VALUE"])
        for target in targets:
            arguments.setdefault(target, []).append(word)
    return arguments


def _unknown_table(word: str, table: str, option: str) -> str:
    guess = nearest(table, TABLES) if option else None
    hint = f"did you mean --{guess}.{option}?" if guess else f"PROCESS is one of {', '.join(TABLES)}"
    return f"command line: {word}: expected --PROCESS.OPTION; {hint}"


def as_given(problem: str, process: str) -> str:
    """A process's complaint about its command line, with the flags as they are written here."""
    if not problem.startswith("command line"):
        return problem
    flags = re.sub(r"--(?!help\b|run\.)(?=[a-z])", f"--{process}.", problem)
    return flags.replace("see --help", f"see {process} --help")


def named_processes(path: Path, text: str) -> tuple[str, ...]:
    """The processes of --only, each of which the file has a table for. Raises ConfigError."""
    names, there = tuple(text.split(",")), [name for name in PROCESSES if name in read_tables(path)]
    if wrong := [name for name in names if name not in there]:
        guess = nearest(wrong[0], there)
        hint = f"did you mean {guess}?" if guess else f"{path.name} has tables for {', '.join(there) or 'none'}"
        raise ConfigError([f"command line: --only: {', '.join(map(repr, wrong))}: {hint}"])
    return names
