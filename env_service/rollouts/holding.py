"""Holding all conversations of a lease, or matches, beside each other.

Without redundancy the first turns of all are one request, since their prompt is the same. With it each is asked for by
itself, so that those which are not needed can be broken off.

What redundancy does to the distribution: the first to finish are mostly the short ones, so a group of them is not a
sample of the policy. Nothing corrects that here; what is broken off is counted, with the tokens that it had.
"""

import asyncio
from collections.abc import Awaitable, Sequence

from env_service.rollouts.completions import continues
from env_service.rollouts.conversation import Conversation
from env_service.rollouts.generation import beside_each_other
from env_service.rollouts.match import Match

Held = Conversation | Match


async def hold_all(all_of_them: Sequence[Held]) -> None:
    """Return when all are over. Raises RolloutFailure when a turn of one cannot be sampled."""
    speaker = all_of_them[0].speaker
    request, end_of = speaker.request, speaker.language.end_of()
    if end_of is not None or not continues(request.sampling):
        # One request each: one that has ended by its text is broken off, one that cannot go on is drawn anew.
        await beside_each_other(each.hold() for each in all_of_them)
        return
    firsts = speaker.progress.completions(len(all_of_them))
    first = speaker.sample(request.model_copy(update={"n": len(firsts)}), firsts)
    await beside_each_other([_done(first), *(each.hold(one) for each, one in zip(all_of_them, firsts, strict=True))])


async def hold_first(all_of_them: Sequence[Held], *, wanted: int) -> Sequence[Held]:
    """The first `wanted` that are over and whose environment has not spoilt them, when there are so many; the others
    are broken off. Where too many are spoilt, some of those.
    """
    running = {asyncio.ensure_future(each.hold()): each for each in all_of_them}
    over: list[Held] = []
    pending = set(running)
    try:
        while pending and sum(not each.spoilt for each in over) < wanted:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in (task for task in running if task in done):
                task.result()
                over.append(running[task])
    finally:
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
    return sorted(over, key=lambda each: each.spoilt)[:wanted]


async def _done(sampling: Awaitable[None]) -> None:
    await sampling
