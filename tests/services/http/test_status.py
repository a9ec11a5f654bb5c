"""Answers of `GET /v1/status`, over a real socket."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest
from pydantic import SecretStr

from protocol.status import ErrorBody, PeerStatus, ProgressStatus, Report, Status
from services.http.app import create_app
from services.http.client import Contacts, HttpClient, ServiceRefused, ServiceUnreachable
from services.http.metrics import Metrics
from services.http.server import Listener, serve_http
from services.http.status import add_status_route, peers_at, recent_failures
from services.http.waiting import Waiting

TOKEN = SecretStr("open sesame")
REPORT = Report(
    id="g-1",
    policy_version="1.7",
    progress=ProgressStatus(unit="tokens", done=12),
    peers=(PeerStatus(name="http://127.0.0.1:7300", kind="learner", state="answers"),),
    problems=("the engine is gone",),
)


@asynccontextmanager
async def serving(waits: Waiting) -> AsyncIterator[str]:
    app = create_app(
        service="generator", version="0.1.0", token=TOKEN, readiness=waits.readiness, metrics=Metrics("generator")
    )
    with Listener(host="127.0.0.1", port=0) as listener, recent_failures() as failures:
        add_status_route(
            app,
            service="generator",
            version="0.1.0",
            waits=waits,
            failures=failures,
            stopping=lambda: True,
            provider=lambda: REPORT,
        )
        server = asyncio.create_task(serve_http(app, listener))
        try:
            yield listener.url
        finally:
            server.cancel()
            await asyncio.wait([server])


def test_a_record_that_cannot_be_formatted_raises_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with recent_failures() as failures:
        for level in (logging.INFO, logging.WARNING):
            failures.handle(logging.LogRecord("x", level, "reward.py", 1, "reward", (0.5,), None))
        failures.handle(logging.LogRecord("x", logging.WARNING, "reward.py", 2, "all is well", (), None))
        assert [one.text for one in failures.newest_first()] == ["all is well"]
    assert "not all arguments converted" in capsys.readouterr().err


async def test_half_a_character_in_the_log_costs_no_status() -> None:
    async with serving(Waiting()) as url, HttpClient(token=TOKEN) as client:
        logging.getLogger("anywhere").warning("no move %s", "\ud83d")
        status = await client.get(f"{url}/v1/status", Status, deadline_s=5)
    assert [failure.text for failure in status.failures] == ["no move ?"]


async def test_a_status_holds_what_the_process_and_its_provider_know() -> None:
    waits = Waiting()
    waits.started()
    async with serving(waits) as url, HttpClient(token=TOKEN) as client:
        logging.getLogger("anywhere").warning("publish %d failed", 3)
        logging.getLogger("anywhere").info("all is well")
        with waits.wait("the learner"), waits.wait("groups", blocks_readiness=False):
            status = await client.get(f"{url}/v1/status", Status, deadline_s=5)
    assert (status.service, status.id, status.stopping) == ("generator", "g-1", True)
    assert (status.policy_version, status.progress, status.problems) == ("1.7", REPORT.progress, REPORT.problems)
    assert [(wait.whom, wait.blocks_readiness) for wait in status.waits] == [("the learner", True), ("groups", False)]
    assert [failure.text for failure in status.failures] == ["publish 3 failed"]
    assert status.pid > 0
    assert status.uptime_s >= 0


async def test_a_process_that_starts_waits_for_its_own_start() -> None:
    async with serving(Waiting()) as url, HttpClient(token=TOKEN) as client:
        status = await client.get(f"{url}/v1/status", Status, deadline_s=5)
    assert [wait.whom for wait in status.waits] == ["its own start"]


async def test_a_status_wants_the_token() -> None:
    async with (
        serving(Waiting()) as url,
        aiohttp.ClientSession() as session,
        session.get(f"{url}/v1/status") as answer,
    ):
        assert answer.status == 401
        assert ErrorBody.model_validate_json(await answer.read()).error.kind == "unauthorized"


def test_failures_are_noted_within_the_block_only_and_few_of_them() -> None:
    log = logging.getLogger("anywhere")
    with recent_failures() as failures:
        for number in range(100):
            log.error("failure %d", number)
    log.error("another")
    texts = [failure.text for failure in failures.newest_first()]
    assert texts[0] == "failure 99"
    assert len(texts) < 20


async def test_a_client_knows_how_its_counterparts_answered() -> None:
    async with serving(Waiting()) as url, HttpClient() as client:
        with pytest.raises(ServiceRefused):
            await client.get(f"{url}/v1/status", Status, deadline_s=5)
        for _ in range(2):
            with pytest.raises(ServiceUnreachable):
                await client.get("http://127.0.0.1:9/v1/status", Status, deadline_s=5)
    refused, dead = client.contacts()
    assert (refused.origin, refused.state) == (url, "answers")
    assert refused.last_answer_s is not None
    assert (dead.last_answer_s, dead.failures_in_row) == (None, 2)
    assert dead.state.startswith("2 calls in a row failed: http://127.0.0.1:9/v1/status: cannot connect")


def test_contacts_forget_the_one_not_called_for_longest() -> None:
    contacts = Contacts(clock=lambda: 5.0)
    for port in range(10_000):
        contacts.answered(f"http://host:{port}/v1/score")
        contacts.failed("http://host:0/v1/score", why="broke", heard=False)
    known = {contact.origin: contact for contact in contacts.all()}
    assert len(known) <= 8192
    assert known["http://host:0"].failures_in_row == 10_000
    assert known["http://host:9999"].last_answer_s == 0.0


def test_a_peer_that_was_not_called_is_said_to_be_so() -> None:
    contacts = Contacts(clock=lambda: 5.0)
    contacts.answered("http://host:1/v1/score")
    called, other = peers_at(("http://host:1/", "http://host:2"), contacts.all(), kind="reward-service")
    assert (called.state, called.last_heard_s) == ("answers", 0.0)
    assert (other.state, other.last_heard_s) == ("not called yet", None)


def test_the_last_lines_of_the_log_are_kept_and_only_warnings_are_failures() -> None:
    logger = logging.getLogger("headway.tests")
    before, root = logger.level, logging.getLogger()
    logger.setLevel(logging.INFO)
    try:
        with recent_failures() as failures:
            for number in range(30):
                logger.info("step %d\nof many", number)
            logger.warning("it is slow %s", "x" * 1000)
    finally:
        logger.setLevel(before)

    lines = failures.lines()
    assert len(lines) == 20
    assert lines[0].endswith("step 11 of many"), "in one line, the oldest first"
    assert " WARNING it is slow" in lines[-1]
    assert len(lines[-1]) == 300
    assert [one.text[:10] for one in failures.newest_first()] == ["it is slow"]
    assert failures not in root.handlers
