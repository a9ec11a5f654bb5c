"""The part that drivers share, run as they run it: by another Python, with nothing of ours on its path."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from env_service.agents.results import result_in
from env_service.environments.interface import AgentResult
from env_service.harnesses.drivers import driving
from tests.process_ends import all_end

DRIVERS = Path(driving.__file__).parent
TOLD: dict[str, object] = {
    "prompt": "Go.", "instructions": "", "data": {}, "folder": None, "max_turns": 3, "settings": {},
    "agent_file": None, "agent_name": "agent",
}  # fmt: skip
PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, sys.argv[1]], stdin=subprocess.PIPE, text=True)
child.stdin.write(sys.argv[2] + "\\n")
child.stdin.flush()
time.sleep(600)
"""


def driver(folder: Path, *lines: str) -> Path:
    file = folder / "driver.py"
    file.write_text("\n".join([f"import sys; sys.path.insert(0, {str(DRIVERS)!r})", "import driving", *lines]))
    return file


def ended(file: Path, environ: dict[str, str] | None = None, /, **told: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-E", "-s", file], input=json.dumps({**TOLD, **told}) + "\n", capture_output=True, text=True,
        env={"AGENT_MODEL": "policy", **(environ or {})}, check=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("answer", "said"), [("'it is 5'", "it is 5"), ("{'sum': 5}", '{"sum": 5}'), ("'ünï\\n'", "ünï\n"), ("5", "5")]
)
def test_an_answer_is_the_last_line_whatever_was_printed_before(tmp_path: Path, answer: str, said: str) -> None:
    file = driver(tmp_path, "driving.GivenTask()", "print('0.25', end='')", f"driving.finish({answer}, stop='done')")

    result = result_in(ended(file).stdout.splitlines()[-1])
    assert isinstance(result, AgentResult)
    assert (result.reward, result.stop, result.answer) == (0.0, "done", said)


def test_the_beginning_of_an_answer_is_kept_that_is_longer_than_what_is_read(tmp_path: Path) -> None:
    file = driver(tmp_path, "driving.GivenTask()", "driving.finish('ü' * 100_000)")

    line = ended(file).stdout.splitlines()[-1]
    result = result_in(line)
    assert len(line) < 64 << 10
    assert isinstance(result, AgentResult)
    assert set(result.answer or "") == {"ü"}


def test_an_agent_is_found_in_the_users_file_with_what_is_beside_it(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "beside.py").write_text("name = 'found'")
    (mine / "agents_of_mine.py").write_text("from beside import name\nboss = name")
    file = driver(tmp_path, "driving.finish(driving.GivenTask().agent())")

    told = {"agent_file": str(mine / "agents_of_mine.py")}
    assert '"answer": "found"' in ended(file, **told, agent_name="boss").stdout
    assert "agents_of_mine.py has no 'agent', which agent_name names" in ended(file, **told).stderr
    assert '"answer": "null"' in ended(file).stdout


def test_a_harness_that_runs_in_its_tasks_computer_runs_commands_there_itself(tmp_path: Path) -> None:
    lines = ["echo out; echo err >&2; exit 3", "kill -9 $$", "exec >&- 2>&-; sleep 60", "(sleep 60 &) ; env; pwd",
             "seq 1 100000"]  # fmt: skip
    ends = f"[driving.command(line, folder={str(tmp_path)!r}) for line in {lines}]"
    run = f"driving.finish([{{**end, 'output': end['output'][-9000:], 'all': len(end['output'])}} for end in {ends}])"
    environ = {"AGENT_INSIDE_COMMAND_S": "0.5", "OPENAI_API_KEY": "inside", "PATH": os.environ["PATH"]}

    result = result_in(ended(driver(tmp_path, run), environ).stdout.splitlines()[-1])
    assert isinstance(result, AgentResult)
    failed, killed, late, here, long = json.loads(result.answer or "")
    assert (failed["output"], failed["exit_code"], failed["timed_out"]) == ("out\nerr\n", 3, False)
    assert killed["exit_code"] == 137
    assert (late["timed_out"], late["exit_code"]) == (True, 137)
    assert (here["output"].splitlines()[-1], here["timed_out"]) == (str(tmp_path), False)
    assert not {"OPENAI_API_KEY=inside", "AGENT_MODEL=policy"} & set(here["output"].splitlines())
    assert (long["all"], long["cut"]) == (64 << 10, True)


def test_a_harness_dies_with_the_service(tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    os.mkfifo(begun)
    file = driver(
        tmp_path,
        "import os, time",
        "driving.GivenTask()",
        f"open({str(begun)!r}, 'w').write(str(os.getpid()))",
        "time.sleep(600)",
    )
    service = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(file), json.dumps(TOLD)], env={**os.environ, "AGENT_MODEL": "policy"}
    )
    pid = int(begun.read_text())
    service.send_signal(signal.SIGKILL)
    service.wait()

    assert all_end([pid])
