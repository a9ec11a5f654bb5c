"""The exit code of the demo of two training loops at once."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# A server that says what the real one does, until it is interrupted.
SERVER = "import signal; signal.signal(2, signal.SIG_DFL); print('base model: x', flush=True); signal.pause()"
DEMO = """
import sys
from pathlib import Path
from examples.tinker import demo
server, folder = sys.argv[1:]
demo.SERVE, demo.HERE, sys.argv = [sys.executable, "-c", server], Path(folder), ["demo.py", sys.executable]
sys.exit(demo.main())
"""


@pytest.mark.parametrize(
    ("first", "code"), [("", 0), ("raise SystemExit(3)", 1), ("import os; os.kill(os.getpid(), 9)", 1)]
)
def test_a_loop_that_fails_or_is_killed_fails_the_demo(tmp_path: Path, first: str, code: int) -> None:
    (tmp_path / "sft.py").write_text(first)
    (tmp_path / "rl.py").write_text("")
    done = subprocess.run(
        [sys.executable, "-c", DEMO, SERVER, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == code, done.stderr
