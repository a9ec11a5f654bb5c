"""A solution, and how it is started."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from reward_service.code.arguments import CodeArguments
from reward_service.code.budget import whole_seconds
from reward_service.code.harness_files import entry_file
from reward_service.sandbox.program import Limits, Program

# Sets of strings have one order in all runs; nothing is written beside the sources.
ENVIRONMENT: Mapping[str, str] = {"PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONIOENCODING": "utf-8"}
# The longest line between the sides: a value of the solution, or of the tests.
MAX_LINE_BYTES = 4 << 20
# What a process may take beside the time of its cases: to start, to load its modules.
START_S = 60.0

_FILE = "solution"


@dataclass(frozen=True, kw_only=True)
class Solution:
    """The code of one completion, and what its processes may take."""

    language: str
    code: str
    memory_mib: int

    def program(self, *, stdin: bytes, wall_s: float, output_bytes: int) -> Program:
        """The whole program, run once."""
        name = f"{_FILE}.py" if self.language == "python" else _FILE
        limits = Limits(
            wall_s=wall_s, cpu_s=whole_seconds(wall_s), memory_mib=self.memory_mib, output_bytes=output_bytes
        )
        return Program(
            argv=(self.language, name),
            files={name: self._source()},
            stdin=stdin,
            environment=ENVIRONMENT,
            limits=limits,
        )

    def served(self, *, harness: Mapping[str, bytes], wall_s: float) -> Program:
        """The process that answers requests about the solution (`harness.solution`)."""
        files = {**harness, "main.py": entry_file("solution"), f"{_FILE}.py": self._source()}
        return talking(files=files, wall_s=wall_s, memory_mib=self.memory_mib)

    def _source(self) -> bytes:
        return self.code.encode(errors="replace")


def solution_of(code: str, *, arguments: CodeArguments) -> Solution:
    """The solution with what is put before it."""
    prelude = arguments.prelude
    if prelude and not prelude.endswith("\n"):
        prelude += "\n"
    return Solution(language=arguments.language, code=prelude + code, memory_mib=arguments.memory_mib)


def talking(*, files: Mapping[str, bytes], wall_s: float, memory_mib: int) -> Program:
    """A Python process with `main.py` that is talked to line by line."""
    limits = dataclasses.replace(
        Limits(), wall_s=wall_s, cpu_s=whole_seconds(wall_s), memory_mib=memory_mib, output_bytes=MAX_LINE_BYTES
    )
    return Program(argv=("python", "main.py"), files=files, environment=ENVIRONMENT, limits=limits)
