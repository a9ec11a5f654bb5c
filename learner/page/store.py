"""Trajectories of a run for its viewer: parts of SQLite in the run's folder, written beside training.

    trainer's thread ── trained ──▶ ┐
    event loop ── left_out ───────▶ ┴ a queue of few steps ──▶ a thread of its own ──▶ trajectories/part-<first step>.db

Nobody waits for it: what finds no room in the queue, in the share of time or on the disk is counted and left out. The
newest part is written to, the oldest is deleted whole. A transaction has the steps of a second: readers see whole
steps, and so does whoever opens the file after a SIGKILL. The tokens of a group are one blob, column by column, as they
share a prompt.
"""

import json
import logging
import math
import queue
import shutil
import sqlite3
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from learner.leases.lease_times import LeaseTimes
from learner.page.taken import NotableGroups, TakenStep
from protocol.trajectories import Trajectory, TrajectoryGroup

logger = logging.getLogger(__name__)

FOLDER = "trajectories"
"""The store's name in the run's folder."""

TOKENIZER = "tokenizer.json"

COLUMNS = {
    "token_ids": "<i4",
    "loss_mask": "u1",
    "versions": "<i4",
    "behavior_logprobs": "<f4",
    "learner_logprobs": "<f4",
    "entropies": "<f2",
    "advantages": "<f4",
}
"""Of each token. `versions` is -1 where nobody sampled; logprobs and entropies in nats; what nobody knows is NaN."""

_OF_THE_LEARNER = ("learner_logprobs", "entropies", "advantages")
_QUEUED_STEPS = 8
_GATHER_S = 1.0
"""Time in which all writes become one transaction: a commit, and waking a thread, cost as much as a small group."""
_GRANTED_S = 0.05
_MAX_GAP = 80.0
_CLOSE_S = 10.0

_SCHEMA = """
PRAGMA page_size=8192; PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL; PRAGMA user_version=1;
CREATE TABLE IF NOT EXISTS groups(id INTEGER PRIMARY KEY, step INT, incarnation INT, lease INT, environment TEXT,
    task INT, why TEXT, size INT, reward_mean REAL, reward_std REAL, prompt TEXT, tokens BLOB, times TEXT,
    greedy_reward REAL);
CREATE TABLE IF NOT EXISTS rows(id INTEGER PRIMARY KEY, grp INT, place INT, step INT, environment TEXT, task INT,
    why TEXT, reward REAL, length INT, lag INT, finish TEXT, facts TEXT, text TEXT, ratio REAL, advantage REAL,
    gap REAL);
CREATE TABLE IF NOT EXISTS steps(step INTEGER PRIMARY KEY, groups INT, trajectories INT, left_out INT);
CREATE INDEX IF NOT EXISTS by_step ON rows(step); CREATE INDEX IF NOT EXISTS by_reward ON rows(reward, id);
CREATE INDEX IF NOT EXISTS by_length ON rows(length, id); CREATE INDEX IF NOT EXISTS by_lag ON rows(lag, id);
CREATE INDEX IF NOT EXISTS by_group ON rows(grp); CREATE INDEX IF NOT EXISTS by_task ON rows(task);
CREATE VIRTUAL TABLE IF NOT EXISTS words USING fts5(text, content='rows', content_rowid='id', prefix='2 3');
"""

Columns = dict[str, NDArray[Any]]
_COUNT = """INSERT INTO steps VALUES(?, ?, ?, ?) ON CONFLICT(step) DO UPDATE SET groups = groups + excluded.groups,
trajectories = trajectories + excluded.trajectories, left_out = left_out + excluded.left_out"""
# By `ratio` goes an index of its own: the parts of earlier releases get the column first.
_LATER_COLUMNS = {"rows": ("ratio REAL", "advantage REAL", "gap REAL"), "groups": ("times TEXT", "greedy_reward REAL")}
_LATER_INDEXES = "CREATE INDEX IF NOT EXISTS by_ratio ON rows(ratio, id)"
_ROWS = (
    "INSERT INTO rows(grp, place, step, environment, task, why, reward, length, lag, finish, facts, text, ratio,"
    " advantage, gap) VALUES "
)
_ROW = f"({', '.join('?' * 15)})"
_ROWS_AT_ONCE = 500
"""SQLite takes at most 32,766 values. Each statement lets go of the GIL, and may wait for it behind the trainer."""


