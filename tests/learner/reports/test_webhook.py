"""Verdicts that are sent to an address."""

import asyncio
from collections import Counter
from typing import Any

from aiohttp import web
from pydantic import SecretStr

from learner.reports.webhook import Webhook
from services.diagnosis.verdict import RunVerdict
from tests.env_service.peers import eventually, hanging, served

SICK = RunVerdict(state="sick", cause="culprit", who="generator", sentence="generator: hangs", remedy="restart it")


async def test_each_verdict_is_posted_as_json_with_a_sentence_for_people() -> None:
    got: list[dict[str, Any]] = []

    async def take(request: web.Request) -> web.Response:
        got.append(await request.json())
        return web.Response(text="ok")

    outcomes = Counter[str]()
    async with served(take, "/hook") as url:
        webhook = Webhook(SecretStr(f"{url}/hook"), run="addition", outcome=lambda what: outcomes.update([what]))
        posting = asyncio.create_task(webhook.run())
        webhook.tell(SICK, step=7)
        webhook.tell(RunVerdict(state="healthy", sentence="Healthy"), step=9)
        await eventually(lambda: outcomes["sent"] == 2)
        posting.cancel()
    assert [(news["state"], news["step"], news["text"]) for news in got] == [
        ("sick", 7, "addition: generator: hangs; restart it"),
        ("healthy", 9, "addition: Healthy"),
    ]
    assert (got[0]["run"], got[0]["cause"], got[0]["who"], got[0]["remedy"]) == (
        "addition", "culprit", "generator", "restart it",
    )  # fmt: skip


async def test_failures_are_counted_and_said_once_without_the_address(caplog: Any) -> None:
    async def refuse(_: web.Request) -> web.Response:
        return web.Response(status=500, text="no")

    outcomes = Counter[str]()
    async with served(refuse, "/secret-path") as url:
        webhook = Webhook(SecretStr(f"{url}/secret-path"), run="addition", outcome=lambda what: outcomes.update([what]))
        posting = asyncio.create_task(webhook.run())
        for step in range(3):
            webhook.tell(SICK, step=step)
        await eventually(lambda: outcomes["failed"] == 3)
        posting.cancel()
    assert len(caplog.messages) == 1
    assert "secret-path" not in caplog.text


async def test_a_listener_that_hangs_holds_up_nobody_and_the_oldest_news_are_dropped() -> None:
    outcomes, connections = Counter[str](), list[asyncio.StreamWriter]()
    async with hanging(connections) as url:
        webhook = Webhook(SecretStr(url), run="addition", outcome=lambda what: outcomes.update([what]))
        posting = asyncio.create_task(webhook.run())
        for step in range(20):
            webhook.tell(SICK, step=step)
        posting.cancel()
    assert outcomes == {"dropped": 12}


async def test_an_address_that_no_client_takes_costs_news_and_not_the_run(caplog: Any) -> None:
    outcomes = Counter[str]()
    webhook = Webhook(
        SecretStr("https://[::1/secret-path"), run="addition", outcome=lambda what: outcomes.update([what])
    )
    posting = asyncio.create_task(webhook.run())
    for step in range(2):
        webhook.tell(SICK, step=step)
    await eventually(lambda: outcomes["failed"] == 2 or posting.done())
    assert not posting.done()
    posting.cancel()
    assert len(caplog.messages) == 1
    assert "secret-path" not in caplog.text
