"""The life of a process: signals, one TaskGroup, one line about what went wrong, an exit code.

    def main() -> None:
        config = load_or_exit(LearnerConfig, process="learner")
        sys.exit(run_process("learner", lambda stop: run(config, stop)))

    async def run(config: LearnerConfig, stop: Stop) -> None:
        async with HttpClient() as client, DealerSocket.connect(...) as intake:
            await run_loops(http=serve_http(app, ...), intake=take_in(intake), train=train(stop))

A signal, or `stop.request`, cancels `main`; its context managers clean up. A loop that raises ends all others. Its
daemon threads keep it from nothing, and are used again: for every thread that ever took part in a collective of gloo's,
torch keeps some 200 bytes for good, and a new one for each publish would add up over a long run.
"""

import asyncio
import atexit
import contextlib
import ctypes
import gc
import logging
import os
import queue
import resource
import signal
import sys
import threading
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from pathlib import Path
from typing import NoReturn

import uvloop

from services.standard_output import show
from services.user_code import in_lines

logger = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1
_MAX_FILES = 1 << 16
_TUNABLES, _HUGE_PAGES = "GLIBC_TUNABLES", "glibc.malloc.hugetlb"
_FIRST_WITH_HUGE_PAGES = (2, 35)
_YOUNG_OBJECTS = 20_000
"""New containers between two searches for cycles among them. A step's groups are some ten thousand, which live until it
is trained and are in no cycles: at Python's own 700 the learner looked through each of them twice.
"""
FINISH_S = 60.0
"""Time of a learner after a stop for the end of its step, its model and its summary, in seconds."""
ENDED, FAILED, NEVER_SERVED, START_AGAIN, WRONG_SETTINGS = 0, 1, 70, 75, 78
"""Exit codes, the last three as in sysexits.h (EX_SOFTWARE, EX_TEMPFAIL, EX_CONFIG): it ended well, or as it was asked
to; an error; one before it had been of any use, so that the same one again is no accident; what was lost may be there
again, so start it again (a learner with `--resume true`), as after a signal; settings with which it cannot run, so that
no new start would help. A configuration that cannot be read at all is 2, as of a wrong command line.
"""


class StartAgain(Exception):
    """Something outside of this process is gone, and a new start may do without it or find it again."""


class NeverServed(Exception):
    """The process ended before it had been of any use. A class of errors that are of this kind derives from it."""


class WrongSettings(Exception):
    """Settings, or what they name, with which the process cannot run, as turned out at its start.

    A class of errors that are always of this kind derives from it.
    """


class LoopCrashed(Exception):
    """A loop raised; the cause is what it raised."""

    def __init__(self, loop: str, error: BaseException) -> None:
        super().__init__(f"{loop}: {describe_error(error)}")


class Stop:
    """The wish that the process ends, set once, with its reason."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self.reason: str | None = None
        self.finish_s = 0.0
        """Seconds after the request in which the work may go on to end by itself; set by work that looks at it."""

    def request(self, reason: str) -> None:
        """Ask the process to end cleanly; the first reason counts."""
        if self.reason is None:
            self.reason = reason
            self._event.set()

    @property
    def requested(self) -> bool:
        """True if the process is to end."""
        return self._event.is_set()

    async def wait(self) -> None:
        """Return when the process is to end."""
        await self._event.wait()


Main = Callable[[Stop], Awaitable[None]]


def run_process(name: str, main: Main, *, finish_s: float = 0.0, clean_up_s: float = 8.0) -> int:
    """Run `main` until it ends, raises, or SIGTERM, SIGINT or SIGHUP arrives; returns the exit code.

    0: it returned, or a stop was requested and it ended. 1: it raised, or 70 for NeverServed, 75 for StartAgain and 78
    for WrongSettings; the reason is logged in one line, with the traceback at debug. After a request, `main` has
    `finish_s` seconds, or what it has set in its Stop, to return by itself, is then cancelled, and has `clean_up_s`
    seconds; if it still runs then, its tasks and threads are logged and the process exits at once with 1. A second
    SIGINT ends it at once, with 130. Under nohup, SIGHUP is ignored and stays so.
    """
    _allow_many_files()
    gc.freeze()  # what is imported by now stays: without this, each full collection looks at all of it
    gc.set_threshold(_YOUNG_OBJECTS)
    watchdog = _Watchdog(clean_up_s)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_supervise(name, main, finish_s=finish_s, watchdog=watchdog))
    finally:
        watchdog.cancel()


def signal_name(number: int) -> str:
    """Such as SIGKILL."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def leave(code: int) -> NoReturn:
    """Ends the process with `code`; what was written is flushed.

    The interpreter is not taken down: with torch and vLLM in it that is seconds of work on a busy machine, and a thread
    of torch's that comes back to it meanwhile, from a process group that is being closed or a step that was cut off,
    aborts the process ("terminate called without an active exception").
    """
    atexit._run_exitfuncs()
    logging.shutdown()
    show()
    os._exit(code)


