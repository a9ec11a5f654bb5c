"""Takes rated answers out of a run for training, each into one file, however often and wherever it is killed.

A row says which stretch of `feedback.jsonl` goes into which file. It is on the disk before the file has its name, and
after all that is to be in it: what cannot be written takes nothing. A kill behind the row leaves a file that the next
call makes, from the same stretch, before it takes more. A second row says that the file is there: from then on it may
be moved or deleted, and is not made again.
"""

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from learner.journal.files import end_of_lines
from learner.releases.feedback import FILE, FeedbackDamaged, rated_in
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


class FormerUnfinished(OSError):
    """The file of a former call was cut off, and cannot be finished now; the text says why, and what to do."""


def take(folder: Path, output: Path) -> tuple[int, list[Path]]:
    """Writes the rated answers that no file has yet to `output`: how many, and files of before that were finished.
    Left out are empty answers, of which nothing can be trained, and those that were cut off: an answer in a file is
    trained with the end token behind it, which the policy never said there.

    Raises NothingRated, FileExistsError if there is such a file, FormerUnfinished, FeedbackDamaged, OSError;
    answers that were not written are not taken then.
    """
    output = output.absolute()
    with _alone(folder):
        stretches = taken(folder)
        finished = [each.path for each in stretches[-1:] if not each.done and _finished_now(folder, each)]
        if output.exists() and output not in finished:
            raise FileExistsError(f"{output} is there already: name another file")
        start, end = (stretches[-1].end if stretches else 0), _end_on_disk(folder / FILE)
        if output in finished:
            return _count(output), finished
        if end <= start:
            cut = "".join(f"{path} is finished now, whose writing had been cut off. " for path in finished)
            text = f"no answer was rated since the last file was taken; {folder / FILE} has {end} bytes"
            raise NothingRated(f"{cut}{text}")
        stretch = TakenStretch(start, end, output)
        draft = _drafted(folder, stretch)
        try:
            _note(folder, {"start": start, "end": end, "path": str(output)})
        except OSError:
            draft.unlink(missing_ok=True)
            raise
        _finish(folder, stretch, draft=draft)
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


def _finished_now(folder: Path, stretch: TakenStretch) -> bool:
    try:
        return _finish(folder, stretch)
    except OSError as error:
        raise FormerUnfinished(
            error.errno,
            f"the file of a former call was cut off, and cannot be finished: {stretch.path}: {error.strerror}. Its "
            f"answers go into no other file: see that {stretch.path.parent} is there and can be written to, and say it "
            "again",
        ) from error


def _finish(folder: Path, stretch: TakenStretch, *, draft: Path | None = None) -> bool:
    """True if the file was not there."""
    is_new = not stretch.path.exists()
    if is_new:
        (draft or _drafted(folder, stretch)).replace(stretch.path)
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


def _drafted(folder: Path, stretch: TakenStretch) -> Path:
    """All that is to be in the file, on the disk under another name."""
    draft = stretch.path.with_name(f"{stretch.path.name}.new")
    try:
        with (folder / FILE).open("rb") as source, draft.open("wb") as target:
            source.seek(stretch.start)
            place = f"{folder / FILE}, behind byte {stretch.start},"
            lines = source.read(stretch.end - stretch.start).splitlines(keepends=True)
            target.writelines(line for line in lines if _can_be_trained(rated_in(line, place=place)))
            target.flush()
            os.fsync(target.fileno())
    except (OSError, FeedbackDamaged):
        with suppress(OSError):
            draft.unlink(missing_ok=True)
        raise
    return draft


def _can_be_trained(row: Mapping[str, object]) -> bool:
    return bool(row["completion"]) and not row.get("cut_off")


def _count(path: Path) -> int:
    return path.read_bytes().count(b"\n")


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    with (folder / f"{TAKEN}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
