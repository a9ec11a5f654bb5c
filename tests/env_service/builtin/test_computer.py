"""Tasks on a computer: the committed ones do, the tools say what they did, and nothing but a solution is rewarded."""

import asyncio
import io
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from pydantic import JsonValue

from env_service.builtin import computer_check
from env_service.builtin.computer import ComputerEnvironment, ComputerOptions, ComputerTask, OutputCheck
from env_service.environments.interface import Action, EnvironmentUnavailable, Step, Task, ToolCall, text_of
from env_service.runtimes.config import RuntimeLimits, RuntimesConfig
from env_service.runtimes.pool import RuntimePool, use_runtimes
from examples.computer import make_tasks
from tests.env_service.peers import eventually
from tests.env_service.runtimes.conftest import keepers

FOLDER = Path(make_tasks.__file__).parent
SETS = ("shell", "repairs")


@pytest.fixture(autouse=True)
async def pool() -> AsyncIterator[RuntimePool]:
    made = use_runtimes(RuntimePool(RuntimesConfig(spare=0, limits=RuntimeLimits(memory_mib=128, disk_mib=8))))
    yield made
    await made.close()


def call(name: str, **arguments: JsonValue) -> Action:
    return Action("", calls=(ToolCall(name, arguments),))


SUBMIT = call("submit")


async def opened(kind: str, number: int) -> tuple[ComputerEnvironment, Task]:
    """The environment with a task of a committed file."""
    options = ComputerOptions(train_file=FOLDER / f"{kind}.jsonl")
    environment, task = ComputerEnvironment(options), ComputerEnvironment.tasks(options).task("train", number)
    await environment.reset(task, 0)
    return environment, task


async def shown(environment: ComputerEnvironment, name: str, **arguments: JsonValue) -> str:
    return text_of((await environment.step(call(name, **arguments))).observation)


async def left(environment: ComputerEnvironment, *lines: str) -> Step:
    """The end after some lines of shell."""
    for line in lines:
        await environment.step(call("shell", command=line))
    step = await environment.step(SUBMIT)
    await environment.close()
    return step


