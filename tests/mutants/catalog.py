"""The planted faults: what each changes, who is to find it, and what is wrong with one that cannot be planted."""

import ast
import tomllib
from dataclasses import dataclass
from pathlib import Path

from services.python_syntax import module_of
from tests.e2e.processes import ROOT

PLANTED = Path(__file__).parent / "planted"


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """A fault: `old`, which stands once in `file`, becomes `new`.

    `tests` are test files, folders, or functions as `file::function`. `simulated`: whether the
    simulator's world has what would show it, with `tenants` that of the Tinker API.
    """

    id: str
    area: str
    what: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    simulated: bool = False
    tenants: bool = False

    def applied(self, text: str) -> str:
        """The file's text with the fault in it."""
        return text.replace(self.old, self.new)


def all_mutants(folder: Path = PLANTED) -> list[Mutant]:
    """Mutants of all files of the folder, in order; a file is an area. Raises TypeError for a wrong key."""
    return [
        Mutant(**{**entry, "tests": tuple(entry["tests"]), "area": path.stem})
        for path in sorted(folder.glob("*.toml"))
        for entry in tomllib.loads(path.read_text(encoding="utf-8"))["mutant"]
    ]


def fault_of(mutant: Mutant, *, root: Path = ROOT) -> str | None:
    """Reason why it cannot be planted in the tree at `root`: expected and found text; None if it can be."""
    path = root / mutant.file
    if not path.is_file():
        return f"there is no {mutant.file}"
    text = path.read_text(encoding="utf-8")
    if (times := text.count(mutant.old)) != 1:
        return f"its old text stands {times} times in {mutant.file}, expected once: write it anew after the file"
    try:
        planted = module_of(mutant.applied(text))
    except SyntaxError as error:
        return f"{mutant.file} with the fault in it is no Python: {error}"
    if ast.dump(planted) == ast.dump(module_of(text)):
        return f"{mutant.file} says the same with the fault in it"
    missing = [test for test in mutant.tests if not _is_there(root, test)]
    if missing or not mutant.tests:
        return f"there is no {', '.join(missing) or 'test named'} to find it: name test files, folders or functions"
    return None


def _is_there(root: Path, test: str) -> bool:
    path, _, function = test.partition("::")
    return (root / path).exists() and (not function or f"def {function}(" in (root / path).read_text(encoding="utf-8"))
