"""The bar below the log of `headway up`: real children, a real supervisor, a pseudo-terminal, and what it shows."""

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from headway.child_output import Bar, RunProgress

ROOT = Path(__file__).parents[2]
SUPERVISOR = """
import json, sys
from pathlib import Path
from services.logs import configure_logging
from headway.child_output import Bar, RunProgress
from headway.supervisor import ProcessCommand, RestartPolicy, StopLimits, Supervisor

configure_logging("headway")
leader = ProcessCommand("learner", (sys.executable, "-c", sys.argv[2]), is_leader=True)
bar = Bar.where_possible(RunProgress(Path(sys.argv[1]), total=40))
limits = StopLimits(restarts=RestartPolicy(most=1, first_s=0.0))
sys.exit(Supervisor([leader], limits=limits, bar=bar).run())
"""
# Notes a step for each line that it is told by a fifo, and says so in its log.
LEADER = """
import json, sys
for line in open({fifo!r}):
    step = int(line)
    with open({metrics!r}, "a") as file:
        times = dict(wait_s=0.0, train_s=60.0, copy_s=0.0)
        file.write(json.dumps(dict(kind="step", step=step, reward_mean=step / 100, lag_mean=1.5, **times)) + "\\n")
    print("line of step", step, file=sys.stderr, flush=True)
print("the result")
{end}
"""


def step(number: int, **values: float) -> str:
    return json.dumps({"kind": "step", "step": number, "wait_s": 1.0, "train_s": 2.0, "copy_s": 0.0, **values}) + "\n"


def screen_of(data: bytes, columns: int) -> list[str]:
    """The lines that a terminal shows: it knows of carriage returns, line feeds, erasing to the end, and colours."""
    lines, column = [""], 0
    for part in re.findall(r"\x1b\[[0-9;]*[A-Za-z]|[^\x1b]", data.decode(errors="ignore")):
        assert not part.startswith("\x1b") or part[-1] in "Km", part
        if part == "\n":
            lines, column = [*lines, ""], column
        elif part == "\r":
            column = 0
        elif part == "\x1b[K":
            lines[-1] = lines[-1][:column]
        elif not part.startswith("\x1b"):
            assert column < columns or not {"━", "─"} & set(lines[-1]), f"wrapped: {lines[-1]!r}"
            lines[-1] = (lines[-1][:column] + part).ljust(column + 1) + lines[-1][column + 1 :]
            column += 1
    return lines


class Terminal:
    """A supervisor whose standard output and error are a pseudo-terminal of some width."""

    def __init__(self, folder: Path, *, columns: int, end: str, **environment: str) -> None:
        self.columns, self.seen = columns, b""
        self._told, metrics = folder / "fifo", folder / "metrics.jsonl"
        os.mkfifo(self._told)
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        code = LEADER.format(fifo=str(self._told), metrics=str(metrics), end=end)
        inherited = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "NO_COLOR")}
        self.process = subprocess.Popen(
            [sys.executable, "-c", SUPERVISOR, str(metrics), code],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            cwd=ROOT,
            env={**inherited, "TERM": "xterm", "PYTHONIOENCODING": "utf-8", **environment},
        )
        os.close(slave)
        self.leader = self._told.open("w")  # when the leader reads it

    def tell(self, number: int) -> None:
        print(number, file=self.leader, flush=True)

    def read_until(self, *lines: str) -> None:
        """Until the last lines on the screen are these, as regular expressions."""
        deadline = time.monotonic() + 60
        while not all(map(re.fullmatch, lines, self.screen[-len(lines) :])) or len(self.screen) < len(lines):
            assert select.select([self._master], [], [], deadline - time.monotonic())[0], (lines, self.screen)
            self.seen += os.read(self._master, 1 << 16)

    def end(self) -> list[str]:
        """Waits until all have ended; returns the lines that stay on the screen."""
        try:
            while data := os.read(self._master, 1 << 16):
                self.seen += data
        except OSError:  # the other side is closed
            pass
        self.process.wait(timeout=60)
        return self.screen

    @property
    def screen(self) -> list[str]:
        return screen_of(self.seen, self.columns)

    def close(self) -> None:
        self.leader.close()
        self.process.kill()
        self.process.wait()
        os.close(self._master)


@pytest.fixture
def opened() -> Iterator[list[Terminal]]:
    found: list[Terminal] = []
    yield found
    for terminal in found:
        terminal.close()


