"""The command line of the umbrella command: its usage, and its own options, told apart from those that it passes on to
the processes.
"""

import importlib
import re
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path

from services.config.models import ProcessConfig
from services.config.options import flag_of, nearest, schema_of
from services.config.sources import PROCESSES, TABLES, ConfigError, read_tables

_USAGES: Mapping[str, str] = {
    "init": """\
       headway init NAME [--model FOLDER]
""",
    "up": """\
       headway up RUN.toml [--only PROCESS,...] [--resume [--accept-changes]] [--restarts N]
                          [--PROCESS.OPTION VALUE ...]
""",
    "check": """\
       headway check RUN.toml [--elsewhere] [--PROCESS.OPTION VALUE ...]
""",
    "doctor": """\
       headway doctor RUN.toml [--before] [--json] [--url PROCESS=URL ...] [--PROCESS.OPTION VALUE ...]
       headway doctor --memory [SIZE ...]
""",
    "eval": """\
       headway eval RUN.toml [--model FOLDER | --checkpoint FOLDER] [--tasks N] [--samples N] [--output FILE]
                             [--against FILE [--judge VERIFIER]] [--PROCESS.OPTION VALUE ...]
""",
    "serve": """\
       headway serve MODEL [--port N] [--host HOST] [--name NAME] [--context N] [--restarts N]
                           [--PROCESS.OPTION VALUE ...]
""",
    "status": """\
       headway status RUN.toml|FOLDER [--json] [--url PROCESS=URL ...] [--PROCESS.OPTION VALUE ...]
""",
    "releases": """\
       headway releases RUN.toml [VERSION [--trajectories FILE]] [--PROCESS.OPTION VALUE ...]
""",
    "rollback": """\
       headway rollback RUN.toml VERSION [--reason TEXT] [--PROCESS.OPTION VALUE ...]
""",
    "promote": """\
       headway promote RUN.toml [VERSION] [--PROCESS.OPTION VALUE ...]
""",
    "feedback": """\
       headway feedback RUN.toml FILE [--PROCESS.OPTION VALUE ...]
""",
    "report": """\
       headway report RUN [RUN ...] [--output FILE]
""",
    "plan": """\
       headway plan (--model FOLDER | --parameters N --layers N --hidden N --kv-width N --vocabulary N [--active N])
                    (--device KIND | --memory-gb N --tflops N --bandwidth N) [--link N] [--network N] --devices N
                    (--lengths N,N,... | --run FOLDER) [--calibrate FOLDER] [--reference] [--critic]
                    [--greedy] [--prompt N] [--groups N] [--group-size N] [--steps N] [--max-lag N]
                    [--at-once N] [--in-flight N] [--environment-s S] [--reward-s S] [--generator-devices N]
                    [--sequence-parallel N] [--optimizer adamw|muon] [--alignment]
                    [--price P] [--json]
""",
    "diff": """\
       headway diff RUN RUN
""",
    "view": """\
       headway view RUN ... [--port N] [--host HOST --token-file FILE]
""",
    "fetch": """\
       headway fetch NAME ... [--dataset] [--revision REVISION]
""",
    "export": """\
       headway export RUN|CHECKPOINT --to FOLDER [--merged] [--model FOLDER]
""",
    "relay": """\
       headway relay (--from LEARNER | --from-relay RELAY) --folder FOLDER [--source-token-file FILE] [--gb N]
                     [--port N] [--host HOST --token-file FILE] [--tls-cert-file FILE --tls-key-file FILE]
                     [--tls-ca-file FILE] [--tls-client-ca-file FILE]
""",
    "--version": """\
       headway --version
""",
    "keys": """\
       headway keys FOLDER [--env-service NAME ...] [--host HOST ...] [--force]
""",
    "data": """\
       headway data convert ROWS.jsonl [TASKS.jsonl] [--reference] [--extract last|first|whole] [--reward all|fraction]
""",
}
_TEXTS: Mapping[str, str] = {
    "init": """\
init    write a project into the folder NAME: a run.toml, tasks, a reward, and a tiny model unless one is named
""",
    "up": """\
up      start the processes that RUN.toml has a table for, and stop them all when the learner has ended; one that dies
        is started again, at most N times (5 if left out) without a minute of life in between; with --resume the run
        of this name goes on from its newest checkpoint; settings that would make it another training (algorithm,
        model, group size) are refused then, unless with --accept-changes; with --only, start these alone, as the
        others run on other machines: without the learner, until a signal comes
""",
    "check": """\
check   read RUN.toml as each process would, with the files and the code that it names; see whether all of it fits
        together and the machine is fit for it, and start nothing; `up` does so first. With --elsewhere the file is
        meant for another machine, or several: what depends on the machine (GPUs, memory, disk, free ports) is left out
""",
    "doctor": """\
doctor  ask the processes, also those at each URL, how they are, and say who is to blame if something is stuck; if none
        of them answers, or with --before: see whether machine, files and settings are fit for a start; FOLDER: that of
        a server that headway serve has started; --memory: needs
""",
    "eval": """\
eval    evaluate the model of RUN.toml, or that in a folder, or a checkpoint of a run with these settings, on N held-out
        tasks with N samples each; print the numbers and write them to FILE (evaluation.json in the run's folder if left
        out); with --against, also the win rate against an earlier such file; with --judge, how often a pairwise
        verifier of the reward service prefers ours to that file's, or to a JSONL's of prompt and completion. Processes
        that run already are used, the others are started and stopped again; nothing is trained, and no run's history
        is touched
""",
    "serve": """\
serve   serve training loops of others by the Tinker API, at port 7300 or another one: start a learner and a generator
        for the model in the folder MODEL, and print the address and a key for clients, who call the model NAME (its
        folder if left out) and have room for N tokens of prompt and completion (4096 if left out, or what the model
        has); state is kept in runs/serve, with which a later start goes on; one that dies is started again
""",
    "status": """\
status  show what the processes do: version, rate, waits, last events; live in a terminal until Ctrl-C, else once; of
        a server that headway serve has started by its FOLDER, runs/serve, also its tenants and their training runs
""",
    "releases": """\
releases  show which version users get, which ones they got before, and what became of each candidate; with VERSION,
        what it came of: steps, leases, rewards, settings; with FILE, write its trajectories as far as they are kept
""",
    "rollback": """\
rollback  give users VERSION again, such as 1.40 or 40, which was released before: its files are compared with their
        hashes, and each generator proves what it loads; promotions are held from then on
""",
    "promote": """\
promote let promotions go on after a rollback; with VERSION, release the candidate that is on trial with users
""",
    "feedback": """\
feedback  write the answers that users have rated and that no such file has yet to FILE, a line each, for training
""",
    "report": """\
report  write curves, balance, settings, environment and samples of runs, by their folders, into one HTML file
        (report.html in the first one's folder if left out)
""",
    "plan": """\
plan    say what memory a run will need, how fast its sides and the whole will be, which split of the devices is best,
        how old its tokens will be and what it will cost: rates from the model's and the devices' numbers, the rest from
        a simulation with the real ledger and pacing; KIND is H100, H200, A100, L40S or CPU (a core)
""",
    "diff": """\
diff    print the settings, versions and commits in which two runs differ, given by their folders
""",
    "view": """\
view    serve the page of runs, given by their folders, at http://127.0.0.1:7390/ or another port: curves, events,
        settings, trajectories token by token; of a run that goes on the learner serves it at its own HTTP address
""",
    "fetch": """\
fetch   download models, or data sets, by their names on the Hugging Face hub into its cache (HF_HOME), where a run.toml
        finds them by the same names
""",
    "export": """\
export  write a checkpoint, or the newest one of a run that has ended, as a Hugging Face folder: the whole model, or of
        a run with adapters (LoRA) these alone, in peft's format, unless with --merged; --model: where the initial model
        of the run is, if it was moved
""",
    "keys": """\
keys    make keys and tokens for processes on several machines, and print the settings that use them; with names of
        env-services that are new, adds theirs to what is in FOLDER; with the hosts of the machines, also makes a CA and
        certificates for HTTPS, or renews those that are there; --force replaces all that is there, as after a leak:
        env-services that are not named lose their keys, and with --host the CA is a new one
""",
    "relay": """\
relay   keep a copy of a learner's weights in FOLDER, of at most N GB (64), near generators that pull them
        (generator.join.relays), at port 7330 or another one; from the learner at its HTTP address, or from another
        relay, so that a slow link carries them once
""",
    "data": """\
data    make tasks for the verifier code of rows of HumanEval(+), MBPP(+), APPS, TACO or LiveCodeBench, in JSONL or
        Parquet; with --reference each holds its published solution, on which its tests are tried first
""",
}
_PROCESS = """\
PROCESS is learner, generator, reward-service or env-service, and run for the table [run]; the --help of each process
lists its options, and so does this with --all. Example: headway up run.toml --learner.max-lag 0 --run.name synchronous
"""
_ENDINGS: Mapping[str, str] = {
    "up": """\
exit code of up and eval: the learner's; 0 if stopped by a signal; 1 if a process could not be kept alive; 2 for wrong
settings, also if a process finds them wrong at its start, which is then not started again
""",
    "check": """\
exit code of check: 0 if all is well, 2 if not
""",
    "doctor": """\
exit code of doctor: 0 if all is well, 1 if not, 2 for wrong settings
""",
}