@pytest.mark.parametrize("kind", SETS)
def test_a_committed_set_is_what_its_program_makes_and_is_solved_by_its_solutions_only(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(make_tasks, "HERE", tmp_path)
    make_tasks.main()
    assert (tmp_path / f"{kind}.jsonl").read_text() == (FOLDER / f"{kind}.jsonl").read_text()
    said = io.StringIO()
    assert computer_check.main(["runtime", "check", str(FOLDER / f"{kind}.jsonl")], out=said) == 0
    assert said.getvalue() == "10 of 10 tasks are solved by their solution, and not without\n"


def test_a_user_that_no_engine_takes_is_refused_like_any_other_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        computer_check.main(["runtime", "check", "tasks.jsonl", "--kind", "engine", "--user", "root"])
    assert "env-service: error: user: " in capsys.readouterr().err


def test_a_task_whose_solution_fails_or_is_not_needed_is_said(tmp_path: Path) -> None:
    tasks = [
        {"name": "wrong", "prompt": "p", "checks": [{"run": "cat x", "prints": "1"}], "solution": "echo 2 > x"},
        {"name": "idle", "prompt": "p", "checks": [{"run": "echo 1", "prints": "1"}], "solution": ":"},
    ]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    said = io.StringIO()
    assert computer_check.main(["runtime", "check", str(tmp_path / "tasks.jsonl")], out=said) == 1
    assert "tasks.jsonl:1: wrong: 0% of its checks pass after its solution" in said.getvalue()
    assert "tasks.jsonl:2: idle: its checks pass before anything is done" in said.getvalue()


async def test_the_tools_say_what_they_did_and_what_they_did_not() -> None:
    environment, _ = await opened("repairs", 0)
    assert await shown(environment, "shell", command="echo here; false") == "here\nexit code 1"
    assert await shown(environment, "python", code="print(6 * 7)") == "42"
    assert await shown(environment, "view", path="slugs.py", first_line=3, lines=1) == (
        "    3      words = ''.join(sign if sign.isalnum() else ' ' for sign in title).split()\n… 1 more lines"
    )
    assert await shown(environment, "search", text="def slug") == "./slugs.py:1:def slug(title):"
    assert await shown(environment, "search", text="no such text") == "found nothing"
    assert await shown(environment, "edit", path="slugs.py", old="sign", new="s") == (
        "error: the old text is 4 times in slugs.py, expected once"
    )
    assert await shown(environment, "edit", path="none.py", old="a", new="b") == (
        "error: /work/none.py cannot be read: No such file or directory"
    )
    assert await shown(environment, "edit", path="new/file", old="", new="x\n") == "made"
    assert await shown(environment, "edit", path="new/file", old="", new="y\n") == (
        "error: new/file is there: say which text in it is to be replaced"
    )
    assert await shown(environment, "edit", path="slugs.py", old="sign if", new="sign.lower() if") == "replaced"
    assert await shown(environment, "shell", command="cat new/file; python3 test_slugs.py") == "x\npassed"
    await shown(environment, "edit", path="pages.py", old="", new="a\n\x0c\nb\u2028\n")
    assert await shown(environment, "view", path="pages.py") == "    1  a\n    2  \x0c\n    3  b\u2028"
    step = await environment.step(SUBMIT)
    assert (step.stop, step.reward, step.metrics["passed_checks"]) == ("solved", 1.0, 1.0)
    await environment.close()


async def test_a_task_is_checked_where_there_is_room_for_one_runtime() -> None:
    small = RuntimesConfig(max_runtimes=1, patience_s=5, limits=RuntimeLimits(memory_mib=128, disk_mib=8))
    pool = use_runtimes(RuntimePool(small))
    try:
        check = OutputCheck(run="cat x", prints="1")
        task = ComputerTask(prompt="p", checks=(check,), solution="echo 1 > x")
        assert await computer_check.fault_of(task, image="host") == ""
    finally:
        await pool.close()


async def test_work_that_is_done_is_judged_before_other_work_begins() -> None:
    small = RuntimesConfig(max_runtimes=1, spare=0, limits=RuntimeLimits(memory_mib=128, disk_mib=8))
    pool = use_runtimes(RuntimePool(small))
    try:
        done, _ = await opened("repairs", 0)
        later = asyncio.create_task(opened("repairs", 1))
        await eventually(lambda: pool._waiting == 1)
        async with asyncio.timeout(60):
            assert (await done.step(SUBMIT)).stop == "failed"
        await done.close()
        await (await later)[0].close()
    finally:
        await pool.close()


CHEATS = {
    "nothing": ":",
    "a module that ends": "echo 'import os; os._exit(0)' > slugs.py",
    "a module that prints what a test wants": "echo 'print(\"passed\")' > slugs.py",
    "other modules in the way": "for each in sys os site sitecustomize; do echo 'raise SystemExit' > $each.py; done",
    "another Python": "printf '#!/bin/sh\\necho passed' > python3; chmod +x python3; export PATH=/work:$PATH; "
    "mkdir -p /home/agent/.local/bin; cp python3 /home/agent/.local/bin; cp python3 /bin/python3",
    "settings of the shell": "echo 'alias python3=true' > /home/agent/.profile; echo 'cd /tmp' > /etc/profile",
    "files where the judge's are": "mkdir /judge; echo 'print(1)' > /judge/calls.py; chmod 555 /judge",
    "the folder is a link": "cd /; rm -rf /work; ln -s /etc /work",
    "the folder is gone": "rm -rf /work",
    "the folder is full": "i=0; while [ $i -lt 3000 ]; do : > f$i; i=$((i+1)); done; cat /dev/zero > full",
    "everything is killed": "python3 -c 'import os; os.kill(-1, 9)'",
}


@pytest.mark.parametrize("cheat", CHEATS)
async def test_no_cheat_is_rewarded(cheat: str) -> None:
    environment, _ = await opened("repairs", 0)
    assert (await left(environment, CHEATS[cheat])).reward == 0.0


async def test_checks_are_never_where_the_policy_is() -> None:
    environment, task = await opened("repairs", 0)
    (hidden,) = json.loads(json.dumps(task.data["checks"]))
    secret = "slug('A  B')"
    assert secret in hidden["files"]["/judge/calls.py"]
    command = f'ls /judge; grep -rlF "{secret}" / --exclude-dir=proc --exclude-dir=usr --exclude-dir=python 2>/dev/null'
    assert "cannot access '/judge'" in (said := await shown(environment, "shell", command=command))
    assert len(said.splitlines()) == 2, f"only {said} and an exit code"
    step = await left(environment, "sleep 1000 &")
    assert step.reward == 0.0


async def test_checks_run_in_a_computer_that_has_only_what_was_left_in_the_work_folder(tmp_path: Path) -> None:
    check = {"run": "[ -e /etc/mark ] || [ -e /tmp/mark ] || cat x", "prints": "1"}
    (tmp_path / "tasks.jsonl").write_text(json.dumps({"prompt": "p", "checks": [check]}) + "\n")
    options = ComputerOptions(train_file=tmp_path / "tasks.jsonl")
    environment = ComputerEnvironment(options)
    await environment.reset(ComputerEnvironment.tasks(options).task("train", 0), 0)
    assert (await left(environment, "echo 1 > x; touch /etc/mark /tmp/mark")).reward == 1.0


CALL = "python3 -c 'import sums; print(sums.double(21))'"
SAME_SECOND = "touch -d @1000000000"
WRONG, RIGHT = "def double(x):\n    return x + 3\n", "def double(x):\n    return x + x\n"


async def ended(tmp_path: Path, line: str, *checks: OutputCheck, files: dict[str, str]) -> Step:
    """The end of a task of one's own after a line of shell."""
    task = ComputerTask(prompt="p", files=files, checks=checks)
    (tmp_path / "tasks.jsonl").write_text(task.model_dump_json() + "\n")
    options = ComputerOptions(train_file=tmp_path / "tasks.jsonl")
    environment = ComputerEnvironment(options)
    await environment.reset(ComputerEnvironment.tasks(options).task("train", 0), 0)
    return await left(environment, line)


@pytest.mark.parametrize("place", ["__pycache__", "lib/__pycache__", "cached"])
async def test_bytecode_that_says_something_else_than_its_source_earns_nothing(tmp_path: Path, place: str) -> None:
    folder = place.removesuffix("__pycache__").rstrip("/") if place != "cached" else "linked"
    moved = "mv __pycache__ cached; ln -s cached __pycache__; cd ..; ln -s mine linked" if place == "cached" else ""
    compiled = "python3 -m compileall -q --invalidation-mode unchecked-hash sums.py"
    plant = f"mkdir -p mine {folder or '.'}; cd {'mine' if moved else folder or '.'}; printf '{RIGHT}' > sums.py; "
    plant += f"{compiled}; printf '{WRONG}' > sums.py; {moved}"
    check = OutputCheck(run=f"cd ./{folder}; {CALL}", prints="42")

    assert (await ended(tmp_path, plant, check, files={"sums.py": WRONG})).reward == 0.0


async def test_a_repair_of_the_same_second_and_size_as_the_fault_is_rewarded(tmp_path: Path) -> None:
    line = f"{SAME_SECOND} sums.py; {CALL}; printf '{RIGHT}' > sums.py"
    check = OutputCheck(run=f"{SAME_SECOND} sums.py; {CALL}", prints="42")

    assert (await ended(tmp_path, line, check, files={"sums.py": WRONG})).reward == 1.0


async def test_no_check_runs_the_files_of_the_one_before(tmp_path: Path) -> None:
    run = f"cd /judge; {SAME_SECOND} asks.py; python3 -c 'import asks'"
    checks = [OutputCheck(run=run, prints=said, files={"/judge/asks.py": f"print({said})\n"}) for said in "12"]
    # The work itself keeps bytecode of what it is asked by, so that it is asked the same again.
    keeps = "python3 -m compileall -q --invalidation-mode unchecked-hash asks.py"
    kept = checks[0].model_copy(update={"run": f"{run}; {keeps}"})

    assert (await ended(tmp_path, ":", *checks, files={})).reward == 1.0
    assert (await ended(tmp_path, ":", kept, checks[1], files={})).reward == 1.0


async def test_a_file_of_the_task_that_is_named_like_bytecode_stays_until_it_is_removed(tmp_path: Path) -> None:
    check = OutputCheck(run="[ -e old/__pycache__/a.pyc ] || echo gone", prints="gone")
    files = {"old/__pycache__/a.pyc": "junk", "old/a.py": ""}

    assert (await ended(tmp_path, ":", check, files=files)).reward == 0.0
    assert (await ended(tmp_path, "rm -r old/__pycache__", check, files=files)).reward == 1.0


async def test_a_computer_that_dies_is_nobodys_fault_and_no_reward_of_nought() -> None:
    environment, _ = await opened("shell", 0)
    for keeper in keepers():
        os.kill(keeper, signal.SIGKILL)
    with pytest.raises(EnvironmentUnavailable):
        await environment.step(SUBMIT)
    await environment.close()


async def test_a_computer_that_was_saved_is_restored_with_its_files() -> None:
    environment, _ = await opened("shell", 0)
    await environment.step(call("shell", command="mkdir kept; printf 'a\\nb' > kept/file; rm app.log"))
    saved = await environment.save()
    await environment.close()
    other, _ = await opened("shell", 0)
    assert "app.log" in await shown(other, "shell", command="ls")
    await other.restore(saved)
    assert await shown(other, "shell", command="cat kept/file; ls") == "a\nbkept"
    assert (await left(other)).stop == "failed"
