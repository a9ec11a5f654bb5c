"""Folders in Harbor's format are read as they are, judged in a fresh copy, or refused by name."""

import logging
from pathlib import Path
from typing import cast

import pytest
from pydantic import JsonValue

from env_service.builtin.task_sets import HarborEnvironment, HarborOptions
from env_service.environments.interface import Action, Step, ToolCall, text_of
from env_service.environments.task_files import TaskFileError
from env_service.runtimes.interface import CommandEnd, RuntimeCommand, RuntimeFile
from env_service.runtimes.pool import RuntimePool, runtimes, use_runtimes
from env_service.task_sets.harbor import read_harbor_task
from env_service.task_sets.judging import reward_of
from env_service.task_sets.preparing import with_image_path
from env_service.task_sets.records import NamedTests, ScriptTests, TaskUnfit
from env_service.task_sets.trying import fault_of
from tests.env_service.task_sets.conftest import with_pytest, worked

TASK = """schema_version = "1.1"
[task]
name = "mine/greet"
keywords = ["easy"]
[metadata]
anything = 1
[verifier]
timeout_sec = 20.0
env = { WANTED = "${WORD:-hello}" }
[agent]
timeout_sec = 5
[environment]
cpus = 1
memory_mb = 64
storage_mb = 100
allow_internet = false
[solution]
env = { SAID = "hello" }
"""
TEST = """#!/bin/bash
mkdir -p /logs/verifier
if [ "$(cat /app/greeting.txt)" = "$WANTED" ] && [ "$(cat "$(dirname "$0")/more")" = x ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
"""


def folder(below: Path, name: str = "greet", **files: str) -> Path:
    """A task's folder; files by name with `__` for a slash and `_dot_` for a dot, an empty one not written."""
    usual = {
        "task.toml": TASK,
        "instruction.md": "<!-- canary GUID 1 -->\n\nWrite the word of word.txt into greeting.txt.\n",
        "environment/Dockerfile": "FROM ubuntu:24.04\nWORKDIR /app\nCOPY word.txt .\n",
        "environment/word.txt": "hello\n",
        "tests/test.sh": TEST,
        "tests/more": "x\n",
        "solution/solve.sh": '#!/bin/bash\ncp word.txt greeting.txt && cat "$(dirname "$0")/extra" && echo "$SAID"\n',
        "solution/extra": "",
    }
    given = {name.replace("__", "/").replace("_dot_", "."): text for name, text in files.items()}
    for path, text in {**usual, **given}.items():
        if text or path == "solution/extra":
            (below / name / path).parent.mkdir(parents=True, exist_ok=True)
            (below / name / path).write_text(text)
    return below / name


IMAGES = {"*": "host"}


def test_a_folder_is_read_as_it_is(tmp_path: Path) -> None:
    task = read_harbor_task(folder(tmp_path), images=IMAGES)

    assert (task.name, task.prompt) == ("mine/greet", "Write the word of word.txt into greeting.txt.")
    assert (task.setup.image, task.setup.cwd, task.carried) == ("host", "/app", ("/app",))
    assert isinstance(task.tests, ScriptTests)
    assert sorted(task.tests.files) == ["/tests/more", "/tests/test.sh"]
    assert (task.tests.wall_s, task.tests.environment) == (20.0, {"WANTED": "hello"})
    assert task.solution is not None
    assert task.solution.environment == {"SAID": "hello"}


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"task_dot_toml": "[environment]\ngpus = 1\n"}, "it wants 1 GPUs"),
        ({"task_dot_toml": "[[steps]]\nname = 'a'\n"}, "tasks in several steps"),
        ({"task_dot_toml": "[[environment.mcp_servers]]\nname = 'a'\n"}, "MCP servers"),
        ({"task_dot_toml": "[verifier]\nenvironment_mode = 'separate'\n"}, "environment_mode is 'separate'"),
        ({"task_dot_toml": "[verifier.environment]\ncpus = 1\n"}, "or verifier.environment is there"),
        ({"task_dot_toml": "[[verifier.collect]]\ncommand = 'dump'\n"}, "verifier.collect has commands"),
        ({"task_dot_toml": "[environment]\nos = 'Windows'\n"}, "it is for Windows"),
        ({"task_dot_toml": "[environment.tpu]\ntype = 'v6e'\ntopology = '2x4'\n"}, "it wants a TPU"),
        ({"task_dot_toml": "[environment.healthcheck]\ncommand = 'curl x'\n"}, "healthcheck waits for a service"),
        (
            {"task_dot_toml": "[agent]\nnetwork_mode = 'allowlist'\nallowed_hosts = ['a.example']\n"},
            "it has to reach a.example",
        ),
        ({"trajectory_dot_json": "{}"}, "trajectory.json has a conversation"),
        ({"task_dot_toml": "[verifier]\nenv = { A = '${SECRET}' }\n"}, "wants the variable SECRET"),
        ({"task_dot_toml": "[verifier]\ntimeout_sec = -1\n"}, "timeout_sec"),
        ({"task_dot_toml": "nonsense"}, "cannot be read"),
        ({"environment__docker-compose_dot_yaml": "services: {}"}, "services or mounts of its own"),
        ({"task_dot_toml": "", "task_dot_yaml": "instruction: x"}, "harbor task migrate -i .*greet -o NEW"),
        ({"tests__test_dot_sh": ""}, "no tests/test.sh"),
        ({"instruction_dot_md": "# canary\n"}, "is empty"),
        ({"environment__Dockerfile": ""}, "no environment/Dockerfile, and images names none"),
        ({"environment__Dockerfile": "FROM x\nRUN apt-get install -y git\n"}, "Dockerfile:2: RUN apt-get install"),
    ],
)
def test_what_a_runtime_is_not_is_refused_by_name(tmp_path: Path, more: dict[str, str], said: str) -> None:
    with pytest.raises(TaskUnfit, match=said):
        read_harbor_task(folder(tmp_path, **more), images=IMAGES)


