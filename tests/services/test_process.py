"""Exit codes, signals, and what is left behind."""

import asyncio
import logging
import os
import signal
import subprocess
import sys
import textwrap

import pytest

from services.process import LoopCrashed, Stop, describe_error, huge_pages, run_loops, run_process
from tests.process_ends import all_end

PRELUDE = """
import asyncio, logging, os, signal, sys, threading
from services.logs import configure_logging
from services.process import parent_death_signal, run_loops, run_process
configure_logging("learner", level=os.environ.get("LEVEL", "info"))
"""


def run_child(code: str, **environ: str) -> tuple[int, str]:
    """Exit code and stderr of a process that runs `code`."""
    child = subprocess.run(
        [sys.executable, "-c", PRELUDE + textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **environ},
    )
    return child.returncode, child.stderr


SIGNALLED = """
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
async def main(stop):
    try:
        os.kill(os.getpid(), signal.{name})
        await run_loops(idle=asyncio.Event().wait())
    finally:
        await asyncio.sleep(0)
        logging.info("cleaned up")
sys.exit(run_process("learner", main))
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP"])
def test_a_signal_ends_the_process_cleanly_with_0(name: str) -> None:
    code, log = run_child(SIGNALLED.format(name=name))
    assert code == 0, log
    assert f"stopping: {name}" in log
    assert "cleaned up" in log
    assert "Traceback" not in log


def test_under_nohup_a_closed_terminal_ends_nothing() -> None:
    code, log = run_child("""
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        async def main(stop):
            os.kill(os.getpid(), signal.SIGHUP)
            await asyncio.sleep(0)
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.Event().wait()
        sys.exit(run_process("learner", main))
    """)
    assert code == 0, log
    assert "stopping: SIGTERM" in log


def test_work_that_can_finish_has_its_time_and_a_second_ctrl_c_ends_it_at_once() -> None:
    finishing = """
        async def main(stop):
            stop.finish_s = 50.0
            os.kill(os.getpid(), signal.SIGINT)
            await stop.wait()
            {more}
            logging.info("results written")
        sys.exit(run_process("learner", main))
    """
    code, log = run_child(finishing.format(more="await asyncio.sleep(0)"))
    assert code == 0, log
    assert "results written" in log
    code, log = run_child(finishing.format(more="os.kill(os.getpid(), signal.SIGINT); await asyncio.sleep(40)"))
    assert code == 130
    assert "exiting at once" in log
    assert "results written" not in log


CRASHING = """
async def crash():
    raise KeyError("what went wrong")
async def main(stop):
    try:
        await run_loops(intake=crash(), idle=asyncio.Event().wait())
    finally:
        logging.info("cleaned up")
