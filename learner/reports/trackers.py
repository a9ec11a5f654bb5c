"""Trackers: a run's numbers sent elsewhere while they are written to `metrics.jsonl`: TensorBoard, W&B, MLflow.

    LineFile.write ──▶ Trackers.take ──▶ Follower: a queue that drops its oldest, and a thread ──▶ Tracker

TensorBoard writes files, MLflow is spoken to by its REST routes, W&B runs in a child process: this module's main.
Training waits for none. What one is too slow for, or fails to take, is counted; the whole is in the file.
"""

import contextlib
import importlib
import json
import logging
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from pydantic import SecretStr

from learner.journal.files import write_atomically
from learner.reports.history import group_of, numbers_of

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


@dataclass(frozen=True)
class TrackedRun:
    """Told to a tracker at the start. `settings` are by dotted key, without secrets."""

    name: str
    folder: Path
    settings: Mapping[str, object]

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
    joins: bool = False
    """Lines that come sooner are passed on together (waking costs as much as a line), or one with their means."""

    def start(self, run: TrackedRun) -> None:
        """Called once, before the others."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Numbers of a step, or of the version after it, named as in `metrics.jsonl`."""

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
                self._waiting.popleft()
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
            self._tracker.start(self._run)
        except Exception as error:  # noqa: BLE001 - whatever a library raises must not end a run
            self._give_up(error)
            return
        self._started = True
        while entries := self._next():
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
        rows = [found for entry in entries if (found := numbers_of(entry)) is not None]
        for some in [rows] if self._tracker.joins and rows else [[row] for row in rows]:
            self._try(partial(self._tracker.log, *mean_of(some)), entries=len(some))
        for entry in entries:
            if numbers_of(entry) is None:
                text = json.dumps({name: value for name, value in entry.items() if name != "kind"})
                step = entry.get("step", entry.get("version"))
                self._try(partial(self._tracker.event, step, str(entry["kind"]), text), entries=1)

    def _try(self, call: Callable[[], None], *, entries: int) -> None:
        try:
            call()
        except Exception as error:  # noqa: BLE001 - the same
            self.dropped += entries
            logger.warning(
                "tracker %s did not take an entry: %s", self.name, error, extra={"same": (self.name, "entry")}
            )

    def _give_up(self, error: Exception) -> None:
        if not self._abandoned:
            logger.error("tracker %s cannot start: %s. The run goes on without it", self.name, error)
        with self._stirred:
            self._failed = True
            self.dropped += len(self._waiting)
            self._waiting.clear()


def mean_of(rows: Sequence[tuple[int, Mapping[str, float]]]) -> tuple[int, dict[str, float]]:
    """The newest step, and of each number the mean of those that have it."""
    values: dict[str, list[float]] = defaultdict(list)
    for _, row in rows:
        for name, value in row.items():
            values[name].append(value)
    return max(step for step, _ in rows), {name: statistics.fmean(found) for name, found in values.items()}


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
        token = None if mlflow_token is None else mlflow_token.get_secret_value()
        found.append(MlFlow(mlflow_url, experiment=mlflow_experiment, token=token))
    return found


