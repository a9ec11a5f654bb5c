"""Trackers: a run's numbers sent elsewhere while they are written to `metrics.jsonl`: TensorBoard, W&B, MLflow.

    LineFile.write ──▶ Trackers.take ──▶ Follower: a queue that drops its oldest, and a thread ──▶ Tracker

TensorBoard writes files, MLflow is spoken to by its REST routes, W&B runs in a child process: this module's main.
Training waits for none. What one is too slow for, or fails to take, is counted; the whole is in the file.

A tracker has each step once. After a resume it is sent from the file what it does not have yet; what is trained again
from the journal is not sent again. Where steps that it has are lost, TensorBoard takes them back, and at the others
another run begins, with all of the history of the present weights.
"""

import contextlib
import importlib
import itertools
import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from pydantic import SecretStr

from learner.journal.files import write_atomically
from learner.reports.history import group_of
from learner.reports.tracked_rows import FormerLines, TrackedRow, is_beyond, joined, newest_of, row_of

logger = logging.getLogger(__name__)

IDS = "trackers.json"
"""In the run's folder: the ids that trackers have given the run, by which a resume goes on with it."""

_MAX_WAITING = 1024
_FINISH_S = 5.0
_STOP_S = 1.0
_QUIET_S = 10.0
_MAX_VALUE = 500
_REQUEST_S = 10.0
_MAX_PARAMS = 100
_MAX_METRICS = 1000
_MAX_NAME = 250
_OUT_OF_NAMES = re.compile(r"[^\w.\- /]")
_ROWS_AT_ONCE = 100
_SENT = "sent.json"


@dataclass(frozen=True)
class TrackedRun:
    """Told to a tracker at the start. `settings` are by dotted key, without secrets. `repeats`: a resume trains steps
    again that come to the same numbers, as a run on files does, and says nothing of it.
    """

    name: str
    folder: Path
    settings: Mapping[str, object]
    repeats: bool = False

    def known_id(self, tracker: str) -> str | None:
        """The id that the tracker gave this run in a former life."""
        return self._ids().get(tracker)

    def keep_id(self, tracker: str, given: str) -> None:
        """Keeps it for the next life."""
        with _ids_lock:
            write_atomically(self.folder / IDS, json.dumps({**self._ids(), tracker: given}) + "\n")

    def _ids(self) -> dict[str, str]:
        try:
            found = json.loads((self.folder / IDS).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}


_ids_lock = threading.Lock()


class Tracker(Protocol):
    """All but `abandon` are called in one thread of its own, may wait, and may raise anything."""

    name: str
    every_s: float = 0.0
    """Lines that come sooner are passed on together: waking costs as much as a line."""
    row_every_s: float = 0.0
    """Steps that are faster than this come as one row with their means."""

    def start(self, run: TrackedRun, *, anew: bool = False) -> Mapping[str, int] | None:
        """Called before the others. Returns the last step of each kind of row that it has of the run, None where that
        is not known. `anew`: as a run that it has never seen.
        """

    def log(self, rows: Sequence[TrackedRow], *, sent: Mapping[str, int]) -> None:
        """Numbers of steps, or of the versions after them, named as in `metrics.jsonl`. With them it has all up to
        `sent`.
        """

    def cut(self, run: TrackedRun, version: int) -> Mapping[str, int] | None:
        """The steps after a version, which it has, are lost. Returns what `start` does: here of another run."""
        self.finish("failed")
        return self.start(replace(run, name=f"{run.name} from {version}"), anew=True)

    def event(self, step: int | None, kind: str, text: str) -> None:
        """Something that happened: a resume, a movement of the guard, a generator that caught up."""

    def finish(self, status: str) -> None:
        """The run is over: `finished`, or `failed`."""

    def abandon(self) -> None:
        """From another thread: `finish` has not ended in time. Returns at once; a daemon's thread needs nothing."""
        return


