"""math-verify by itself on labelled pairs, as other systems call it: what `math` is compared with.

It works in a process of its own, which is killed when one pair takes too long: the library's own limit is an alarm,
which some of its work does not heed.
"""

import multiprocessing
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Self

_PAIR_S = 10.0


class MathVerifyAlone:
    """A context manager: leaving it kills the process."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("spawn")
        self._worker: tuple[BaseProcess, Connection] | None = None

    def equal(self, *, golds: Sequence[str], completion: str) -> bool | None:
        """True if the completion's answer is one of the right ones; None if it took more than ten seconds."""
        if self._worker is None:
            self._worker = self._start()
        _, connection = self._worker
        connection.send((tuple(golds), completion))
        if not connection.poll(_PAIR_S):
            self._stop()
            return None
        return bool(connection.recv())

    def _start(self) -> tuple[BaseProcess, Connection]:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(theirs,), daemon=True)
        process.start()
        theirs.close()
        assert ours.recv() == "ready"
        return process, ours

    def _stop(self) -> None:
        if self._worker is not None:
            process, connection = self._worker
            process.kill()
            process.join()
            connection.close()
            self._worker = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop()


def _serve(connection: Connection) -> None:
    import logging

    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)

    def judged(golds: tuple[str, ...], completion: str) -> bool:
        # It reads LaTeX only where that is marked, so bare texts get the marks that its users would set.
        marked = completion if any(mark in completion for mark in ("$", r"\(", r"\[", r"\boxed")) else f"${completion}$"
        targets = [LatexExtractionConfig(), ExprExtractionConfig()]
        answers = [parse(text, targets) for text in dict.fromkeys((completion, marked))]
        rights = [
            parse(gold if "boxed" in gold else f"\\boxed{{{gold.strip().strip('$')}}}", targets) for gold in golds
        ]
        return any(verify(right, answer) for right in rights for answer in answers)

    connection.send("ready")
    with suppress(EOFError):
        while True:
            golds, completion = connection.recv()
            try:
                connection.send(judged(golds, completion))
            except Exception:  # noqa: BLE001  callers take whatever it raises as a wrong answer
                connection.send(False)
