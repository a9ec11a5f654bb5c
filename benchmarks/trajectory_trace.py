"""How many of our files a trajectory passes on its way from lease to loss.

    .venv/bin/python -m benchmarks.trajectory_trace

Starts a short run of the addition task, as `headway up` does, with a profile function in each of the four processes. It
notes each file of ours of which a function runs inside one of the calls below, or in a task that such a call has
started; what runs beside the way (starting, announcing, moving weights, heartbeats, metrics pages) does not count, and
neither do files of which only a class is used. vLLM's own files are not ours, and do not count.

    learner      grants (Intake), messages in and out (RouterSocket), Finished (Intake), the take of a batch,
                 the batch's sequences, and the step of the trainer, up to its metrics
    env_service  messages in and out (DealerSocket), Granted and what comes of it, environments in their thread
    generator    POST /v1/generate
    reward       POST /v1/score
"""

import os
import subprocess
import sys
import tempfile
from contextvars import ContextVar
from inspect import CO_OPTIMIZED
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).parents[1]
PACKAGES = ("protocol", "services", "learner", "generator", "reward_service", "env_service", "headway")
COMMANDS = ("learner", "generator", "reward-service", "env-service")
FOLDER = "TRAJECTORY_TRACE"
STEPS = 3

ENTRIES = frozenset(
    {
        "Intake._pump", "Intake.take", "RouterSocket.receive_whole", "RouterSocket.send", "DealerSocket.receive",
        "DealerSocket.send", "OnlineTraining._sequences", "Trainer.train_step", "_Job.run",
    }
)  # fmt: skip
"""Calls that belong to the way as a whole."""

MESSAGES = {"Intake._handle": "finished", "Conversation._handle": "finished", "LearnerLink._handle": "granted"}
"""Calls that do when they are about a message of that kind."""

PATHS = {"/v1/generate", "/v1/score"}

on_the_way: ContextVar[bool] = ContextVar("on_the_way", default=False)


def trace() -> None:
    """In a process of the run: notes what it passes, from now on. Does nothing in any other."""
    folder = os.environ.get(FOLDER)
    command = next((Path(word).name for word in sys.orig_argv[:3] if Path(word).name in COMMANDS), None)
    if folder is None or command is None:
        return
    import threading

    noted = Noted(Path(folder) / f"{command}.{os.getpid()}")
    threading.setprofile(noted.profile)
    sys.setprofile(noted.profile)


class Noted:
    """The files that were passed, written down as soon as they are."""

    def __init__(self, output: Path) -> None:
        self._output = output
        self._files: set[str] = set()
        self._before: dict[int, bool] = {}
        self._roots = tuple(f"{ROOT / package}{os.sep}" for package in PACKAGES)

    def profile(self, frame: FrameType, event: str, argument: object) -> None:
        """Called by Python at each call and return, and each time that a coroutine goes on or waits."""
        if event == "call":
            if _begins(frame):
                self._before[id(frame)] = on_the_way.get()
                on_the_way.set(True)
            if on_the_way.get():
                self._note(frame)
        elif event == "return" and id(frame) in self._before:
            on_the_way.set(self._before.pop(id(frame)))

    def _note(self, frame: FrameType) -> None:
        code = frame.f_code
        file = code.co_filename
        if file in self._files or not code.co_flags & CO_OPTIMIZED or not file.startswith(self._roots):
            return
        self._files.add(file)
        with self._output.open("a") as output:
            output.write(f"{Path(file).relative_to(ROOT)}\n")


def _begins(frame: FrameType) -> bool:
    name = frame.f_code.co_qualname
    if name in ENTRIES:
        return True
    if name in MESSAGES:
        return bool(getattr(frame.f_locals["message"], "kind", None) == MESSAGES[name])
    return name == "Starlette.__call__" and frame.f_locals["scope"].get("path") in PATHS


def main() -> None:
    """Runs the system, prints the files by process, and how many there are."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "hook").mkdir()
        (folder / "hook" / "sitecustomize.py").write_text(
            "from benchmarks.trajectory_trace import trace\n\ntrace()\n", encoding="utf-8"
        )
        (folder / "notes").mkdir()
        _run(folder)
        _report(folder / "notes")


def _run(folder: Path) -> None:
    model = folder / "model"
    subprocess.run([sys.executable, "examples/addition/make_model.py", str(model)], cwd=ROOT, check=True)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(folder / "hook"), str(ROOT))),
        FOLDER: str(folder / "notes"),
    }
    settings = {
        "run.directory": folder / "runs", "learner.model": model, "generator.model": model, "env-service.model": model,
        "learner.steps": STEPS, "learner.evaluation.tasks": 0, "learner.evaluation.final-tasks": 0,
    }  # fmt: skip
    words = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    headway = str(Path(sys.executable).with_name("headway"))
    subprocess.run([headway, "up", "examples/addition/run.toml", *words], cwd=ROOT, env=environment, check=True)


def _report(notes: Path) -> None:
    every: set[str] = set()
    for command in COMMANDS:
        files = {line for file in notes.glob(f"{command}.*") for line in file.read_text().splitlines()}
        every |= files
        print(f"\n{command}: {len(files)} files", *sorted(files), sep="\n  ")
    print(f"\nfrom lease to loss: {len(every)} files")


if __name__ == "__main__":
    main()
