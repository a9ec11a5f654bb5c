"""How many of our files a trajectory passes on its way from lease to loss.

    .venv/bin/python -m benchmarks.trajectory_trace

Starts a short run of the addition task, as `headway up` does. In each of the four processes each function of ours notes
its file when it is called inside one of the calls below, or in a task that such a call has started; what runs beside
the way (starting, announcing, moving weights, heartbeats, metrics pages) does not count, and neither do files of which
only a class is used. vLLM's own files are not ours, and do not count.

    learner      grants (GroupFlow), messages in and out (RouterSocket), Finished (Conversation), the take of a batch,
                 the batch's sequences, and the step of the trainer, up to its metrics
    env_service  messages in and out (DealerSocket), Granted and what comes of it, environments in their thread
    generator    POST /v1/generate
    reward       POST /v1/score
"""

import ast
import builtins
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import Any

ROOT = Path(__file__).parents[1]
PACKAGES = ("protocol", "services", "learner", "generator", "reward_service", "env_service", "headway")
COMMANDS = ("learner", "generator", "reward-service", "env-service")
FOLDER = "TRAJECTORY_TRACE"
STEPS = 3

ENTRIES = frozenset(
    {
        "GroupFlow.grant_all", "Intake.take", "RouterSocket.receive_whole", "RouterSocket.send",
        "DealerSocket.receive", "DealerSocket.send", "OnlineTraining._sequences", "Trainer.train_step", "_Job.run",
    }
)  # fmt: skip
"""Calls that belong to the way as a whole."""

MESSAGES = {"Conversation._handle": "finished", "LearnerLink._handle": "granted"}
"""Calls that do when they are about a message of that kind."""

BESIDE = frozenset({"Waiting._speak", "Waiting._end"})
"""Calls from within it that do not: what is said and counted of a wait, which a quick machine hardly has."""

PATHS = {"/v1/generate", "/v1/score"}

on_the_way: ContextVar[bool] = ContextVar("on_the_way", default=False)


def trace() -> None:
    """In a process of the run: has our functions note what is passed. Does nothing in any other."""
    folder = os.environ.get(FOLDER)
    command = next((Path(word).name for word in sys.orig_argv[:3] if Path(word).name in COMMANDS), None)
    if folder is None or command is None:
        return
    files: set[str] = set()
    output = Path(folder) / f"{command}.{os.getpid()}"

    def note(file: str) -> None:
        if on_the_way.get() and file not in files:
            files.add(file)
            with output.open("a") as written:
                written.write(f"{Path(file).relative_to(ROOT)}\n")

    vars(builtins)["__note_file__"], vars(builtins)["__way__"] = note, _way
    vars(builtins)["__beside__"] = _beside
    sys.meta_path.insert(0, _Finder())
    _watch_routes()


@contextmanager
def _way(is_one: bool) -> Iterator[None]:
    before = on_the_way.set(on_the_way.get() or is_one)
    try:
        yield
    finally:
        on_the_way.reset(before)


@contextmanager
def _beside() -> Iterator[None]:
    before = on_the_way.set(False)
    try:
        yield
    finally:
        on_the_way.reset(before)


def _watch_routes() -> None:
    from starlette.applications import Starlette

    serve = Starlette.__call__

    async def served(self: Starlette, scope: Any, receive: Any, send: Any) -> None:
        with _way(scope.get("path") in PATHS):
            await serve(self, scope, receive, send)

    Starlette.__call__ = served  # type: ignore[method-assign]


class _Finder(MetaPathFinder):
    """Finds our modules, to be compiled with notes."""

    def find_spec(self, name: str, path: Any, target: object = None) -> ModuleSpec | None:
        if name.partition(".")[0] not in PACKAGES:
            return None
        spec = PathFinder.find_spec(name, path)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


class _Loader(SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        """Never the compiled file that is kept: it has no notes."""
        path = self.get_filename(fullname)
        tree = _Notes(path).visit(ast.parse(self.get_data(path), path))
        return compile(ast.fix_missing_locations(tree), path, "exec", dont_inherit=True)


class _Notes(ast.NodeTransformer):
    """Has each function note its file, and the calls of the way mark what they call."""

    def __init__(self, file: str) -> None:
        self._note = f"__note_file__({file!r})"
        self._classes: list[str] = []

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        self._classes.append(node.name)
        self.generic_visit(node)
        self._classes.pop()
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return self._noted(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        return self._noted(node)

    def _noted(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> ast.AST:
        self.generic_visit(node)
        documented = ast.get_docstring(node) is not None
        head, body = node.body[:documented], [*ast.parse(self._note).body, *node.body[documented:]]
        name = ".".join([*self._classes[-1:], node.name])
        if name in ENTRIES:
            body = _inside("__way__(True)", body)
        elif name in BESIDE:
            body = _inside("__beside__()", body)
        elif name in MESSAGES:
            body = _inside(f"__way__(getattr(message, 'kind', None) == {MESSAGES[name]!r})", body)
        node.body = [*head, *body]
        return node


def _inside(context: str, body: list[ast.stmt]) -> list[ast.stmt]:
    (entered,) = ast.parse(f"with {context}:\n    pass").body
    assert isinstance(entered, ast.With)
    entered.body = body
    return [entered]


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
    from tests.e2e.run_files import write_run_file  # imports ours, which must come after the notes

    model = folder / "model"
    subprocess.run([sys.executable, "examples/addition/make_model.py", str(model)], cwd=ROOT, check=True)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(folder / "hook"), str(ROOT))),
        FOLDER: str(folder / "notes"),
    }
    run_file = write_run_file(folder, model=model)
    words = f"--learner.steps {STEPS} --learner.evaluation.tasks 0 --learner.evaluation.final-tasks 0".split()
    headway = str(Path(sys.executable).with_name("headway"))
    subprocess.run([headway, "up", str(run_file.path), *words], cwd=ROOT, env=environment, check=True)


def _report(notes: Path) -> None:
    every: set[str] = set()
    for command in COMMANDS:
        files = {line for file in notes.glob(f"{command}.*") for line in file.read_text().splitlines()}
        every |= files
        print(f"\n{command}: {len(files)} files", *sorted(files), sep="\n  ")
    print(f"\nfrom lease to loss: {len(every)} files")


if __name__ == "__main__":
    main()
