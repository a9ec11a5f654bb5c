"""Refusals of a service that cannot have its sandbox."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from reward_service.sandbox.pool import open_sandboxes
from reward_service.verifier.program import ExecutionConfig, Program
from reward_service.verifier.submission import UserError

USUAL = ExecutionConfig(concurrency=1, cgroup="off", packages=(), max_sessions=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"python": Path("/bin/false")}, "execution.python: /bin/false does not run as a Python"),
        ({"packages": ("no-such-distribution",)}, "execution.packages names 'no-such-distribution'.*pip install"),
        ({"folders": (Path("/no/such/folder"),)}, "the sandbox needs the folder /no/such/folder"),
        ({"cgroup": "/no/such/group"}, "execution.cgroup: no groups can be made below /no/such/group"),
    ],
)
async def test_a_setting_that_cannot_be_met_is_named(change: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        async with open_sandboxes(kind="required", config=USUAL.model_copy(update=change)):
            pass


async def test_without_a_sandbox_nothing_is_started() -> None:
    async with open_sandboxes(kind="off", config=USUAL) as sandboxes:
        assert sandboxes is None


async def test_listed_packages_and_folders_are_inside_and_others_are_not(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("shared")
    os.chmod(tmp_path, 0o755)  # programs are another user
    config = USUAL.model_copy(update={"packages": ("iniconfig",), "folders": (tmp_path,)})
    source = f"import iniconfig; print(open({str(tmp_path / 'data')!r}).read())\nimport pydantic"
    async with open_sandboxes(kind="required", config=config) as sandboxes:
        assert sandboxes is not None
        ended = await sandboxes.programs.run(Program(argv=("python", "-c", source)))
    assert (ended.stdout, b"No module named 'pydantic'" in ended.stderr) == (b"shared\n", True), ended


async def test_a_disk_of_another_size_is_what_the_program_gets() -> None:
    source = "import os; s = os.statvfs('/tmp'); print(s.f_blocks * s.f_frsize >> 20)"
    async with open_sandboxes(kind="required", config=USUAL) as sandboxes:
        assert sandboxes is not None
        program = Program(argv=("python", "-c", source))
        sizes = [
            (await sandboxes.programs.run(Program(argv=program.argv, limits=limits))).stdout
            for limits in (program.limits, type(program.limits)(disk_mib=100), program.limits)
        ]
    assert sizes == [b"32\n", b"100\n", b"32\n"]


def test_a_service_that_cannot_have_its_sandbox_does_not_start(tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    config.write_text("[reward-service]\nhttp.port = 0\nexecution = { cgroup = 'off', python = '/bin/false' }\n")
    command = [sys.executable, "-c", "from reward_service.command import main; main()", "--config", str(config)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, "does not run as a Python" in ended.stderr) == (78, True), ended.stderr
