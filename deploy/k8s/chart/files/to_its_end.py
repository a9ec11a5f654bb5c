"""Runs a command, and stays when it has ended well: `python to_its_end.py [--answer PORT] COMMAND...`

A StatefulSet starts a container again however it ended. A run that is over would be resumed, and end, again and again;
so this process stays, does nothing, and with --answer says so at /healthz (200) and /readyz (503) until SIGTERM comes.
At /metrics it has none to show, which is no fault, either.
Any other end of the command is its own: the exit code is passed on.
"""

import contextlib
import json
import os
import signal
import ssl
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


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
        told = json.dumps({"ready": False, "waiting_for": ["nothing: the run is over"]}).encode()
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


def main(words: list[str]) -> int:
    """The exit code: the command's, or 0 once it is told to end."""
    port = int(words[1]) if words[:1] == ["--answer"] else None
    told = threading.Event()
    children: list[subprocess.Popen[bytes]] = []

    def end(number: int, frame: object) -> None:
        told.set()
        for child in children:
            child.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    children.append(subprocess.Popen(words[2:] if port is not None else words))
    if told.is_set():  # while the command was being started
        children[0].terminate()
    code = children[0].wait()
    if code != 0 or told.is_set():
        return code if code >= 0 else 128 - code
    print("the run is over; this pod does nothing more, and may be deleted", flush=True)
    if port is not None:
        answer(port)
    while not told.wait(timeout=3600.0):
        continue
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
