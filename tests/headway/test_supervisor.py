"""Real children, real signals: what ends what, what is left behind, and what is seen."""

import contextlib
import errno
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from headway.supervisor import ProcessCommand, children
from services.local_processes import each_process
from tests.process_ends import all_end

ROOT = Path(__file__).parents[2]
MARK = "HEADWAY_TEST_MARK"

SUPERVISOR = """
import json, logging, os, sys
from services.logs import configure_logging
from headway.supervisor import RestartPolicy
from headway.supervisor import ProcessCommand, StopLimits, Supervisor

own = os.getpid()
def complain(event, arguments):
    if event == "import" and os.getpid() != own:
        os.write(2, b"imported between fork and exec\\n")
sys.addaudithook(complain)

configure_logging("headway")
def command(again, arguments, environment, **fields):
    pairs = tuple((name, value) for name, value in environment)
    restarted = again and (lambda: tuple(again))
    return ProcessCommand(arguments=tuple(arguments), again=restarted, environment=pairs, **fields)
commands = [command(**one) for one in json.loads(sys.argv[1])]
limits = json.loads(sys.argv[2])
restarts = RestartPolicy(**{"first_s": 0.0, **limits.pop("restarts", {})})
sys.exit(Supervisor(commands, limits=StopLimits(restarts=restarts, **limits)).run())
"""

IDLE = "import signal; print('up', flush=True); signal.pause()"
# Says when it stops, and ends with 0, as the real processes do.
POLITE = """
import logging, signal, sys
def stop(*_):
    {on_stop}
    sys.stderr.write("{name} stops\\n")
    sys.exit({code})
signal.signal(signal.SIGTERM, stop)
sys.stderr.write("{name} is up\\n")
{once_up}
while True: signal.pause()
"""
STUBBORN = """
import os, signal
signal.signal(signal.SIGTERM, lambda *_: os.write(2, b"will not stop\\n"))
os.write(2, b"stubborn is up\\n")
while True: signal.pause()
"""
# A grandchild in a session of its own, deaf to SIGTERM, whose parent does not care about it.
WITH_GRANDCHILD = """
import signal, subprocess, sys
code = "import signal; signal.signal(15, signal.SIG_IGN); print('grandchild is up', flush=True); signal.pause()"
child = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
signal.pause()
"""


class SupervisorProcess:
    """A supervisor in a process of its own, and everything that descends from it."""

    def __init__(self, *commands: ProcessCommand, limits: dict[str, Any], output: int = subprocess.PIPE) -> None:
        self.mark = uuid.uuid4().hex
        described = json.dumps([described_command(command) for command in commands])
        self.process = subprocess.Popen(
            [sys.executable, "-c", SUPERVISOR, described, json.dumps(limits)],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, MARK: self.mark},
            cwd=ROOT,
        )
        self.seen = b""

    def read_until(self, *texts: str, timeout_s: float = 20.0) -> None:
        """Reads output until all the texts have been seen."""
        assert self.process.stdout is not None
        deadline = time.monotonic() + timeout_s
        while not all(text.encode() in self.seen for text in texts):
            ready = select.select([self.process.stdout], [], [], deadline - time.monotonic())[0]
            data = os.read(self.process.stdout.fileno(), 1 << 16) if ready else b""
            assert data, f"{texts} did not come: {self.seen.decode()}"
            self.seen += data

    def end(self, timeout_s: float = 20.0) -> tuple[int, str]:
        """The exit code and all output, when it has ended; nothing may be left behind."""
        rest, _ = self.process.communicate(timeout=timeout_s)
        self.seen += rest or b""
        assert descendants(self.mark) == []
        return self.process.returncode, self.seen.decode()


