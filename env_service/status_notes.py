"""Notes to the learner on how this process is, and how its reward services are, for the verdict on the run."""

import asyncio
from collections.abc import Callable, Sequence

from env_service.config import EnvServiceConfig
from env_service.connection import LearnerLink
from protocol.messages import StatusNote
from protocol.status import Status
from services.diagnosis.asked import Target
from services.diagnosis.asking import ask

_EVERY_S = 3.0
_RAREST = 8
_FAILURES = 2
_REWARDS = 64
"""Reward services that a note tells of: the first ones, where there are more."""


async def send_notes(link: LearnerLink, tell: Callable[[], Status], *, url: str, rewards: Sequence[Target]) -> None:
    """Sends one every few seconds until cancelled, before the first hello, too: it may say why there is none.

    They queue up for a learner that is not there, so they become rarer.
    """
    unheard = 0
    while True:
        async with asyncio.TaskGroup() as tasks:
            asked = [tasks.create_task(ask(target)) for target in rewards[:_REWARDS]]
        status = tell()
        found = tuple(task.result().to_tell() for task in asked)
        told = status.model_copy(update={"failures": status.failures[:_FAILURES]})
        await link.note(StatusNote(url=url, status=told, rewards=found))
        unheard = 0 if link.welcomed else unheard + 1
        await asyncio.sleep(_EVERY_S * max(1, min(unheard, _RAREST)))


def asked_rewards(config: EnvServiceConfig) -> list[Target]:
    """The reward services that are asked how they are: none where environments may give all rewards themselves."""
    if not config.needs_rewards:
        return []
    given = [(url, None) for url in config.reward_urls] + [(each.url, each.token) for each in config.rewards]
    return [
        Target(kind="reward-service", url=url.rstrip("/"), token=token or config.reward_token, tls=config.http.tls)
        for url, token in dict(given).items()
    ]