def test_lines_scroll_above_the_bar_and_nothing_of_it_stays_after_the_result(
    tmp_path: Path, opened: list[Terminal]
) -> None:
    terminal = Terminal(tmp_path, columns=90, end="")
    opened.append(terminal)
    terminal.read_until(r"─+  no step yet  \d+s")
    for number in (1, 2, 20):
        terminal.tell(number)
        terminal.read_until(f"line of step {number}", ".*[━─]  .+")
    terminal.read_until("line of step 20", r"━+─+  step 20/40  (20m00s|1\dm\d\ds) left  reward 0.200  lag 1.5")
    *lines, bar = terminal.screen
    assert lines == ["line of step 1", "line of step 2", "line of step 20"]
    assert abs(bar.count("━") - bar.count("─")) <= 1
    terminal.leader.close()
    assert terminal.end() == [*lines, "the result", ""]
    assert terminal.process.returncode == 0


@pytest.mark.parametrize(
    ("end", "told"), [("import signal; signal.pause()", "stopping: SIGINT"), ("raise SystemExit(2)", "learner: ")]
)
def test_an_interrupt_or_an_error_leaves_no_trace_of_the_bar(
    tmp_path: Path, opened: list[Terminal], end: str, told: str
) -> None:
    terminal = Terminal(tmp_path, columns=80, end=end)
    opened.append(terminal)
    terminal.tell(1)
    terminal.read_until("line of step 1", ".* step 1/40  reward.*")
    terminal.leader.close()
    if "SIGINT" in told:
        terminal.process.send_signal(signal.SIGINT)
    screen = terminal.end()
    assert any(told in line for line in screen)
    assert not any("━" in line or "─" in line or "1/40" in line for line in screen)
    assert screen[-1] == ""


def test_no_colour_where_none_is_wanted_and_no_bar_where_the_terminal_is_dumb(
    tmp_path: Path, opened: list[Terminal]
) -> None:
    for name, environment in (("plain", {"NO_COLOR": "1"}), ("dumb", {"TERM": "dumb"})):
        (tmp_path / name).mkdir()
        terminal = Terminal(tmp_path / name, columns=60, end="", **environment)
        opened.append(terminal)
        terminal.tell(1)
        last = "[━─]+  step 1/40  reward.*" if name == "plain" else ""
        terminal.read_until("line of step 1", last)
        terminal.leader.close()
        assert terminal.end() == ["line of step 1", "the result", ""]
        assert b"\x1b[3" not in terminal.seen
        assert (b"\x1b" in terminal.seen) == (name == "plain")


@pytest.mark.parametrize("columns", [1, 10, 20, 40, 60, 100, 300])
def test_a_bar_is_narrower_than_its_terminal_and_keeps_what_matters_most(tmp_path: Path, columns: int) -> None:
    path = tmp_path / "metrics.jsonl"
    progress = RunProgress(path, total=700)
    path.write_text("".join(step(number, reward_mean=0.25, lag_mean=2.0) for number in range(1, 36)))
    progress.look()
    shown = re.sub(r"\x1b\[\d*m", "", Bar(progress).line(columns))
    assert len(shown) <= max(0, columns - 3)
    assert ("step 35/700" in shown) == (columns >= 20)
    assert ("left" in shown) == (columns >= 40)
    assert (re.match("[━─#-]{8,40}  step", shown) is not None) == (columns >= 40)


def test_a_resume_takes_steps_back_and_a_new_file_is_read_from_its_beginning(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(step(90))
    progress = RunProgress(path, total=100)
    progress.look()
    assert progress.step is None, "of a former life"
    with path.open("a") as file:
        file.write(json.dumps({"kind": "resume", "version": 80}) + "\n" + step(81)[:9])
    progress.look()
    assert progress.step == 80
    path.unlink()
    progress.look()
    path.write_text("not JSON\n[1]\n" + step(1, reward_mean=float("nan")) + step(2))
    progress.look()
    assert progress.words()[0] == "step 2/100"
    assert not progress.values


def test_of_an_offline_run_in_passes_the_bar_has_a_loss_and_no_end(tmp_path: Path) -> None:
    progress = RunProgress(tmp_path / "metrics.jsonl", total=None)
    (tmp_path / "metrics.jsonl").write_text(step(3, loss=0.12345))
    progress.look()
    assert progress.words() == ["step 3", "loss 0.1235"]
