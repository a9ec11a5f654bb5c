"""The layout of the code: no circles of folders, single class names, functions of a size to read, constants before
the first definition, and docstrings that begin with what a thing does.
"""

import ast
import gc
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

from services.python_syntax import module_of

ROOT = Path(__file__).parents[1]
PACKAGES = ("protocol", "services", "learner", "generator", "reward_service", "env_service", "headway", "simulation")
MAX_FUNCTION = 60
PARTICIPLE = re.compile(
    "_?([A-Z][a-z]*[^e]ed|Begun|Bound|Broken|Brought|Built|Caught|Chosen|Done|Drawn|Former|Found|Given|Gone|Grown|Heard|"
    "Held|Hidden|Kept|Known|Laid|Left|Lent|Lost|Made|Met|Paid|Said|Seen|Sent|Shown|Sold|Spent|Split|Spoken|Taken|Told|"
    "Unknown|Unseen|Unsent|Untold|Won|Written)"
)
"""In one word: the `ed` of regular ones that is not of a noun, such as `Need`, and the irregular ones."""
STAND_INS = ("benchmarks/soak/torch_engine.py", "simulation/actors/vllm_stub.py")
"""Their classes are named as those of vLLM that they stand for."""
WHOLE_TREE = (*PACKAGES, "tests", "benchmarks", "docs", "deploy", "examples")
OPENERS = ("What", "Whether", "Those", "Which", "One", "How", "That", "Who", "Whose", "Why")


@pytest.fixture(autouse=True)
def trees_stay() -> Iterator[None]:
    """Looks for no garbage in the trees, which all stay: that would take a fifth of the time."""
    gc.disable()
    yield
    gc.freeze()
    gc.enable()


@cache
def _tree(path: Path) -> ast.Module:
    return module_of(path.read_text(encoding="utf-8"))


def _modules() -> dict[str, Path]:
    found = {}
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def _imported(path: Path, modules: dict[str, Path]) -> Iterator[str]:
    """The modules of ours that a file imports when it is loaded or later, those for type checkers alone left out."""
    tree = _tree(path)
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                if whole in modules or node.module in modules:
                    yield whole if whole in modules else node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)


def _folder_edges() -> dict[str, set[str]]:
    modules = _modules()
    edges: dict[str, set[str]] = defaultdict(set)
    for path in modules.values():
        here = str(path.parent.relative_to(ROOT))
        for name in _imported(path, modules):
            there = str(modules[name].parent.relative_to(ROOT))
            if there != here:
                edges[here].add(there)
    return edges


def _reached(edges: dict[str, set[str]], start: str) -> set[str]:
    reached: set[str] = set()
    waiting = [start]
    while waiting:
        for there in edges[waiting.pop()] - reached:
            reached.add(there)
            waiting.append(there)
    return reached


def test_no_two_folders_import_each_other_not_even_by_way_of_others() -> None:
    edges = defaultdict(set, _folder_edges())

    circles = {folder for folder in list(edges) if folder in _reached(edges, folder)}

    assert circles == set()


def _whole_tree() -> list[Path]:
    return [path for folder in WHOLE_TREE for path in (ROOT / folder).rglob("*.py")]


def _classes(paths: Iterable[Path]) -> Iterator[tuple[str, str]]:
    """The name of each class in these files, and its place."""
    for path in paths:
        for node in ast.walk(_tree(path)):
            if isinstance(node, ast.ClassDef):
                yield node.name, f"{path.relative_to(ROOT)}:{node.lineno}"


def test_no_public_class_name_stands_twice() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for name, place in _classes(path for path in _whole_tree() if str(path.relative_to(ROOT)) not in STAND_INS):
        if not name.startswith("_"):
            places[name].append(place)

    assert {name: where for name, where in places.items() if len(where) > 1} == {}


def test_a_class_is_named_by_a_noun_and_not_by_a_bare_participle() -> None:
    bare = {f"{place} {name}" for name, place in _classes(_modules().values()) if PARTICIPLE.fullmatch(name)}

    assert bare == set()


def test_functions_are_of_a_size_to_read() -> None:
    long = {
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}": lines
        for path in _modules().values()
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (lines := (node.end_lineno or node.lineno) - node.lineno + 1) > MAX_FUNCTION
    }

    assert long == {}


def _late_constants(tree: ast.Module) -> Iterator[str]:
    """Names in capitals that are set behind the first definition, and need nothing that the file defines."""
    defined = {
        node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    }
    behind = False
    for node in tree.body:
        behind = behind or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        if not behind or not isinstance(node, ast.Assign | ast.AnnAssign):
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        made = {inner.id for target in targets for inner in ast.walk(target) if isinstance(inner, ast.Name)}
        names = {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}
        if names & defined or not all(name.isupper() for name in made):
            defined |= made
        else:
            yield from made


def test_constants_stand_before_the_first_definition() -> None:
    late = {
        f"{path.relative_to(ROOT)}: {name}" for path in _modules().values() for name in _late_constants(_tree(path))
    }
    assert late == set()


def _opened_by_a_clause(tree: ast.Module) -> Iterator[str]:
    """First lines of docstrings that begin so: of modules, classes and functions, and of constants and fields."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            text = node.value.value.lstrip()
            if re.split(r"\W", text, maxsplit=1)[0] in OPENERS:
                yield text.splitlines()[0]


def test_a_docstring_begins_with_what_the_thing_does() -> None:
    found = [f"{path.relative_to(ROOT)}: {text}" for path in _whole_tree() for text in _opened_by_a_clause(_tree(path))]

    assert found == []
