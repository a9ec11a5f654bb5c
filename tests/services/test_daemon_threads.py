"""Threads that are used again."""

import queue
import threading

from services.process import DaemonThreads

TIMEOUT_S = 10.0


def idents_of(threads: DaemonThreads, *, works: int) -> list[int]:
    """The threads in which pieces of work ran that were begun one after the other's end."""
    done: queue.SimpleQueue[int] = queue.SimpleQueue()
    found = []
    for _ in range(works):
        threads.start(lambda: done.put(threading.get_ident()))
        found.append(done.get(timeout=TIMEOUT_S))
        wait_until_idle(threads)
    return found


def wait_until_idle(threads: DaemonThreads) -> None:
    """The thread is idle a moment after its work has told its result."""
    for _ in range(1000):
        if threads.idle:
            return
        threading.Event().wait(0.01)


def test_one_thread_does_what_is_begun_one_after_the_other() -> None:
    assert len(set(idents_of(DaemonThreads(name="test"), works=5))) == 1


def test_work_that_does_not_return_holds_up_no_other() -> None:
    threads, release = DaemonThreads(name="test"), threading.Event()
    threads.start(lambda: release.wait(TIMEOUT_S))

    first, second = idents_of(threads, works=2)
    release.set()

    assert first == second


def test_threads_end_with_their_process() -> None:
    found: queue.SimpleQueue[threading.Thread] = queue.SimpleQueue()
    DaemonThreads(name="test-name").start(lambda: found.put(threading.current_thread()))

    thread = found.get(timeout=TIMEOUT_S)
    assert (thread.name, thread.daemon) == ("test-name", True)
