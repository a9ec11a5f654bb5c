"""The two scripts of the chart: what stays when a run is over, and the probe of pods that serve no HTTP."""

import importlib.util
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType

import httpx
import pytest

from headway.certificates import Authority
from tests.e2e.processes import until

FILES = Path(__file__).resolve().parents[2] / "deploy/k8s/chart/files"
TRAP = "trap 'exit 0' TERM; echo on; while :; do sleep 0.1; done"
"""A process that ends in order when it is told to."""

ASKING = "import sys, to_its_end; to_its_end.ASK_S = 0.2; sys.exit(to_its_end.main(sys.argv[1:]))"
"""The script, which asks the learner ten times as often as in a pod."""


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def _start(*words: str) -> "subprocess.Popen[str]":
    script = ["-c", ASKING] if "--with" in words else [str(FILES / "to_its_end.py")]
    return subprocess.Popen(
        [sys.executable, *script, *words],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(FILES)},
    )


def test_a_run_that_is_over_is_not_begun_again_and_says_so() -> None:
    port = _free_port()
    process = _start("--answer", str(port), "true")
    try:
        until(lambda: _status(port, "/healthz") == 200, what="an answer", timeout_s=60)
        assert _status(port, "/readyz") == 503
        metrics = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=20)
        assert (metrics.status_code, metrics.text) == (200, "")
        assert metrics.headers["Content-Type"].startswith("text/plain")
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0
    finally:
        process.kill()
        process.communicate()


def test_a_caller_that_says_nothing_holds_up_no_other_where_https_is_spoken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = Authority.new()
    authority.write(tmp_path)
    authority.issue(tmp_path, "learner", hosts=())
    monkeypatch.setenv("HEADWAY_LEARNER__HTTP__TLS_CERT_FILE", str(tmp_path / "learner.pem"))
    monkeypatch.setenv("HEADWAY_LEARNER__HTTP__TLS_KEY_FILE", str(tmp_path / "learner.key"))
    trusted = ssl.create_default_context(cafile=tmp_path / "ca.pem")
    port = _free_port()
    process = _start("--answer", str(port), "true")
    try:
        until(lambda: _https_status(port, trusted) == 200, what="an answer", timeout_s=60)
        with socket.create_connection(("127.0.0.1", port)):
            assert _https_status(port, trusted) == 200
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(("command", "code"), [("exit 75", 75), ("kill -9 $$", 137)])
def test_an_end_that_is_none_is_passed_on(command: str, code: int) -> None:
    process = _start("sh", "-c", command)
    assert process.communicate(timeout=60)[0] == ""
    assert process.returncode == code


def test_a_signal_reaches_the_command_whose_end_then_counts() -> None:
    process = _start("sh", "-c", "trap 'exit 9' TERM; echo on; while :; do sleep 0.1; done")
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "on\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 9
    finally:
        process.kill()
        process.communicate()


def _started(*words: str) -> "subprocess.Popen[str]":
    """Starts a process that runs TRAP by now."""
    process = _start(*words, "sh", "-c", TRAP)
    assert process.stdout is not None
    assert process.stdout.readline() == "on\n"
    return process


def test_a_learner_of_a_job_tells_those_beside_it_and_all_end_with_0() -> None:
    port = _free_port()
    beside = _started("--with", f"http://127.0.0.1:{port}")
    learner = _start("--answer", str(port), "--for", "6", "true")
    try:
        told = beside.communicate(timeout=60)[0]
        assert (beside.returncode, learner.wait(timeout=60)) == (0, 0)
        assert told == f"the learner at http://127.0.0.1:{port} says that the run is over: this process ends, too\n"
    finally:
        for process in (beside, learner):
            process.terminate()
            process.communicate(timeout=60)


def test_one_that_ends_badly_once_the_run_is_over_is_no_fault() -> None:
    port = _free_port()
    learner = _start("--answer", str(port), "true")
    try:
        until(lambda: _status(port, "/healthz") == 200, what="an answer", timeout_s=60)
        beside = _start(
            "--with", f"http://127.0.0.1:{port}", "sh", "-c", "trap 'exit 9' TERM; while :; do sleep 0.1; done"
        )
        assert "it ended with 9, which is no fault now\n" in beside.communicate(timeout=60)[0]
        assert beside.returncode == 0
    finally:
        learner.kill()
        learner.communicate()


def test_nobody_waits_for_ever_for_a_learner_that_is_gone() -> None:
    port = _free_port()
    beside = _started("--with", f"http://127.0.0.1:{port}", "--patience", "1")
    told = beside.communicate(timeout=60)[0]
    assert told == f"no learner has answered at http://127.0.0.1:{port} for 1 s: this process ends, too\n"
    assert beside.returncode == 0


