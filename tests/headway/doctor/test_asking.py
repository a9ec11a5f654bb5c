"""Real sockets that answer, hang, refuse, or are not there."""

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import pytest
from fastapi import FastAPI, Response
from pydantic import SecretStr

from headway.doctor.asking import ask_all, targets_of, tokens_of
from protocol.status import PeerStatus, Readiness, Status
from services.config.models import ConfigModel, HttpConfig, ProcessConfig
from services.diagnosis.asked import Condition, Target, place_of
from services.diagnosis.asking import ask
from services.http.app import create_app
from services.http.bodies import json_answer
from services.http.metrics import Metrics
from services.http.server import Listener, serve_http
from services.local_processes import listener_of
from tests.services.diagnosis.statuses import status


class WithHttp(ProcessConfig):
    """The config of a process that serves HTTP."""

    http: HttpConfig


@asynccontextmanager
async def serving(answer: Status | None, *, token: SecretStr | None = None) -> AsyncIterator[str]:
    """A process with this status; without one, with no such route."""

    def ready() -> Readiness:
        return Readiness(ready=True)

    app: FastAPI = create_app(
        service="generator", version="0", token=token, readiness=ready, metrics=Metrics("generator")
    )
    if answer is not None:

        @app.get("/v1/status")
        async def tell() -> Response:
            return json_answer(answer)

    with Listener(host="127.0.0.1", port=0) as listener:
        server = asyncio.create_task(serve_http(app, listener))
        try:
            yield listener.url
        finally:
            server.cancel()
            await asyncio.wait([server])


@contextmanager
def hanging() -> Iterator[str]:
    """Accepts connections, as the kernel does for a stopped process, and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


async def test_one_that_answers_is_heard() -> None:
    async with serving(status("generator")) as url:
        proc = await ask(Target(kind="generator", url=url))
    assert (proc.condition, proc.status) == (Condition.ANSWERS, status("generator"))


async def test_one_that_hangs_is_told_from_one_that_is_dead_and_its_process_is_named() -> None:
    with hanging() as url:
        hangs = await ask(Target(kind="generator", url=url), deadline_s=0.3)
    dead = await ask(Target(kind="generator", url=url), deadline_s=5)
    assert (hangs.condition, dead.condition) == (Condition.HANGS, Condition.DEAD)
    assert hangs.process is not None
    assert "python" in hangs.process.command or "pytest" in hangs.process.command
    assert not hangs.process.is_stopped


@pytest.mark.parametrize(
    ("answer", "token", "complaint"),
    [
        (status("generator"), SecretStr("x"), "wants another token"),
        (None, None, "has no /v1/status"),
        (status("learner"), None, "a learner answers there, expected the generator"),
    ],
)
async def test_one_that_answers_something_else_is_strange(
    answer: Status | None, token: SecretStr | None, complaint: str
) -> None:
    async with serving(answer, token=token) as url:
        proc = await ask(Target(kind="generator", url=url))
    assert proc.condition is Condition.STRANGE
    assert complaint in proc.complaint


async def test_generators_that_the_learner_speaks_of_are_asked_too_with_the_token_of_their_kind() -> None:
    token = SecretStr("x")
    second = status("generator").model_copy(update={"pid": 2})
    async with serving(status("generator"), token=token) as one, serving(second, token=token) as other:
        peers = tuple(PeerStatus(name=url, kind="generator", url=url, state="serving") for url in (one, other))
        async with serving(status("learner", peers=peers)) as learner:
            procs = await ask_all([Target(kind="learner", url=learner), Target(kind="generator", url=one, token=token)])
    assert [proc.kind for proc in procs] == ["learner", "generator", "generator"]
    assert {proc.condition for proc in procs} == {Condition.ANSWERS}


class Routed(ConfigModel):
    url: str
    token: SecretStr | None = None


class WithRoutes(ProcessConfig):
    rewards: tuple[Routed, ...]


async def test_one_with_a_token_of_its_own_is_asked_with_that() -> None:
    answer, own = status("generator"), SecretStr("own")
    async with serving(answer, token=own) as url:
        configs = {"env-service": WithRoutes(rewards=(Routed(url=f"{url}/", token=own), Routed(url="http://other:1")))}
        assert tokens_of(configs) == {place_of(url): own}
        peers = (PeerStatus(name=url, kind="generator", url=url, state="serving"),)
        async with serving(status("learner", peers=peers)) as learner:
            asked = [Target(kind="learner", url=learner), Target(kind="generator", url="http://127.0.0.1:1")]
            procs = await ask_all(asked, tokens=tokens_of(configs))
    assert procs[-1].target.place == place_of(url)
    assert procs[-1].condition is Condition.ANSWERS


async def test_a_process_with_two_addresses_is_listed_once() -> None:
    async with serving(status("generator")) as url:
        targets = [
            Target(kind="generator", url=url),
            Target(kind="generator", url=url.replace("127.0.0.1", "127.0.0.2")),
        ]
        assert len(await ask_all(targets)) == 1


def test_targets_are_where_the_config_says_that_processes_listen() -> None:
    token = SecretStr("sixteen-or-more!")
    configs = {
        "learner": WithHttp(http=HttpConfig(host="0.0.0.0", port=7300, token=token)),
        "generator": WithHttp(http=HttpConfig(host="::1", port=7310)),
        "env-service": WithHttp(http=HttpConfig(port=0)),
    }
    assert targets_of(configs) == [
        Target(kind="learner", url="http://127.0.0.1:7300", token=token),
        Target(kind="generator", url="http://[::1]:7310"),
    ]


def test_nobody_listens_on_a_port_that_is_free() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        assert listener_of(unused.getsockname()[1]) is None