@pytest.fixture(autouse=True)
def hangups_end() -> Iterator[None]:
    """Whoever starts the tests under nohup has them ignore SIGHUP, and so would all that they start."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture
def cleaned() -> Iterator[list[SupervisorProcess]]:
    """Commands that were started, killed at the end of the test should it fail."""
    started: list[SupervisorProcess] = []
    yield started
    for running in started:
        running.process.kill()
        running.process.wait()
        if running.process.stdout is not None:
            running.process.stdout.close()
        for pid in descendants(running.mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def descendants(mark: str) -> list[int]:
    """Processes that carry the mark in their environment, but for zombies, which have none any more."""
    return [pid for pid, environment in each_process("environ") if f"{MARK}={mark}".encode() in environment]


def described_command(command: ProcessCommand) -> dict[str, Any]:
    again = None if command.again is None else command.again()
    return {**{field.name: getattr(command, field.name) for field in fields(ProcessCommand)}, "again": again}


def start(
    cleaned: list[SupervisorProcess],
    *commands: ProcessCommand,
    restarts: dict[str, float] | None = None,
    **limits: float,
) -> SupervisorProcess:
    running = SupervisorProcess(*commands, limits={"restarts": restarts or {}, **limits})
    cleaned.append(running)
    return running


def helper(code: str, *, name: str = "helper") -> ProcessCommand:
    return ProcessCommand(name, (sys.executable, "-c", code))


def leader(code: str) -> ProcessCommand:
    return ProcessCommand("leader", (sys.executable, "-c", code), is_leader=True)


def polite(name: str, *, code: int = 0, stop_stage: int = 0, once_up: str = "", on_stop: str = "") -> ProcessCommand:
    program = POLITE.format(name=name, code=code, once_up=once_up, on_stop=on_stop)
    return ProcessCommand(name, (sys.executable, "-c", program), stop_stage=stop_stage)


def fifo(tmp_path: Path) -> tuple[str, str]:
    """Code that says that it is time, and code that waits for that."""
    path = str(tmp_path / "fifo")
    os.mkfifo(path)
    return f"open({path!r}, 'w').close()", f"open({path!r}).read()\n"


@pytest.mark.parametrize("code", [0, 1, 5])
def test_the_leaders_end_ends_all_with_its_exit_code(cleaned: list[SupervisorProcess], code: int) -> None:
    running = start(cleaned, polite("helper"), leader(f"raise SystemExit({code})"))
    assert running.end()[0] == code


def test_after_the_result_of_a_good_run_nothing_is_printed(cleaned: list[SupervisorProcess], tmp_path: Path) -> None:
    tell, wait = fifo(tmp_path)
    training = leader(wait + "import sys; print('the table', flush=True); sys.stderr.write('last step\\n')")
    code, output = start(cleaned, polite("helper", once_up=tell), training).end()
    assert (code, output.splitlines()) == (0, ["helper is up", "last step", "the table"])


def test_a_helper_that_fails_while_it_is_stopped_is_heard(cleaned: list[SupervisorProcess], tmp_path: Path) -> None:
    tell, wait = fifo(tmp_path)
    failing = polite("helper", once_up=tell, code=1)
    code, output = start(cleaned, failing, leader(wait + "print('the table')")).end()
    assert code == 0
    assert output.splitlines() == ["helper is up", "the table", "helper stops"]


def test_a_leader_that_is_killed_too_often_is_named_with_its_signal_and_its_last_lines(
    cleaned: list[SupervisorProcess],
) -> None:
    killed = leader("import os, sys; print('last words', file=sys.stderr, flush=True); os.kill(os.getpid(), 9)")
    code, output = start(cleaned, killed, polite("helper"), restarts={"most": 2}).end()
    assert code == 137
    assert "WARNING leader was killed by SIGKILL; started again in 0 s (2 of 2)" in output
    told = output[output.index("ERROR leader was killed by SIGKILL, after 2 restarts: stopping all.") :]
    assert "Its last lines:\n    last words" in told


def test_a_leader_that_was_killed_is_started_again_with_other_arguments_and_its_end_ends_all(
    cleaned: list[SupervisorProcess],
) -> None:
    resumed = (sys.executable, "-c", "print('resumed'); raise SystemExit(3)")
    killed = (sys.executable, "-c", "import os; print('began', flush=True); os.kill(os.getpid(), 11)")
    training = ProcessCommand("leader", killed, is_leader=True, again=lambda: resumed)
    code, output = start(cleaned, polite("helper"), training).end()
    assert code == 3
    assert output.count("began\n") == output.count("resumed\n") == 1
    assert "leader was killed by SIGSEGV; started again in 0 s (1 of 5)" in output


def test_a_leader_that_asks_for_a_new_start_gets_one_and_in_the_end_its_code_is_passed_on(
    cleaned: list[SupervisorProcess],
) -> None:
    asking = (sys.executable, "-c", "print('began', flush=True); raise SystemExit(75)")
    resumed = (sys.executable, "-c", "print('resumed', flush=True); raise SystemExit(75)")
    training = ProcessCommand("leader", asking, is_leader=True, again=lambda: resumed)
    code, output = start(cleaned, polite("helper"), training, restarts={"most": 2}).end()
    assert code == 75
    assert (output.count("began\n"), output.count("resumed\n")) == (1, 2)
    assert "leader has ended with code 75; started again in 0 s (2 of 2)" in output


def test_a_leader_that_fails_by_itself_is_not_started_again(cleaned: list[SupervisorProcess]) -> None:
    code, output = start(cleaned, leader("raise SystemExit(1)"), polite("helper")).end()
    assert code == 1
    assert "started again" not in output


def test_a_helper_that_crashes_is_started_again_a_few_times(cleaned: list[SupervisorProcess]) -> None:
    crashing = helper("import sys; print('started', file=sys.stderr, flush=True); raise SystemExit(7)")
    code, output = start(cleaned, crashing, leader(IDLE), restarts={"most": 3}).end()
    assert code == 1
    assert output.count("\nstarted\n") + output.startswith("started\n") == 4
    for number in (1, 2, 3):
        assert f"WARNING helper has ended with code 7; started again in 0 s ({number} of 3)" in output
    assert "ERROR helper has ended with code 7, after 3 restarts: stopping all. Its last lines:" in output


def test_without_restarts_the_first_death_ends_all(cleaned: list[SupervisorProcess]) -> None:
    code, output = start(cleaned, helper("raise SystemExit(7)"), leader(IDLE), restarts={"most": 0}).end()
    assert code == 1
    assert "ERROR helper has ended with code 7: stopping all" in output
    assert "started again" not in output


def test_a_helper_that_lived_long_enough_has_all_its_restarts_again(
    cleaned: list[SupervisorProcess], tmp_path: Path
) -> None:
    tell, wait = fifo(tmp_path)
    starts = str(tmp_path / "starts")
    crashing = f"""
