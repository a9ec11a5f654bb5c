"""Two network namespaces joined by a wire with delay, loss and cuts, for kernels without netem (root, /dev/net/tun).

    python wire.py ONE TWO CONTROL

CONTROL is a file of JSON, read again when it changes: {"delay_ms": 10, "loss": 0.01, "cut": false}. A cut is silent, as
that of a broken switch: both ends believe that the other one is there. Until SIGTERM; the namespaces stay.
"""

import ctypes
import fcntl
import heapq
import itertools
import json
import os
import random
import selectors
import signal
import struct
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

DEVICE = "wire"
_TUNSETIFF, _TUN_WITHOUT_HEADER = 0x400454CA, 0x1001
_LOOK_S = 0.1
_BURST = 64


@dataclass(frozen=True)
class Weather:
    """Weather on the wire: its delay, the share of lost packets, and if it is cut."""

    delay_ms: float = 0.0
    loss: float = 0.0
    cut: bool = False


def end_in(namespace: str, address: str) -> int:
    """A TUN device in the namespace, as a descriptor that works from everywhere."""
    libc = ctypes.CDLL(None, use_errno=True)
    home = os.open("/proc/self/ns/net", os.O_RDONLY)
    there = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    try:
        if libc.setns(there, 0):
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {namespace}")
        device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), _TUN_WITHOUT_HEADER))
    finally:
        libc.setns(home, 0)
        os.close(there)
        os.close(home)
    link = ["ip", "-n", namespace]
    subprocess.run([*link, "addr", "add", f"{address}/24", "dev", DEVICE], check=True)
    subprocess.run([*link, "link", "set", DEVICE, "mtu", "9000", "txqueuelen", "2000", "up"], check=True)
    return device


class Wire:
    """Carries packets between two descriptors."""

    def __init__(self, one: int, two: int, control: Path) -> None:
        self._control = control
        self._weather = Weather()
        self._flying: list[tuple[float, int, int, bytes]] = []
        self._number = itertools.count()
        self._poll = selectors.DefaultSelector()
        for end, far in ((one, two), (two, one)):
            self._poll.register(end, selectors.EVENT_READ, far)

    def turn(self) -> None:
        """Waits until packets can be taken or are due, and moves them."""
        due = self._flying[0][0] - time.monotonic() if self._flying else _LOOK_S
        for key, _ in self._poll.select(max(0.0, min(due, _LOOK_S))):
            self._take(key.fd, key.data)
        while self._flying and self._flying[0][0] <= time.monotonic():
            _, _, far, packet = heapq.heappop(self._flying)
            _write(far, packet)

    def look(self) -> None:
        """Reads how the wire is to be; half of a file that is being written is read again."""
        try:
            self._weather = Weather(**json.loads(self._control.read_text()))
        except (OSError, ValueError):
            return

    def _take(self, end: int, far: int) -> None:
        for _ in range(_BURST):
            try:
                packet = os.read(end, 1 << 16)
            except OSError:  # there is no more, or the device is down
                return
            if not self._weather.cut and random.random() >= self._weather.loss:
                due = time.monotonic() + self._weather.delay_ms / 1e3
                heapq.heappush(self._flying, (due, next(self._number), far, packet))


def _write(end: int, packet: bytes) -> None:
    try:
        os.write(end, packet)
    except OSError:  # the device is down, or full: a packet is lost
        return


def main(one: str, two: str, control: str) -> None:
    """Runs until SIGTERM."""
    wire = Wire(end_in(one, "10.77.0.1"), end_in(two, "10.77.0.2"), Path(control))
    told: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: told.append(number))
    print("up", flush=True)
    looked = 0.0
    while not told:
        wire.turn()
        if time.monotonic() - looked > _LOOK_S:
            wire.look()
            looked = time.monotonic()


if __name__ == "__main__":
    main(*sys.argv[1:])