def test_a_prebuilt_image_is_taken_by_its_name_or_the_tasks(tmp_path: Path) -> None:
    prebuilt = folder(
        tmp_path, environment__Dockerfile="", task_dot_toml="[environment]\ndocker_image = 'a/b:1'\nworkdir = '/x'\n"
    )

    assert read_harbor_task(prebuilt, images={"a/b:1": "mine"}).setup.image == "mine"
    assert read_harbor_task(prebuilt, images={"greet": "other"}).setup.image == "other"
    assert read_harbor_task(prebuilt, images=IMAGES).setup.cwd == "/x"


@pytest.mark.parametrize(
    ("files", "reward"),
    [
        ({"reward.txt": b"1\n"}, 1.0),
        ({"reward.txt": b"0.25"}, 0.25),
        ({"reward.txt": b"1", "reward.json": b'{"reward": 0.5, "tests": 3}'}, 0.5),
        ({"reward.json": b'{"accuracy": 0.75}'}, 0.75),
        ({"reward.json": b'{"a": 1, "b": 2}'}, 0.0),
        ({"reward.json": b"[" * 100_000}, 0.0),
        ({"reward.json": b'{"reward": NaN}'}, 0.0),
        ({"reward.txt": b"inf"}, 0.0),
        ({"reward.txt": b"\xff"}, 0.0),
        ({}, 0.0),
    ],
)
def test_a_reward_is_read_as_harbor_writes_it(files: dict[str, bytes], reward: float) -> None:
    assert reward_of({name: RuntimeFile(content) for name, content in files.items()}) == reward


@pytest.mark.usefixtures("pool")
@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            """echo '{"correctness": 1, "performance": 0.5}' > /logs/verifier/reward.json""",
            "reward.json has correctness, performance, none of which is the reward: expected `reward` among them",
        ),
        ("true", "there is no reward.txt or reward.json in /logs/verifier: expected one of them from tests/test.sh"),
    ],
)
async def test_a_script_that_names_no_reward_is_told_so(tmp_path: Path, line: str, said: str) -> None:
    made = folder(tmp_path)
    (made / "tests/test.sh").write_text(f"#!/bin/sh\n{line}\n")

    fault = await fault_of(read_harbor_task(made, images=IMAGES))

    assert fault.startswith("its tests give 0 after its solution")
    assert said in fault


@pytest.mark.usefixtures("pool")
async def test_a_solution_is_rewarded_and_nothing_is_not(tmp_path: Path) -> None:
    assert await fault_of(read_harbor_task(folder(tmp_path), images=IMAGES)) == ""


@pytest.mark.usefixtures("pool")
async def test_a_solution_that_works_outside_of_the_folder_is_said_and_done_where_that_is_carried(
    tmp_path: Path,
) -> None:
    files = {
        "tests__test_dot_sh": "mkdir -p /logs/verifier; cat /srv/done > /logs/verifier/reward.txt",
        "solution__solve_dot_sh": "mkdir -p /srv; echo 1 > /srv/done; touch pyproject.toml",
    }
    made = folder(tmp_path, **files)

    fault = await fault_of(read_harbor_task(made, images=IMAGES))
    assert fault.startswith(
        "its tests give 0 after its solution; not carried over (allow): /app/pyproject.toml; changed outside of /app "
        "(carry): /srv/done"
    )
    assert await fault_of(read_harbor_task(made, images=IMAGES, carry=("/srv",))) == ""


