"""`headway data`, `headway fetch`, `headway diff`, `headway view`, `headway export`: published data sets as task files,
models and data sets of the hub, what two runs were made with, the page of runs that have ended, their checkpoints as
Hugging Face folders.
"""

import importlib
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from headway.own_options import own_options
from services.config import made_with
from services.config.run_paths import HubKind, hub_cache, is_hub_name
from services.config.sources import ConfigError
from services.process import WrongSettings

# Found by name, so that this package imports none of the processes.
_CONVERTERS = "reward_service.code.published_rows"
_PAGE = "learner.view"
_LEARNER = "learner.command"

_OPTIONS = {"--reference": False, "--extract": True, "--reward": True}
_VALUES = {"--extract": ("last", "first", "whole"), "--reward": ("all", "fraction")}
_VIEW = {"--host": True, "--port": True, "--token-file": True}
_VIEW_PORT = "7390"
_EXPORT = {"--to": True, "--merged": False, "--model": True}


def convert_data(words: Sequence[str]) -> int:
    """Writes a task for each row of a file. Raises ConfigError for wrong arguments, and all rows that are unknown."""
    own, paths = own_options(words, _OPTIONS)
    unknown = [path for path in paths if path.startswith("-") and path != "-"]
    if unknown or not 1 <= len(paths) <= 2:
        usage = "headway data convert ROWS.jsonl [TASKS.jsonl] [--reference] [--extract HOW] [--reward HOW]"
        raise ConfigError([f"{' '.join(unknown) or 'a wrong number of files'}: expected {usage}"])
    for name, values in _VALUES.items():
        if (given := own.get(name, [values[0]])[-1]) not in values:
            raise ConfigError([f"command line: {name}: got {given!r}, expected one of {', '.join(values)}"])
    rows = importlib.import_module(_CONVERTERS)
    choices = rows.Choices(
        reference="--reference" in own,
        **{name.removeprefix("--"): own[name][-1] for name in _VALUES if name in own},
    )
    lines: list[str] = []
    problems: list[str] = []
    for place, row in _rows(Path(paths[0])):
        try:
            lines.append(json.dumps(rows.task_of(row, choices), ensure_ascii=False) + "\n")
        except rows.UnknownRow as error:
            problems.append(f"{place}: {error}")
    if problems:
        raise ConfigError(problems)
    _write(lines, Path(paths[1]) if len(paths) == 2 and paths[1] != "-" else None)
    return 0


def _rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of a JSONL or Parquet file with their places."""
    try:
        if path.suffix == ".parquet":
            yield from _parquet_rows(path)
            return
        with path.open(encoding="utf-8-sig") as text:
            yield from _json_rows(path, text)
    except (OSError, UnicodeError) as error:
        raise ConfigError([f"{path}: cannot be read: {error}"]) from error


def _json_rows(path: Path, text: TextIO) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, line in enumerate(text, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ConfigError([f"{path}, line {number}: no JSON: {error}"]) from error
        if not isinstance(row, dict):
            raise ConfigError([f"{path}, line {number}: got {type(row).__name__}, expected an object"])
        yield f"{path}, line {number}", row


def _parquet_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        arrow, parquet = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise ConfigError([f"{path}: to read Parquet, pip install pyarrow; or give it as JSONL"]) from error
    number = 0
    try:
        for batch in parquet.ParquetFile(path).iter_batches():
            for row in batch.to_pylist():
                number += 1
                yield f"{path}, row {number}", row
    except arrow.ArrowException as error:
        raise ConfigError([f"{path}: cannot be read: {error}"]) from error


def _write(lines: Sequence[str], path: Path | None) -> None:
    if path is None:
        sys.stdout.writelines(lines)
        return
    aside = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        aside.write_text("".join(lines), encoding="utf-8")
        aside.replace(path)
    except OSError as error:
        raise ConfigError([f"cannot write {path}: {error.strerror}"]) from error
    sys.stderr.write(f"{len(lines)} tasks in {path}\n")


def compare_runs(folders: Sequence[str]) -> int:
    """`headway diff RUN RUN`: 0 if nothing differs, else 1. Raises ConfigError for a folder without a record."""
    if len(folders) != 2 or any(each.startswith("-") for each in folders):
        raise ConfigError(["headway diff needs the folders of two runs: headway diff runs/ONE runs/OTHER"])
    before, after = (_made(Path(each)) for each in folders)
    found = [
        *made_with.differences(before["settings"], after["settings"]),
        *_of_the_others(before, after),
        *made_with.differences(_apart("version", before.get("versions")), _apart("version", after.get("versions"))),
        *made_with.differences(_apart("git", before.get("git")), _apart("git", after.get("git"))),
        *made_with.differences(_apart("host", before.get("host")), _apart("host", after.get("host"))),
    ]
    shown = [each for each in found if each.key not in ("resume", "accept_changes")]
    sys.stdout.write("".join(f"{each}\n" for each in shown) or "no difference\n")
    return 1 if shown else 0


def _of_the_others(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[made_with.Difference]:
    """Of the processes beside the learner, which are known where `headway up` started them all."""
    one, other = (made.get("beside") for made in (before, after))
    if isinstance(one, dict) and isinstance(other, dict):
        return made_with.differences(one, other)
    if one or other:
        sys.stderr.write("the settings of the other processes are known of one of the two alone, and not compared\n")
    return []


def _made(folder: Path) -> Mapping[str, Any]:
    if not folder.is_dir():
        raise ConfigError([f"{folder} is no folder; expected that of a run, such as runs/addition"])
    found = made_with.read(folder)
    if not isinstance(found.get("settings"), dict):
        raise ConfigError([f"{folder} holds no {made_with.FILE}: it is no run's folder, or of an earlier release"])
    return found


def _apart(name: str, given: object) -> dict[str, Any]:
    return {f"{name} {key}": value for key, value in given.items()} if isinstance(given, dict) else {}


def fetch(arguments: Sequence[str]) -> int:
    """`headway fetch NAME ...`: downloads each into the hub's cache. Raises ConfigError if one cannot be had."""
    own, names = own_options(arguments, {"--dataset": False, "--revision": True})
    wrong = [name for name in names if not is_hub_name(name)]
    if wrong or not names:
        got = f", got {', '.join(wrong)}" if wrong else ""
        raise ConfigError([f"headway fetch needs names on the hub, such as Qwen/Qwen2.5-0.5B-Instruct{got}"])
    kind: HubKind = "dataset" if "--dataset" in own else "model"
    for name in names:
        folder = _fetched(name, kind, own.get("--revision", ["main"])[-1])
        sys.stdout.write(f"{name}: {folder}\n")
    return 0


