"""Two training loops at once on one base model, each with its own adapter: `demo.py SDK_PYTHON`.

Starts `headway serve models/addition`, then sft.py and rl.py with the Python that has the Tinker SDK, and ends it all.
"""

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

HERE = Path(__file__).parent
SERVE = [str(Path(sys.executable).with_name("headway")), "serve", "models/addition", "--name", "models/addition"]
ASKED = re.compile(r"export (TINKER_\w+)=(\S+)")


def main() -> int:
    """Exit code 0 if both loops came to their end."""
    server = subprocess.Popen(SERVE, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        found: dict[str, str] = {}
        for line in server.stdout:
            sys.stdout.write(line)
            if match := ASKED.match(line):
                found[match[1]] = match[2]
            if line.startswith("base model"):
                break
        else:
            return 1
        threading.Thread(target=server.stdout.read, daemon=True).start()
        environment = {**os.environ, **found, "TINKER_TELEMETRY": "0"}
        loops = [subprocess.Popen([sys.argv[1], HERE / name], env=environment) for name in ("sft.py", "rl.py")]
        codes = [loop.wait() for loop in loops]
        return int(any(code != 0 for code in codes))  # that of one that a signal has ended is below 0
    finally:
        server.send_signal(signal.SIGINT)
        server.wait()


if __name__ == "__main__":
    sys.exit(main())
