"""Daemon threads that are used again. For every thread that ever took part in a collective of gloo's, torch keeps some
200 bytes for good: a new one for each publish adds up over a long run.
"""

import queue
import threading
from collections import deque
from collections.abc import Callable

Work = Callable[[], object]


class DaemonThreads:
    """As many threads as there is work at once; to be asked from one thread. They keep nobody from exiting.

    Work that never returns takes its thread with it, and the next piece gets another one.
    """

    def __init__(self, *, name: str) -> None:
        self._name = name
        self._idle: deque[queue.SimpleQueue[Work]] = deque()

    @property
    def idle(self) -> int:
        """How many wait for work."""
        return len(self._idle)

    def start(self, work: Work) -> None:
        """Has it done, in an idle thread if there is one. What it raises ends the thread."""
        try:
            inbox = self._idle.pop()
        except IndexError:
            inbox = queue.SimpleQueue()
            threading.Thread(target=self._serve, args=(inbox,), name=self._name, daemon=True).start()
        inbox.put(work)

    def _serve(self, inbox: "queue.SimpleQueue[Work]") -> None:
        while True:
            inbox.get()()
            self._idle.append(inbox)
