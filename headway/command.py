"""The command `headway`: its words, and what `up`, `check` and `eval` do; the other commands have files of their own.

    headway init NAME        writes a small project that runs as it is
    headway up RUN.toml      starts what RUN.toml has a table for, and stops it all when the learner has ended
    headway check RUN.toml   reads it as the processes would, and starts nothing
    headway doctor RUN.toml  asks the processes how they are; before a start, looks at the machine
    headway status RUN.toml  shows what they do, live
    headway releases RUN.toml            shows the versions that users got, and what became of each candidate
    headway rollback RUN.toml VERSION    gives users a former version again
    headway promote RUN.toml [VERSION]   lets promotions go on after that
    headway feedback RUN.toml FILE       writes answers that users have rated, for training
    headway report RUN ...   writes one HTML file of one run or of several
    headway view RUN ...     serves the page of runs from their files
    headway diff RUN RUN     shows in which settings and versions two runs differ
    headway plan ...         says what a run will need and how fast it will be, before there is one
    headway eval RUN.toml    evaluates a model on held-out tasks, and trains nothing
    headway serve MODEL      serves training loops of others, by the Tinker API
    headway fetch NAME ...   downloads models or data sets from the hub
    headway export RUN       writes a checkpoint as a Hugging Face folder
    headway keys FOLDER      makes the keys and tokens with which processes on several machines trust each other
    headway relay            keeps a copy of a learner's weights near generators that pull them
    headway data convert     makes tasks of the rows of published data sets

Nothing that it does is needed when the processes are deployed one by one.
"""

import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from headway.child_output import Bar, RunProgress
from headway.examination import examined
from headway.file_commands import compare_runs, convert_data, export_checkpoint, fetch, view_runs
from headway.keys_command import make_keys
from headway.new_project import make_project
from headway.own_options import config_model, named_processes, own_options, split_options, usage
from headway.run_configs import Arguments, devices_of, load_agreeing, load_separately, read_each
from headway.starting import LEADER, log_as, prepared, process_command, restart_policy
from headway.supervisor import RestartPolicy, StopLimits, Supervisor
from services.config.agreements import disagreements
from services.config.made_with import handed_over
from services.config.models import ProcessConfig, help_text
from services.config.options import nearest
from services.config.sources import PROCESSES, ConfigError, read_tables
from services.standard_output import standard_output

if TYPE_CHECKING:
    from headway.doctor_options import DoctorOptions


@standard_output()
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
    """Says that a config file is good, with all that it names. `elsewhere`: for another machine than this.

    Raises ConfigError with every problem otherwise.
    """
    configs, problems = read_each(path, arguments)
    problems += disagreements(configs)
    found = examined(configs, elsewhere=elsewhere)
    if problems or found.faults:
        raise ConfigError(_together([*problems, *found.faults]))
    notes = "".join(f"note: {note}\n" for note in found.notes)
    folder = f"run: {configs[LEADER].run.folder}\n" if LEADER in configs else ""
    template = f"chat template: {found.template}\n" if found.template else ""
    sys.stdout.write(f"{path}: good for {', '.join(configs)}\n{folder}{template}{found.table}{notes}")
    return 0


def _together(problems: Sequence[str]) -> list[str]:
    """Each problem once; the tables that share one are joined: `[learner], [generator] model: ...`."""
    tables: dict[str, list[str]] = {}
    for problem in problems:
        table, _, rest = problem.partition(" ") if problem.startswith("[") else ("", "", problem)
        tables.setdefault(rest, []).append(table)
    return [f"{', '.join(dict.fromkeys(several))} {rest}".strip() for rest, several in tables.items()]


def up(
    path: Path,
    arguments: Arguments,
    *,
    restarts: RestartPolicy,
    written: Sequence[str] = (),
    only: Sequence[str] = PROCESSES,
) -> int:
    """Runs the processes until the learner has ended or a signal comes; the exit code is as `headway up --help` says.

    A run that has not come to its end can be taken up again: what to type for that is said, with the options as they
    were `written`. Of the tables of others than `only`, nothing is read: their keys are on their own machines.

    Raises ConfigError, before it starts anything, with every problem of the config file, or if the run lives already.
    """
    configs = load_agreeing(path, arguments, only=only)
    given = prepared(configs)
    others = {name: one for name, one in configs.items() if name != LEADER}
    told = handed_over(others, ["headway", "up", str(path), *written])
    given[LEADER] = {**given.get(LEADER, {}), **told}
    commands = [
        process_command(
            name,
            ("--config", str(path), *arguments.get(name, ())),
            run_folder=one.run.folder,
            environment=given.get(name, {}),
            is_leader=name == LEADER,
        )
        for name, one in configs.items()
    ]
    bar = Bar.where_possible(_progress(configs[LEADER])) if LEADER in configs else None
    supervisor = Supervisor(commands, limits=StopLimits(restarts=restarts), bar=bar)
    code = supervisor.run()
    unfinished = supervisor.was_stopped or (code not in (0, 2) and not supervisor.is_hopeless)
    if unfinished and LEADER in configs and (configs[LEADER].run.folder / "incarnation").exists():
        again = shlex.join(["headway", "up", str(path), *written, "--resume"])
        before = "" if supervisor.was_stopped else "once what ended it is mended, "
        sys.stderr.write(f"headway: {before}the run can go on: {again}\n")
    return code


