"""The command `headway`: all four processes on one machine, and checks of their one config file.

    headway init NAME        writes a small project that runs as it is
    headway up RUN.toml      starts what RUN.toml has a table for, and stops it all when the learner has ended
    headway check RUN.toml   reads it as the processes would, and starts nothing
    headway doctor RUN.toml  asks the processes how they are; before a start, looks at the machine
    headway status RUN.toml  shows what they do, live
    headway report RUN ...   writes one HTML file of one run or of several
    headway plan ...         says what a run will need and how fast it will be, before there is one
    headway eval RUN.toml    evaluates a model on held-out tasks, and trains nothing
    headway serve MODEL      serves training loops of others, by the Tinker API
    headway export RUN       writes a checkpoint as a Hugging Face folder
    headway keys FOLDER      makes the keys and tokens with which processes on several machines trust each other
    headway data convert     makes tasks of the rows of published data sets

Nothing that it does is needed when the processes are deployed one by one.
"""

import json
import logging
import os
import re
import select
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, NoReturn

from headway.child_output import Bar, RunProgress
from headway.file_commands import compare_runs, convert_data, export_checkpoint, fetch, view_runs
from headway.keys_command import make_keys
from headway.new_project import make_project
from headway.own_options import as_given, config_model, named_processes, own_options, split_options, usage
from headway.supervisor import ProcessCommand, RestartPolicy, StopLimits, Supervisor
from services.config.agreements import disagreements, on_one_machine
from services.config.devices import VISIBLE, Need, enough, shared_out, visible
from services.config.made_with import handed_over
from services.config.models import ProcessConfig, help_text, load_config
from services.config.options import nearest
from services.config.run_paths import import_code_beside
from services.config.sources import PROCESSES, TABLES, ConfigError, read_tables
from services.logs import configure_logging
from services.process import huge_pages
from services.run_lock import holder_of, taken_text

if TYPE_CHECKING:
    from headway.checking import Examination

logger = logging.getLogger(__name__)

_LEADER = "learner"
_QUIET_S = 10.0
_PORT_S = 8.0
# The env-service first: it gives its unfinished work back while everybody is still there to take it.
_STOPPED_LAST = ("generator", "reward-service")

Arguments = Mapping[str, Sequence[str]]
Configs = Mapping[str, ProcessConfig]


def main() -> None:
    """Parses the command line and exits with the command's code."""
    try:
        sys.exit(_run(sys.argv[1:]))
    except ConfigError as error:
        sys.stderr.write("".join(f"headway: {problem}\n" for problem in error.problems))
        sys.exit(2)
    except KeyboardInterrupt:  # before anything was started
        sys.exit(130)


def check(path: Path, arguments: Arguments, *, elsewhere: bool = False) -> int:
    """Says that a config file is good, with all that it names, for this machine, or for any that may be `elsewhere`.

    Raises ConfigError with every problem otherwise.
    """
    configs, problems = _read_each(path, arguments)
    problems += disagreements(configs)
    found = examined(configs, elsewhere=elsewhere)
    if problems or found.faults:
        raise ConfigError(_together([*problems, *found.faults]))
    notes = "".join(f"note: {note}\n" for note in found.notes)
    folder = f"run: {configs[_LEADER].run.folder}\n" if _LEADER in configs else ""
    template = f"chat template: {found.template}\n" if found.template else ""
    sys.stdout.write(f"{path}: good for {', '.join(configs)}\n{folder}{template}{found.table}{notes}")
    return 0


def _together(problems: Sequence[str]) -> list[str]:
    """Each once; what several tables have in common in one line: `[learner], [generator] model: ...`."""
    tables: dict[str, list[str]] = {}
    for problem in problems:
        table, _, rest = problem.partition(" ") if problem.startswith("[") else ("", "", problem)
        tables.setdefault(rest, []).append(table)
    return [f"{', '.join(dict.fromkeys(several))} {rest}".strip() for rest, several in tables.items()]


