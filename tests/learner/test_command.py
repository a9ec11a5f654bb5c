"""The end of the process."""

import subprocess
import sys
from pathlib import Path

from learner.command import resumed_if_there_is_a_run
from learner.config import LearnerConfig

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


def test_auto_resumes_a_run_that_is_there_and_begins_one_that_is_not(tmp_path: Path) -> None:
    settings = {"model": tmp_path / "model", "steps": 1, "resume": "auto", "run": {"name": "r", "directory": tmp_path}}
    config = LearnerConfig.model_validate(settings)
    assert resumed_if_there_is_a_run(config).resume is False
    config.run.folder.mkdir()
    assert resumed_if_there_is_a_run(config).resume is True
