"""The processes of the harness, which are talked to line by line, and their files."""

import importlib.resources
from collections.abc import Mapping
from dataclasses import dataclass

from reward_service.code.budget import whole_seconds
from reward_service.sandbox.config import ExecutionConfig
from reward_service.sandbox.program import Limits, Program

# What a process may take beside the time of its cases: to start, to load its modules.
START_S = 60.0

_PACKAGE = "reward_service.code.harness"
_FOLDER = _PACKAGE.replace(".", "/")


@dataclass(frozen=True, kw_only=True)
class Harness:
    """The modules of the harness at the paths by which they import each other, and the operator's maxima.

    The longest line between the sides is what is kept of a program's output.
    """

    files: Mapping[str, bytes]
    execution: ExecutionConfig

    def program(self, *, module: str, files: Mapping[str, bytes], seconds: float, memory_mib: int) -> Program:
        """A process that runs a module of the harness, beside which it finds `files`. Its cases have `seconds`."""
        most = self.execution
        limits = Limits(
            wall_s=min(START_S + seconds, most.max_wall_s),
            cpu_s=min(whole_seconds(START_S + seconds), most.max_cpu_s),
            memory_mib=memory_mib,
            output_bytes=most.max_output_bytes,
        )
        return Program(
            argv=("python", "main.py"), files={**self.files, **files, "main.py": _entry(module)}, limits=limits
        )


def load_harness(execution: ExecutionConfig) -> Harness:
    """Read the files of the harness."""
    folder = importlib.resources.files(_PACKAGE)
    modules = [file for file in folder.iterdir() if file.name.endswith(".py")]
    packages = {"reward_service/__init__.py": b"", "reward_service/code/__init__.py": b""}
    files = {f"{_FOLDER}/{module.name}": module.read_bytes() for module in modules}
    return Harness(files={**packages, **files}, execution=execution)


def _entry(module: str) -> bytes:
    # Nothing is run twice, so there is nothing to cache.
    return f"import sys\nsys.dont_write_bytecode = True\nfrom {_PACKAGE}.{module} import main\nmain()\n".encode()
