"""The demo of `make demo`, shortened, with vLLM and the learner on one GPU."""

import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.gpu.rows import say

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "models" / "addition"
STEPS = 60
SHARED = ("--learner.devices", "0", "--generator.devices", "0", "--generator.engine.gpu-memory-fraction", "0.3")


def main() -> int:
    """The exit code of `headway up`."""
    if not MODEL.is_dir():
        say("demo", f"{MODEL.relative_to(ROOT)} is not there: `make demo` makes it", "skipped")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        words = ["up", "examples/addition/run.toml", "--learner.steps", str(STEPS), "--run.directory", folder, *SHARED]
        program = "from headway.command import main; main()"
        done = subprocess.run(
            [sys.executable, "-c", program, *words], cwd=ROOT, text=True, capture_output=True, check=False
        )
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    for line in lines[-6:]:
        say(f"demo, {STEPS} steps", line[:400])
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