def test_a_learner_that_waits_or_errs_is_waited_for_however_long() -> None:
    asked: list[str] = []

    class BusyLearner(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            body = b'{"ready": false, "waiting_for": ["a generator"]}' if len(asked) % 2 else b"<h1>oh</h1>"
            self.send_response(503)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), BusyLearner) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        beside = _started("--with", f"http://127.0.0.1:{server.server_port}", "--patience", "1")
        try:
            until(lambda: len(asked) >= 10, what="ten questions, twice as long as its patience", timeout_s=120)
            assert beside.poll() is None
            assert set(asked) == {"/readyz"}
        finally:
            beside.terminate()  # killed, it would leave its command behind, which holds the pipe
            beside.communicate(timeout=60)
            server.shutdown()


@pytest.mark.parametrize("words", [("--for", "10"), ("--with", "http://127.0.0.1:9")])
def test_a_job_is_not_done_when_its_node_is_drained(words: tuple[str, str]) -> None:
    process = _started(*words)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM


def test_those_beside_a_learner_believe_only_the_ca_that_they_are_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, other = tmp_path / "ours", tmp_path / "other"
    for folder in (ours, other):
        folder.mkdir()
        authority = Authority.new()
        authority.write(folder)
        authority.issue(folder, "learner", hosts=())
    monkeypatch.setenv("HEADWAY_LEARNER__HTTP__TLS_CERT_FILE", str(ours / "learner.pem"))
    monkeypatch.setenv("HEADWAY_LEARNER__HTTP__TLS_KEY_FILE", str(ours / "learner.key"))
    port = _free_port()
    learner = _start("--answer", str(port), "true")
    try:
        trusted = ssl.create_default_context(cafile=ours / "ca.pem")
        until(lambda: _https_status(port, trusted) == 200, what="an answer", timeout_s=60)
        url = f"https://localhost:{port}"
        good = _started("--with", url, "--ca", str(ours / "ca.pem"))
        bad = _started("--with", url, "--ca", str(other / "ca.pem"), "--patience", "1")
        assert "says that the run is over" in good.communicate(timeout=60)[0]
        assert "no learner has answered" in bad.communicate(timeout=60)[0]
    finally:
        learner.kill()
        learner.communicate()


def _status(port: int, path: str) -> int:
    try:
        return httpx.get(f"http://127.0.0.1:{port}{path}", timeout=20).status_code
    except httpx.TransportError:
        return 0


def _https_status(port: int, trusted: ssl.SSLContext) -> int:
    try:
        return httpx.get(f"https://localhost:{port}/healthz", timeout=20, verify=trusted).status_code
    except httpx.TransportError:
        return 0


@pytest.fixture(scope="module")
def probe() -> ModuleType:
    spec = importlib.util.spec_from_file_location("ranks_probe", FILES / "ranks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """A /proc with the connections of this machine, and no process."""
    (tmp_path / "net").symlink_to("/proc/net")
    return tmp_path


@pytest.fixture
def store() -> Iterator[tuple[int, socket.socket, socket.socket]]:
    """Rank 0's port, its end of a rank's connection, and the rank's."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as rank, listener.accept()[0] as ours:
            yield port, ours, rank


def _rank(proc: Path, port: int) -> None:
    folder = proc / "4711"
    folder.mkdir()
    place = ("RANK=1", "MASTER_ADDR=localhost", f"MASTER_PORT={port}", "")
    (folder / "environ").write_bytes("\0".join(place).encode())


def test_a_pod_whose_ranks_wait_for_rank_0_is_alive_and_not_ready(probe: ModuleType, proc: Path) -> None:
    assert probe.main("alive", proc) == 0
    assert probe.main("ready", proc) == 1


def test_a_pod_whose_ranks_are_connected_is_ready_until_their_store_is_gone(
    probe: ModuleType, proc: Path, store: tuple[int, socket.socket, socket.socket]
) -> None:
    port, ours, _ = store
    _rank(proc, port)
    assert (probe.main("alive", proc), probe.main("ready", proc)) == (0, 0)
    ours.close()
    until(lambda: probe.main("alive", proc) == 1, what="the end of the connection", timeout_s=60)
    assert probe.main("ready", proc) == 1


def test_a_pod_whose_ranks_hang_at_another_store_is_not_alive(
    probe: ModuleType, proc: Path, store: tuple[int, socket.socket, socket.socket]
) -> None:
    other = _free_port()
    _rank(proc, other)
    assert probe.main("alive", proc) == 1