def _progress(learner: ProcessConfig) -> RunProgress:
    """The bar's source; no total with `data.epochs`, since only the learner knows how many steps those are."""
    in_passes = getattr(getattr(learner, "data", None), "epochs", None) is not None
    return RunProgress(
        learner.run.folder / "metrics.jsonl", total=None if in_passes else getattr(learner, "steps", None)
    )


def _run(words: Sequence[str]) -> int:
    if {"--help", "-h"} & set(words) or words == ["help"]:
        sys.stdout.write(usage(words[0]) + "".join(_all_options(words)))
        return 0
    match words:
        case ["doctor", "--memory", *sizes]:
            return _run_memory(sizes)
        case [command, path, *rest] if command in _COMMANDS and path[:1] != "-":
            return _COMMANDS[command](Path(path), rest)
        case [command, *_] if command in _COMMANDS:
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
    if "--all" in words:
        for name in _processes_of(words[0]):
            asked = [word.replace(f"--{name}.", "--", 1) for word in words if word not in (*_COMMANDS, "serve")]
            said = help_text(config_model(name), process=name, argv=asked)
            yield "\n" + re.sub(r"^  --(?!run\.)", f"  --{name}.", said, flags=re.MULTILINE)


def _processes_of(command: str) -> Sequence[str]:
    """The processes whose options a command passes on."""
    if command == "serve":
        from headway.serve_command import SERVED  # deferred for the same reason as the doctor

        return SERVED
    return PROCESSES if command in _COMMANDS or command.startswith("-") else ()


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
    for name in ("--restarts", "--only"):
        if name in own:
            written = [name, own[name][-1], *written]
    return up(path, split_options(overrides), restarts=restart_policy(own), written=written, only=only)


def _run_eval(path: Path, words: Sequence[str]) -> int:
    # Deferred for the same reason as the doctor.
    from headway.evaluation_command import EVALUATION_OPTIONS, evaluation_words, to_be_started

    own, overrides = own_options(words, EVALUATION_OPTIONS)
    arguments = evaluation_words(own, split_options(overrides), path=path, tables=read_tables(path))
    configs = load_agreeing(path, arguments)
    log_as(configs)
    given = devices_of(configs)
    commands = [
        process_command(
            name,
            ("--config", str(path), *arguments.get(name, ())),
            environment=dict(given.get(name, ())),
            is_leader=name == LEADER,
        )
        for name in to_be_started(configs)
    ]
    return Supervisor(commands).run()


def _run_doctor(path: Path, words: Sequence[str]) -> int:
    # Deferred: its HTTP client takes longer to load than everything else here, and `up` does without it.
    from headway.doctor_command import doctor

    return doctor(*_asked_about(path, words))


def _asked_about(path: Path, words: Sequence[str]) -> "tuple[dict[str, ProcessConfig], DoctorOptions]":
    """The processes that doctor and status ask: of a RUN.toml, or of the folder of a server."""
    from headway.doctor_options import of_folder, options_of  # deferred as the doctor is

    options, overrides = options_of(words)
    if path.is_dir():
        if overrides:
            raise ConfigError([f"command line: {overrides[0]}: {path} is a folder; options are for a RUN.toml"])
        return {}, of_folder(path, options)
    return load_separately(path, split_options(overrides)), options


def _run_memory(sizes: Sequence[str]) -> int:
    from headway.memory_table import tell_memory

    return tell_memory(sizes)


def _run_status(path: Path, words: Sequence[str]) -> int:
    from headway.status_command import status

    return status(*_asked_about(path, words))


def _run_report(words: Sequence[str]) -> int:
    from headway.report import report  # deferred: no other command needs it

    return report(words)


def _run_plan(words: Sequence[str]) -> int:
    from headway.planner import plan_run  # deferred: no other command needs it

    return plan_run(words)


def _run_releases(path: Path, words: Sequence[str]) -> int:
    from headway.releases_command import show_releases  # deferred: no other command needs it

    return show_releases(path, words)


def _run_rollback(path: Path, words: Sequence[str]) -> int:
    from headway.releases_command import roll_back

    return roll_back(path, words)


def _run_promote(path: Path, words: Sequence[str]) -> int:
    from headway.releases_command import promote

    return promote(path, words)


def _run_feedback(path: Path, words: Sequence[str]) -> int:
    from headway.releases_command import take_feedback

    return take_feedback(path, words)


_COMMANDS: Mapping[str, Callable[[Path, Sequence[str]], int]] = {
    "up": _run_up, "check": _run_check, "doctor": _run_doctor, "eval": _run_eval, "status": _run_status,
    "releases": _run_releases, "rollback": _run_rollback, "promote": _run_promote,
    "feedback": _run_feedback,
}  # fmt: skip


def _run_relay(words: Sequence[str]) -> int:
    from headway.relay_command import run_relay  # deferred for the same reason as the doctor

    return run_relay(words)


def _run_serve(words: Sequence[str]) -> int:
    from headway.serve_command import serve  # deferred for the same reason as the doctor

    return serve(words)


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
    "relay": _run_relay,
    "data": _run_data,
}


if __name__ == "__main__":
    main()
