"""The end of the process."""

import subprocess
import sys

CODE = """
import atexit, sys, threading
from learner.command import leave
atexit.register(sys.stdout.write, "handlers ran, ")
threading.Thread(target=threading.Event().wait).start()
sys.stdout.write("what was written stays, ")
leave(3)
"""


def test_no_thread_keeps_the_process_and_nothing_written_is_lost() -> None:
    """The interpreter's own end would wait for the thread for ever."""
    ended = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (3, "")
    assert ended.stdout == "what was written stays, handlers ran, "