open({starts!r}, "a").write("x")
if len(open({starts!r}).read()) == 4: {tell}
raise SystemExit(7)
"""
    limits = {"most": 1, "stable_s": 0.0}
    code, output = start(cleaned, helper(crashing), leader(wait), restarts=limits).end()
    assert code == 0
    assert output.count("(1 of 1)") >= 3


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_all_while_a_restart_is_waited_for(
    cleaned: list[SupervisorProcess], number: signal.Signals
) -> None:
    running = start(
        cleaned, helper("raise SystemExit(7)"), polite("other"), restarts={"first_s": 1000.0, "longest_s": 1000.0}
    )
    running.read_until("started again in 1000 s", "other is up")
    running.process.send_signal(number)
    code, output = running.end(timeout_s=10)
    assert code == 0
    assert "other stops" in output


@pytest.mark.parametrize(("code", "role"), [(2, helper), (78, helper), (78, leader)])
def test_a_child_with_wrong_settings_ends_all_at_once_and_its_sentence_is_the_last_one(
    cleaned: list[SupervisorProcess], code: int, role: Callable[[str], ProcessCommand]
) -> None:
    mistaken = role(
        f"import sys; sys.stderr.write('12:00:00 it CRITICAL stopped by an error: no x\\n'); sys.exit({code})"
    )
    other = helper(IDLE) if role is leader else leader(IDLE)
    ended, output = start(cleaned, other, mistaken).end()
    assert ended == 2
    assert output.count("stopped by an error: no x") == 1
    assert output.index("stopped by an error") < output.index(f"{mistaken.name} cannot be run with these settings")
    assert output.strip().endswith(f"ERROR {mistaken.name}: no x")
    assert "started again" not in output


DIES = """
import os, sys
lives = open({path!r}, "a+"); lives.write("x"); lives.flush(); lives.seek(0); life = len(lives.read())
code, said = {lives!r}[min(life, len({lives!r})) - 1]
sys.stderr.write(f"12:00:00 generator CRITICAL stopped by an error: {{said}}\\n")
sys.exit(code)
"""


def dying(tmp_path: Path, *lives: tuple[int, str]) -> ProcessCommand:
    """Its lives end in turn with these codes and words, all further ones as the last of them."""
    return helper(DIES.format(path=str(tmp_path / "lives"), lives=lives))


def test_the_same_death_twice_before_it_ever_served_ends_all_with_its_sentence(
    cleaned: list[SupervisorProcess], tmp_path: Path
) -> None:
    deaths = (
        (70, "the engine's process has died: no head_dim=16 at 0x1"),
        (70, "the engine's process has died: no head_dim=16 at 0x2"),
    )
    code, output = start(cleaned, dying(tmp_path, *deaths), leader(IDLE)).end()
    assert code == 1
    assert output.count("started again in 0 s") == 1
    assert "ERROR helper died twice of the same error before it ever served: stopping all" in output
    assert output.strip().endswith("ERROR helper: the engine's process has died: no head_dim=16 at 0x2")


@pytest.mark.parametrize(
    "lives",
    [
        ((70, "no memory"), (70, "no room")),  # another death
        ((1, "no memory"), (70, "no room"), (70, "no room")),  # it may have served in its first life
        ((1, "no room"), (1, "no room")),  # it has served
    ],
)
def test_other_deaths_have_all_their_restarts(
    lives: tuple[tuple[int, str], ...], cleaned: list[SupervisorProcess], tmp_path: Path
) -> None:
    code, output = start(cleaned, dying(tmp_path, *lives), leader(IDLE), restarts={"most": 3}).end()
    assert code == 1
    assert "(3 of 3)" in output
    assert "twice of the same" not in output


def test_a_command_that_cannot_be_started_ends_all(cleaned: list[SupervisorProcess]) -> None:
    code, output = start(cleaned, polite("helper"), ProcessCommand("broken", ("/nowhere/broken",))).end()
    assert code == 1
    assert "ERROR cannot start broken" in output


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_all_and_leaves_no_grandchild(cleaned: list[SupervisorProcess], number: signal.Signals) -> None:
    running = start(cleaned, polite("helper"), helper(WITH_GRANDCHILD, name="parent"), leader(IDLE))
    running.read_until("helper is up", "grandchild is up")
    assert len(descendants(running.mark)) == 5
    running.process.send_signal(number)
    code, output = running.end(timeout_s=10)
    assert code == 0
    assert f"stopping: {number.name}" in output
    assert "helper stops" in output
    assert "killed" not in output


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_while_children_are_started_leaves_none(
    cleaned: list[SupervisorProcess], number: signal.Signals
) -> None:
    sender = helper(f"import os; os.kill(os.getppid(), {int(number)})")
    others = [polite(f"helper-{index}") for index in range(8)]
    code, output = start(cleaned, sender, *others, leader(IDLE)).end()
    assert code == 0
    assert f"stopping: {number.name}" in output


def test_a_second_interrupt_kills_what_does_not_stop(cleaned: list[SupervisorProcess]) -> None:
    running = start(cleaned, helper(STUBBORN, name="stubborn"), stage_s=60, stop_s=60)
    running.read_until("stubborn is up")
    running.process.send_signal(signal.SIGINT)
    running.read_until("will not stop")
    running.process.send_signal(signal.SIGINT)
    code, output = running.end(timeout_s=10)
    assert code == 0
    assert "stubborn does not stop and is killed" in output


def test_a_repeated_hangup_is_in_no_hurry(cleaned: list[SupervisorProcess]) -> None:
    running = start(cleaned, polite("slow", on_stop="signal.sigtimedwait([signal.SIGUSR1], 0.3)"))
    running.read_until("slow is up")
    running.process.send_signal(signal.SIGTERM)
    running.read_until("stopping: SIGTERM")
    running.process.send_signal(signal.SIGHUP)
    assert "slow stops" in running.end()[1]


def test_a_child_that_does_not_stop_in_time_is_killed(cleaned: list[SupervisorProcess]) -> None:
    running = start(cleaned, helper(STUBBORN, name="stubborn"), polite("helper"), stage_s=0.1, stop_s=0.2)
    running.read_until("stubborn is up", "helper is up")
    running.process.terminate()
    assert "stubborn does not stop and is killed" in running.end()[1]


def test_children_are_found_while_other_processes_end(monkeypatch: pytest.MonkeyPatch) -> None:
    stat = os.stat

    def gone(path: Path | str, **named: Any) -> os.stat_result:
        if Path(path).name == "stat":
            raise ProcessLookupError(errno.ESRCH, "No such process", str(path))
        return stat(path, **named)

    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with monkeypatch.context() as patched:
        patched.setattr(os, "stat", gone)
        found = [each.pid for each in children()]
    child.communicate()
    assert child.pid in found


def test_children_are_stopped_stage_by_stage(cleaned: list[SupervisorProcess]) -> None:
    running = start(cleaned, polite("last", stop_stage=2), polite("first"), polite("middle", stop_stage=1))
    running.read_until("last is up", "first is up", "middle is up")
    running.process.terminate()
    output = running.end()[1]
    assert output.index("first stops") < output.index("middle stops") < output.index("last stops")


def test_children_end_when_the_supervisor_is_killed(cleaned: list[SupervisorProcess]) -> None:
    running = start(cleaned, polite("a"), polite("b"), leader(IDLE))
    running.read_until("a is up", "b is up")
    children = [pid for pid in descendants(running.mark) if pid != running.process.pid]
    assert len(children) == 3
    running.process.kill()
    assert all_end(children)


def test_what_a_killed_child_left_running_is_killed_before_it_is_started_again(
    cleaned: list[SupervisorProcess], tmp_path: Path
) -> None:
    code = """
