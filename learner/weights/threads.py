"""Blocking work of the weight plane, beside the event loop."""

import asyncio
import threading
from collections.abc import Callable, Collection
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


async def in_thread(work: Callable[[], T]) -> T:
    """Runs `work` in a daemon thread: a stop waits for no collective, which ends by its own timeout, unheard."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()

    def call() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - it crosses to the awaiting task, which raises it
            future.set_exception(error)

    threading.Thread(target=call, name="weight-plane", daemon=True).start()
    return await asyncio.wrap_future(future)


async def collective_beside(
    collective: Callable[[], T], asked: "Collection[asyncio.Future[object]]", *, answer_s: float, grace_s: float
) -> T | Exception:
    """The learner's part of a collective, in a thread, beside the members' requests; its result or its error.

    Returns when all have answered; or else `answer_s` seconds after the collective went through, and `grace_s` after it
    failed. A request that has no answer by then is cancelled.
    """
    ours = asyncio.ensure_future(in_thread(collective))
    try:
        answers = asyncio.gather(*asked, return_exceptions=True)
        either: set[asyncio.Future[Any]] = {ours, answers}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if ours.done():
            await asyncio.wait({answers}, timeout=grace_s if ours.exception() else answer_s)
        failed = any(not one.done() or one.exception() for one in asked)
        if failed and not ours.done():
            return TimeoutError("not all members take part")  # without them it can only time out
        return await ours
    except Exception as error:  # noqa: BLE001 - what a collective raises is its caller's to judge
        return error
    finally:
        for one in asked:
            one.cancel()
        ours.cancel()
        ours.add_done_callback(_heard)


def _heard(task: "asyncio.Future[T]") -> None:
    """Its error is known or of no interest; asyncio complains of errors that nobody looks at."""
    if not task.cancelled():
        task.exception()
