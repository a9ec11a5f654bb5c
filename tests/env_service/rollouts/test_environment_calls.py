"""Coroutines of environments whose caller is cancelled: they are closed, whenever that happens."""

import asyncio
import gc
import inspect
import threading
import warnings
from collections.abc import Awaitable, Coroutine

import pytest

from env_service.environments.interface import EnvironmentFailed
from env_service.rollouts.environment_calls import EnvironmentCalls, closed


class Held:
    """A call that returns a coroutine once it is let go."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.go_on = threading.Event()
        self.made: list[Coroutine[object, object, None]] = []

    def __call__(self) -> Awaitable[None]:
        async def step() -> None:
            await asyncio.Event().wait()

        self.begun.set()
        assert self.go_on.wait(20)
        self.made.append(step())
        return self.made[0]

    @property
    def state(self) -> str:
        return inspect.getcoroutinestate(self.made[0])


async def _waiting(calls: EnvironmentCalls, held: Held) -> "asyncio.Task[None]":
    caller: asyncio.Task[None] = asyncio.create_task(calls.one(held, what="a step"))
    await asyncio.to_thread(held.begun.wait, 20)
    return caller


async def _after(calls: EnvironmentCalls) -> "tuple[asyncio.Task[None], threading.Event]":
    """A call behind all others, and what it sets: the thread has then told the others' results."""
    reached = threading.Event()
    behind = asyncio.create_task(calls.one(reached.set, what="the one behind"))
    await asyncio.sleep(0)
    return behind, reached


async def _is_cancelled(caller: "asyncio.Task[None]") -> None:
    with pytest.raises(asyncio.CancelledError):
        await caller


async def test_a_caller_cancelled_as_its_call_returns_leaves_no_coroutine_open() -> None:
    calls, held = EnvironmentCalls(timeout_s=20.0), Held()
    caller = await _waiting(calls, held)
    behind, reached = await _after(calls)

    held.go_on.set()
    reached.wait(20)  # the event loop stands still meanwhile: it sees the result and the cancellation in one round
    asyncio.get_running_loop().call_soon(caller.cancel)
    await _is_cancelled(caller)

    assert held.state == inspect.CORO_CLOSED
    await behind


async def test_a_call_that_returns_after_its_caller_was_cancelled_leaves_no_coroutine_open() -> None:
    calls, held = EnvironmentCalls(timeout_s=20.0), Held()
    caller = await _waiting(calls, held)
    behind, reached = await _after(calls)

    caller.cancel()
    await _is_cancelled(caller)
    held.go_on.set()
    reached.wait(20)

    assert held.state == inspect.CORO_CLOSED
    await behind


def test_a_call_that_returns_after_the_event_loop_ended_leaves_no_coroutine_open() -> None:
    calls, held = EnvironmentCalls(timeout_s=20.0), Held()

    async def cancelled() -> None:
        caller = await _waiting(calls, held)
        caller.cancel()
        await _is_cancelled(caller)

    asyncio.run(cancelled())
    held.go_on.set()

    async def one_more() -> None:
        await calls.one(lambda: None, what="the one behind")

    asyncio.run(one_more())
    assert held.state == inspect.CORO_CLOSED


@pytest.mark.parametrize("error", [SystemExit("I quit"), asyncio.CancelledError()], ids=repr)
async def test_a_call_that_would_end_the_thread_fails_alone(error: BaseException) -> None:
    def ends() -> None:
        raise error

    calls = EnvironmentCalls(timeout_s=5.0)
    with pytest.raises(EnvironmentFailed, match=f"its code let out {type(error).__name__}.*, in ends"):
        await calls.one(ends, what="a step")

    threads = [each for each in threading.enumerate() if each.name == "environments"]
    assert await calls.one(threading.current_thread, what="the one behind") in threads


async def test_the_thread_ends_with_what_it_was_made_for() -> None:
    calls = EnvironmentCalls(timeout_s=5.0)
    thread = await calls.one(threading.current_thread, what="a step")
    del calls
    gc.collect()
    await asyncio.to_thread(thread.join, 5.0)
    assert not thread.is_alive()


class ClosedLate:
    """An environment whose `close` is awaited."""

    def __init__(self) -> None:
        self.is_closed = False

    async def close(self) -> None:
        self.is_closed = True


async def test_a_close_that_nobody_comes_to_await_leaves_no_coroutine_open() -> None:
    environment = ClosedLate()
    given_up = closed(environment)
    assert inspect.iscoroutine(given_up)

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        given_up.close()
        del given_up
        gc.collect()
    assert [str(each.message) for each in told] == []

    closing = closed(environment)
    assert closing is not None
    await closing
    assert environment.is_closed
