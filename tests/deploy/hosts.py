"""Two hosts on one machine: network namespaces, with a link between them that can be cut in two ways. Needs root."""

import json
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tests.e2e.processes import ROOT, Launched, Launcher, kill_marked, script, until

Kind = Literal["veth", "wire"]
MODEL = ROOT / "models/addition"
"""The model that `make machines-test` makes first, as the demo does."""
ADDRESSES = {"a": "10.77.0.1", "b": "10.77.0.2"}


def why_not() -> str | None:
    """Reason why there can be no such hosts here, if so."""
    if os.geteuid() != 0:
        return "needs root, to make network namespaces"
    if shutil.which("ip") is None:
        return "needs the command ip (iproute2), to make network namespaces"
    name = f"hw{uuid.uuid4().hex[:8]}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return f"cannot make network namespaces: {made.stderr.strip()}" if made.returncode else None


@dataclass
class Hosts:
    """Hosts a (10.77.0.1) and b (10.77.0.2). Processes of each are marked, so that a host can be lost with them."""

    folder: Path
    kind: Kind
    name: str = field(default_factory=lambda: f"hw{uuid.uuid4().hex[:6]}")
    marks: dict[str, str] = field(default_factory=lambda: {host: uuid.uuid4().hex for host in ADDRESSES})

    def namespace(self, host: str) -> str:
        return f"{self.name}{host}"

    def start(self, launch: Launcher, host: str, name: str, words: Sequence[str], **environment: str) -> Launched:
        """A command on a host."""
        command = ["ip", "netns", "exec", self.namespace(host), *words]
        launched = Launched(name, command, folder=self.folder, mark=self.marks[host], environment=environment)
        launch.launched.append(launched)
        return launched

    def process(self, launch: Launcher, host: str, name: str, config: Path, *words: str) -> Launched:
        """Starts one of the four processes, by its console script."""
        return self.start(launch, host, name, [script(name), "--config", str(config), *words])

    def lose(self, host: str) -> None:
        """Everything on the host dies, and nothing of it says so."""
        self.cut()
        kill_marked(self.marks[host])

    def cut(self) -> None:
        """Of a veth pair: one end is down, with errors at once on its side. Of a wire: silence."""
        self._set(cut=True)

    def restore(self) -> None:
        self._set(cut=False)

    def _set(self, *, cut: bool) -> None:
        if self.kind == "wire":
            _write(self.folder / "wire.json", {"delay_ms": 10, "loss": 0.01, "cut": cut})
        else:
            _ip("-n", self.namespace("a"), "link", "set", "wire", "down" if cut else "up")


@contextmanager
def hosts(folder: Path, kind: Kind) -> Iterator[Hosts]:
    """Both hosts, joined; nothing of them is left."""
    two = Hosts(folder=folder, kind=kind)
    carrier: subprocess.Popen[bytes] | None = None
    try:
        for host in ADDRESSES:
            _ip("netns", "add", two.namespace(host))
            _ip("-n", two.namespace(host), "link", "set", "lo", "up")
        if kind == "veth":
            _join(two)
        else:
            carrier = _wire(two)
        yield two
    finally:
        for host in ADDRESSES:
            kill_marked(two.marks[host])
        if carrier is not None:
            carrier.terminate()
            carrier.wait(timeout=30)
        for host in ADDRESSES:
            subprocess.run(["ip", "netns", "del", two.namespace(host)], capture_output=True)


def _join(two: Hosts) -> None:
    one, other = two.namespace("a"), two.namespace("b")
    _ip("link", "add", "wire", "netns", one, "type", "veth", "peer", "name", "wire", "netns", other)
    for host, address in ADDRESSES.items():
        _ip("-n", two.namespace(host), "addr", "add", f"{address}/24", "dev", "wire")
        _ip("-n", two.namespace(host), "link", "set", "wire", "up")


def _wire(two: Hosts) -> subprocess.Popen[bytes]:
    two.restore()
    said = two.folder / "wire.log"
    words = [sys.executable, str(Path(__file__).with_name("wire.py")), two.namespace("a"), two.namespace("b")]
    with said.open("wb") as output:
        carrier = subprocess.Popen([*words, str(two.folder / "wire.json")], stdout=output, stderr=output)
    until(lambda: "up" in said.read_text() or carrier.poll() is not None, what="the wire", timeout_s=60)
    assert carrier.poll() is None, said.read_text()
    return carrier


def _write(path: Path, value: Mapping[str, object]) -> None:
    aside = path.with_suffix(".aside")
    aside.write_text(json.dumps(value))
    aside.replace(path)


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"
