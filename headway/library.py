"""Training and evaluation from Python: what `headway up` and `headway eval` do, with their results.

    run = headway.train("sums/run.toml", learner={"steps": 30, "rollouts": {"group_size": 8}})
    run.summary["accuracy_after"], run.metrics("step")[-1]["reward"], run.model
    headway.evaluate("sums/run.toml", model=run.model, tasks=20)["result"]["accuracy"]

The processes are started beside this one, and end with the call; what they say is printed. A notebook's event loop is
not in their way.
"""

import json
import signal
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.process import parent_death_signal

_TABLES = {"run": "run", "learner": "learner", "generator": "generator"}
_TABLES |= {"reward_service": "reward-service", "env_service": "env-service"}
_LAST_LINES = 30
_MAX_LINE = 1 << 16

Settings = Mapping[str, Any]


class RunFailed(Exception):
    """The processes ended with an error; the text has their exit code and their last lines."""


@dataclass(frozen=True)
class Run:
    """The files of a run."""

    folder: Path

    @property
    def model(self) -> Path:
        """The Hugging Face folder of the trained model."""
        return self.folder / "model"

    @property
    def summary(self) -> dict[str, Any]:
        """The content of summary.json. Raises FileNotFoundError for a run that has none yet."""
        found: dict[str, Any] = json.loads((self.folder / "summary.json").read_text(encoding="utf-8"))
        return found

    def metrics(self, kind: str | None = None) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl, or those of a kind: step, publish, evaluation and others."""
        return [line for line in _objects_in(self.folder / "metrics.jsonl") if kind is None or line.get("kind") == kind]

    def samples(self) -> list[dict[str, Any]]:
        """The lines of samples.jsonl."""
        return list(_objects_in(self.folder / "samples.jsonl"))


def train(path: str | Path, /, *, resume: bool = False, quiet: bool = False, **settings: Settings) -> Run:
    """Runs the processes of a run.toml until training has ended. `settings` are by table: `learner={"steps": 10}`.

    Raises ConfigError for wrong settings, before anything is started, and RunFailed. KeyboardInterrupt stops it, as
    Ctrl-C does in a terminal, and is raised again at its end.
    """
    from headway.run_configs import run_folder

    words = _words(settings)
    folder = run_folder(Path(path), words)
    _started(["up", str(path), *words, *(["--resume"] if resume else [])], quiet=quiet)
    return Run(folder)


def evaluate(
    path: str | Path,
    /,
    *,
    model: str | Path | None = None,
    checkpoint: str | Path | None = None,
    tasks: int | None = None,
    samples: int | None = None,
    against: str | Path | None = None,
    quiet: bool = False,
    **settings: Settings,
) -> dict[str, Any]:
    """Evaluates the model of a run.toml, one in a folder, or a checkpoint; returns what evaluation.json holds.

    Raises ConfigError and RunFailed as `train`.
    """
    from headway.run_configs import run_folder

    words = _words(settings)
    run_folder(Path(path), words)
    own = {"model": model, "checkpoint": checkpoint, "tasks": tasks, "samples": samples, "against": against}
    given = [word for name, value in own.items() if value is not None for word in (f"--{name}", str(value))]
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "evaluation.json"
        _started(["eval", str(path), *given, "--output", str(output), *words], quiet=quiet)
        found: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))
        return found


def _words(settings: Mapping[str, Settings]) -> list[str]:
    unknown = sorted(settings.keys() - _TABLES.keys())
    if unknown:
        raise TypeError(f"unknown settings {', '.join(unknown)}; expected some of {', '.join(_TABLES)}")
    return [
        word
        for table, given in settings.items()
        for word in _flags(f"--{_TABLES[table]}", given, whole=_whole_tables(_TABLES[table]))
    ]


def _whole_tables(table: str) -> frozenset[str]:
    """The flags of all settings of a table of run.toml: a mapping is the value of such a one, and else more settings.

    The table [run] is the same for all processes.
    """
    from headway.own_options import config_model
    from services.config.options import flag_of, schema_of

    known = schema_of(config_model("learner" if table == "run" else table)).options
    return frozenset(flag_of(key) if table == "run" else flag_of(f"{table}.{key}") for key in known)


def _flags(prefix: str, given: Mapping[str, Any], *, whole: frozenset[str]) -> Iterator[str]:
    for name, value in given.items():
        flag = f"{prefix}.{name.replace('_', '-')}"
        if isinstance(value, Mapping) and flag not in whole:
            yield from _flags(flag, value, whole=whole)
        else:
            yield from (flag, _written(value))


def _written(value: object) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple | dict):
        return json.dumps(value)
    return str(value)


def _started(words: Sequence[str], *, quiet: bool) -> None:
    command = [str(Path(sys.executable).with_name("headway")), *words]
    last: deque[str] = deque(maxlen=_LAST_LINES)
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # a terminal's Ctrl-C would come twice otherwise
        preexec_fn=_heeds_interrupts,
    ) as process:
        try:
            _show(process, last, quiet=quiet)
        except BaseException:
            _stop(process, last, quiet=quiet)
            raise
    if process.returncode != 0:
        raise RunFailed(f"headway {words[0]} ended with code {process.returncode}:\n{''.join(last)}")


def _heeds_interrupts() -> None:
    """Of a script in the background, as `python train.py &` in another script, children are born deaf to SIGINT."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    parent_death_signal()


def _stop(process: "subprocess.Popen[str]", last: "deque[str]", *, quiet: bool) -> None:
    """Stops it in good order, and waits for its end; each further Ctrl-C hurries it, as in a terminal."""
    process.send_signal(signal.SIGINT)
    while process.poll() is None:
        try:
            _show(process, last, quiet=quiet)
            process.wait()
        except KeyboardInterrupt:
            process.send_signal(signal.SIGINT)
        except OSError:  # nobody reads what is printed
            quiet = True


def _show(process: "subprocess.Popen[str]", last: "deque[str]", *, quiet: bool) -> None:
    assert process.stdout is not None
    while line := process.stdout.readline(_MAX_LINE):
        last.append(line)
        if not quiet:
            _print(line)


def _print(line: str) -> None:
    """A letter that the output has no bytes for ends no training."""
    try:
        sys.stdout.write(line)
    except UnicodeEncodeError:
        encoding = getattr(sys.stdout, "encoding", None) or "ascii"
        sys.stdout.write(line.encode(encoding, "backslashreplace").decode(encoding))


def _objects_in(path: Path) -> Iterator[dict[str, Any]]:
    # Deferred: `import headway` is light, and the simulation takes hold of the clock before it loads the product.
    from learner.reports.history import objects_in

    yield from objects_in(path)