def _fetched(name: str, kind: HubKind, revision: str) -> str:
    try:
        # Deferred: an environment service of its own machine has it, a reward service may not.
        import huggingface_hub
        from huggingface_hub import constants, errors
    except ImportError as error:
        raise ConfigError([f"{error.name} is missing; pip install 'headway[learner]'"]) from error
    if constants.HF_HUB_OFFLINE:
        raise ConfigError([f"{name}: HF_HUB_OFFLINE is set, so nothing is downloaded; unset it, or copy the folder"])
    try:
        # Weights in other formats than the one that is read would only take room.
        return huggingface_hub.snapshot_download(
            name, repo_type=kind, revision=revision, cache_dir=hub_cache(),
            ignore_patterns=["*.bin", "*.pth", "*.gguf", "*.h5", "*.msgpack", "*.onnx"] if kind == "model" else None,
        )  # fmt: skip
    except (OSError, ValueError, errors.HfHubHTTPError) as error:
        text = " ".join(str(error).split())
        raise ConfigError(
            [f"{name}: cannot be fetched: {text:.300}; is the name right, and the hub reachable?"]
        ) from error


def view_runs(words: Sequence[str]) -> int:
    """`headway view RUN ...`: serves the page of runs from their files, until a signal. Raises ConfigError."""
    own, given = own_options(words, _VIEW)
    folders = [Path(each) for each in given]
    wrong = [each for each in folders if not (each / "metrics.jsonl").is_file()]
    if wrong or not folders:
        got = f", got {wrong[0]}, which has no metrics.jsonl" if wrong else ""
        raise ConfigError([f"headway view needs folders of runs, such as runs/addition{got}"])
    code: int = importlib.import_module(_PAGE).serve_runs(
        folders,
        host=own.get("--host", ["127.0.0.1"])[-1],
        port=own.get("--port", [_VIEW_PORT])[-1],
        token_file=own["--token-file"][-1] if "--token-file" in own else None,
    )
    return code


def export_checkpoint(words: Sequence[str]) -> int:
    """`headway export RUN|CHECKPOINT --to FOLDER`: writes a Hugging Face folder. Raises ConfigError if it cannot."""
    own, given = own_options(words, _EXPORT)
    if len(given) != 1 or given[0].startswith("-") or "--to" not in own:
        usage = "headway export RUN|CHECKPOINT --to FOLDER [--merged] [--model FOLDER]"
        raise ConfigError([f"headway export needs a run's folder, or that of a checkpoint, and a new one: {usage}"])
    source = Path(given[0])
    if not source.is_dir():
        raise ConfigError([f"{source} is no folder; expected that of a run, such as runs/addition, or of a checkpoint"])
    model = Path(own["--model"][-1]) if "--model" in own else None
    try:
        export = importlib.import_module(_LEARNER).export_of_run
        said: str = export(source, Path(own["--to"][-1]), merged="--merged" in own, model=model)
    except WrongSettings as error:
        raise ConfigError([str(error)]) from error
    except ImportError as error:
        raise ConfigError([f"{error.name} is missing; pip install 'headway[learner]'"]) from error
    sys.stdout.write(said)
    return 0