def examined(configs: Configs, *, patience_s: float = 0.0, elsewhere: bool = False) -> "Examination":
    """Problems that a start would find beyond the settings themselves."""
    # Deferred: what it loads is not wanted in a supervisor, nor for --help.
    from headway.checking import examine

    found = examine(configs, patience_s=patience_s, elsewhere=elsewhere)
    try:
        if not elsewhere or on_one_machine(configs):
            _devices(configs, elsewhere=elsewhere)
    except ConfigError as error:
        found.faults += error.problems
    return found


def examined_apart(configs: Configs, *, patience_s: float = 60.0) -> None:
    """The same, in a child: the user's code that it imports, and all that it loads, does not stay in the supervisor.

    Raises ConfigError with every fault; notes are logged. After `patience_s` seconds a start goes on without it.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        _examine_in_child(configs, writer)
    os.close(writer)
    text = _text_of(reader, patience_s=patience_s)
    if text is None:
        os.kill(child, signal.SIGKILL)
        logger.warning("what the settings name could not be checked within %g s: starting all the same", patience_s)
    os.waitpid(child, 0)
    said = json.loads(text or "{}")
    for note in said.get("notes", ()):
        logger.warning("%s", note)
    if said.get("faults"):
        raise ConfigError(said["faults"])


def _examine_in_child(configs: Configs, writer: int) -> NoReturn:
    try:
        found = examined(configs, patience_s=_PORT_S)
        with os.fdopen(writer, "w") as pipe:
            json.dump({"faults": found.faults, "notes": found.notes}, pipe)
    except Exception:
        logger.exception("what the settings name could not be checked")
    finally:
        os._exit(0)


def _text_of(reader: int, *, patience_s: float) -> str | None:
    """All that is written to a pipe; None if its end does not come in time. After some seconds it is said."""
    data, began = b"", time.monotonic()
    with os.fdopen(reader, "rb") as pipe:
        said = False
        while (left := began + patience_s - time.monotonic()) > 0:
            if select.select([pipe], [], [], min(left, _QUIET_S))[0]:
                part = os.read(reader, 1 << 16)
                if not part:
                    return data.decode()
                data += part
            elif not said:
                logger.info("reading the tasks and importing the code that the settings name: more than %g s", _QUIET_S)
                said = True
    return None


def up(
    path: Path,
    arguments: Arguments,
    *,
    restarts: RestartPolicy,
    written: Sequence[str] = (),
    only: Sequence[str] = PROCESSES,
) -> int:
    """Runs the processes until the learner has ended or a signal comes; the exit code is as `USAGE` says.

    A run that has not come to its end can be taken up again: what to type for that is said, with the options as they
    were `written`. Of the tables of others than `only`, nothing is read: their keys are on their own machines.

    Raises ConfigError, before it starts anything, with every problem of the config file, or if the run lives already.
    """
    configs = _load_all(path, arguments, only=only)
    _check_free(configs)
    _log_as(configs)
    examined_apart(configs)
    given = {name: dict(variables) for name, variables in _devices(configs).items()}
    others = {name: one for name, one in configs.items() if name != _LEADER}
    told = handed_over(others, ["headway", "up", str(path), *written])
    given[_LEADER] = {**given.get(_LEADER, {}), **told}
    commands = [
        _command(name, path, arguments.get(name, ()), folder=one.run.folder, environment=given.get(name, {}))
        for name, one in configs.items()
    ]
    bar = Bar.where_possible(_progress(configs[_LEADER])) if _LEADER in configs else None
    supervisor = Supervisor(commands, limits=StopLimits(restarts=restarts), bar=bar)
    code = supervisor.run()
    unfinished = supervisor.was_stopped or (code not in (0, 2) and not supervisor.is_hopeless)
    if unfinished and _LEADER in configs and (configs[_LEADER].run.folder / "incarnation").exists():
        again = shlex.join(["headway", "up", str(path), *written, "--resume"])
        sys.stderr.write(f"headway: the run can go on: {again}\n")
    return code


def _progress(learner: ProcessConfig) -> RunProgress:
    """Of passes over examples nobody here knows how many steps they are."""
    in_passes = getattr(getattr(learner, "data", None), "epochs", None) is not None
    return RunProgress(
        learner.run.folder / "metrics.jsonl", total=None if in_passes else getattr(learner, "steps", None)
    )


def _devices(configs: Configs, *, elsewhere: bool = False) -> dict[str, tuple[tuple[str, str], ...]]:
    """The GPUs of each process that names none itself. Raises ConfigError if they do not suffice.

    `elsewhere` there are as many as are wanted.
    """
    needs = [
        Need(process=name, count=one.gpus_wanted, devices=one.devices, collective=one.collective)
        for name, one in configs.items()
    ]
    given = shared_out(needs, seen=enough(needs) if elsewhere else visible(os.environ))
    return {name: ((VISIBLE, ",".join(gpus)),) for name, gpus in given.items() if not configs[name].devices}


def _run(words: Sequence[str]) -> int:
    if {"--help", "-h"} & set(words) or words == ["help"]:
        sys.stdout.write(usage(words[0]) + "".join(_all_options(words)))
        return 0
    match words:
        case ["up" | "check" | "doctor" | "eval" | "status" as command, path, *rest] if (
            path[:1] != "-" or path == "--memory"
        ):
            return _COMMANDS[command](Path(path), rest)
        case ["up" | "check" | "doctor" | "eval" | "status" as command, *_]:
            raise ConfigError([f"headway {command} needs the path of a TOML file: headway {command} RUN.toml"])
        case ["--version"]:
            sys.stdout.write(f"headway {version('headway')}\n")
            return 0
        case [word, *arguments] if word in _OTHERS:
            return _OTHERS[word](arguments)
        case [word, *_]:
            guess = nearest(word, (*_COMMANDS, *_OTHERS))
            names = ", ".join((*_COMMANDS, *_OTHERS))
            hint = f"did you mean {guess}?" if guess else f"expected one of {names}; see headway --help"
            raise ConfigError([f"unknown command {word!r}; {hint}"])
    sys.stderr.write(usage())
    return 2


def _all_options(words: Sequence[str]) -> Iterator[str]:
    """With --all, what each process that a command starts or reads can be told."""
    if "--all" in words and (words[0] in _COMMANDS or words[0].startswith("-")):
        for name in PROCESSES:
            asked = [word.replace(f"--{name}.", "--", 1) for word in words if word not in _COMMANDS]
            said = help_text(config_model(name), process=name, argv=asked)
            yield "\n" + re.sub(r"^  --(?!run\.)", f"  --{name}.", said, flags=re.MULTILINE)


def _run_check(path: Path, words: Sequence[str]) -> int:
    own, overrides = own_options(words, {"--elsewhere": False})
    return check(path, split_options(overrides), elsewhere="--elsewhere" in own)


def _run_up(path: Path, words: Sequence[str]) -> int:
    own, written = own_options(
        words, {"--restarts": True, "--resume": False, "--accept-changes": False, "--only": True}
    )
    only = named_processes(path, own["--only"][-1]) if "--only" in own else PROCESSES
    overrides = list(written)
    for name in ("--resume", "--accept-changes"):
        if name in own:
            overrides += [f"--learner.{name[2:]}", "true"]
    restarts = RestartPolicy(most=_count(own.get("--restarts", ["5"])[-1]))
    if "--only" in own:
        written = ["--only", own["--only"][-1], *written]
    return up(path, split_options(overrides), restarts=restarts, written=written, only=only)


def _run_eval(path: Path, words: Sequence[str]) -> int:
    # Deferred for the same reason as the doctor.
    from headway.evaluation_command import EVALUATION_OPTIONS, evaluation_words, to_be_started

    own, overrides = own_options(words, EVALUATION_OPTIONS)
    arguments = evaluation_words(own, split_options(overrides), path=path, tables=read_tables(path))
    configs = _load_all(path, arguments)
    _log_as(configs)
    commands = [_command(name, path, arguments.get(name, ()), folder=Path()) for name in to_be_started(configs)]
    return Supervisor([replace(command, again=None) for command in commands]).run()


def _run_doctor(path: Path, words: Sequence[str]) -> int:
    # Deferred: its HTTP client takes longer to load than everything else here, and `up` does without it.
    from headway.doctor_command import doctor
    from headway.doctor_options import options_of
    from headway.memory_table import tell_memory

    if path == Path("--memory"):
        return tell_memory(words)
    options, overrides = options_of(words)
    return doctor(_load_each(path, split_options(overrides)), options)


def _run_status(path: Path, words: Sequence[str]) -> int:
    from headway.doctor_options import options_of
    from headway.status_command import status

    options, overrides = options_of(words)
    return status(_load_each(path, split_options(overrides)), options)


def _run_report(words: Sequence[str]) -> int:
    from headway.report import report  # deferred: no other command needs it

    return report(words)


def _run_plan(words: Sequence[str]) -> int:
    from headway.planner import plan_run  # deferred: no other command needs it

    return plan_run(words)


_COMMANDS: Mapping[str, Callable[[Path, Sequence[str]], int]] = {
    "up": _run_up, "check": _run_check, "doctor": _run_doctor, "eval": _run_eval, "status": _run_status,
}  # fmt: skip


def _run_serve(words: Sequence[str]) -> int:
    # Deferred for the same reason as the doctor.
    from headway.serve_command import SERVED, ServingNotice, free_port, serve_options, serve_plan
    from learner.config import LearnerConfig

    if not words or words[0].startswith("-"):
        raise ConfigError(["headway serve needs the folder of a model: headway serve MODEL"])
    own, overrides = serve_options(words[1:])
    plan = serve_plan(words[0], own, overrides, free_port=free_port(), on_cpu=not visible(os.environ))
    environ = {**os.environ, **plan.environment}
    configs, problems = dict[str, ProcessConfig](), list[str]()
    for name in SERVED:
        try:
            configs[name] = load_config(config_model(name), process=name, argv=plan.arguments[name], environ=environ)
        except ConfigError as error:
            problems += [as_given(problem, name) for problem in error.problems]
    if problems := [*problems, *disagreements(configs)]:
        raise ConfigError(problems)
    _check_free(configs)
    _log_as(configs)
    examined_apart(configs)
    given = {name: dict(variables) for name, variables in _devices(configs).items()}
    commands = [
        ProcessCommand(
            name=name,
            arguments=(_script(name), *plan.arguments[name]),
            stop_stage=1 if name in _STOPPED_LAST else 0,
            environment=(*plan.environment.items(), *given.get(name, {}).items()),
        )
        for name in SERVED
    ]
    learner = configs["learner"]
    assert isinstance(learner, LearnerConfig)
    restarts = RestartPolicy(most=_count(own.get("--restarts", ["5"])[-1]))
    with ServingNotice(learner, [configs["generator"]]):
        return Supervisor(commands, limits=StopLimits(restarts=restarts)).run()


def _run_data(words: Sequence[str]) -> int:
    if words[:1] != ["convert"]:
        raise ConfigError(["headway data converts: headway data convert ROWS.jsonl [TASKS.jsonl]"])
    return convert_data(words[1:])


_OTHERS: Mapping[str, Callable[[Sequence[str]], int]] = {
    "init": make_project,
    "diff": compare_runs,
    "view": view_runs,
    "report": _run_report,
    "plan": _run_plan,
    "serve": _run_serve,
    "fetch": fetch,
    "export": export_checkpoint,
    "keys": make_keys,
    "data": _run_data,
}


def run_folder(path: Path, words: Sequence[str]) -> Path:
    """The folder of the run of a config file, whose settings fit together. Raises ConfigError otherwise."""
    return next(iter(_load_all(path, split_options(words)).values())).run.folder


def _log_as(configs: Configs) -> None:
    log = next(iter(configs.values())).log
    configure_logging("headway", level=log.level, format=log.format)


def _check_free(configs: Configs) -> None:
    """Before anything is started that might meet the processes of the run that lives. Raises ConfigError."""
    if _LEADER in configs and (holder := holder_of(configs[_LEADER].run.folder)) is not None:
        raise ConfigError([taken_text(configs[_LEADER].run.folder, holder)])


def _count(text: str) -> int:
    if not text.isdecimal():
        raise ConfigError([f"command line: --restarts: got {text!r}: expected a number, 0 for none"])
    return int(text)


def _command(
    process: str,
    path: Path,
    arguments: Sequence[str],
    *,
    folder: Path,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> ProcessCommand:
    """The console script beside this interpreter. A learner that a signal has ended goes on with its own run."""
    words = (_script(process), "--config", str(path), *arguments)
    is_leader = process == _LEADER
    return ProcessCommand(
        name=process,
        arguments=words,
        stop_stage=1 if process in _STOPPED_LAST else 0,
        is_leader=is_leader,
        again=partial(_resumed, words, folder / "incarnation", _written_at(folder / "incarnation"))
        if is_leader
        else None,
        environment=(*environment.items(), *(huge_pages(os.environ).items() if is_leader else ())),
    )


def _script(process: str) -> str:
    return str(Path(sys.executable).with_name(process))


def _resumed(words: tuple[str, ...], marker: Path, before: int | None) -> tuple[str, ...]:
    """With `--resume true` if the run's marker is not the one that was there before the first start."""
    return words if _written_at(marker) in (None, before) else (*words, "--resume", "true")


