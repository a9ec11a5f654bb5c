"""A solution, and how it is started."""

from dataclasses import dataclass

from reward_service.code.arguments import CodeArguments
from reward_service.code.budget import whole_seconds
from reward_service.code.processes import Harness
from reward_service.sandbox.program import Limits, Program

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
        return Program(argv=(self.language, name), files={name: self._source()}, stdin=stdin, limits=limits)

    def served(self, harness: Harness, *, seconds: float) -> Program:
        """The process that answers requests about the solution (`harness.solution`)."""
        files = {f"{_FILE}.py": self._source()}
        return harness.program(module="solution", files=files, seconds=seconds, memory_mib=self.memory_mib)

    def _source(self) -> bytes:
        return self.code.encode(errors="replace")


def solution_of(code: str, *, arguments: CodeArguments) -> Solution:
    """The solution with what is put before it."""
    prelude = arguments.prelude
    if prelude and not prelude.endswith("\n"):
        prelude += "\n"
    return Solution(language=arguments.language, code=prelude + code, memory_mib=arguments.memory_mib)