import os, pathlib, signal, subprocess, sys
sleeper = "import signal; signal.signal(15, signal.SIG_IGN); print(flush=True); signal.pause()"
known = pathlib.Path({path!r}).read_text().split() if os.path.exists({path!r}) else []
print("left:", [pid for pid in known if os.path.exists(f"/proc/{{pid}}")], flush=True)
if not known:
    for own_session in (True, False):
        child = subprocess.Popen([sys.executable, "-c", sleeper], stdout=subprocess.PIPE, start_new_session=own_session)
        child.stdout.readline()
        open({path!r}, "a").write(f"{{child.pid}} ")
    os.kill(os.getpid(), signal.SIGKILL)
"""
    crashing = helper(code.format(path=str(tmp_path / "pids")))
    output = start(cleaned, crashing, polite("other"), restarts={"most": 1}).end()[1]
    assert "WARNING helper was killed by SIGKILL; started again in 0 s (1 of 1)" in output
    assert output.count("left: []") == 2


def test_orphans_that_end_leave_no_zombies(cleaned: list[SupervisorProcess]) -> None:
    # Each shell ends before what it has started, which the supervisor takes over and outlives.
    code = """
import os, signal, subprocess, time
words = ["sh", "-c", "sleep 0.2 > /dev/null & echo $!"]
orphans = [int(subprocess.run(words, capture_output=True).stdout) for _ in range(5)]
deadline = time.monotonic() + 15
def left():
    return [pid for pid in orphans if os.path.exists(f"/proc/{pid}")]
