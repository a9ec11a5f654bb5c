"""The processes of the harness, which are talked to line by line, and their files."""

import importlib.resources
from collections.abc import Mapping
from dataclasses import dataclass

from reward_service.code.budget import whole_seconds
from reward_service.sandbox.program import Limits, Program

# What a process may take beside the time of its cases: to start, to load its modules.
START_S = 60.0

_PACKAGE = "reward_service.code.harness"
_FOLDER = _PACKAGE.replace(".", "/")


@dataclass(frozen=True, kw_only=True)
class Harness:
    """The modules of the harness at the paths by which they import each other, and the longest line between sides."""

    files: Mapping[str, bytes]
    line_bytes: int

    def program(self, *, module: str, files: Mapping[str, bytes], seconds: float, memory_mib: int) -> Program:
        """A process that runs a module of the harness, beside which it finds `files`. Its cases have `seconds`."""
        wall_s = START_S + seconds
        limits = Limits(wall_s=wall_s, cpu_s=whole_seconds(wall_s), memory_mib=memory_mib, output_bytes=self.line_bytes)
        return Program(
            argv=("python", "main.py"), files={**self.files, **files, "main.py": _entry(module)}, limits=limits
        )


def load_harness(*, line_bytes: int) -> Harness:
    """Read the files of the harness."""
    folder = importlib.resources.files(_PACKAGE)
    modules = [file for file in folder.iterdir() if file.name.endswith(".py")]
    files = {f"{_FOLDER}/{module.name}": module.read_bytes() for module in modules}
    return Harness(
        files={"reward_service/__init__.py": b"", "reward_service/code/__init__.py": b"", **files},
        line_bytes=line_bytes,
    )


def _entry(module: str) -> bytes:
    # Nothing is run twice, so there is nothing to cache.
    return f"import sys\nsys.dont_write_bytecode = True\nfrom {_PACKAGE}.{module} import main\nmain()\n".encode()