class TensorBoard(Tracker):
    """Event files in `tensorboard/` of the run's folder, by the innermost writer of tensorboardX: the queue between
    processes and the thread that the package has around it are a `Follower`'s here, and took five times as much.
    """

    name = "tensorboard"
    every_s = 1.0

    def __init__(self) -> None:
        self._writer: Any = None

    def start(self, run: TrackedRun) -> None:
        """Opens a new file; curves of several files in a folder are one."""
        folder = run.folder / "tensorboard"
        folder.mkdir(exist_ok=True)
        self._writer = _imported("tensorboardX").event_file_writer.EventsWriter(str(folder / "events"))
        self.event(0, "settings", json.dumps(dict(run.settings), indent=4))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """A scalar for each, in one event; those of a step are grouped by figure."""
        made = _imported("tensorboardX.proto.summary_pb2").Summary
        tags = {name if "/" in name else f"{group_of(name)}/{name}": value for name, value in values.items()}
        self._write(step, made(value=[made.Value(tag=tag, simple_value=value) for tag, value in tags.items()]))

    def event(self, step: int | None, kind: str, text: str) -> None:
        """A text."""
        self._write(step or 0, _imported("tensorboardX.summary").text(kind, text))

    def _write(self, step: int, summary: Any) -> None:
        made = _imported("tensorboardX.proto.event_pb2").Event
        self._writer.write_event(made(wall_time=time.time(), step=step, summary=summary))
        self._writer.flush()

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
    joins = True

    def __init__(self, url: str, *, experiment: str, token: str | None = None) -> None:
        self._url = url.rstrip("/")
        self._experiment = experiment
        self._headers = {"Content-Type": "application/json"}
        if token is not None:
            self._headers["Authorization"] = f"Bearer {token}"
        self._run_id = ""

    def start(self, run: TrackedRun) -> None:
        """Makes the run, and the experiment if there is none; a run of a former life goes on."""
        known = run.known_id(self.name)
        if known is not None:
            self._run_id = known
            self._call("runs/update", {"run_id": known, "status": "RUNNING"})
            return
        body = {"experiment_id": self._experiment_id(), "run_name": run.name, "start_time": _now_ms()}
        self._run_id = self._call("runs/create", body)["run"]["info"]["run_id"]
        run.keep_id(self.name, self._run_id)
        params = [{"key": key, "value": str(value)[:_MAX_VALUE]} for key, value in run.settings.items()]
        for first in range(0, len(params), _MAX_PARAMS):
            self._call("runs/log-batch", {"run_id": self._run_id, "params": params[first : first + _MAX_PARAMS]})

    def _experiment_id(self) -> str:
        try:
            found = self._call(f"experiments/get-by-name?experiment_name={urllib.parse.quote(self._experiment)}")
        except _NotThere:
            return str(self._call("experiments/create", {"name": self._experiment})["experiment_id"])
        return str(found["experiment"]["experiment_id"])

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Logs one batch."""
        same = {"timestamp": _now_ms(), "step": step}
        rows = [{"key": key, "value": value, **same} for key, value in values.items()]
        self._call("runs/log-batch", {"run_id": self._run_id, "metrics": rows})

    def event(self, step: int | None, kind: str, text: str) -> None:
        """A tag, which holds the newest of its kind."""
        self._call("runs/set-tag", {"run_id": self._run_id, "key": f"event.{kind}", "value": text[:5000]})

    def finish(self, status: str) -> None:
        """Ends the run."""
        self._call("runs/update", {"run_id": self._run_id, "status": status.upper(), "end_time": _now_ms()})

    def _call(self, route: str, body: Mapping[str, object] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self._url}/api/2.0/mlflow/{route}", data, self._headers)
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


def _now_ms() -> int:
    return int(1000 * time.time())


class WeightsAndBiases(Tracker):
    """W&B in a child process: its library has threads, hooks and waits of its own, and a child can be ended.

    `mode`: online, or offline into `wandb/` of the run's folder, to be sent later by `wandb sync`.
    """

    name = "wandb"
    every_s, joins = 2.0, True  # its library and its process take some 6 ms of CPU for a row

    def __init__(self, *, mode: str, project: str) -> None:
        self._where = {"mode": mode, "project": project}
        self._child: subprocess.Popen[str] | None = None

    def start(self, run: TrackedRun) -> None:
        """Starts the child, and waits until it has begun the run."""
        first = {"name": run.name, "folder": str(run.folder), "settings": dict(run.settings), **self._where}
        self._child = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, process_group=0,
        )  # fmt: skip
        self._send({**first, "id": run.known_id(self.name)})
        assert self._child.stdout is not None
        said = json.loads(self._child.stdout.readline() or '{"failed": "its process ended without a word"}')
        if "failed" in said:
            self._close()
            raise RuntimeError(said["failed"])
        run.keep_id(self.name, said["id"])

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Logs one row, with its step as a value: a resume may take steps back."""
        self._send({"log": {"step": step, **values}})

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
    status = "failed"  # of a parent that died
    for line in sys.stdin:
        what = json.loads(line)
        if "log" in what:
            run.log(what["log"])
        run.summary.update(what.get("event", {}))
        status = what.get("status", status)
    run.finish(exit_code=0 if status == "finished" else 1)


if __name__ == "__main__":
    _wandb_child()
