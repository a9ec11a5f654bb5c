"""Threads that are used again."""

import gc
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


def test_idle_threads_end_with_the_object_and_a_busy_one_after_its_work() -> None:
    threads, together, release = DaemonThreads(name="ending"), threading.Barrier(3), threading.Event()
    for _ in range(2):
        threads.start(lambda: together.wait(TIMEOUT_S))
    threads.start(lambda: (together.wait(TIMEOUT_S), release.wait(TIMEOUT_S)))
    *idle, busy = [thread for thread in threading.enumerate() if thread.name == "ending"]
    while threads.idle < 2:
        threading.Event().wait(0.01)

    del threads
    gc.collect()
    for thread in idle:
        thread.join(TIMEOUT_S)
    assert [thread.is_alive() for thread in (*idle, busy)] == [False, False, True]

    release.set()
    busy.join(TIMEOUT_S)
    assert not busy.is_alive()
