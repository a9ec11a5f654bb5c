"""A small repository with a mistake, the tests that show it, and the verdict on what lines of shell leave of it."""

import importlib.util
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from env_service.builtin.task_sets import RepositoryOptions
from env_service.runtimes.config import RuntimeLimits, RuntimesConfig
from env_service.runtimes.interface import RuntimeCommand, RuntimeFile
from env_service.runtimes.pool import RuntimePool, use_runtimes
from env_service.task_sets.dockerfile import files_in
from env_service.task_sets.judging import WorkVerdict, judged
from env_service.task_sets.preparing import opened
from env_service.task_sets.records import JudgedTask, SetupStep
from env_service.task_sets.rows import RepositoryRow, read_row

PYTEST_FOLDER = "/opt/lib"
LIMITS = RuntimeLimits(memory_mib=192, disk_mib=32, command_s=60)
SOURCE = "def double(x):\n    return x + x + 1\n\n\ndef half(x):\n    return x // 2\n"
RIGHT = SOURCE.replace(" + 1", "")
TESTS = "from shop.sums import double, half\n\n\ndef test_half():\n    assert half(9) == 4\n"
HIDDEN = f"{TESTS}\n\ndef test_double():\n    assert double(4) == 8\n"
FIX = "sed -i 's/ + 1$//' shop/sums.py"


@pytest.fixture(scope="session")
def bound(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """Folders of runtimes: pytest at a place where nobody looks who is not told to, and nothing at that of packages of
    this machine's Python, of which each machine has others.
    """
    folder, empty = tmp_path_factory.mktemp("pytest"), tmp_path_factory.mktemp("empty")
    for made in (folder, empty):
        made.chmod(0o755)  # runtimes are another user
    for place in _pytest_places():
        if place.is_dir():
            shutil.copytree(place, folder / place.name)
        else:
            shutil.copy2(place, folder)
    subprocess.run([sys.executable, "-m", "compileall", "-q", folder], check=True, timeout=300)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = Path(sys.base_prefix, "lib", version, "site-packages")
    own = {f"/opt/python/lib/{version}/site-packages": empty} if sys.base_prefix != "/usr" and packages.is_dir() else {}
    return {PYTEST_FOLDER: folder, **own}


def _pytest_places() -> Iterator[Path]:
    """Packages, and modules of one file, that pytest is."""
    for name in ("pytest", "_pytest", "py", "pluggy", "iniconfig", "packaging", "pygments"):
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None:
            place = Path(spec.origin)
            yield place.parent if place.name == "__init__.py" else place


@pytest.fixture
async def pool(bound: Mapping[str, Path]) -> AsyncIterator[RuntimePool]:
    """Runtimes with small limits, none of them warm."""
    made = use_runtimes(RuntimePool(RuntimesConfig(spare=0, limits=LIMITS)))
    made.bind(bound, purpose="a test")
    yield made
    await made.close()


def row(**changes: object) -> RepositoryRow:
    """The row of the repository."""
    told: dict[str, object] = {
        "instance_id": "shop-1",
        "problem_statement": "double doubles wrongly",
        "files": {"shop/__init__.py": "", "shop/sums.py": SOURCE, "tests/test_sums.py": TESTS},
        "test_files": {"tests/test_sums.py": HIDDEN},
        "patch": "--- a/shop/sums.py\n+++ b/shop/sums.py\n@@ -1,5 +1,5 @@\n def double(x):\n-    return x + x + 1\n"
        "+    return x + x\n \n \n def half(x):\n",
        "FAIL_TO_PASS": ["tests/test_sums.py::test_double"],
        "PASS_TO_PASS": ["tests/test_sums.py::test_half"],
    }
    return RepositoryRow.model_validate({**told, **changes})


def task(**changes: object) -> JudgedTask:
    """The task of the row, on this machine's own programs, which have no pytest."""
    return read_row(row(**changes), RepositoryOptions(train_file=Path("rows.jsonl")).rows)


def with_pytest(given: JudgedTask, *, copied: bool = False) -> JudgedTask:
    """The task on a computer that has pytest: where that of `pool` has it, or `copied` there."""
    steps = given.setup.steps
    if copied:
        steps = (SetupStep(files=dict(_pytest_files())), *steps)
    environment = {"PYTHONPATH": PYTEST_FOLDER, "PYTHONDONTWRITEBYTECODE": "1"}
    return replace(given, setup=replace(given.setup, steps=steps, environment=environment))


def _pytest_files() -> Iterator[tuple[str, RuntimeFile]]:
    for place in _pytest_places():
        for path, file in files_in(place).items() if place.is_dir() else [("", RuntimeFile(place.read_bytes()))]:
            if not path or path.endswith(".py"):
                yield f"{PYTEST_FOLDER}/{place.name}/{path}".rstrip("/"), file


async def worked(given: JudgedTask, *lines: str) -> WorkVerdict:
    """The verdict after lines of shell."""
    runtime, before = await opened(given.setup)
    try:
        for line in lines:
            await runtime.exec(RuntimeCommand(argv=("/bin/sh", "-c", line), cwd=given.setup.cwd))
        return await judged(given, before, await runtime.snapshot(), instead_of=runtime)
    finally:
        await runtime.stop()


Made = Callable[..., JudgedTask]
Files = Mapping[str, str]
