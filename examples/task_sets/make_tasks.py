"""Makes the tasks of this folder: `python -m examples.task_sets.make_tasks` in the folder above `examples`.

repairs.jsonl: twenty issues in five small packages, rows like SWE-bench's. A mistake is one change of a sign, a number
or a name, drawn from a seed. It is kept if some tests fail by it, some still pass, and none does the same already.
shell/: twenty tasks for a shell in Harbor's format. What has to come out is computed here, in Python.
"""

import difflib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from random import Random

from examples.computer import make_tasks as computer
from examples.task_sets.packages import CALLS, PACKAGES
from examples.task_sets.shell_work import more_shell_tasks

SEED = 43
EACH = 4
HERE = Path(__file__).parent

CHANGES: Sequence[tuple[str, str]] = (
    (r" <= ", " < "),
    (r" < ", " <= "),
    (r" >= ", " > "),
    (r" > ", " >= "),
    (r" == ", " != "),
    (r" != ", " == "),
    (r" \+ 1\b", ""),
    (r" \+ 1\b", " + 2"),
    (r" - ", " + "),
    (r" \+= ", " -= "),
    (r"\bmax\(", "min("),
    (r"\bmin\(", "max("),
    (r"\band\b", "or"),
    (r"\bstart=1\b", "start=0"),
    (r"\b100\b", "10"),
    (r"\b60\b", "100"),
    (r"\b0\b", "1"),
    (r"sorted\(", "list("),
    (r"\.lower\(\)", ""),
    (r"\.strip\(\)", ""),
    (r"\bnot in\b", "in"),
    (r"\(-", "("),
    (r"//", "%"),
    (r":02d", ""),
    (r"\ball\(", "any("),
    (r"True\b", "False"),
)
"""Texts that stand in code, and what a mistake makes of them."""

_CHECK = """import json, resource, sys
# Of its own time, so that a busy machine makes the same tasks.
resource.setrlimit(resource.RLIMIT_CPU, (5, 5))
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
sys.path.insert(0, {place!r})
import importlib
names = {{name: importlib.import_module("{package}." + name) for name in {modules!r}}}
found = {{}}
for call in json.loads({calls!r}):
    try:
        found[call] = repr(eval(call, dict(names)))
    except MemoryError:
        raise
    except Exception as error:
        found[call] = type(error).__name__
print(json.dumps(found))
"""

_DOCKERFILE = "FROM debian:12-slim\nWORKDIR /app\nCOPY files/ /app/\n"
_TASK = """schema_version = "1.1"

[task]
name = "headway/{name}"
description = "{title}"

[verifier]
timeout_sec = 60.0

[agent]
timeout_sec = 600.0

[environment]
build_timeout_sec = 60.0
cpus = 1
memory_mb = 256
allow_internet = false
"""
_TEST = """#!/bin/sh
# Nothing that is in /app is run: what it says is compared with what it has to say.
good=1
cd /app || good=0
for check in /tests/check-*; do
  found=$(/bin/sh "$check" 2>/dev/null)
  [ "$found" = "$(cat "/tests/prints-${check##*-}")" ] || good=0
done
echo "$good" > /logs/verifier/reward.txt
"""


def outcomes(package: str, files: Mapping[str, str]) -> dict[str, str] | None:
    """The results of a package's calls; None for one that cannot be loaded, or does not come to an end."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place, package)
        folder.mkdir()
        for name, text in {"__init__.py": "", **files}.items():
            (folder / name).write_text(text, encoding="utf-8")
        modules = [name.removesuffix(".py") for name in files]
        code = _CHECK.format(place=place, package=package, modules=modules, calls=json.dumps(CALLS[package]))
        # With one order of sets, so that each machine makes the same tasks.
        alone = {"PATH": os.environ.get("PATH", ""), "PYTHONHASHSEED": "0"}
        ended = subprocess.run([sys.executable, "-s", "-P", "-c", code], env=alone, capture_output=True, check=False)
    return dict(json.loads(ended.stdout)) if ended.returncode == 0 else None


def mistakes(package: str, chance: Random) -> Iterator[tuple[str, str, dict[str, str]]]:
    """A file's name, its text with a mistake, and what the calls then give; in a drawn order."""
    places = [
        (name, at.start(), at.end(), new)
        for name, text in PACKAGES[package].items()
        for old, new in CHANGES
        for at in re.finditer(old, text)
        if _is_code(text, at.start())
    ]
    chance.shuffle(places)
    right = outcomes(package, PACKAGES[package])
    assert right is not None, package
    for name, start, end, new in places:
        text = PACKAGES[package][name]
        wrong = text[:start] + new + text[end:]
        found = outcomes(package, {**PACKAGES[package], name: wrong})
        if found is not None and 1 <= sum(found[call] != right[call] for call in right) <= len(right) // 2:
            yield name, wrong, found