def keep_tokenizer(model: Path, folder: Path) -> None:
    """Copies the tokenizer of a model's folder into the run's: its trajectories can be read without the model then."""
    try:
        shutil.copyfile(model / TOKENIZER, folder / TOKENIZER)
    except OSError as error:
        logger.warning("no tokenizer is kept in %s, so tokens are shown by their numbers: %s", folder, error)


def packed(columns: Sequence[Columns]) -> bytes:
    """The columns of a group's trajectories as one blob."""
    lengths = [len(each["token_ids"]) for each in columns]
    parts = [struct.pack(f"<I{len(lengths)}I", len(lengths), *lengths)]
    parts += [np.concatenate([each[name] for each in columns]).astype(kind).tobytes() for name, kind in COLUMNS.items()]
    return zlib.compress(b"".join(parts), 1)


def unpacked(blob: bytes) -> list[Columns]:
    """Reverses `packed`. Raises zlib.error, struct.error or ValueError for something else."""
    data = zlib.decompress(blob)
    (count,) = struct.unpack_from("<I", data)
    lengths = struct.unpack_from(f"<{count}I", data, 4)
    at, total = 4 + 4 * count, sum(lengths)
    found: list[Columns] = [{} for _ in range(count)]
    for name, kind in COLUMNS.items():
        whole = np.frombuffer(data, kind, total, at)
        at += whole.nbytes
        for columns, part in zip(found, np.split(whole, np.cumsum(lengths)[:-1]), strict=True):
            columns[name] = part
    return found


def columns_of(taken: TakenStep) -> Iterator[tuple[TrajectoryGroup, list[Columns]]]:
    """The columns of each group's trajectories."""
    found = [[_own_columns(one) for one in group.trajectories] for group in taken.groups]
    at = 0
    for place in taken.places:
        columns = found[place.group][place.trajectory]
        for name, values in taken.values.items():
            columns[name][place.start : place.start + place.length] = values[at : at + place.length]
        at += place.length
    yield from zip(taken.groups, found, strict=True)


def _own_columns(trajectory: Trajectory) -> Columns:
    unknown = {name: np.full(len(trajectory.token_ids), np.nan, dtype=np.float32) for name in _OF_THE_LEARNER}
    return {
        "token_ids": trajectory.token_ids,
        "loss_mask": trajectory.loss_mask,
        "versions": trajectory.token_versions(),
        "behavior_logprobs": trajectory.behavior_logprobs,
        **unknown,
    }


def _anyone() -> None:
    """Nobody else can have the folder."""


