"""The committed tasks are what their program makes, and each is solved by its solution and not by doing nothing."""

import io
import shutil
import sys
from pathlib import Path

import pytest

from env_service import workbench
from env_service.builtin.task_sets import HarborEnvironment, HarborOptions, RepositoryEnvironment, RepositoryOptions
from examples.task_sets import make_tasks
from tests.env_service.task_sets.conftest import PYTEST_FOLDER

FOLDER = Path(make_tasks.__file__).parent


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_the_sets_are_what_their_program_makes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(make_tasks, "HERE", tmp_path)

    make_tasks.main()

    assert (tmp_path / "repairs.jsonl").read_text() == (FOLDER / "repairs.jsonl").read_text()
    assert contents(tmp_path / "shell") == contents(FOLDER / "shell")
    assert len(list((FOLDER / "shell").iterdir())) == 20


@pytest.mark.usefixtures("pool")
@pytest.mark.parametrize("environment", [{}, {"PYTHONPATH": PYTEST_FOLDER}], ids=["plain", "pytest"])
async def test_every_repair_is_solved_by_its_patch_and_only_so(tmp_path: Path, environment: dict[str, str]) -> None:
    shutil.copy(FOLDER / "repairs.jsonl", tmp_path)
    options = RepositoryOptions(train_file=tmp_path / "repairs.jsonl", environment=environment)

    ended = await RepositoryEnvironment.tasks(options).try_all(RepositoryEnvironment(options).solution_fault)

    assert len(ended) == 20
    assert {each.where: fault for each, fault in ended if fault} == {}


@pytest.mark.usefixtures("pool")
async def test_every_task_for_a_shell_is_solved_by_its_script_and_only_so(tmp_path: Path) -> None:
    shutil.copytree(FOLDER / "shell", tmp_path / "shell")
    options = HarborOptions(train_folder=tmp_path / "shell")

    ended = await HarborEnvironment.tasks(options).try_all(HarborEnvironment(options).solution_fault)

    assert len(ended) == 20
    assert {each.where: fault for each, fault in ended if fault} == {}


def test_solutions_are_tried_by_a_command_that_names_what_is_left_out(tmp_path: Path) -> None:
    for name in ("rename", "remove-empty"):
        shutil.copytree(FOLDER / "shell" / name, tmp_path / "set" / name)
    (tmp_path / "set/rename/solution/solve.sh").write_text("true\n")
    (tmp_path / "run.toml").write_text(
        f"[env-service]\nmodel = {str(tmp_path)!r}\n[[env-service.environments]]\nname = 'work'\nsource = 'harbor'\n"
        f"options = {{ train_folder = 'set' }}\n"
    )
    said, config = io.StringIO(), ("--config", str(tmp_path / "run.toml"))
    nobody = ("--generator", "http://127.0.0.1:9")
    assert workbench.main(["try", "work", "--task", "1", *nobody, *config], out=said) == 1
    assert said.getvalue() == "its tests give 0 after its solution\n", "and no model is asked"
    said = io.StringIO()

    code = workbench.main(["try", "work", "--solutions", *config], out=said)

    assert code == 1
    assert said.getvalue() == (
        f"{tmp_path}/set/rename: its tests give 0 after its solution\n"
        "1 of 2 tasks are solved by their solution, and not without; the other 1 are left out\n"
    )
    again = HarborEnvironment.tasks(HarborOptions(train_folder=tmp_path / "set"))
    assert [again.task("train", at).data["folder"] for at in range(again.train_tasks)] == [
        str(tmp_path / "set/remove-empty")
    ]


def test_tasks_without_solutions_are_said_to_have_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert workbench.main(["try", "nim", "--solutions"], out=sys.stdout) == 2
    assert "the tasks of nim have no solutions that could be tried" in capsys.readouterr().err