@pytest.mark.usefixtures("pool")
async def test_what_a_task_names_as_left_for_its_judges_is_carried_but_never_programs(tmp_path: Path) -> None:
    files = {
        "task_dot_toml": "artifacts = ['/srv/done', '/usr/bin', '/', { source = '/data/' }, '../x']\n",
        "tests__test_dot_sh": "mkdir -p /logs/verifier; cat /srv/done > /logs/verifier/reward.txt",
        "solution__solve_dot_sh": "mkdir -p /srv; echo 1 > /srv/done",
    }

    task = read_harbor_task(folder(tmp_path, **files), images=IMAGES)

    assert task.carried == ("/app", "/srv/done", "/data")
    assert await fault_of(task) == ""


def test_a_compose_file_of_another_name_is_a_file_of_the_task(tmp_path: Path) -> None:
    made = folder(
        tmp_path, environment__Dockerfile="FROM x\nCOPY compose.yaml /app/\n", environment__compose_dot_yaml="x"
    )

    assert read_harbor_task(made, images=IMAGES).setup.image == "host"


@pytest.mark.usefixtures("pool")
async def test_programs_of_the_image_are_found_where_a_dockerfile_adds_to_their_path(tmp_path: Path) -> None:
    said = (
        'FROM x\nENV USUAL=$PATH\nENV PATH="/opt/own:${PATH}"\n'
        'RUN test "/opt/own:$USUAL" = "$PATH" && mkdir -p /opt/own && printf "#!/bin/sh\\nls" > /opt/own/mine\n'
        "RUN chmod 755 /opt/own/mine && mine\nCOPY word.txt /app/\n"
    )

    assert await fault_of(read_harbor_task(folder(tmp_path, environment__Dockerfile=said), images=IMAGES)) == ""


class SilentComputer:
    """A computer whose shell tells nothing; and the pool that starts it."""

    async def start(self, _image: str) -> "SilentComputer":
        return self

    async def exec(self, _command: RuntimeCommand) -> CommandEnd:
        return CommandEnd(exit_code=127, signal=None, stdout=b"", stderr=b"sh: not found")

    async def stop(self) -> None:
        """Nothing is left."""


async def test_a_path_that_the_image_does_not_tell_is_no_empty_one(tmp_path: Path) -> None:
    made = folder(tmp_path, environment__Dockerfile="FROM x\nENV PATH=/opt/own:$PATH\nCOPY word.txt /app/\n")
    usual = runtimes()
    use_runtimes(cast("RuntimePool", SilentComputer()))
    try:
        with pytest.raises(TaskUnfit, match="image host does not say its PATH by /bin/sh: sh: not found"):
            await with_image_path(read_harbor_task(made, images=IMAGES))
    finally:
        use_runtimes(usual)


INSTALLS = """#!/bin/bash
set -euo pipefail
apt-get update && apt-get install -y curl
curl -LsSf https://astral.sh/uv/0.9.5/install.sh | sh
source $HOME/.local/bin/env
pip install -q pytest==8.4.1
uv venv .own && source .own/bin/activate
uv pip install pytest==8.4.1
uv run --with pytest true
uvx -p 3.13 --with pytest==8.4.1 --quiet test -f /app/done && echo 1 > /logs/verifier/reward.txt
"""


@pytest.mark.usefixtures("pool")
async def test_scripts_that_fetch_their_test_runner_find_the_images(tmp_path: Path) -> None:
    made = folder(
        tmp_path, tests__test_dot_sh=INSTALLS, solution__solve_dot_sh="set -e; apt-get install -y jq; touch done"
    )

    assert await fault_of(read_harbor_task(made, images=IMAGES, network_steps="skip")) == ""
    assert await fault_of(read_harbor_task(made, images=IMAGES)) != ""


