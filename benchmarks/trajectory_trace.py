"""Files of ours on a trajectory's way from lease to loss, and the calls that lead from one to another.

    .venv/bin/python -m benchmarks.trajectory_trace

Starts a short run of the addition task, as `headway up` does. In each of the four processes each function of ours notes
its file when it is called inside one of the calls below, or in a task that such a call has started; what runs beside
the way (starting, announcing, moving weights, heartbeats, metrics pages) does not count, and neither do files of which
only a class is used. vLLM's own files are not ours, and do not count. A call from one file to another counts once,
however often it happens.

    learner      grants (GroupFlow), messages in and out (RouterSocket), a finished group (EnvServiceConversation), the
                 take of a batch, the batch's sequences, and the step of the trainer, up to its metrics
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

MESSAGES = {"EnvServiceConversation._handle": "finished", "LearnerLink._handle": "granted"}
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
    noted: set[str] = set()
    output = Path(folder) / f"{command}.{os.getpid()}"

    def note(function: str) -> None:
        if not on_the_way.get():
            return
        line = f"{_caller()} {function}"
        if line not in noted:
            noted.add(line)
            with output.open("a") as written:
                written.write(f"{line}\n")

    vars(builtins)["__note__"], vars(builtins)["__way__"] = note, _way
    vars(builtins)["__beside__"] = _beside
    sys.meta_path.insert(0, _Finder())
    _watch_routes()


def _caller() -> str:
    """Place of the function of ours that called the one that notes, directly or through code of others; `-` of none."""
    frame = sys._getframe(2).f_back
    while frame is not None:
        file = Path(frame.f_code.co_filename)
        if file.is_relative_to(ROOT) and file.relative_to(ROOT).parts[0] in PACKAGES:
            return _place(file, frame.f_code.co_qualname)
        frame = frame.f_back
    return "-"


def _place(file: Path, function: str) -> str:
    return f"{file.relative_to(ROOT)}:{function}"


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
        self._file = Path(file)
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
        name = ".".join([*self._classes[-1:], node.name])
        note = f"__note__({_place(self._file, name)!r})"
        head, body = node.body[:documented], [*ast.parse(note).body, *node.body[documented:]]
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
    if missing := (ENTRIES | MESSAGES.keys() | BESIDE) - _methods():
        sys.exit(
            f"error: the way begins at methods that are not there: {', '.join(sorted(missing))}; name those of now"
        )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "hook").mkdir()
        (folder / "hook" / "sitecustomize.py").write_text(
            "from benchmarks.trajectory_trace import trace\n\ntrace()\n", encoding="utf-8"
        )
        (folder / "notes").mkdir()
        _run(folder)
        _report(folder / "notes")


def _methods() -> set[str]:
    """`Class.method` of all methods of ours."""
    trees = (ast.parse(file.read_text(encoding="utf-8")) for name in PACKAGES for file in (ROOT / name).rglob("*.py"))
    classes = (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    return {
        f"{each.name}.{inner.name}"
        for each in classes
        for inner in each.body
        if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef)
    }


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
    total = 0
    for command in COMMANDS:
        lines = {line for file in notes.glob(f"{command}.*") for line in file.read_text().splitlines()}
        files = {_file(callee) for _, callee in map(str.split, lines)}
        calls = sum(caller != "-" and _file(caller) != _file(callee) for caller, callee in map(str.split, lines))
        every |= files
        total += calls
        print(f"\n{command}: {len(files)} files, {calls} calls across files", *sorted(files), sep="\n  ")
    print(f"\nfrom lease to loss: {len(every)} files, {total} calls across files")


def _file(place: str) -> str:
    return place.partition(":")[0]


if __name__ == "__main__":
    main()
