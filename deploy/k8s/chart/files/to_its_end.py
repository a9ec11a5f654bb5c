"""Runs a command to the end of its run, which may be another one than the command's own.

    python to_its_end.py [--answer PORT [--for SECONDS]] COMMAND...     a learner
    python to_its_end.py --with URL [--patience SECONDS] [--ca FILE] COMMAND...     a process beside it

A StatefulSet starts a container again however it ended. A run that is over would be resumed, and end, again and again;
so this process stays when a learner has ended well, does nothing, and with --answer says so at /healthz (200) and
/readyz (503) until SIGTERM comes; with --for only so long, and then it ends with 0, as a Job and Compose want it. At
/metrics it has none to show, which is no fault, either. Any other end of the command is its own: the exit code is
passed on.

Those beside a learner would wait for another one. With --with they ask the learner at URL again and again: once it says
that the run is over, or nothing at all for --patience seconds (its Job has failed, or was deleted), the command gets
SIGTERM, and this process ends with 0.

With --for or --with, 0 means that the run is over: a Job then makes no other pod. A command that a signal has ended in
order before that, as when its node is drained, becomes 143.
"""

import argparse
import contextlib
import json
import os
import signal
import ssl
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

OVER = "nothing: the run is over"
"""Answer at /readyz of a learner whose run is over."""
ASK_S, ANSWER_S = 2.0, 5.0
LONGEST_ANSWER = 1 << 16
STOPPED = 128 + signal.SIGTERM
"""Exit code of a process that was told to end before its run was over."""


class Over(BaseHTTPRequestHandler):
    """Answers for a process that is no more."""

    timeout = 10.0
    """Longest silence of a caller, in seconds."""

    def handle(self) -> None:
        """Answers a connection to its end, also one that breaks, or that is no TLS where that is expected."""
        with contextlib.suppress(OSError):
            super().handle()

    def do_GET(self) -> None:
        """200 at /healthz and, with nothing in it, at /metrics; 503 elsewhere."""
        path = self.path.partition("?")[0]
        is_measured = path == "/metrics"
        told = json.dumps({"ready": False, "waiting_for": [OVER]}).encode()
        body = b"" if is_measured else told
        self.send_response(200 if is_measured or path == "/healthz" else 503)
        self.send_header("Content-Type", "text/plain; version=0.0.4" if is_measured else "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Probes are no news."""


def answer(port: int) -> None:
    """Serves from a thread, by HTTPS if the learner did."""
    server = ThreadingHTTPServer(("", port), Over)
    certificate = os.environ.get("HEADWAY_LEARNER__HTTP__TLS_CERT_FILE")
    if certificate:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, os.environ["HEADWAY_LEARNER__HTTP__TLS_KEY_FILE"])
        # By each connection's own thread: within accept, one that says nothing would hold up all others.
        server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    threading.Thread(target=server.serve_forever, daemon=True).start()


def asked(url: str, trust: ssl.SSLContext | None) -> bool | None:
    """True if the learner says that its run is over; None if it says nothing."""
    try:
        with urllib.request.urlopen(f"{url}/readyz", timeout=ANSWER_S, context=trust) as found:
            text = found.read(LONGEST_ANSWER)
    except urllib.error.HTTPError as error:
        with contextlib.suppress(OSError), error:
            text = error.read(LONGEST_ANSWER)
            return _says_over(text)
        return False
    except (OSError, ValueError):
        return None
    return _says_over(text)


def _says_over(text: bytes) -> bool:
    try:
        waiting = json.loads(text)["waiting_for"]
        return OVER in waiting
    except (ValueError, KeyError, TypeError):
        return False


def why_over(url: str, *, patience_s: float, ca: str, ended: threading.Event) -> str:
    """Asks until the run is over, and says why it is; empty once `ended` is set."""
    trust = ssl.create_default_context(cafile=ca) if ca else None
    heard = time.monotonic()
    while not ended.wait(ASK_S):
        over = asked(url, trust)
        if over:
            return f"the learner at {url} says that the run is over"
        if over is not None:
            heard = time.monotonic()
        elif time.monotonic() - heard > patience_s:
            return f"no learner has answered at {url} for {patience_s:g} s"
    return ""


class RunCommand:
    """The command, which gets the signals that this process is sent."""

    def __init__(self, words: Sequence[str]) -> None:
        self.told = threading.Event()
        """Set once a signal has come, or the run is over."""
        self._child: subprocess.Popen[bytes] | None = None
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._end)
        self._child = subprocess.Popen(words)
        if self.told.is_set():  # while the command was being started
            self._child.terminate()

    def _end(self, number: int, frame: object) -> None:
        self.told.set()
        if self._child is not None:
            self._child.send_signal(number)

    def end(self) -> None:
        """Has it end in order."""
        self._end(signal.SIGTERM, None)

    def wait(self) -> int:
        """Waits for its end, and returns its exit code."""
        assert self._child is not None
        code = self._child.wait()
        return code if code >= 0 else 128 - code


def beside_learner(command: RunCommand, *, url: str, patience_s: float, ca: str) -> int:
    """The exit code of a process that ends with the run of the learner at `url`."""
    ended, why = threading.Event(), ""

    def watch() -> None:
        nonlocal why
        why = why_over(url, patience_s=patience_s, ca=ca, ended=ended)
        if why:
            print(f"{why}: this process ends, too", flush=True)
            command.end()

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    code = command.wait()
    ended.set()
    if why and code:
        print(f"it ended with {code}, which is no fault now", flush=True)
    if not why and not code and command.told.is_set():
        return STOPPED
    return 0 if why else code


def learner(command: RunCommand, *, port: int | None, for_s: float | None) -> int:
    """The exit code of a learner's process. If its run is over it stays for `for_s` seconds, or until it is told."""
    code = command.wait()
    if not code and command.told.is_set() and for_s is not None:
        return STOPPED
    if code or command.told.is_set():
        return code
    stays = "may be deleted" if for_s is None else f"ends in {for_s:g} s"
    print(f"the run is over; this pod does nothing more, and {stays}", flush=True)
    if port is not None:
        answer(port)
    if for_s is not None:
        command.told.wait(timeout=for_s)
    else:
        while not command.told.wait(timeout=3600.0):
            continue
    return 0


def main(words: Sequence[str]) -> int:
    """The exit code: the command's, or 0 once the run is over."""
    parser = argparse.ArgumentParser(prog="to_its_end.py")
    parser.add_argument("--answer", type=int)
    parser.add_argument("--for", type=float, dest="for_s")
    parser.add_argument("--with", dest="url")
    parser.add_argument("--patience", type=float, default=3600.0)
    parser.add_argument("--ca", default="")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    given = parser.parse_args(words)
    command = RunCommand(given.command)
    if given.url is None:
        return learner(command, port=given.answer, for_s=given.for_s)
    return beside_learner(command, url=given.url.rstrip("/"), patience_s=given.patience, ca=given.ca)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