def _is_code(text: str, at: int) -> bool:
    """True of a place that is in no docstring."""
    return text[:at].count('"""') % 2 == 0


def repairs() -> Iterator[dict[str, object]]:
    """The rows."""
    chance = Random(SEED)
    for package in PACKAGES:
        right, seen = outcomes(package, PACKAGES[package]), []
        assert right is not None
        for name, wrong, found in mistakes(package, chance):
            broken = [call for call in right if found[call] != right[call]]
            if broken in seen:  # much the same mistake
                continue
            seen.append(broken)
            yield repair(package, name, wrong, right=right, found=found, number=len(seen))
            if len(seen) == EACH:
                break
        assert len(seen) == EACH, f"{package} has {len(seen)} mistakes that do"


def repair(
    package: str, name: str, wrong: str, *, right: Mapping[str, str], found: Mapping[str, str], number: int
) -> dict[str, object]:
    """The row of a mistake."""
    broken = [call for call in right if found[call] != right[call]]
    ids = {call: f"tests/test_{package}.py::{test_name(call, at)}" for at, call in enumerate(right)}
    whole = [call for call in right if call not in broken]
    sources = {f"{package}/{file}": text for file, text in PACKAGES[package].items()}
    files = {
        "README.md": f"# {package}\n\nTests: `python3 -m pytest`, or call the functions in tests/.\n",
        f"{package}/__init__.py": "",
        **sources,
        f"{package}/{name}": wrong,
        f"tests/test_{package}.py": tests(package, right, whole[::2], ids),
    }
    function = broken[0].partition("(")[0]
    patch = "".join(
        difflib.unified_diff(
            wrong.splitlines(keepends=True), PACKAGES[package][name].splitlines(keepends=True),
            f"a/{package}/{name}", f"b/{package}/{name}",
        )
    )  # fmt: skip
    return {
        "instance_id": f"{package}-{number}",
        "problem_statement": f"{package}.{broken[0]} gives {found[broken[0]]}, and {right[broken[0]]} was expected. "
        f"{package}.{function} or something that it needs does not do what its docstring says.",
        "files": files,
        "test_files": {f"tests/test_{package}.py": tests(package, right, list(right), ids)},
        "FAIL_TO_PASS": [ids[call] for call in broken],
        "PASS_TO_PASS": [ids[call] for call in whole],
        "patch": patch,
    }


def test_name(call: str, number: int) -> str:
    """The name of a call's test."""
    return f"test_{call.partition('(')[0].rpartition('.')[2]}_{number + 1}"


def tests(package: str, right: Mapping[str, str], calls: Sequence[str], ids: Mapping[str, str]) -> str:
    """A file of tests with some of the calls."""
    modules = ", ".join(name.removesuffix(".py") for name in PACKAGES[package])
    bodies = [f"def {ids[call].rpartition('::')[2]}():\n    assert {call} == {right[call]}\n" for call in calls]
    return "\n\n".join([f"from {package} import {modules}\n", *bodies])


def write_shell_task(folder: Path, line: Mapping[str, object]) -> None:
    """A task for a shell as a folder."""
    files, checks, title = line["files"], line["checks"], str(line["name"])
    assert isinstance(files, dict)
    assert isinstance(checks, list)
    name = folder.name
    texts = {
        "task.toml": _TASK.format(name=name, title=title),
        "instruction.md": f"{line['prompt']}\n\nAll files are in /app.\n",
        "environment/Dockerfile": _DOCKERFILE,
        **{f"environment/files/{path}": text for path, text in files.items()},
        "solution/solve.sh": f"#!/bin/sh\nset -e\ncd /app\n{line['solution']}\n",
        "tests/test.sh": _TEST,
    }
    for number, check in enumerate(checks, start=1):
        texts[f"tests/check-{number}"] = f"{check['run']}\n"
        texts[f"tests/prints-{number}"] = f"{check['prints']}\n"
    for path, text in texts.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(str(text), encoding="utf-8")


def main() -> None:
    """Write all of them."""
    (HERE / "repairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in repairs()), encoding="utf-8")
    shutil.rmtree(HERE / "shell", ignore_errors=True)
    lines = [*computer.shell_tasks(Random(SEED)), *more_shell_tasks(Random(SEED))]
    # Sources that are data are no sources of this repository.
    for line in json.loads(json.dumps(lines).replace(".py", ".txt")):
        write_shell_task(HERE / "shell" / shlex.quote(str(line["name"]).replace(" ", "-")), line)


if __name__ == "__main__":
    main()
