"""Notes on this process, and the status in them."""

import asyncio
from typing import Any, cast

import pytest

from env_service.app import EnvServiceStatus
from env_service.connection import LearnerLink
from env_service.rollouts.fleet import GeneratorFleet
from env_service.status_notes import send_notes
from protocol.messages import StatusNote
from services.diagnosis.asked import Target
from services.http.client import Contact, HttpClient
from tests.env_service.peers import serving
from tests.services.diagnosis.statuses import status


class NotedLink:
    """Takes one note, and ends the sending."""

    welcomed = True

    def __init__(self) -> None:
        self.notes: list[StatusNote] = []

    async def note(self, note: StatusNote) -> None:
        self.notes.append(note)
        raise asyncio.CancelledError


async def test_of_more_reward_services_than_a_note_holds_the_first_are_told_of() -> None:
    link = NotedLink()
    targets = [Target(kind="reward-service", url=f"http://127.0.0.1:1/{number}") for number in range(65)]

    with pytest.raises(asyncio.CancelledError):
        await send_notes(
            cast("LearnerLink", link), lambda: status("env-service"), url="http://127.0.0.1:2", rewards=targets
        )

    (note,) = link.notes
    assert [each.url for each in note.rewards] == [target.url for target in targets[:64]]


class LookedUpClient:
    """Knows one generator; counts how often it is asked."""

    looks = 0

    def contacts(self) -> tuple[Contact, ...]:
        self.looks += 1
        return (Contact(origin="http://127.0.0.1:2", last_answer_s=1.5, failures_in_row=0, last_failure=None),)


def test_all_generators_are_looked_up_at_once() -> None:
    fleet, client = GeneratorFleet(), LookedUpClient()
    fleet.replace([serving(f"g{number}", f"http://127.0.0.1:{number}") for number in range(1, 4)])
    reader: Any = EnvServiceStatus.__new__(EnvServiceStatus)
    reader._fleet, reader._generators = fleet, cast("HttpClient", client)

    peers = reader._generators_heard()

    assert [(peer.name, peer.last_heard_s) for peer in peers] == [("g1", None), ("g2", 1.5), ("g3", None)]
    assert client.looks == 1