def _written_at(path: Path) -> int | None:
    return path.stat().st_mtime_ns if path.exists() else None


def _load_all(path: Path, arguments: Arguments, *, only: Sequence[str] = PROCESSES) -> dict[str, ProcessConfig]:
    """The configs, which fit together. Raises ConfigError with all problems."""
    configs, problems = _read_each(path, arguments, only=only)
    problems = [*problems, *disagreements(configs)]
    if problems:
        raise ConfigError(problems)
    return configs


def _load_each(path: Path, arguments: Arguments) -> dict[str, ProcessConfig]:
    """The configs, each good by itself. Raises ConfigError with all problems."""
    configs, problems = _read_each(path, arguments)
    if problems:
        raise ConfigError(problems)
    return configs


def _read_each(
    path: Path, arguments: Arguments, *, only: Sequence[str] = PROCESSES
) -> tuple[dict[str, ProcessConfig], list[str]]:
    """The config of each process that the file has a table for, and what is wrong with the others."""
    tables = read_tables(path)
    import_code_beside(path)
    wanted = [name for name in PROCESSES if name in tables and name in only]
    problems = [] if wanted else _no_process(path, tables)
    configs: dict[str, ProcessConfig] = {}
    for name in wanted:
        argv = ["--config", str(path), *arguments.get(name, [])]
        try:
            configs[name] = load_config(config_model(name), process=name, argv=argv, environ=os.environ)
        except ConfigError as error:
            problems += [as_given(problem, name) for problem in error.problems]
    problems += [
        f"command line: {word.replace('--', f'--{name}.', 1)}: "
        + (f"--only leaves [{name}] to another machine" if name in tables else f"{path.name} has no table [{name}]")
        for name, words in arguments.items()
        for word in words
        if name not in wanted and word.startswith("--") and not word.startswith("--run.")
    ]
    return configs, list(dict.fromkeys(problems))


def _no_process(path: Path, tables: Mapping[str, object]) -> list[str]:
    guesses = {name: nearest(name, PROCESSES) for name in tables if name not in TABLES}
    hints = [f"; did you mean [{guess}] instead of [{name}]?" for name, guess in guesses.items() if guess]
    return [f"{path}: no table of a process; expected some of [{'], ['.join(PROCESSES)}]" + "".join(hints)]


if __name__ == "__main__":
    main()