@pytest.mark.usefixtures("pool")
async def test_what_scripts_fetch_beside_installers_is_missed_where_they_do(tmp_path: Path) -> None:
    done = "apt-get install -y jq; curl -s http://127.0.0.1:9/ || echo lost; uvx jqq . ; touch done"
    made = folder(tmp_path, tests__test_dot_sh="echo 0 > /logs/verifier/reward.txt", solution__solve_dot_sh=done)

    fault = await fault_of(read_harbor_task(made, images=IMAGES, network_steps="skip"))

    assert fault.startswith("its tests give 0 after its solution\n")
    assert "apt-get install -y jq: not done, there is no network; the image has to have it" in fault
    assert "lost" in fault
    assert "jqq: not found" in fault


@pytest.mark.usefixtures("pool")
async def test_a_line_of_the_dockerfile_that_fails_is_said(tmp_path: Path) -> None:
    made = folder(tmp_path, environment__Dockerfile="FROM x\nRUN echo why; exit 3\n")

    fault = await fault_of(read_harbor_task(made, images=IMAGES))

    assert fault == f"{made}/environment/Dockerfile:2: RUN echo why; exit 3: ends with 3 in image host: why"


LIES = {
    "a reward that is there": "mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt; chmod 444 /logs/verifier/*",
    "the script is there already": "mkdir -p /tests; echo 'echo 1 > /logs/verifier/reward.txt' > /tests/test.sh",
    "an answer that is a link to what judges": "ln -s /proc/self/environ greeting.txt",
    "programs of its own": "mkdir -p bin; printf '#!/bin/sh\\necho hello\\n' > bin/cat; chmod +x bin/cat; "
    "cp bin/cat /usr/local/bin/cat; cp bin/cat /bin/cat; echo 'PATH=/app/bin:$PATH' > /home/agent/.bashrc",
    "the folder is a link": "cd /; cp -r app srv; rm -rf /app; ln -s /srv /app",
}


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.usefixtures("pool")
async def test_no_lie_is_rewarded(tmp_path: Path, lie: str) -> None:
    assert (await worked(read_harbor_task(folder(tmp_path), images=IMAGES), LIES[lie])).reward == 0.0


# The policy's program runs while the tests do, and writes the reward for as long as it lives.
FORGER = """import os, sys
if os.fork() == 0:
    os.setsid()
    for handle in range(3):
        os.close(handle)
    while True:
        try:
            with open('/logs/verifier/mine', 'w') as file:
                file.write('1')
            os.replace('/logs/verifier/mine', '/logs/verifier/reward.txt')
        except OSError:
            pass
print('wrong')
"""
SCRIPT = """cd /tests
if python3 test_it.py; then good=1; else good=0; fi
echo $good > /logs/verifier/reward.txt
sleep 0.4
"""
TEST_IT = """import subprocess, sys
def test_said():
    assert subprocess.run([sys.executable, '/app/say.py'], capture_output=True, text=True).stdout == 'right\\n'
"""
RUNNER = """
if __name__ == '__main__':
    import test_it
    for name, test in list(vars(test_it).items()):
        if name.startswith('test'):
            test()
"""


@pytest.mark.usefixtures("pool")
async def test_a_reward_that_comes_whatever_the_tests_say_is_none(tmp_path: Path) -> None:
    made = folder(
        tmp_path,
        tests__test_dot_sh=SCRIPT,
        tests__test_it_dot_py=TEST_IT + RUNNER,
        solution__solve_dot_sh="echo \"print('right')\" > say.py",
    )
    task = read_harbor_task(made, images=IMAGES)
    assert await fault_of(task) == ""

    verdict = await worked(task, f"cat > say.py <<'END'\n{FORGER}END")

    assert (verdict.reward, verdict.tampered) == (0.0, True)


FETCHES = (
    "curl -LsSf https://x.example/install.sh | sh\nuvx pytest /tests/test_it.py && echo 1 > /logs/verifier/reward.txt\n"
)
VALUES = """import sys
import pytest
sys.path.insert(0, '/app')
from answer import value
@pytest.mark.parametrize('times', [1, 2])
def test_value(times):
    assert times * value() == times * 7
def test_type():
    assert isinstance(value(), int)
"""
ANY = """class Any(int):
    def __eq__(self, other):
        return True
    def __rmul__(self, other):
        return self
"""


def test_tests_of_python_can_be_taken_in_place_of_a_script(tmp_path: Path) -> None:
    made = folder(tmp_path, tests__test_dot_sh=FETCHES, tests__test_it_dot_py=VALUES)

    task = read_harbor_task(made, images=IMAGES, judge="pytest")

    assert isinstance(task.tests, NamedTests)
    assert task.tests.must_change == ("test_it.py::test_value", "test_it.py::test_type")
    assert (task.tests.folder, task.tests.wall_s) == ("/tests", 20.0)
    with pytest.raises(TaskUnfit, match=r"no tests in tests/test_\*\.py"):
        read_harbor_task(folder(tmp_path, "other"), images=IMAGES, judge="pytest")