while left() and time.monotonic() < deadline:
    time.sleep(0.05)
print("looked:", len(orphans), "left:", len(left()), flush=True)
signal.pause()
"""
    running = start(cleaned, helper(code), leader(IDLE))
    running.read_until("looked: 5 left: 0")
    running.process.send_signal(signal.SIGTERM)
    assert running.end()[0] == 0


def test_no_output_is_lost_and_no_line_is_cut(cleaned: list[SupervisorProcess]) -> None:
    code = """
import sys
for index in range(20000):
    sys.stdout.write(f"NAME out {index} {'x' * 20}\\n"); sys.stderr.write(f"NAME err {index}\\n")
sys.stdout.write("NAME without an end")
"""
    other = helper(code.replace("NAME", "helper") + "\nsys.stdout.flush(); import signal; signal.pause()")
    running = start(cleaned, other, leader(code.replace("NAME", "leader") + "\nsys.exit(3)"))
    output = running.end()[1].splitlines()
    for index in (0, 777, 19999):
        assert output.count(f"leader out {index} {'x' * 20}") == 1
    assert sum(line.startswith("leader out") for line in output) == 20000
    assert sum(line.startswith("leader err") for line in output) == 20000
    assert "leader without an end" in output
    assert all(line.startswith(("leader ", "helper ")) for line in output)


def test_a_reader_that_leaves_disturbs_nobody(cleaned: list[SupervisorProcess]) -> None:
    talking = leader("import sys; [print('x' * 1000) for _ in range(9999)]; sys.exit(4)")
    running = start(cleaned, polite("helper"), talking)
    assert running.process.stdout is not None
    running.process.stdout.close()
    assert running.process.wait(timeout=20) == 4
    assert descendants(running.mark) == []


def test_a_reader_that_is_stuck_does_not_hinder_a_stop(cleaned: list[SupervisorProcess]) -> None:
    running = start(cleaned, polite("helper"), leader("while True: print('x' * 1000, flush=True)"))
    running.read_until("helper is up", "x" * 1000)
    running.process.terminate()
    assert running.process.wait(timeout=10) == 0
    assert descendants(running.mark) == []


def test_a_child_can_do_nothing_to_the_terminal(cleaned: list[SupervisorProcess]) -> None:
    code = """
import os, sys
sys.stderr.write("terminals: " + str([os.isatty(n) for n in range(3)]) + "\\n")
sys.stderr.write("escape \\x1b[2J and umlaut \\u00e4\\n")
try: open("/dev/tty")
except OSError: sys.stderr.write("no terminal of its own\\n")
"""
    controller, terminal = pty.openpty()
    running = SupervisorProcess(leader(code), limits={}, output=terminal)
    cleaned.append(running)
    os.close(terminal)
    running.process.wait(timeout=20)
    output = os.read(controller, 1 << 16).decode()
    os.close(controller)
    assert output.splitlines() == [
        "terminals: [False, False, False]",
        "escape ?[2J and umlaut ä",
        "no terminal of its own",
    ]


def test_nothing_is_imported_between_fork_and_exec(cleaned: list[SupervisorProcess]) -> None:
    assert "imported" not in start(cleaned, polite("helper"), leader("print('done')")).end()[1]
