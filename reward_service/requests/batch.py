"""A request's items on their way through the lanes, beside each other and beside those of other requests.

    items -> in their turn, so many at once -> lane: an outcome at once                                  -> finish
                                                  -> an outcome to wait for, `share` items at a time     -> finish

It waits for its turn, which each request has for `_AT_ONCE` items and which no lane holds up; then for the lanes, each
of which ends at its items' deadlines.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from functools import partial

from protocol.rewards import ScoreError, ScoreItem, ScoreRequest
from reward_service.requests.open_lanes import OpenLanes
from reward_service.requests.turns import Turns
from reward_service.verifier.submission import Outcome

logger = logging.getLogger(__name__)


_INCOMPLETE = (
    "the verifier compares the {size} completions of a group, and this request holds {here} of them: send a group in "
    "one request (env-service: batch_items of at least group_size)"
)
# A few milliseconds of items that are judged at once.
_AT_ONCE = 128


class ScoreBatch:
    """`finish` is called once for each item, by its index, with its outcome."""

    def __init__(
        self,
        *,
        request: ScoreRequest,
        lanes: OpenLanes,
        turns: Turns,
        longest_s: float,
        finish: Callable[[int, Outcome], None],
    ) -> None:
        self._items = request.items
        self._lanes = lanes
        self._turns = turns
        self._finish = finish
        self._longest_s = min(request.deadline_s, longest_s)
        self._began = asyncio.get_running_loop().time()
        self._windows: dict[str, asyncio.Semaphore] = {}
        self._judged: list[Awaitable[Outcome | Sequence[Outcome]]] = []
        self._group_of = self._groups()

    async def run(self) -> None:
        """Until every item has its outcome. Cancelled, it takes back what is not judged yet."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for start in range(0, len(self._items), _AT_ONCE):
                    stop = min(start + _AT_ONCE, len(self._items))
                    await self._turns.take(partial(self._judge, start, stop, tasks))
        finally:
            for judged in self._judged:
                if isinstance(judged, Coroutine):
                    judged.close()

    def _judge(self, start: int, stop: int, tasks: asyncio.TaskGroup) -> None:
        for index in range(start, stop):
            item = self._items[index]
            group = self._group_of.get(index)
            if group is not None:
                if index == group[-1]:
                    self._judge_group(group, tasks)
                continue
            deadline = self._deadline(item)
            judged = self._judged_by_lane(item, deadline=deadline)
            # A task is made only for what has to wait: a batch of exact matches pays for none.
            if isinstance(judged, Outcome):
                self._finish(index, judged)
            else:
                self._judged.append(judged)
                tasks.create_task(self._wait((index,), judged, deadline=deadline))

    def _groups(self) -> Mapping[int, Sequence[int]]:
        """Of each item that is judged with its group, the indices of the group's items that are in this request."""
        found: dict[tuple[str, str], list[int]] = {}
        for index, item in enumerate(self._items):
            if item.group and self._lanes.takes_groups(item.verifier):
                found.setdefault((item.verifier, item.group), []).append(index)
        return {index: group for group in found.values() for index in group}

    def _judge_group(self, group: Sequence[int], tasks: asyncio.TaskGroup) -> None:
        items = [self._items[index] for index in group]
        size = items[0].group_size
        if len(items) != size and self._lanes.needs_whole_groups(items[0].verifier):
            error = ScoreError(kind="infrastructure", message=_INCOMPLETE.format(size=size, here=len(items)))
            self._finish_all(group, [Outcome(result=error)] * len(items))
            return
        deadline = min(map(self._deadline, items))
        judged = self._lanes.judge_together(items, deadline=deadline)
        self._judged.append(judged)
        tasks.create_task(self._wait(group, judged, deadline=deadline))

    async def _wait(
        self, indices: Sequence[int], judged: Awaitable[Outcome | Sequence[Outcome]], *, deadline: float
    ) -> None:
        item = self._items[indices[0]]
        window = self._window(item.verifier)
        try:
            async with asyncio.timeout_at(deadline):
                await window.acquire()
        except TimeoutError:
            late = ScoreError(kind="infrastructure", message="deadline: other items of the request were before it")
            self._finish_all(indices, [Outcome(result=late)] * len(indices))
            return
        try:
            found = await judged
        except Exception as error:  # noqa: BLE001  a lane's fault is an error of these items alone
            found = [_fault(item, error)] * len(indices)
        finally:
            window.release()
        self._finish_all(indices, [found] if isinstance(found, Outcome) else found)

    def _finish_all(self, indices: Sequence[int], outcomes: Sequence[Outcome]) -> None:
        for index, outcome in zip(indices, outcomes, strict=True):
            self._finish(index, outcome)

    def _judged_by_lane(self, item: ScoreItem, *, deadline: float) -> Outcome | Awaitable[Outcome]:
        try:
            return self._lanes.judge(item, deadline=deadline)
        except Exception as error:  # noqa: BLE001  a lane's fault is an error of this item alone
            return _fault(item, error)

    def _window(self, verifier: str) -> asyncio.Semaphore:
        window = self._windows.get(verifier)
        if window is None:
            window = self._windows[verifier] = asyncio.Semaphore(self._lanes.share(verifier))
        return window

    def _deadline(self, item: ScoreItem) -> float:
        own_s = self._longest_s if item.deadline_s is None else min(self._longest_s, item.deadline_s)
        return self._began + own_s


def _fault(item: ScoreItem, error: Exception) -> Outcome:
    """Lanes do not raise; one that does all the same is at fault, and its item has no reward."""
    logger.error("the lane of verifier %s failed", item.verifier, exc_info=error)
    message = f"the service failed at this item: {type(error).__name__}; its log says more"
    return Outcome(result=ScoreError(kind="infrastructure", message=message))
