"""Trackers: what they are sent, and that none of them costs a run anything. The MLflow server here is a stand-in of a
few routes over real HTTP; TensorBoard's files are read back; W&B runs offline, and against a server that never answers.
"""

import contextlib
import dataclasses
import importlib
import importlib.util
import json
import os
import posixpath
import re
import shutil
import signal
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

import pytest
from pydantic import SecretStr

from learner.evaluation.config import TrackersConfig
from learner.journal.files import LineFile
from learner.reports import trackers as module
from learner.reports.history import numbers_of
from learner.reports.tracked_rows import TrackedRow
from learner.reports.trackers import (
    Follower,
    MlFlow,
    TensorBoard,
    TrackedRun,
    Tracker,
    Trackers,
    WeightsAndBiases,
    trackers_of,
)

STEP = {
    "kind": "step", "step": 3, "reward_mean": 0.5, "loss": float("nan"), "entropy": None, "lease_ids": (1, 2),
    "lag_counts": {0: 4}, "reward_by_verifier": {"math": 0.25},
}  # fmt: skip
PATIENCE_S = 60.0


def absent(package: str) -> bool:
    return importlib.util.find_spec(package) is None


class ScriptedTracker(Tracker):
    """A tracker that does what it is told: `start` and `log` are called in its thread. It has up to `sent` already."""

    name = "scripted"

    def __init__(
        self,
        *,
        start: Callable[[], None] = lambda: None,
        log: Callable[[], None] = lambda: None,
        sent: Mapping[str, int] | None = {},
    ) -> None:
        self._start = start
        self._log = log
        self._sent = sent
        self.seen: list[object] = []
        self.abandoned = False

    def start(self, run: TrackedRun, *, anew: bool = False) -> Mapping[str, int] | None:
        self._start()
        self.seen.append(run.name)
        return {} if anew else self._sent

    def log(self, rows: Sequence[TrackedRow], *, sent: Mapping[str, int]) -> None:
        self._log()
        self.seen += [(row.step, dict(row.values)) for row in rows]

    def event(self, step: int | None, kind: str, text: str) -> None:
        self.seen.append((step, kind, json.loads(text)))

    def finish(self, status: str) -> None:
        self.seen.append(status)

    def abandon(self) -> None:
        self.abandoned = True


@pytest.fixture
def run(tmp_path: Path) -> TrackedRun:
    return TrackedRun("sums", tmp_path, {"max_lag": 4, "http.token": "(a secret)"})


def test_the_numbers_of_a_line_keep_their_names_and_what_is_none_is_left_out() -> None:
    assert numbers_of(STEP) == (3, {"reward_mean": 0.5, "reward_by_verifier/math": 0.25})
    assert numbers_of({"kind": "publish", "version": 2, "total_s": 0.5, "unix_s": 1.0}) == (2, {"publish/total_s": 0.5})
    evaluation = {"kind": "evaluation", "version": 2, "accuracy": 0.5, "pass_at_k": {4: 1.0}}
    assert numbers_of(evaluation) == (2, {"evaluation/accuracy": 0.5, "evaluation/pass_at_k/4": 1.0})
    assert numbers_of({"kind": "resume", "version": 2, "incarnation": 5}) is None


def test_a_tracker_gets_all_lines_of_the_file_in_their_order(run: TrackedRun, tmp_path: Path) -> None:
    tracker = ScriptedTracker()
    with Trackers([tracker], run) as followed:
        lines = LineFile(tmp_path / "metrics.jsonl", told=followed.take)
        for step in range(1, 51):
            lines.write({"kind": "step", "step": step, "reward_mean": step / 100})
        lines.write({"kind": "resume", "version": 50, "incarnation": 2})
        lines.close()

    written = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    logged = [(entry["step"], {"reward_mean": entry["reward_mean"]}) for entry in written[:-1]]
    assert tracker.seen == ["sums", *logged, (50, "resume", {"version": 50, "incarnation": 2}), "finished"]
    assert followed.dropped() == {"scripted": 0.0}