sys.exit(run_process("learner", main))
"""


def test_a_crashed_loop_ends_the_process_with_1_and_one_line() -> None:
    code, log = run_child(CRASHING)
    assert code == 1
    assert "CRITICAL stopped by an error: intake: KeyError: 'what went wrong'" in log
    assert "cleaned up" in log
    assert "Traceback" not in log
    assert "Traceback" in run_child(CRASHING, LEVEL="debug")[1]


def test_a_clean_up_that_hangs_is_cut_off_and_named() -> None:
    code, log = run_child("""
        async def main(stop):
            stop.request("enough")
            try:
                await asyncio.to_thread(threading.Event().wait)
            finally:
                await asyncio.Event().wait()
        sys.exit(run_process("learner", main, clean_up_s=0.2))
    """)
    assert code == 1
    assert "clean-up took more than 0.2 s" in log
    assert "running tasks: Task-1, learner; threads: MainThread" in log


def test_a_child_dies_with_its_parent() -> None:
    code, log = run_child("""
        import subprocess
        read, write = os.pipe()
        program = (
            "import os, signal; from services.process import parent_death_signal; parent_death_signal();"
            f"os.write({write}, str(os.getpid()).encode()); signal.pause()"
        )
        subprocess.Popen([sys.executable, "-c", program], pass_fds=[write])
        print(os.read(read, 20).decode(), file=sys.stderr)
    """)
    assert code == 0
    assert all_end([int(log.split()[-1])])


def test_a_main_that_returns_exits_with_0_and_a_request_ends_it() -> None:
    async def returns(stop: Stop) -> None:
        assert not stop.requested

    async def asks(stop: Stop) -> None:
        stop.request("finished")
        stop.request("again")
        assert stop.reason == "finished"
        await asyncio.Event().wait()

    assert run_process("learner", returns) == 0
    assert run_process("learner", asks) == 0


def test_main_may_finish_by_itself_within_its_time() -> None:
    seen = []

    async def main(stop: Stop) -> None:
        stop.request("finished")
        await stop.wait()
        await asyncio.sleep(0)
        seen.append("saved")

    assert run_process("learner", main, finish_s=10) == 0
    assert seen == ["saved"]


def test_an_error_while_cleaning_up_exits_with_1(caplog: pytest.LogCaptureFixture) -> None:
    async def main(stop: Stop) -> None:
        stop.request("finished")
        try:
            await asyncio.Event().wait()
        finally:
            raise OSError("disk full")

    with caplog.at_level(logging.CRITICAL):
        assert run_process("learner", main) == 1
    assert "OSError: disk full" in caplog.text


async def test_a_crashed_loop_cancels_the_others_and_is_named() -> None:
    cancelled = []

    async def crash() -> None:
        await asyncio.sleep(0)
        raise ValueError("x")

    async def idle() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append("idle")
            raise

    with pytest.raises(ExceptionGroup) as caught:
        await run_loops(intake=crash(), idle=idle())
    assert cancelled == ["idle"]
    assert isinstance(caught.value.exceptions[0], LoopCrashed)
    assert describe_error(caught.value) == "intake: ValueError: x"


def test_signal_handlers_are_taken_back_at_the_end() -> None:
    before = signal.getsignal(signal.SIGTERM)

    async def main(stop: Stop) -> None: ...

    run_process("learner", main)
    assert signal.getsignal(signal.SIGTERM) is before


def test_sealed_descriptors_are_in_no_child_of_the_event_loop() -> None:
    code, text = run_child("""
        from services.process import seal_descriptors
        async def main(stop):
            left = os.dup(2)
            os.set_inheritable(left, True)
            seal_descriptors()
            child = await asyncio.create_subprocess_exec(
                sys.executable, "-c", "import os, sys; os.fstat(int(sys.argv[1]))", str(left), stderr=-3
            )
            assert await child.wait() == 1, "the child has what was open"
        sys.exit(run_process("learner", main))
    """)
    assert code == 0, text


ASKING = """
from services.process import NeverServed, StartAgain, WrongSettings
async def ask():
    raise {name}("what is gone")
async def main(stop):
    async with asyncio.TaskGroup() as group:
        group.create_task(run_loops(asks=ask()))
sys.exit(run_process("learner", main))
"""


@pytest.mark.parametrize(
    ("name", "expected"), [("NeverServed", 70), ("StartAgain", 75), ("WrongSettings", 78), ("ValueError", 1)]
)
def test_an_error_says_by_the_exit_code_whether_a_new_start_may_help(name: str, expected: int) -> None:
    code, log = run_child(ASKING.format(name=name))
    assert code == expected, log
    kind = "" if name == "WrongSettings" else f"{name}: "  # what is for the user needs no class's name
    assert f"stopped by an error: asks: {kind}what is gone" in log


@pytest.mark.skipif(not huge_pages({}), reason="another libc, or a kernel that gives huge pages to all or to none")
def test_huge_pages_are_asked_for_beside_what_the_user_asks_of_glibc() -> None:
    assert huge_pages({}) == {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
    assert huge_pages({"GLIBC_TUNABLES": "glibc.malloc.check=0"}) == {
        "GLIBC_TUNABLES": "glibc.malloc.check=0:glibc.malloc.hugetlb=1"
    }
    assert huge_pages({"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"}) == {}


LEAVING = """
import atexit, sys, threading
from services.process import leave
atexit.register(sys.stdout.write, "handlers ran, ")
threading.Thread(target=threading.Event().wait).start()
sys.stdout.write("what was written stays, ")
leave(3)
"""


def test_no_thread_keeps_the_process_and_nothing_written_is_lost() -> None:
    """The interpreter's own end would wait for the thread for ever."""
    ended = subprocess.run([sys.executable, "-c", LEAVING], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (3, "")
    assert ended.stdout == "what was written stays, handlers ran, "