def _allow_many_files() -> None:
    """Every peer is a connection, and every connection a file: as many as the system lets this process have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


async def run_loops(**loops: Coroutine[object, object, None]) -> None:
    """Run coroutines beside each other until all return. The first that raises cancels the rest.

    Raises an ExceptionGroup of LoopCrashed, which name the loop.
    """
    async with asyncio.TaskGroup() as group:
        for name, loop in loops.items():
            group.create_task(_named(name, loop), name=name)


def parent_death_signal(signal_number: signal.Signals = signal.SIGTERM) -> None:
    """Have the kernel send this process a signal when its parent dies. Linux only; elsewhere nothing happens.

    To be called in the child, before it does anything else: the parent may have died before, so a child that finds
    itself with another parent than it expects should exit.
    """
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, int(signal_number), 0, 0, 0) != 0:
            error = ctypes.get_errno()
            raise OSError(error, f"prctl(PR_SET_PDEATHSIG): {os.strerror(error)}")


def huge_pages(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables for a child's environment so that glibc takes memory in huge pages: a hundredth of the page faults.

    Empty where that would do nothing: another libc, an old one, a kernel that gives them to all or to none, or one who
    has set it. It is read at the start of a program only, so that a process cannot set it for itself.
    """
    if not _has_tunable_huge_pages() or _HUGE_PAGES in environ.get(_TUNABLES, ""):
        return {}
    return {_TUNABLES: ":".join(filter(None, (environ.get(_TUNABLES), f"{_HUGE_PAGES}=1")))}