def test_a_tracker_that_hangs_loses_its_oldest_entries_and_keeps_nobody(
    run: TrackedRun, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "_FINISH_S", 0.2)
    hanging, let_go = threading.Event(), threading.Event()

    def hang() -> None:
        hanging.set()
        let_go.wait()

    tracker = ScriptedTracker(log=hang)
    with Trackers([tracker], run) as followed:
        followed.take({"kind": "step", "step": 0})
        assert hanging.wait(PATIENCE_S)
        for step in range(1, 2001):
            followed.take({"kind": "step", "step": step})
        assert followed.dropped() == {"scripted": 2000.0 - 1024}
    assert tracker.abandoned
    assert followed.dropped() == {"scripted": 2000.0}
    assert "has not taken the last 1024 entries" in caplog.text
    let_go.set()


def test_after_a_hang_the_newest_entries_come(run: TrackedRun) -> None:
    hanging, let_go = threading.Event(), threading.Event()

    def hang() -> None:
        hanging.set()
        assert let_go.wait(PATIENCE_S)

    tracker = ScriptedTracker(log=hang)
    follower = Follower(tracker, run, most_waiting=2)
    follower.put({"kind": "step", "step": 0})
    assert hanging.wait(PATIENCE_S)
    for step in range(1, 6):
        follower.put({"kind": "step", "step": step})
    let_go.set()
    follower.end("finished")
    follower._thread.join(PATIENCE_S)

    assert tracker.seen == ["sums", (0, {}), (4, {}), (5, {}), "finished"]
    assert follower.dropped == 3