class Follower:
    """A tracker behind its queue. `put` never waits; `finish` waits for at most as long as it is told."""

    def __init__(self, tracker: Tracker, run: TrackedRun, *, most_waiting: int = _MAX_WAITING) -> None:
        self.name = tracker.name
        self.dropped = 0
        """Entries that the tracker never got, or did not take."""
        self._tracker, self._run = tracker, run
        self._former = FormerLines.in_folder(run.folder)
        self._sent: Mapping[str, int] = {}
        self._repeated: Mapping[str, int] = {}
        self._most_waiting = most_waiting
        self._waiting: deque[Mapping[str, Any]] = deque()
        self._stirred = threading.Condition()
        self._ending: str | None = None
        self._failed = self._started = self._slow_said = self._abandoned = False
        self._began = self._due = time.monotonic()
        self._thread = threading.Thread(target=self._work, name=f"tracker {self.name}", daemon=True)
        self._thread.start()

    def put(self, entry: Mapping[str, Any]) -> None:
        """Queues a line; from any thread."""
        with self._stirred:
            if self._failed:
                self.dropped += 1
                return
            self._waiting.append(entry)
            if len(self._waiting) > self._most_waiting:
                # Without the resume, the first line of a life, steps that are lost would stay in the tracker.
                del self._waiting[1 if self._waiting[0]["kind"] == "resume" else 0]
                self.dropped += 1
            self._stirred.notify()
        if not (self._started or self._slow_said) and time.monotonic() - self._began > _QUIET_S:
            self._slow_said = True
            logger.warning("tracker %s has not started after %.0f s: the run goes on without it", self.name, _QUIET_S)

    def end(self, status: str) -> None:
        """Nothing comes after this; `finish` waits for it."""
        with self._stirred:
            self._ending = status
            self._stirred.notify()

    def finish(self, *, deadline: float) -> None:
        """Returns when the tracker has taken all, or at `deadline` (monotonic)."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            with self._stirred:
                left = len(self._waiting)
                self.dropped += left
                self._waiting.clear()
                self._abandoned = True
            logger.warning("tracker %s has not taken the last %d entries: the run ends without it", self.name, left)
            self._tracker.abandon()

    def _work(self) -> None:
        try:
            self._has(self._tracker.start(self._run))
        except Exception as error:  # noqa: BLE001 - whatever a library raises must not end a run
            self._give_up(error)
            return
        self._started = True
        if self._run.repeats:
            self._fill_up(None)
        while not self._failed and (entries := self._next()):
            self._pass_on(entries)
        try:
            self._tracker.finish(self._ending or "finished")
        except Exception as error:  # noqa: BLE001 - the same
            if not self._abandoned:
                logger.warning("tracker %s failed at the end: %s", self.name, error)

    def _next(self) -> list[Mapping[str, Any]]:
        """The next one; all that have come, if they are sent as one; nothing at the end."""
        with self._stirred:
            self._stirred.wait_for(lambda: self._ending is not None, max(0.0, self._due - time.monotonic()))
            self._stirred.wait_for(lambda: self._waiting or self._ending is not None)
            self._due = time.monotonic() + self._tracker.every_s
            count = len(self._waiting) if self._tracker.every_s else min(1, len(self._waiting))
            return [self._waiting.popleft() for _ in range(count)]

    def _pass_on(self, entries: Sequence[Mapping[str, Any]]) -> None:
        rows: list[TrackedRow] = []
        for entry in entries:
            row = row_of(entry)
            if row is None:
                self._send(rows)
                rows = []
                self._tell(entry)
            elif is_beyond(row, self._repeated):
                rows.append(row)
        self._send(rows)

    def _tell(self, entry: Mapping[str, Any]) -> None:
        step = entry.get("step", entry.get("version"))
        if entry["kind"] == "resume":
            self._take_up(int(entry["version"]))
        text = json.dumps({name: value for name, value in entry.items() if name != "kind"})
        self._try(partial(self._tracker.event, step, str(entry["kind"]), text), entries=1)

    def _has(self, sent: Mapping[str, int] | None) -> None:
        """Takes what the tracker has; of a run that an earlier release began, all that there was."""
        self._sent = dict(newest_of(self._former.rows()) if sent is None else sent)

    def _take_up(self, version: int) -> None:
        """The run goes on from a version."""
        if any(step > version for step in self._sent.values()):
            try:
                self._has(self._tracker.cut(self._run, version))
            except Exception as error:  # noqa: BLE001 - the same
                self._give_up(error)
                return
        self._fill_up(version)

    def _fill_up(self, version: int | None) -> None:
        """Sends what the tracker does not have of the former lives' rows."""
        try:
            for some in _in_parts(row for row in self._former.rows(version=version) if is_beyond(row, self._sent)):
                self._send(some)
        except Exception as error:  # noqa: BLE001 - the file may be cut while it is read
            self._give_up(error, done="go on")
            return
        self._repeated = dict(self._sent)

    def _send(self, rows: Sequence[TrackedRow]) -> None:
        if not rows:
            return
        every_s, newest = self._tracker.row_every_s, newest_of(rows)
        sent = {**self._sent, **{kind: max(step, self._sent.get(kind, step)) for kind, step in newest.items()}}
        made = joined(rows, every_s=every_s) if every_s else rows
        if self._try(partial(self._tracker.log, made, sent=sent), entries=len(rows)):
            self._sent = sent

    def _try(self, call: Callable[[], None], *, entries: int) -> bool:
        """True if it was taken."""
        try:
            call()
        except Exception as error:  # noqa: BLE001 - the same
            self.dropped += entries
            logger.warning(
                "tracker %s did not take an entry: %s", self.name, error, extra={"same": (self.name, "entry")}
            )
            return False
        return True

    def _give_up(self, error: Exception, *, done: str = "start") -> None:
        if not self._abandoned:
            logger.error("tracker %s cannot %s: %s. The run goes on without it", self.name, done, error)
        with self._stirred:
            self._failed = True
            self.dropped += len(self._waiting)
            self._waiting.clear()


