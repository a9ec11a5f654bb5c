"""Takes rated answers out of a run for training, each into one file, however often and wherever it is killed.

A row says which stretch of `feedback.jsonl` goes into which file, and is on the disk before the file is begun. So a
kill between the two leaves a file that the next call makes, from the same stretch, before it takes more. A second row
says that the file is there: from then on it may be moved or deleted, and is not made again.
"""

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from learner.journal.files import end_of_lines
from learner.releases.feedback import FILE
from services.append_file import AppendFile, sync_folder

TAKEN = "feedback_taken.jsonl"


@dataclass(frozen=True)
class TakenStretch:
    """Bytes `start` to `end` of the rated answers, which are in `path` and in no other file; `done` once they were."""

    start: int
    end: int
    path: Path
    done: bool = False


class NothingRated(LookupError):
    """There is no rated answer that no file has; the text says so."""


def take(folder: Path, output: Path) -> tuple[int, list[Path]]:
    """Writes the rated answers that no file has yet to `output`: how many, and files of before that were finished.
    Empty answers are left out, since nothing of them can be trained.

    Raises NothingRated, FileExistsError if there is such a file, and OSError.
    """
    output = output.absolute()
    with _alone(folder):
        stretches = taken(folder)
        finished = [each.path for each in stretches[-1:] if not each.done and _finish(folder, each)]
        if output.exists() and output not in finished:
            raise FileExistsError(f"{output} is there already: name another file")
        start, end = (stretches[-1].end if stretches else 0), _end_on_disk(folder / FILE)
        if output in finished:
            return _count(output), finished
        if end <= start:
            raise NothingRated(f"no answer was rated since the last file was taken; {folder / FILE} has {end} bytes")
        stretch = TakenStretch(start, end, output)
        _note(folder, {"start": start, "end": end, "path": str(output)})
        _finish(folder, stretch)
        return _count(output), finished


def taken(folder: Path) -> list[TakenStretch]:
    """The stretches that were taken so far."""
    path, found = folder / TAKEN, list[TakenStretch]()
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            with suppress(ValueError):
                row = json.loads(line)
                if "done" in row:
                    found = [replace(each, done=each.done or each.end == row["done"]) for each in found]
                else:
                    found.append(TakenStretch(row["start"], row["end"], Path(row["path"])))
    return found


def _finish(folder: Path, stretch: TakenStretch) -> bool:
    """True if the file was not there."""
    is_new = not stretch.path.exists()
    if is_new:
        _write(folder, stretch)
    sync_folder(stretch.path.parent)
    _note(folder, {"done": stretch.end})
    return is_new


def _note(folder: Path, row: dict[str, object]) -> None:
    with closing(AppendFile(folder / TAKEN, end=end_of_lines(folder / TAKEN))) as file:
        file.append((json.dumps(row) + "\n").encode())
        file.sync()
    sync_folder(folder)


def _end_on_disk(path: Path) -> int:
    """End of the whole lines, which a power cut leaves there: else the stretch would take in what is rated later."""
    end = end_of_lines(path)
    if end:
        with path.open("rb") as file:
            os.fsync(file.fileno())
    return end


def _write(folder: Path, stretch: TakenStretch) -> None:
    draft = stretch.path.with_name(f"{stretch.path.name}.new")
    with (folder / FILE).open("rb") as source, draft.open("wb") as target:
        source.seek(stretch.start)
        lines = source.read(stretch.end - stretch.start).splitlines(keepends=True)
        target.writelines(line for line in lines if json.loads(line)["completion"])
        target.flush()
        os.fsync(target.fileno())
    draft.replace(stretch.path)


def _count(path: Path) -> int:
    return path.read_bytes().count(b"\n")


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    with (folder / f"{TAKEN}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
