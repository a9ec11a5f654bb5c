"""A small repository with a mistake, the tests that show it, and the verdict on what lines of shell leave of it."""

import importlib.util
from collections.abc import AsyncIterator, Callable, Mapping
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

LIMITS = RuntimeLimits(memory_mib=192, disk_mib=32, command_s=60)
SOURCE = "def double(x):\n    return x + x + 1\n\n\ndef half(x):\n    return x // 2\n"
RIGHT = SOURCE.replace(" + 1", "")
TESTS = "from shop.sums import double, half\n\n\ndef test_half():\n    assert half(9) == 4\n"
HIDDEN = f"{TESTS}\n\ndef test_double():\n    assert double(4) == 8\n"
FIX = "sed -i 's/ + 1$//' shop/sums.py"


@pytest.fixture
async def pool() -> AsyncIterator[RuntimePool]:
    """Runtimes with small limits, none of them warm."""
    made = use_runtimes(RuntimePool(RuntimesConfig(spare=0, limits=LIMITS)))
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


def with_pytest(given: JudgedTask) -> JudgedTask:
    """The task on a computer that has pytest."""
    files: dict[str, RuntimeFile] = {}
    for name in ("pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments"):
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None:
            folder = Path(spec.origin).parent
            files |= {
                f"/opt/lib/{name}/{path}": file for path, file in files_in(folder).items() if path.endswith(".py")
            }
    step = SetupStep(files=files)
    environment = {"PYTHONPATH": "/opt/lib", "PYTHONDONTWRITEBYTECODE": "1"}
    return replace(given, setup=replace(given.setup, steps=(step, *given.setup.steps), environment=environment))


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
