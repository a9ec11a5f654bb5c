"""The two scripts of the chart: what stays when a run is over, and the probe of pods that serve no HTTP."""

import importlib.util
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import httpx
import pytest

from headway.certificates import Authority
from tests.e2e.processes import until

FILES = Path(__file__).resolve().parents[2] / "deploy/k8s/chart/files"


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def _start(*words: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, str(FILES / "to_its_end.py"), *words], stdout=subprocess.PIPE, text=True
    )  # fmt: skip


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