def test_a_start_that_fails_is_said_and_the_run_goes_on(run: TrackedRun, caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise RuntimeError("the key is not known")

    follower = Follower(ScriptedTracker(start=fail), run)
    follower._thread.join(PATIENCE_S)
    assert "tracker scripted cannot start: the key is not known. The run goes on without it" in caplog.text
    follower.put(STEP)
    assert follower.dropped == 1


def test_an_entry_that_is_not_taken_is_counted_and_the_next_one_is_tried(run: TrackedRun) -> None:
    answers = iter([True, False])

    def fail_once() -> None:
        if next(answers):
            raise ValueError("not now")

    tracker = ScriptedTracker(log=fail_once)
    with Trackers([tracker], run) as followed:
        followed.take({"kind": "step", "step": 1})
        followed.take({"kind": "step", "step": 2})

    assert tracker.seen == ["sums", (2, {}), "finished"]
    assert followed.dropped() == {"scripted": 1.0}


def test_steps_that_come_too_soon_are_one_row_and_an_evaluation_one_of_its_own(run: TrackedRun) -> None:
    hanging, let_go = threading.Event(), threading.Event()

    def hang() -> None:
        hanging.set()
        assert let_go.wait(PATIENCE_S)

    tracker = ScriptedTracker(log=hang)
    tracker.every_s, tracker.row_every_s = 0.05, 0.5
    follower = Follower(tracker, run)
    follower.put({"kind": "step", "step": 1, "loss": 0.5, "unix_s": 100.0})
    assert hanging.wait(PATIENCE_S)
    for entry in (
        {"kind": "step", "step": 2, "loss": 1.0, "unix_s": 101.0},
        {"kind": "publish", "version": 2, "total_s": 0.25, "unix_s": 101.1},
        {"kind": "evaluation", "version": 1, "accuracy": 0.75, "unix_s": 101.2},
        {"kind": "step", "step": 3, "loss": 3.0, "unix_s": 101.3},
        {"kind": "step", "step": 4, "loss": 4.0, "unix_s": 101.6},
        {"kind": "guard", "step": 4},
        {"kind": "step", "step": 5, "loss": 5.0, "unix_s": 101.7},
    ):
        follower.put(entry)
    let_go.set()
    follower.end("finished")
    follower._thread.join(PATIENCE_S)

    joined = [(3, {"loss": 2.0, "publish/total_s": 0.25}), (1, {"evaluation/accuracy": 0.75}), (4, {"loss": 4.0})]
    rest = [(4, "guard", {"step": 4}), (5, {"loss": 5.0}), "finished"]
    assert tracker.seen == ["sums", (1, {"loss": 0.5}), *joined, *rest]
    assert follower.dropped == 0


def test_lines_that_come_too_soon_are_passed_on_together_where_each_is_wanted(run: TrackedRun) -> None:
    tracker = ScriptedTracker()
    tracker.every_s = 2 * PATIENCE_S
    follower = Follower(tracker, run)
    for step in range(1, 4):
        follower.put({"kind": "step", "step": step, "loss": 0.5 * step})
    follower.end("finished")
    follower._thread.join(PATIENCE_S)

    assert tracker.seen == ["sums", *((step, {"loss": 0.5 * step}) for step in range(1, 4)), "finished"]


def test_a_run_that_fails_is_a_failed_one_there(run: TrackedRun) -> None:
    tracker = ScriptedTracker()
    with pytest.raises(KeyError), Trackers([tracker], run):
        raise KeyError
    assert tracker.seen == ["sums", "failed"]


def test_the_settings_name_the_trackers() -> None:
    assert trackers_of(**dict(TrackersConfig())) == []
    every = TrackersConfig.model_validate({"tensorboard": True, "wandb": "offline", "mlflow_url": "http://h:5000"})
    assert [tracker.name for tracker in trackers_of(**dict(every))] == ["tensorboard", "wandb", "mlflow"]


class StandIn(ThreadingHTTPServer):
    """The routes of an MLflow server that are used, with what it keeps in memory: a stand-in, no MLflow."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Routes)
        self.experiments: dict[str, str] = {}
        self.runs: dict[str, dict[str, Any]] = {}
        self.tokens: set[str | None] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def answer(self, route: str, body: dict[str, Any]) -> tuple[int, object]:
        match route:
            case "experiments/get-by-name":
                name = body["experiment_name"]
                if name not in self.experiments:
                    return 404, {"error_code": "RESOURCE_DOES_NOT_EXIST", "message": f"no experiment {name}"}
                return 200, {"experiment": {"experiment_id": self.experiments[name], "name": name}}
            case "runs/get":
                metrics = [{"key": key, "value": value, "step": step} for key, value, step in self.newest(body)]
                return 200, {"run": {"data": {"metrics": metrics} if metrics else {}}}
            case "experiments/create":
                self.experiments[body["name"]] = str(len(self.experiments) + 1)
                return 200, {"experiment_id": self.experiments[body["name"]]}
            case "runs/create":
                made = f"run{len(self.runs)}"
                self.runs[made] = {**body, "metrics": [], "params": {}, "tags": {}, "status": "RUNNING"}
                return 200, {"run": {"info": {"run_id": made, "run_name": body["run_name"]}}}
        return self._of_a_run(route, self.runs[body["run_id"]], body)

    def newest(self, body: Mapping[str, str]) -> list[tuple[str, float, int]]:
        """Of each number the value of the last step."""
        rows = sorted(self.runs[body["run_id"]]["metrics"], key=lambda row: int(row[2]))
        return list({row[0]: row for row in rows}.values())

    @staticmethod
    def _of_a_run(route: str, run: dict[str, Any], body: dict[str, Any]) -> tuple[int, object]:
        match route:
            case "runs/log-batch":
                metrics, params = body.get("metrics", []), body.get("params", [])
                if len(metrics) > 1000 or len(params) > 100:
                    return 400, {"error_code": "INVALID_PARAMETER_VALUE", "message": "too many"}
                if not all(is_name(row["key"]) for row in (*metrics, *params)):
                    return 400, {"error_code": "INVALID_PARAMETER_VALUE", "message": "Invalid metric name"}
                run["metrics"] += [(row["key"], row["value"], row["step"]) for row in metrics]
                run["params"] |= {row["key"]: row["value"] for row in params}
            case "runs/set-tag":
                run["tags"][body["key"]] = body["value"]
            case "runs/update":
                run["status"] = body["status"]
            case _:
                return 404, {"error_code": "ENDPOINT_NOT_FOUND"}
        return 200, {}


def is_name(key: str) -> bool:
    """As MLflow's own check: a key may be the path of a file."""
    allowed = re.fullmatch(r"[/\w.\- ]{1,250}", key) is not None
    return allowed and key == posixpath.normpath(key) and not key.startswith(("/", "..")) and key != "."


class _Routes(BaseHTTPRequestHandler):
    server: StandIn

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        self._reply(parts.path, {name: values[0] for name, values in parse_qs(parts.query).items()})

    def do_POST(self) -> None:
        self._reply(self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def _reply(self, path: str, body: dict[str, Any]) -> None:
        self.server.tokens.add(self.headers["Authorization"])
        status, answer = self.server.answer(path.removeprefix("/api/2.0/mlflow/"), body)
        text = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def mlflow() -> Iterator[StandIn]:
    with StandIn() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join(PATIENCE_S)


def followed_by(tracker: Tracker, run: TrackedRun, *entries: Mapping[str, object]) -> Follower:
    """To its end, without a hurry."""
    follower = Follower(tracker, run)
    for entry in entries:
        follower.put(entry)
    follower.end("finished")
    follower._thread.join(PATIENCE_S)
    assert not follower._thread.is_alive()
    return follower


def test_mlflow_gets_settings_numbers_and_events_and_a_resume_goes_on_with_its_run(
    mlflow: StandIn, run: TrackedRun
) -> None:
    several = TrackedRun(run.name, run.folder, {**run.settings, **{f"key{n}": n for n in range(250)}})
    tracker = MlFlow(mlflow.url + "/", experiment="my sums", token=SecretStr("open"))
    follower = followed_by(tracker, several, STEP, {"kind": "guard", "step": 3, "after": 2})
    assert follower.dropped == 0
    again = followed_by(MlFlow(mlflow.url, experiment="my sums"), several, {"kind": "step", "step": 4, "loss": 1.0})
    assert again.dropped == 0

    ((run_id, made),) = mlflow.runs.items()
    assert json.loads((run.folder / "trackers.json").read_text()) == {"mlflow": run_id}
    assert mlflow.experiments == {"my sums": made["experiment_id"]}
    assert (made["run_name"], made["status"]) == ("sums", "FINISHED")
    assert made["params"]["max_lag"] == "4"
    assert len(made["params"]) == 252
    assert made["metrics"] == [("reward_mean", 0.5, 3), ("reward_by_verifier/math", 0.25, 3), ("loss", 1.0, 4)]
    assert json.loads(made["tags"]["event.guard"]) == {"step": 3, "after": 2}
    assert mlflow.tokens == {"Bearer open", None}


def test_mlflow_gets_the_numbers_of_verifiers_and_components_of_any_name(mlflow: StandIn, run: TrackedRun) -> None:
    names = ("tests:judge", "length < 100", "", "../..", "a//b", "n" * 300, "größe", "format")
    entry = {"kind": "step", "step": 1, "loss": 0.5, "reward_by_component": dict.fromkeys(names, 0.25)}
    follower = followed_by(MlFlow(mlflow.url, experiment="e"), run, entry)

    ((_, made),) = mlflow.runs.items()
    assert follower.dropped == 0
    assert [key.removeprefix("reward_by_component/")[:12] for key, _, _ in made["metrics"]] == [
        "loss", "tests_judge", "length _ 100", "_", "_/_", "a/_/b", "n" * 12, "größe", "format"
    ]  # fmt: skip


def test_mlflow_that_is_not_there_is_said_by_its_address(run: TrackedRun, caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    follower = followed_by(MlFlow(f"http://127.0.0.1:{port}", experiment="e"), run, STEP)

    assert f"tracker mlflow cannot start: http://127.0.0.1:{port} did not answer experiments/get-by-name" in caplog.text
    assert follower.dropped == 1


@pytest.fixture
def hanging_server() -> Iterator[str]:
    """It accepts, and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


HANGING = [
    pytest.param("mlflow", id="mlflow"),
    pytest.param(
        "wandb", id="wandb", marks=pytest.mark.skipif(absent("wandb"), reason="needs wandb: pip install wandb")
    ),
]


@pytest.mark.parametrize("name", HANGING)
def test_a_server_that_accepts_and_never_answers_costs_a_run_nothing(
    name: str, run: TrackedRun, hanging_server: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "_FINISH_S", 1.0)
    monkeypatch.setenv("WANDB_BASE_URL", hanging_server)
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    made = {"mlflow": {"mlflow_url": hanging_server}, "wandb": {"wandb": "online"}}[name]
    with Trackers(trackers_of(**dict(TrackersConfig.model_validate(made))), run) as followed:
        for step in range(100):
            followed.take({"kind": "step", "step": step, "reward_mean": 0.5})

    assert followed.dropped() == {name: 100.0}
    assert f"tracker {name} has not taken the last 100 entries" in caplog.text
    for follower in followed._followers:
        if name == "wandb":
            follower._thread.join(PATIENCE_S)
        child = getattr(follower._tracker, "_child", None)
        assert child is None or child.returncode not in (None, 0), "its process is gone as well"


def scalars_in(run: TrackedRun) -> list[tuple[str, int, float]]:
    """As TensorBoard shows them: what begins anew at a step takes back what was there from it on."""
    from tensorboardX.proto.event_pb2 import Event, SessionLog
    from tensorboardX.record_writer import masked_crc32c

    found: list[tuple[str, int, float]] = []
    for path in sorted((run.folder / "tensorboard").glob("events*"), key=lambda each: each.stat().st_mtime_ns):
        data = path.read_bytes()
        while data:
            size = int.from_bytes(data[:8], "little")
            assert int.from_bytes(data[8:12], "little") == masked_crc32c(data[:8])
            event = Event.FromString(data[12 : 12 + size])
            if event.session_log.status == SessionLog.START:
                found = [row for row in found if row[1] < event.step]
            values = [value for value in event.summary.value if not value.HasField("tensor")]
            found += [(value.tag, event.step, value.simple_value) for value in values]
            data = data[16 + size :]
    return found


@pytest.mark.skipif(absent("tensorboardX"), reason="needs tensorboardX: pip install tensorboardX")
def test_tensorboard_files_hold_every_number(run: TrackedRun) -> None:
    more = {"loss": 1.0, "tokens": 9, "reward_by_verifier": {"math": 0.5}}
    entries = [{"kind": "step", "step": step, "reward_mean": step / 8, **more} for step in range(1, 9)]
    assert followed_by(TensorBoard(), run, *entries).dropped == 0

    found = scalars_in(run)
    rewards = [row for row in found if row[0] == "reward/reward_mean"]
    assert rewards == [("reward/reward_mean", n, n / 8) for n in range(1, 9)]
    assert {tag for tag, _, _ in found} == {
        "reward/reward_mean",
        "loss/loss",
        "volume/tokens",
        "reward_by_verifier/math",
    }


def test_a_package_that_is_missing_is_named_with_its_remedy(
    run: TrackedRun, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "tensorboardX", None)
    followed_by(TensorBoard(), run, STEP)

    assert "tracker tensorboard cannot start: the package tensorboardX is not installed: pip install" in caplog.text


@pytest.mark.skipif(absent("wandb"), reason="needs wandb: pip install wandb")
def test_wandb_writes_offline_what_it_is_sent(run: TrackedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    tracker = WeightsAndBiases(mode="offline", project="p")
    assert followed_by(tracker, run, STEP, {"kind": "resume", "version": 3}).dropped == 0

    (path,) = run.folder.glob("wandb/offline-run-*/*.wandb")
    data = path.read_bytes()
    assert b"reward_by_verifier/math" in data
    assert json.loads((run.folder / "trackers.json").read_text())["wandb"].encode() in data
    assert tracker._child is not None
    with pytest.raises(ProcessLookupError):
        os.killpg(tracker._child.pid, 0)


@pytest.mark.skipif(absent("wandb"), reason="needs wandb: pip install wandb")
def test_wandb_gets_only_the_cpu_that_training_leaves(run: TrackedRun) -> None:
    """Linux shares out the CPU between sessions first: niceness counts within one alone."""
    tracker = WeightsAndBiases(mode="offline", project="p")
    try:
        tracker.start(run)
        assert tracker._child is not None
        assert os.getpriority(os.PRIO_PROCESS, tracker._child.pid) == 19
        assert os.getsid(tracker._child.pid) == os.getsid(0)
    finally:
        tracker.finish("finished")


def test_wandb_that_is_not_installed_is_named_with_its_remedy(
    run: TrackedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "wandb.py").write_text("raise ModuleNotFoundError")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    followed_by(WeightsAndBiases(mode="offline", project="p"), run, STEP)

    assert "tracker wandb cannot start: the package wandb is not installed: pip install wandb" in caplog.text


# Resumes. A run of six steps, with an evaluation beside training, is killed, and goes on from a version.


def a_step(step: int, *, kind: str = "step", loss: float | None = None) -> dict[str, object]:
    return {"kind": kind, "step": step, "loss": float(step) if loss is None else loss, "unix_s": 100.0 + step}


FIRST_LIFE: list[dict[str, object]] = [
    *(a_step(step) for step in range(1, 6)),
    {"kind": "evaluation", "version": 3, "accuracy": 0.5, "unix_s": 105.5},
    a_step(6),
]
NEVER_SENT: list[dict[str, object]] = [
    {"kind": "evaluation", "version": 4, "accuracy": 0.75, "unix_s": 106.5},
    a_step(7),
]
SECOND_LIFE: list[dict[str, object]] = [
    {"kind": "resume", "version": 7, "incarnation": 2},
    *(a_step(step, kind="replay") for step in range(5, 9)),
    a_step(9),
]
"""The journal had an eighth step, which the first life did not come to note."""

WITHOUT_JOURNAL: list[dict[str, object]] = [
    {"kind": "resume", "version": 4, "incarnation": 2},
    *(a_step(step, loss=10.0 * step) for step in range(5, 8)),
]


def write_former(run: TrackedRun, *entries: Mapping[str, object]) -> None:
    """As a killed learner left them, with a line that it did not end."""
    lines = "".join(json.dumps(entry) + "\n" for entry in entries)
    (run.folder / "metrics.jsonl").write_text(lines + '{"kind": "st')


def test_after_a_resume_a_tracker_gets_from_the_file_what_it_has_not_and_nothing_twice(run: TrackedRun) -> None:
    write_former(run, *FIRST_LIFE, *NEVER_SENT)
    tracker = ScriptedTracker(sent={"step": 6, "evaluation": 3})
    assert followed_by(tracker, run, *SECOND_LIFE).dropped == 0

    told = (7, "resume", {"version": 7, "incarnation": 2})
    rows = [(4, {"evaluation/accuracy": 0.75}), (7, {"loss": 7.0}), told, (8, {"loss": 8.0}), (9, {"loss": 9.0})]
    assert tracker.seen == ["sums", *rows, "finished"]


def test_where_steps_are_lost_that_a_tracker_has_another_run_begins_with_the_whole_history(run: TrackedRun) -> None:
    write_former(run, *FIRST_LIFE, *NEVER_SENT)
    tracker = ScriptedTracker(sent={"step": 6, "evaluation": 3})
    assert followed_by(tracker, run, *WITHOUT_JOURNAL).dropped == 0

    before = [(step, {"loss": float(step)}) for step in range(1, 5)]
    evaluations = [(version, {"evaluation/accuracy": value}) for version, value in ((3, 0.5), (4, 0.75))]
    after = [(step, {"loss": 10.0 * step}) for step in range(5, 8)]
    told = (4, "resume", {"version": 4, "incarnation": 2})
    assert tracker.seen == ["sums", "failed", "sums from 4", *before, *evaluations, told, *after, "finished"]


def test_a_tracker_that_starts_slowly_loses_steps_but_not_the_resume(run: TrackedRun) -> None:
    write_former(run, *FIRST_LIFE)
    let_go = threading.Event()
    tracker = ScriptedTracker(start=lambda: assert_set(let_go), sent={"step": 6, "evaluation": 3})
    follower = Follower(tracker, run, most_waiting=3)
    for entry in WITHOUT_JOURNAL:
        follower.put(entry)
    let_go.set()
    follower.end("finished")
    follower._thread.join(PATIENCE_S)

    steps = [row[0] for row in tracker.seen if isinstance(row, tuple) and "loss" in row[1]]
    assert tracker.seen[:3] == ["sums", "failed", "sums from 4"]
    assert (steps, follower.dropped) == ([1, 2, 3, 4, 6, 7], 1)


def assert_set(event: threading.Event) -> None:
    assert event.wait(PATIENCE_S)


def test_a_tracker_of_an_earlier_release_is_not_sent_again_what_the_file_holds(run: TrackedRun) -> None:
    write_former(run, *FIRST_LIFE)
    tracker = ScriptedTracker(sent=None)
    assert followed_by(tracker, run, {"kind": "resume", "version": 6, "incarnation": 2}, a_step(7)).dropped == 0

    assert [row for row in tracker.seen if isinstance(row, tuple)][1:] == [(7, {"loss": 7.0})]


def test_steps_of_an_earlier_release_which_have_no_time_are_not_joined(run: TrackedRun) -> None:
    steps = [{"kind": "step", "step": step, "loss": float(step)} for step in range(1, 7)]
    write_former(run, *steps)
    tracker = ScriptedTracker(sent=None)
    tracker.every_s, tracker.row_every_s = 0.05, 0.5
    assert followed_by(tracker, run, *WITHOUT_JOURNAL[:1]).dropped == 0

    history = [(step, {"loss": float(step)}) for step in range(1, 5)]
    assert tracker.seen[:-2] == ["sums", "failed", "sums from 4", *history]


def test_a_run_on_files_trains_the_same_steps_again_and_sends_them_once(run: TrackedRun) -> None:
    write_former(run, *FIRST_LIFE)
    tracker = ScriptedTracker(sent={"step": 4})
    follower = followed_by(tracker, dataclasses.replace(run, repeats=True), *(a_step(step) for step in range(4, 8)))

    assert follower.dropped == 0
    steps = [row[0] for row in tracker.seen if isinstance(row, tuple) and "loss" in row[1]]
    assert steps == [5, 6, 7]


@pytest.mark.parametrize("repeats", [True, False])
def test_a_tracker_that_cannot_read_the_former_lines_is_given_up_aloud(
    repeats: bool, run: TrackedRun, caplog: pytest.LogCaptureFixture
) -> None:
    """As where the trainer cuts the file, to go on where its checkpoint stood, while they are read."""
    path = run.folder / "metrics.jsonl"
    path.write_text("".join(json.dumps(a_step(step)) + "\n" for step in range(1, 20_001)))
    cut = path.stat().st_size - 5  # in the middle of the last line

    tracker = ScriptedTracker(log=lambda: os.truncate(path, cut))
    began = () if repeats else ({"kind": "resume", "version": 20_000, "incarnation": 2},)
    follower = followed_by(tracker, dataclasses.replace(run, repeats=repeats), *began)
    follower.put(a_step(20_001))

    (said,) = caplog.messages
    assert said.startswith("tracker scripted cannot go on: ")
    assert (follower.dropped, tracker.seen[-1]) == (1, "finished")


def two_lives(run: TrackedRun, make: Callable[[], Tracker], second: Sequence[Mapping[str, object]]) -> None:
    """The first one is killed before it has sent its last lines."""
    assert followed_by(make(), run, *FIRST_LIFE).dropped == 0
    write_former(run, *FIRST_LIFE, *NEVER_SENT)
    assert followed_by(make(), run, *second).dropped == 0


ONCE = [("loss", float(step), step) for step in range(1, 10)]
EVALUATED = [("evaluation/accuracy", 0.5, 3), ("evaluation/accuracy", 0.75, 4)]
RETRAINED = [("loss", float(step), step) for step in range(1, 5)] + [("loss", 10.0 * step, step) for step in (5, 6, 7)]


def test_mlflow_has_each_step_once_after_a_resume(mlflow: StandIn, run: TrackedRun) -> None:
    two_lives(run, lambda: MlFlow(mlflow.url, experiment="e"), SECOND_LIFE)

    ((_, made),) = mlflow.runs.items()
    assert sorted(made["metrics"]) == sorted([*ONCE, *EVALUATED])


def test_mlflow_has_another_run_where_steps_are_lost(mlflow: StandIn, run: TrackedRun) -> None:
    two_lives(run, lambda: MlFlow(mlflow.url, experiment="e"), WITHOUT_JOURNAL)

    first, second = mlflow.runs.values()
    assert (first["run_name"], first["status"], second["run_name"]) == ("sums", "FAILED", "sums from 4")
    assert sorted(second["metrics"]) == sorted([*RETRAINED, *EVALUATED])


@pytest.mark.skipif(absent("tensorboardX"), reason="needs tensorboardX: pip install tensorboardX")
@pytest.mark.parametrize(
    ("second", "steps"), [(SECOND_LIFE, ONCE), (WITHOUT_JOURNAL, RETRAINED)], ids=["resumed", "with steps lost"]
)
def test_tensorboard_shows_each_step_once_after_a_resume(
    run: TrackedRun, second: Sequence[Mapping[str, object]], steps: Sequence[tuple[str, float, int]]
) -> None:
    two_lives(run, TensorBoard, second)

    expected = [("loss/loss", step, value) for _, value, step in steps]
    assert sorted(scalars_in(run)) == sorted([*expected, *((name, step, value) for name, value, step in EVALUATED)])


def history_in(folder: Path) -> list[tuple[int, dict[str, Any]]]:
    """Number and values of each row in the files that W&B wrote offline, the oldest file first."""
    made: Any = importlib.import_module("wandb.proto.wandb_internal_pb2")
    rows = []
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb"), key=lambda each: each.stat().st_mtime_ns):
        for data in records_in(path.read_bytes()):
            record = made.Record.FromString(data)
            if record.WhichOneof("record_type") == "history":
                items = {
                    each.key or "/".join(each.nested_key): json.loads(each.value_json) for each in record.history.item
                }
                rows.append((record.history.step.num, items))
    return rows


def records_in(data: bytes) -> Iterator[bytes]:
    """Of a LevelDB log after W&B's header of seven bytes: blocks of 32 KiB, a record in one part or several."""
    at, whole = 7, b""
    while at + 7 <= len(data):
        if (left := -at % 32768) and left < 7:
            at += left
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):
            yield whole
            whole = b""


@pytest.mark.skipif(absent("wandb"), reason="needs wandb: pip install wandb")
def test_wandb_has_each_step_once_after_a_resume_in_rows_that_it_takes(
    run: TrackedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    two_lives(run, lambda: WeightsAndBiases(mode="offline", project="p"), SECOND_LIFE)

    rows = history_in(run.folder)
    numbers = [number for number, _ in rows]
    assert numbers == sorted(set(numbers)), "W&B drops a row whose number is not above the one before"
    found = [
        (name, row[name], row["step"]) for _, row in rows for name in ("loss", "evaluation/accuracy") if name in row
    ]
    assert sorted(found) == sorted([*ONCE, *EVALUATED])
    assert {row["step"]: row["_timestamp"] for _, row in rows if "loss" in row} == {n: 100.0 + n for n in range(1, 10)}


MLFLOW = os.environ.get("HEADWAY_MLFLOW") or shutil.which("mlflow")


@pytest.fixture
def real_mlflow(tmp_path: Path) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    assert MLFLOW is not None
    store = [
        "--backend-store-uri",
        f"sqlite:///{tmp_path}/mlflow.db",
        "--artifacts-destination",
        str(tmp_path / "kept"),
    ]
    words = [MLFLOW, "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1", *store]
    with subprocess.Popen(
        words, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as server:
        try:
            _answers(f"http://127.0.0.1:{port}/health")
            yield f"http://127.0.0.1:{port}"
        finally:
            os.killpg(server.pid, signal.SIGKILL)


def _answers(url: str) -> None:
    end = time.monotonic() + 3 * PATIENCE_S
    while time.monotonic() < end:
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5):
            return
        time.sleep(0.2)
    raise AssertionError(f"{url} does not answer")


@pytest.mark.skipif(MLFLOW is None, reason="needs mlflow: pip install mlflow in a folder of its own, HEADWAY_MLFLOW=")
@pytest.mark.parametrize(
    ("second", "steps"), [(SECOND_LIFE, ONCE), (WITHOUT_JOURNAL, RETRAINED)], ids=["resumed", "with steps lost"]
)
def test_a_real_mlflow_server_has_each_step_once_after_a_resume(
    run: TrackedRun, real_mlflow: str, second: Sequence[Mapping[str, object]], steps: Sequence[tuple[str, float, int]]
) -> None:
    two_lives(run, lambda: MlFlow(real_mlflow, experiment="e"), second)

    known, found = run.known_id("mlflow"), []
    for name in ("loss", "evaluation/accuracy"):
        query = urlencode({"run_id": known, "metric_key": name})
        with urllib.request.urlopen(f"{real_mlflow}/api/2.0/mlflow/metrics/get-history?{query}") as answer:
            rows = json.loads(answer.read())["metrics"]
        found += [(each["key"], each["value"], int(each["step"])) for each in rows]
        assert all(each["timestamp"] < 1000 * 200 for each in rows), "the time is that of the line"
    assert sorted(found) == sorted([*steps, *EVALUATED])