def _in_parts(rows: Iterator[TrackedRow]) -> Iterator[list[TrackedRow]]:
    while some := list(itertools.islice(rows, _ROWS_AT_ONCE)):
        yield some


def _read_sent(folder: Path) -> dict[str, Any]:
    """The tracker's folder, as it says what it has; empty if nothing."""
    try:
        found = json.loads((folder / _SENT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _write_sent(folder: Path, **told: object) -> None:
    """Once a second or so, and so not waited for until the disk has it: a death of the process alone loses nothing."""
    draft = folder / f"{_SENT}.new"
    draft.write_text(json.dumps(told) + "\n", encoding="utf-8")
    draft.replace(folder / _SENT)


class Trackers:
    """All trackers of a run; a context manager. Leaving it takes at most 5 s, after an error or a stop 1 s."""

    def __init__(self, trackers: Sequence[Tracker], run: TrackedRun) -> None:
        self._followers = [Follower(tracker, run) for tracker in trackers]

    def take(self, entry: Mapping[str, Any]) -> None:
        """A line of the file, which nobody changes any more."""
        for follower in self._followers:
            follower.put(entry)

    def dropped(self) -> dict[str, float]:
        """Number of entries that each tracker did not get."""
        return {follower.name: float(follower.dropped) for follower in self._followers}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for follower in self._followers:
            follower.end("finished" if kind is None else "failed")
        deadline = time.monotonic() + (_FINISH_S if kind is None else _STOP_S)
        for follower in self._followers:
            follower.finish(deadline=deadline)


def trackers_of(
    *, tensorboard: bool, wandb: str, wandb_project: str, mlflow_url: str | None, mlflow_experiment: str,
    mlflow_token: SecretStr | None,
) -> list[Tracker]:  # fmt: skip
    """The trackers that the settings of `[learner.trackers]` name; none of them has done anything yet."""
    found: list[Tracker] = []
    if tensorboard:
        found.append(TensorBoard())
    if wandb != "off":
        found.append(WeightsAndBiases(mode=wandb, project=wandb_project))
    if mlflow_url is not None:
        found.append(MlFlow(mlflow_url, experiment=mlflow_experiment, token=mlflow_token))
    return found


class TensorBoard(Tracker):
    """Event files in `tensorboard/` of the run's folder, by the innermost writer of tensorboardX: the queue between
    processes and the thread that the package has around it are a `Follower`'s here, and took five times as much.
    """

    name = "tensorboard"
    every_s = 1.0

    def __init__(self) -> None:
        self._writer: Any = None
        self._folder = Path()
        self._sent: Mapping[str, int] = {}

    def start(self, run: TrackedRun, *, anew: bool = False) -> Mapping[str, int] | None:
        """Opens a new file; curves of several files in a folder are one."""
        self._folder = run.folder / "tensorboard"
        self._folder.mkdir(exist_ok=True)
        known = len(list(self._folder.glob("events*")))
        made = _imported("tensorboardX").event_file_writer.EventsWriter
        self._writer = made(str(self._folder / "events"), f".{known}")  # two of one second would be one file
        self.event(0, "settings", json.dumps(dict(run.settings), indent=4))
        if not known:
            _write_sent(self._folder, sent={})
        sent = _read_sent(self._folder).get("sent")
        self._sent = sent or {}
        return None if sent is None else self._sent

    def log(self, rows: Sequence[TrackedRow], *, sent: Mapping[str, int]) -> None:
        """A scalar for each, in an event for a row; those of a step are grouped by figure."""
        made = _imported("tensorboardX.proto.summary_pb2").Summary
        for row in rows:
            tags = {name if "/" in name else f"{group_of(name)}/{name}": value for name, value in row.values.items()}
            summary = made(value=[made.Value(tag=tag, simple_value=value) for tag, value in tags.items()])
            self._write(row.step, row.unix_s, summary=summary)
        self._writer.flush()
        self._sent = sent
        _write_sent(self._folder, sent=sent)

    def cut(self, run: TrackedRun, version: int) -> Mapping[str, int]:
        """Has TensorBoard forget what lies beyond the version."""
        log = _imported("tensorboardX.proto.event_pb2").SessionLog
        self._write(version + 1, time.time(), session_log=log(status=log.START))
        self._writer.flush()
        return {kind: min(step, version) for kind, step in self._sent.items()}

    def event(self, step: int | None, kind: str, text: str) -> None:
        """A text."""
        self._write(step or 0, time.time(), summary=_imported("tensorboardX.summary").text(kind, text))
        self._writer.flush()

    def _write(self, step: int, unix_s: float, **what: Any) -> None:
        made = _imported("tensorboardX.proto.event_pb2").Event
        self._writer.write_event(made(wall_time=unix_s, step=step, **what))

    def finish(self, status: str) -> None:
        """Closes the file."""
        self._writer.close()


def _imported(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise RuntimeError(f"the package {name} is not installed: pip install {name}") from error


class MlFlow(Tracker):
    """An MLflow server, by its REST routes 2.0: no package is needed. `url` is the server's, `token` a bearer token."""

    name = "mlflow"
    every_s = 1.0

    def __init__(self, url: str, *, experiment: str, token: SecretStr | None = None) -> None:
        self._url = url.rstrip("/")
        self._experiment = experiment
        self._token = token
        self._run_id = ""

    def start(self, run: TrackedRun, *, anew: bool = False) -> Mapping[str, int] | None:
        """Makes the run, and the experiment if there is none; a run of a former life goes on, as far as the server has
        it.
        """
        known = None if anew else run.known_id(self.name)
        if known is not None:
            self._run_id = known
            self._call("runs/update", {"run_id": known, "status": "RUNNING"})
            metrics = self._call(f"runs/get?run_id={known}")["run"].get("data", {}).get("metrics", [])
            return newest_of(TrackedRow(_kind_of(each["key"]), int(each["step"]), {}, 0.0) for each in metrics)
        body = {"experiment_id": self._experiment_id(), "run_name": run.name, "start_time": _now_ms()}
        self._run_id = self._call("runs/create", body)["run"]["info"]["run_id"]
        run.keep_id(self.name, self._run_id)
        params = [{"key": _key_of(name), "value": str(value)[:_MAX_VALUE]} for name, value in run.settings.items()]
        for first in range(0, len(params), _MAX_PARAMS):
            self._call("runs/log-batch", {"run_id": self._run_id, "params": params[first : first + _MAX_PARAMS]})
        return {}

    def _experiment_id(self) -> str:
        try:
            found = self._call(f"experiments/get-by-name?experiment_name={urllib.parse.quote(self._experiment)}")
        except _NotThere:
            return str(self._call("experiments/create", {"name": self._experiment})["experiment_id"])
        return str(found["experiment"]["experiment_id"])

    def log(self, rows: Sequence[TrackedRow], *, sent: Mapping[str, int]) -> None:
        """Logs each number at its own step and time, whole rows together as far as a request may hold them."""
        metrics: list[dict[str, object]] = []
        for row in rows:
            same = {"timestamp": int(1000 * row.unix_s), "step": row.step}
            made = [{"key": _key_of(name), "value": value, **same} for name, value in row.values.items()]
            if len(metrics) + len(made) > _MAX_METRICS:
                self._call("runs/log-batch", {"run_id": self._run_id, "metrics": metrics})
                metrics = []
            metrics += made
        self._call("runs/log-batch", {"run_id": self._run_id, "metrics": metrics})

    def event(self, step: int | None, kind: str, text: str) -> None:
        """A tag, which holds the newest of its kind."""
        self._call("runs/set-tag", {"run_id": self._run_id, "key": f"event.{kind}", "value": text[:5000]})

    def finish(self, status: str) -> None:
        """Ends the run."""
        self._call("runs/update", {"run_id": self._run_id, "status": status.upper(), "end_time": _now_ms()})

    def _call(self, route: str, body: Mapping[str, object] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        if self._token is not None:
            headers["Authorization"] = f"Bearer {self._token.get_secret_value()}"
        request = urllib.request.Request(f"{self._url}/api/2.0/mlflow/{route}", data, headers)
        try:
            with urllib.request.urlopen(request, timeout=_REQUEST_S) as answer:
                return json.loads(answer.read() or b"{}")
        except urllib.error.HTTPError as error:
            said = error.read(_MAX_VALUE).decode(errors="replace")
            kind = _NotThere if error.code == 404 else RuntimeError
            raise kind(f"{self._url} answered {route} with {error.code}: {said}") from error
        except (OSError, ValueError) as error:
            raise RuntimeError(f"{self._url} did not answer {route}: {error}") from error


class _NotThere(RuntimeError): ...


def _key_of(name: str) -> str:
    """The name as every MLflow server takes it: for another one the whole request is refused, and those of verifiers
    and components may be anything.
    """
    parts = _OUT_OF_NAMES.sub("_", name)[:_MAX_NAME].split("/")
    return "/".join("_" if part in ("", ".", "..") else part for part in parts)


def _kind_of(key: str) -> str:
    """The kind of the rows that have a number of this name."""
    kind, _, rest = key.partition("/")
    return kind if rest and kind in ("publish", "evaluation", "held_out") else "step"


def _now_ms() -> int:
    return int(1000 * time.time())


class WeightsAndBiases(Tracker):
    """W&B in a child process: its library has threads, hooks and waits of its own, and a child can be ended.

    `mode`: online, or offline into `wandb/` of the run's folder, to be sent later by `wandb sync`.
    """

    name = "wandb"
    every_s, row_every_s = 2.0, 0.5  # its library and its process take more than a ms of CPU for a row

    def __init__(self, *, mode: str, project: str) -> None:
        self._where = {"mode": mode, "project": project}
        self._child: subprocess.Popen[str] | None = None

    def start(self, run: TrackedRun, *, anew: bool = False) -> Mapping[str, int] | None:
        """Starts the child, and waits until it has begun the run."""
        known = None if anew else run.known_id(self.name)
        sent = _read_sent(run.folder / "wandb")
        sent = sent if known is not None and sent.get("id") == known else {}
        first = {"name": run.name, "folder": str(run.folder), "settings": dict(run.settings), **self._where}
        self._child = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, process_group=0,
        )  # fmt: skip
        self._send({**first, "id": known, "rows": sent.get("rows", 0)})
        assert self._child.stdout is not None
        said = json.loads(self._child.stdout.readline() or '{"failed": "its process ended without a word"}')
        if "failed" in said:
            self._close()
            raise RuntimeError(said["failed"])
        run.keep_id(self.name, said["id"])
        return {} if known is None else sent.get("sent")

    def log(self, rows: Sequence[TrackedRow], *, sent: Mapping[str, int]) -> None:
        """Logs each row with its step as a value: an evaluation is of an earlier one. The child notes what it has, as
        it has it also if this process is gone meanwhile.
        """
        made = [{"step": row.step, "_timestamp": row.unix_s, **row.values} for row in rows]
        self._send({"log": made, "sent": sent})

    def event(self, step: int | None, kind: str, text: str) -> None:
        """The newest of its kind, in the run's summary."""
        self._send({"event": {f"event/{kind}": text}})

    def finish(self, status: str) -> None:
        """Closes the child's input, at which it ends the run."""
        self._send({"status": status})
        self._close()

    def abandon(self) -> None:
        """Kills the child, and what it has started."""
        if self._child is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._child.pid, signal.SIGKILL)

    def _close(self) -> None:
        assert self._child is not None
        with contextlib.suppress(BrokenPipeError):
            self._child.communicate()

    def _send(self, what: Mapping[str, object]) -> None:
        assert self._child is not None
        assert self._child.stdin is not None
        self._child.stdin.write(json.dumps(what) + "\n")
        self._child.stdin.flush()


def _wandb_child() -> None:
    """The child of WeightsAndBiases: lines of JSON come in; `{"id": ...}` or `{"failed": ...}` goes out, once."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(19)  # its processes, too, can wait for training; in a session of their own that would count for nothing
    out, sys.stdout = sys.stdout, sys.stderr  # the library's own words are not ours
    given = json.loads(sys.stdin.readline())
    try:
        wandb = _imported("wandb")
        run = wandb.init(
            project=given["project"], name=given["name"], dir=given["folder"], mode=given["mode"], id=given["id"],
            resume="allow", config=given["settings"], settings=wandb.Settings(silent=True, console="off"),
        )  # fmt: skip
        run.define_metric("*", step_metric="step")
    except Exception as error:  # noqa: BLE001 - told to the parent, whatever it is
        out.write(json.dumps({"failed": str(error)}) + "\n")
        out.flush()
        return
    out.write(json.dumps({"id": run.id}) + "\n")
    out.flush()
    status, number = "failed", given["rows"]  # the status of a parent that died
    if given["id"] is None:
        _write_sent(Path(given["folder"]) / "wandb", id=run.id, rows=0, sent={})
    for line in sys.stdin:
        what = json.loads(line)
        for row in what.get("log", ()):
            # W&B drops a row whose number is not above the last one's, also of a former life.
            number = max(number, run.step) + 1
            run.log(row, step=number)
        if "sent" in what:
            _write_sent(Path(given["folder"]) / "wandb", id=run.id, rows=number, sent=what["sent"])
        run.summary.update(what.get("event", {}))
        status = what.get("status", status)
    run.finish(exit_code=0 if status == "finished" else 1)


if __name__ == "__main__":
    _wandb_child()