class TrajectoryStore:
    """Takes trajectories from any thread; a context manager. `folder` is the run's.

    At most `share` of the time goes into it, by the CPU clocks of its thread and of those that call it: beyond that one
    group for a step is kept, of the notable ones, beyond twice that none. Over `budget_bytes` the oldest part goes.
    `may_write` is called before anything is written or removed, and raises if the folder is no longer this process's.
    """

    def __init__(
        self,
        folder: Path,
        *,
        budget_bytes: int,
        share: float,
        part_bytes: int = 64 << 20,
        may_write: Callable[[], None] = _anyone,
    ) -> None:
        self._may_write = may_write
        self._folder, self._budget_bytes, self._share = folder / FOLDER, budget_bytes, share
        self._part_bytes = min(part_bytes, max(1 << 20, budget_bytes // 4))
        self._queue: queue.Queue[TakenStep | None] = queue.Queue(maxsize=_QUEUED_STEPS)
        self._wanted_now = threading.Event()
        self._began = time.monotonic()
        self._missed: dict[int, int] = {}
        self._lock = threading.Lock()
        self._part: Path | None = None
        self._database: sqlite3.Connection | None = None
        self._said = False
        self._notable = NotableGroups()
        self._choosing = threading.Lock()
        self.left_out = 0
        """Groups that were not kept."""
        self.left_out_trajectories = 0
        self.spent_s = 0.0
        """CPU seconds that it has taken from all threads."""
        self._thread = threading.Thread(target=self._write, name="trajectories", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        while (held := self._notable.take()) is not None:
            self._hand_over(held)
        with suppress(queue.Full):  # a thread that hangs on its disk is left behind
            self._queue.put(None, timeout=_CLOSE_S)
            self._wanted_now.set()
            self._thread.join(_CLOSE_S)

    def take_up(self, *, version: int) -> None:
        """Forgets what former lives kept of steps beyond `version`; to be called before the first `put`."""
        for path in sorted(self._folder.glob("part-*.db")):
            try:
                if int(path.stem.removeprefix("part-")) > version:
                    _remove(path)
                else:
                    _forget_beyond(path, version)
            except (OSError, ValueError, sqlite3.Error) as error:
                logger.warning("%s cannot be cut at step %d and is removed: %s", path, version, error)
                _remove(path)

    def put(self, taken: TakenStep) -> None:
        """Never waits and never raises. Where not all of a step's groups can be kept, the most notable ones of the run
        are, and some by lot.
        """
        began = time.thread_time()
        self._take(taken)
        self._spend(taken.spent_s + time.thread_time() - began)

    def _take(self, taken: TakenStep) -> None:
        groups = taken.groups
        granted_s = self._share * (time.monotonic() - self._began) + _GRANTED_S
        if self.spent_s > 2 * granted_s:
            self._count(taken, len(groups))
            return
        if self.spent_s > granted_s:
            with self._choosing:
                lost, chosen = self._notable.offer(taken), self._notable.take()
            for step, trajectories in lost:
                self._count(step, 1, trajectories=trajectories)
            if chosen is None:
                return
            taken = chosen
        self._hand_over(taken)

    def _hand_over(self, taken: TakenStep) -> None:
        try:
            self._queue.put_nowait(taken)
        except queue.Full:
            self._count(taken, len(taken.groups))
        if self._queue.qsize() >= _QUEUED_STEPS // 2:
            self._wanted_now.set()

    def put_left_out(self, group: TrajectoryGroup, *, step: int, why: str) -> None:
        """A group that will not be trained, although it came; `step` is the one that it might have been in."""
        taken = TakenStep(step=step, groups=(group,), why=why)
        if self._queue.qsize() < _QUEUED_STEPS - 1:  # what is trained comes first
            self.put(taken)
        else:
            self._count(taken, 1)

    def wait_idle(self) -> None:
        """Returns when all that was taken so far is written, or given up."""
        self._wanted_now.set()
        self._queue.join()

    def _count(self, taken: TakenStep, groups: int, *, trajectories: int | None = None) -> None:
        """So many groups of the step are left out; all of their trajectories unless it is said how many."""
        with self._lock:
            self._missed[taken.step] = self._missed.get(taken.step, 0) + groups
            self.left_out += groups
            self.left_out_trajectories += taken.trajectories if trajectories is None else trajectories

    def _spend(self, seconds: float) -> None:
        with self._lock:
            self.spent_s += seconds

    def _write(self) -> None:
        while steps := self._next():
            self._try_to_write(steps)
            for _ in steps:
                self._queue.task_done()
        if self._missed:
            self._try_to_write(())
        if self._database is not None:
            self._database.close()

    def _try_to_write(self, steps: Sequence[TakenStep]) -> None:
        began = time.thread_time()
        try:
            self._write_steps(steps)
        except Exception as error:  # noqa: BLE001 - a full disk, or whatever else, costs samples, never the run
            self._give_up(error)
            for taken in steps:
                self._count(taken, len(taken.groups))
        self._spend(time.thread_time() - began)

    def _next(self) -> list[TakenStep]:
        """The part that is written together next; empty at the end."""
        found: list[TakenStep] = []
        taken = self._queue.get()
        if taken is not None:
            self._wanted_now.wait(_GATHER_S)
            self._wanted_now.clear()
        while taken is not None:
            found.append(taken)
            try:
                taken = self._queue.get_nowait()
            except queue.Empty:
                return found
        if found:
            self._queue.put(None)  # the end is met once more
        return found

    def _give_up(self, error: Exception) -> None:
        if not self._said:
            logger.warning("trajectories cannot be kept in %s: %s. The run goes on without them", self._folder, error)
        self._said = True
        if self._database is not None:
            self._database.close()
        self._database = None

    def _write_steps(self, steps: Sequence[TakenStep]) -> None:
        """Writes them, and how many groups were left out so far; only that of no steps."""
        self._may_write()
        database = self._open(steps[0].step if steps else min(self._missed))
        with self._lock:
            missed, self._missed = self._missed, {}
        database.execute("BEGIN IMMEDIATE")
        for taken in steps:
            for number, (group, columns) in enumerate(columns_of(taken)):
                times = taken.times[number] if number < len(taken.times) else None
                _insert(database, group, columns, taken, times=times)
        counted = [
            *((taken.step, len(taken.groups), taken.trajectories, 0) for taken in steps),
            *((step, 0, 0, n) for step, n in missed.items()),
        ]
        database.executemany(_COUNT, counted)
        database.execute("COMMIT")

    def _open(self, step: int) -> sqlite3.Connection:
        if self._database is not None and self._part is not None and _bytes(self._part) < self._part_bytes:
            return self._database
        if self._database is not None:
            self._database.close()
        self._folder.mkdir(exist_ok=True)
        newest = max(self._folder.glob("part-*.db"), default=None)
        goes_on = self._part is None and newest is not None and _bytes(newest) < self._part_bytes
        if goes_on and newest is not None:
            part = newest
        else:
            # A step that was held, or whose groups were left out, may be an old one: the newest part is written to.
            begins = step if newest is None else max(step, 1 + int(newest.stem.removeprefix("part-")))
            part = self._folder / f"part-{begins:010d}.db"
        self._part = part
        self._database = sqlite3.connect(part, isolation_level=None, check_same_thread=False)
        self._database.executescript(_SCHEMA)
        _add_later_columns(self._database)
        self._trim()
        return self._database

    def _trim(self) -> None:
        assert self._part is not None, "a part is open"
        old = sorted(path for path in self._folder.glob("part-*.db") if path != self._part)
        while old and sum(map(_bytes, (*old, self._part))) + self._part_bytes > self._budget_bytes:
            _remove(old.pop(0))


def _add_later_columns(database: sqlite3.Connection) -> None:
    for table, columns in _LATER_COLUMNS.items():
        known = {row[1] for row in database.execute(f"PRAGMA table_info({table})")}
        for column in columns:
            if column.split()[0] not in known:
                database.execute(f"ALTER TABLE {table} ADD COLUMN {column}")
    database.execute(_LATER_INDEXES)


def _insert(
    database: sqlite3.Connection,
    group: TrajectoryGroup,
    columns: Sequence[Columns],
    taken: TakenStep,
    *,
    times: LeaseTimes | None,
) -> None:
    rewards = np.array([one.reward.reward for one in group.trajectories if one.reward.reward is not None])
    mean, std = (float(rewards.mean()), float(rewards.std())) if len(rewards) else (None, None)
    added = database.execute(
        "INSERT INTO groups(step, incarnation, lease, environment, task, why, size, reward_mean, reward_std, prompt,"
        " tokens, times, greedy_reward) VALUES(?,?,?,?,?,?,?,?,?,?,?,?,?)",
        (taken.step, group.incarnation, group.lease_id, group.environment, group.task_index, taken.why,
         len(group.trajectories), mean, std, _without_zeros(group.prompt_text), packed(columns),
         json.dumps(_times(group, times)), group.greedy_reward),
    )  # fmt: skip
    rows = [
        (added.lastrowid, place, taken.step, group.environment, group.task_index, taken.why, one.reward.reward,
         int(one.loss_mask.sum()), _lag(one, taken.step), one.stop_reason or one.turns[-1].finish_reason,
         json.dumps(_facts(one, own)),
         _without_zeros(one.completion_text),
         _largest_ratio(own), _mean_advantage(own), _largest_gap(own))
        for place, (one, own) in enumerate(zip(group.trajectories, columns, strict=True))
    ]  # fmt: skip
    for first in range(0, len(rows), _ROWS_AT_ONCE):
        some = rows[first : first + _ROWS_AT_ONCE]
        database.execute(_ROWS + ", ".join([_ROW] * len(some)), [value for row in some for value in row])
    database.execute("INSERT INTO words(rowid, text) SELECT id, text FROM rows WHERE grp = ?", (added.lastrowid,))


def _times(group: TrajectoryGroup, times: LeaseTimes | None) -> dict[str, Any]:
    """Times of a group's life that are known: the learner's since 1970, the rollout's since it began, in seconds."""
    own = {"rollout_s": group.rollout_s or None, "scoring_s": group.scoring_s}
    noted = {} if times is None else vars(times)
    return {name: value for name, value in {**own, **noted}.items() if value is not None}


def _without_zeros(text: str) -> str:
    """At a zero SQLite's functions see a text's end."""
    return text.replace("\0", "\u2400")


def _lag(trajectory: Trajectory, step: int) -> int | None:
    oldest = trajectory.oldest_version
    return None if oldest is None else max(0, step - 1 - oldest)


def _facts(trajectory: Trajectory, own: Columns) -> dict[str, Any]:
    """Facts of one trajectory that are shown, and not searched by."""
    return {
        "reward": trajectory.reward.model_dump(mode="json", exclude_none=True),
        "spans": [[span.version, span.start, span.end] for span in trajectory.version_spans],
        "turns": [turn.model_dump(mode="json", exclude_none=True) for turn in trajectory.turns],
        "sequence_starts": list(trajectory.sequence_starts),
        "player": trajectory.player,
        "forks": [[fork.at, fork.branch] for fork in trajectory.forks],
        "advantage": _mean_advantage(own),
    }


def _mean_advantage(own: Columns) -> float | None:
    mask = own["loss_mask"] == 1
    advantage = float(own["advantages"][mask].mean()) if mask.any() else math.nan
    return advantage if math.isfinite(advantage) else None  # SQLite takes no JSON with an infinity


def _largest_ratio(own: Columns) -> float | None:
    """Of the trained tokens' learner to sampling probabilities; None where the learner's are not known."""
    gaps = _gaps(own)
    return math.exp(min(_MAX_GAP, float(gaps.max()))) if len(gaps) else None


def _largest_gap(own: Columns) -> float | None:
    """Of the trained tokens' logprobs by learner and by generator, in nats, whichever is higher; None as for ratios."""
    gaps = np.abs(_gaps(own))
    return min(_MAX_GAP, float(gaps.max())) if len(gaps) else None


def _gaps(own: Columns) -> NDArray[np.float32]:
    """The learner's logprobs minus the generator's, of the trained tokens of which both are known."""
    gaps: NDArray[np.float32] = (own["learner_logprobs"] - own["behavior_logprobs"])[own["loss_mask"] == 1]
    known: NDArray[np.float32] = gaps[~np.isnan(gaps)]
    return known


def _bytes(path: Path) -> int:
    """Of a part, with what SQLite keeps beside it."""
    files = (path.with_name(path.name + end) for end in ("", "-wal"))
    return sum(file.stat().st_size for file in files if file.exists())


def _remove(path: Path) -> None:
    for end in ("", "-wal", "-shm"):
        path.with_name(path.name + end).unlink(missing_ok=True)


def _forget_beyond(path: Path, version: int) -> None:
    database = sqlite3.connect(path, isolation_level=None)
    try:
        database.execute("BEGIN")
        database.execute(
            "INSERT INTO words(words, rowid, text) SELECT 'delete', id, text FROM rows WHERE step > ?", (version,)
        )
        for table in ("rows", "groups", "steps"):
            database.execute(f"DELETE FROM {table} WHERE step > ?", (version,))
        database.execute("COMMIT")
    finally:
        database.close()