def usage(command: str = "") -> str:
    """All that `headway --help` says, or what `headway COMMAND --help` says of one command."""
    names = [command] if command in _USAGES else list(_USAGES)
    uses = "".join(_USAGES[name] for name in names)
    endings = [_ENDINGS.get(name, "") for name in (("up",) if command == "eval" else names)]
    parts = ["usage: " + uses.removeprefix("       "), "".join(_TEXTS.get(name, "") for name in names)]
    parts += [_PROCESS if "PROCESS.OPTION" in uses else "", "".join(endings)]
    return "\n".join(part for part in parts if part)


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


def config_model(process: str) -> type[ProcessConfig]:
    """Found by entry point, so that this package imports none of the processes."""
    (entry,) = entry_points(group="headway.process", name=process)
    model: type[ProcessConfig] = getattr(importlib.import_module(entry.module), entry.attr)
    return model


def _unknown_table(word: str, table: str, option: str) -> str:
    guess = nearest(table, TABLES)
    meant = f"--{guess}.{option}" if guess and option else None if option else _with_process(table)
    hint = f"did you mean {meant}?" if meant else f"PROCESS is one of {', '.join(TABLES)}"
    return f"command line: {word}: expected --PROCESS.OPTION; {hint}"


def _with_process(name: str) -> str | None:
    """The flag that is meant by one without its process: of the first that has such an option, or one like it."""
    key, known = name.replace("-", "_"), {one: schema_of(config_model(one)).options for one in PROCESSES}
    guesses = {process: nearest(key, options) for process, options in known.items()}
    process = next((one for one, options in known.items() if key in options), None)
    process = process or next((one for one, guess in guesses.items() if guess), None)
    return None if process is None else flag_of(f"{process}.{guesses[process]}")


def as_given(problem: str, process: str) -> str:
    """A process's complaint about its command line, with the flags as they are written here."""
    if not problem.startswith("command line"):
        return problem
    flags = re.sub(r"(?<!learner )--(?!help\b|run\.)(?=[a-z])", f"--{process}.", problem)
    return flags.replace("see --help", f"see {process} --help")


def named_processes(path: Path, text: str) -> tuple[str, ...]:
    """The processes of --only, each of which the file has a table for. Raises ConfigError."""
    names, there = tuple(text.split(",")), [name for name in PROCESSES if name in read_tables(path)]
    if wrong := [name for name in names if name not in there]:
        guess = nearest(wrong[0], there)
        hint = f"did you mean {guess}?" if guess else f"{path.name} has tables for {', '.join(there) or 'none'}"
        raise ConfigError([f"command line: --only: {', '.join(map(repr, wrong))}: {hint}"])
    return names