def _has_tunable_huge_pages() -> bool:
    try:
        libc, _, release = (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")
        modes = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text(encoding="ascii")
        version = tuple(int(number) for number in release.split(".")[:2])
    except (OSError, ValueError):
        return False
    return libc == "glibc" and version >= _FIRST_WITH_HUGE_PAGES and "[madvise]" in modes


def seal_descriptors() -> None:
    """Have no child inherit what this process has open, but for stdin, stdout and stderr and what it is given by name.

    To be called before each asyncio.create_subprocess_exec: uvloop does not close descriptors in a child.
    """
    folder = "/proc/self/fd" if sys.platform == "linux" else "/dev/fd"
    for name in os.listdir(folder):
        if int(name) > 2:
            with contextlib.suppress(OSError):  # that of the listing itself
                os.set_inheritable(int(name), False)


def describe_error(error: BaseException) -> str:
    """An error in one line; of a group, each member's."""
    if isinstance(error, BaseExceptionGroup):
        return "; ".join(describe_error(inner) for inner in error.exceptions)
    if isinstance(error, LoopCrashed):
        return str(error)
    text = " ".join(str(error).split())
    if isinstance(error, WrongSettings) and text:  # it is for the user, and whole
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


async def _named(name: str, loop: Coroutine[object, object, None]) -> None:
    try:
        await loop
    except Exception as error:
        raise LoopCrashed(name, error) from error


class _Watchdog:
    """Ends the process from a thread, since a hanging clean-up may hold the event loop or wait for another thread."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._timer: threading.Timer | None = None

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._timer is None:
            self._timer = threading.Timer(self._limit_s, self._end, [loop])
            self._timer.daemon = True
            self._timer.start()

    def cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _end(self, loop: asyncio.AbstractEventLoop) -> None:
        tasks = sorted(task.get_name() for task in asyncio.all_tasks(loop))
        threads = sorted(thread.name for thread in threading.enumerate() if thread is not threading.current_thread())
        logger.critical(
            "clean-up took more than %g s and is cut off; running tasks: %s; threads: %s",
            self._limit_s,
            ", ".join(tasks) or "none",
            ", ".join(threads),
        )
        logging.shutdown()
        os._exit(1)


async def _supervise(name: str, main: Main, *, finish_s: float, watchdog: _Watchdog) -> int:
    stop = Stop()
    loop = asyncio.get_running_loop()
    asking = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # it comes when the terminal is closed
        asking.append(signal.SIGHUP)
    for number in asking:
        loop.add_signal_handler(number, _asked_to_stop, stop, number)
    try:
        async with asyncio.TaskGroup() as group:
            work = group.create_task(_run_main(main, stop), name=name)
            ending = group.create_task(_end_on_request(work, stop, finish_s=finish_s, watchdog=watchdog))
            work.add_done_callback(lambda _: ending.cancel())
    finally:
        watchdog.start(loop)
        for number in asking:
            loop.remove_signal_handler(number)
    if work.cancelled():
        return 0 if stop.requested else 1
    return work.result()


def _asked_to_stop(stop: Stop, number: signal.Signals) -> None:
    """By a signal; who presses Ctrl-C a second time wants no order."""
    if stop.requested and number == signal.SIGINT:
        logger.warning("second interrupt: exiting at once")
        logging.shutdown()
        os._exit(128 + number)
    stop.request(number.name)


async def _run_main(main: Main, stop: Stop) -> int:
    try:
        await main(stop)
    except Exception as error:
        logger.critical("stopped by an error: %s%s", describe_error(error), _in_user_code(error))
        logger.debug("traceback", exc_info=error)
        return exit_code_of(error)
    return ENDED


def _in_user_code(error: BaseException) -> str:
    lines = in_lines(error)
    return f"\nin your code:\n{lines}" if lines else ""


def exit_code_of(error: BaseException) -> int:
    """Exit code for an error that ends the process, also if others came with it, or a loop was ended by it."""
    if isinstance(error, StartAgain):
        return START_AGAIN
    if isinstance(error, WrongSettings):
        return WRONG_SETTINGS
    if isinstance(error, NeverServed):
        return NEVER_SERVED
    inner = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    if isinstance(error, LoopCrashed) and error.__cause__ is not None:
        inner = (error.__cause__,)
    return max(map(exit_code_of, inner), default=FAILED)


async def _end_on_request(work: asyncio.Task[int], stop: Stop, *, finish_s: float, watchdog: _Watchdog) -> None:
    await stop.wait()
    logger.info("stopping: %s", stop.reason)
    if (patience_s := max(finish_s, stop.finish_s)) > 0:
        await asyncio.wait([work], timeout=patience_s)
    watchdog.start(asyncio.get_running_loop())
    work.cancel()


Work = Callable[[], object]


class DaemonThreads:
    """As many threads as there is work at once; to be asked from one thread. They keep nobody from exiting.

    Work that never returns takes its thread with it, and the next piece gets another one. Idle ones end with this
    object: a process that makes many of them would come to its limit of threads.
    """

    def __init__(self, *, name: str) -> None:
        self._name = name
        self._idle = _IdleThreads()
        weakref.finalize(self, self._idle.end).atexit = False

    @property
    def idle(self) -> int:
        """Number of threads that wait for work."""
        return len(self._idle.inboxes)

    def start(self, work: Work) -> None:
        """Has it done, in an idle thread if there is one. What it raises ends the thread."""
        try:
            inbox = self._idle.inboxes.pop()
        except IndexError:
            inbox = queue.SimpleQueue()
            threading.Thread(target=_serve, args=(inbox, self._idle), name=self._name, daemon=True).start()
        inbox.put(work)


class _IdleThreads:
    """Inboxes of threads that wait for work, until they are told to end."""

    def __init__(self) -> None:
        self.inboxes: deque[queue.SimpleQueue[Work | None]] = deque()
        self._over = False

    def add(self, inbox: "queue.SimpleQueue[Work | None]") -> None:
        self.inboxes.append(inbox)
        if self._over:  # which may have been said before it was added
            self.end()

    def end(self) -> None:
        self._over = True
        with contextlib.suppress(IndexError):
            while True:
                self.inboxes.pop().put(None)


def _serve(inbox: "queue.SimpleQueue[Work | None]", idle: _IdleThreads) -> None:
    """Knows nothing of the object that it works for, and keeps nothing of work that is done."""
    while (work := inbox.get()) is not None:
        work()
        del work
        idle.add(inbox)