@pytest.mark.usefixtures("pool")
async def test_a_task_whose_script_would_fetch_pytest_is_judged_by_that_of_the_image(tmp_path: Path) -> None:
    solution = "printf 'def value():\\n    return 7\\n' > answer.py"
    made = folder(tmp_path, tests__test_dot_sh=FETCHES, tests__test_it_dot_py=VALUES, solution__solve_dot_sh=solution)
    task = with_pytest(read_harbor_task(made, images=IMAGES, judge="pytest"))

    assert await fault_of(task) == ""
    some = await worked(task, "printf 'def value():\\n    return 8\\n' > answer.py")
    assert (some.reward, some.passed, some.tampered) == (0.0, 0.5, False)
    lie = await worked(task, f"cat > answer.py <<'END'\n{ANY}def value():\n    return Any(0)\nEND")
    assert (lie.reward, lie.tampered) == (0.0, True)


def call(name: str, **arguments: JsonValue) -> Action:
    return Action("", calls=(ToolCall(name, arguments),))


@pytest.mark.usefixtures("pool")
async def test_the_policy_works_in_the_tasks_own_folder_by_its_tools(tmp_path: Path) -> None:
    folder(tmp_path)
    options = HarborOptions(train_folder=tmp_path, images=IMAGES)
    environment = HarborEnvironment(options)
    opening = await environment.reset(HarborEnvironment.tasks(options).task("train", 0), 0)
    assert "in the folder /app" in text_of(opening.prompt)
    assert "/work" not in str(opening.tools)
    assert text_of((await environment.step(call("shell", command="pwd; ls -A"))).observation) == "/app\nword.txt"
    await environment.step(call("edit", path="greeting.txt", old="", new="hello\n"))
    step: Step = await environment.step(call("submit"))
    await environment.close()

    assert (step.stop, step.reward, step.metrics["tampered"]) == ("solved", 1.0, 0.0)


@pytest.mark.usefixtures("pool")
async def test_tasks_that_do_not_do_are_said_and_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder(tmp_path, "good")
    folder(tmp_path, "idle", tests__test_dot_sh="echo 1 > /logs/verifier/reward.txt")
    folder(tmp_path, "refused", environment__Dockerfile="FROM x\nRUN curl x\n")
    folder(tmp_path, "unsolved", solution__solve_dot_sh="true")
    options = HarborOptions(train_folder=tmp_path, images=IMAGES)
    environment, tasks = HarborEnvironment(options), HarborEnvironment.tasks(options)
    assert tasks.train_tasks == 3

    ended = await tasks.try_all(environment.solution_fault)

    assert {Path(each.where).name: fault.splitlines()[0] if fault else "" for each, fault in ended} == {
        "good": "",
        "idle": "its tests give 1 before anything is done",
        "unsolved": "its tests give 0 after its solution",
    }
    with caplog.at_level(logging.WARNING):
        again = HarborEnvironment.tasks(options)
    assert [again.task("train", at).data["folder"] for at in range(again.train_tasks)] == [str(tmp_path / "good")]
    assert f"left out: {tmp_path}/idle: its tests give 1 before anything is done" in caplog.text
    assert "refused/environment/Dockerfile:2: RUN curl x wants the network" in caplog.text
    (tmp_path / "unsolved/solution/solve.sh").write_text("cp word.txt greeting.txt")
    assert HarborEnvironment.tasks(options).train_tasks == 2, "a task that was changed is to be tried again"


def test_a_folder_without_a_task_that_is_fit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TaskFileError, match=r"holds no task: expected folders with a task\.toml$"):
        HarborEnvironment.tasks(HarborOptions(train_folder=tmp_path, images=IMAGES))
    (tmp_path / "older").mkdir()
    (tmp_path / "older/task.yaml").write_text("instruction: x")
    with pytest.raises(TaskFileError, match="Terminal-Bench's first form: `harbor task migrate"):
        HarborEnvironment.tasks(HarborOptions(train_folder=tmp_path, images=IMAGES))
    folder(tmp_path, tests__test_dot_sh="")
    with pytest.raises(TaskFileError, match=r"no task is fit: .*no tests/test\.sh"):
        HarborEnvironment.tasks(HarborOptions(train_folder=tmp_path, images=IMAGES))
