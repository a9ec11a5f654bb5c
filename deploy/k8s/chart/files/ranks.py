"""Probes of a pod of further ranks, which serve no HTTP: `python ranks.py alive|ready`, exit code 0 if so.

ready: the ranks that torchrun starts here run, and are connected to rank 0's store.
alive: the same, or none runs: they wait for rank 0, or the run is over. Ranks whose store is gone, or is at another
address by now, hang: others end when they lose it, and torchrun does not look at more than their exit codes.
"""

import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

ESTABLISHED = "01"


def ranks(proc: Path) -> Iterator[dict[str, str]]:
    """The environment of each rank's process."""
    for folder in proc.iterdir():
        if not folder.name.isdecimal():
            continue
        try:
            words = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
        except OSError:  # it has just ended, or is somebody else's
            continue
        environment = dict(word.partition("=")[::2] for word in words)
        if "RANK" in environment and "MASTER_ADDR" in environment and "MASTER_PORT" in environment:
            yield environment


def connected(proc: Path) -> set[tuple[str, int]]:
    """The far ends of the IPv4 and IPv4-mapped connections of this pod that are up."""
    found = set()
    for name in ("tcp", "tcp6"):
        table = proc / "net" / name
        for line in table.read_text().splitlines()[1:] if table.exists() else ():
            far, state = line.split()[2:4]
            host, _, port = far.partition(":")
            if state == ESTABLISHED:
                found.add((socket.inet_ntoa(bytes.fromhex(host[-8:])[::-1]), int(port, 16)))
    return found


def main(word: str, proc: Path = Path("/proc")) -> int:
    """The exit code."""
    found = list(ranks(proc))
    if not found:
        print("no rank runs here", file=sys.stderr)
        return 0 if word == "alive" else 1
    try:
        store = socket.gethostbyname(found[0]["MASTER_ADDR"]), int(found[0]["MASTER_PORT"])
    except OSError as error:
        print(f"{found[0]['MASTER_ADDR']}: {error}", file=sys.stderr)
        return 1
    if store not in connected(proc):
        print(
            f"{len(found)} ranks run, and none is connected to rank 0's store at {store[0]}:{store[1]}", file=sys.stderr
        )
        return 1
    return 0


if __name__ == "__main__":
    os.environ.pop("RANK", None)  # of this process itself, if somebody asks from within a rank
    sys.exit(main(sys.argv[1]))
