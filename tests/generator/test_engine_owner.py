"""A process that holds the tie ends with its owner."""

import subprocess
import sys

OWNER = """
import multiprocessing, os, threading
from generator.engine.options import OwnerTie

def child(tie):
    print(os.getpid(), flush=True)
    threading.Event().wait()

if __name__ == "__main__":
    multiprocessing.get_context("spawn").Process(target=child, args=(OwnerTie(owner_pid=os.getpid()),)).start()
    threading.Event().wait()
"""


def test_a_child_that_unpickles_the_tie_ends_when_its_owner_is_killed(tmp_path: object) -> None:
    script = f"{tmp_path}/owner.py"
    with open(script, "w") as file:
        file.write(OWNER)
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        assert int(owner.stdout.readline()) != owner.pid
        owner.kill()
        # The child holds the other end of this pipe: it closes when the child has ended.
        assert owner.stdout.read() == ""
