"""A simulation that would run past the product's code, or beside it, does not start: each in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GONE = """
import services.zmq.sockets as sockets
del sockets._open
"""
PAST = """
import sys, types
import services.zmq.sockets as sockets
other = types.ModuleType("services.other")
other.opened = sockets._open
sys.modules["services.other"] = other
"""
EARLY = """
import services.http.client
"""


@pytest.mark.parametrize(
    ("before", "said"),
    [
        (
            GONE,
            "SeamGone: services.zmq.sockets has no _open of its own: the simulation takes hold of something else now",
        ),
        (PAST, "SeamGone: services.other calls services.zmq.sockets._open by a name of its own, past its stand-in"),
        (EARLY, "RuntimeError: services.http.client was imported before the simulation took hold of its clock"),
    ],
    ids=["gone", "past", "early"],
)
def test_a_simulation_that_does_not_hold_what_it_replaces_does_not_start(before: str, said: str) -> None:
    program = f"{before}\nfrom simulation.install import install\ninstall()\nprint('it runs')"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 1, ended.stdout
    assert said in ended.stderr.splitlines()[-1]
