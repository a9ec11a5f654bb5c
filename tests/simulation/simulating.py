"""`python -m tests.simulation.simulating`: simulations in children of a process in which one has taken hold already.

To load the product anew for each takes longer than most of them. Each child is as good as a process of its own: it is
a copy of one that has never simulated anything. Each line of stdin is a JSON object: a `program`, or `arguments` of
`python -m simulation`; what it finds on its stdin, `told`; and the folder for what it prints. The answer is a line with
its exit code.
"""

import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from services.process import parent_death_signal
from tests.e2e.processes import ROOT


class Simulator:
    """The process, as its user sees it. `hash_seed` is that of all its children."""

    def __init__(self, folder: Path, *, hash_seed: int) -> None:
        self._folder = folder
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.simulation.simulating"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": str(hash_seed), "OMP_NUM_THREADS": "1"},
            preexec_fn=lambda: parent_death_signal(signal.SIGKILL),
        )  # fmt: skip

    def run(self, program: str) -> "subprocess.CompletedProcess[str]":
        """As `python -c`."""
        return self._answer(program=program)

    def simulation(self, *arguments: str, told: str = "") -> "subprocess.CompletedProcess[str]":
        """As `python -m simulation`."""
        return self._answer(arguments=arguments, told=told)

    def _answer(
        self, *, program: str = "", arguments: Sequence[str] = (), told: str = ""
    ) -> "subprocess.CompletedProcess[str]":
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        asked = {"folder": str(self._folder), "program": program, "arguments": list(arguments), "told": told}
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, f"the process that simulates ended with {self._process.wait()}"
        said, erred = ((self._folder / name).read_text(encoding="utf-8") for name in ("said", "erred"))
        return subprocess.CompletedProcess(arguments, json.loads(answer), said, erred)

    def close(self) -> None:
        """Ends it, in the middle of a run too."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


def main() -> None:
    """Answers until stdin ends."""
    from simulation.install import install  # the clock of this process is another one from here on

    install()
    from simulation.checking import invariants, tenant_run  # noqa: F401 - the children find them loaded

    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            _simulate(**json.loads(line))
        _, status = os.waitpid(child, 0)
        sys.stdout.write(f"{json.dumps(os.waitstatus_to_exitcode(status))}\n")
        sys.stdout.flush()


def _simulate(*, folder: str, program: str, arguments: Sequence[str], told: str) -> None:
    """Never returns."""
    parent_death_signal(signal.SIGKILL)
    asked = Path(folder, "told")
    asked.write_text(told, encoding="utf-8")
    files = (os.open(asked, os.O_RDONLY), *(_fresh(Path(folder, name)) for name in ("said", "erred")))
    for number, file in enumerate(files):
        os.dup2(file, number)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - without what has been read ahead for the parent
    code: object = 1
    try:
        if program:
            exec(compile(program, "<string>", "exec"), {"__name__": "__main__"})
        else:
            from simulation.__main__ import main as simulate

            simulate(arguments)
        code = 0
    except SystemExit as ended:
        code = ended.code
    except BaseException:  # noqa: BLE001 - as at the end of any program
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else int(code is not None))


def _fresh(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)


if __name__ == "__main__":
    main()
