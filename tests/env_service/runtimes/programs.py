"""Programs of this machine with the libraries that they need, for roots and images that hold little else."""

import os
import subprocess
from collections.abc import Iterable
from pathlib import Path


def libraries_of(programs: Iterable[Path]) -> set[Path]:
    """Shared libraries of programs; without those of LD_PRELOAD, which vLLM sets in a process that imports it."""
    command = ["ldd", *map(str, programs)]
    told = subprocess.run(command, capture_output=True, text=True, check=True, env={"PATH": os.environ["PATH"]}).stdout
    return {Path(word) for word in told.split() if word.startswith("/") and not word.endswith(":")}
