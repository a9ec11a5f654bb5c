"""Announcements to a learner that refuses them, for good or for a while."""

import asyncio
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from aiohttp import web

from headway.certificates import Authority
from protocol.fleet import Announcement, AnnouncementAnswer, Fingerprints
from protocol.status import ErrorBody, ErrorDetail, Readiness
from services.http.app import create_app
from services.http.client import HttpClient
from services.http.metrics import Metrics
from services.http.server import Listener, serve_http
from services.http.tls import TlsFiles, client_tls
from services.http.waiting import Waiting
from services.process import FAILED, NEVER_SERVED, exit_code_of
from tests.env_service.peers import eventually, served

with warnings.catch_warnings():  # those of vLLM
    warnings.simplefilter("ignore")
    from generator import announcer
    from generator.announcer import JoinRefusedByLearner, announce
    from generator.serving import Serving

ANNOUNCEMENT = Announcement(
    generator_id="g",
    url="http://g",
    protocol_version=1,
    fingerprints=Fingerprints(model="m", tokenizer="t", chat_template="c"),
    backend="gloo",
    max_model_len=8,
    serving_version=None,
)


def _serving() -> Serving:
    none = cast(Any, None)
    return Serving(
        engine=none, generator_id="g", vocabulary_size=8, max_model_len=8, max_waiting_requests=1, metrics=none
    )


class RefusingLearner:
    """Answers the first announcement, or the first `times`, with `status` and `text`, and takes the others."""

    def __init__(self, status: int, *, times: int = 1, text: str = "refused") -> None:
        self._statuses: Iterator[int] = iter([status] * times)
        self._text = text
        self.asked = 0

    async def handle(self, _: web.Request) -> web.Response:
        self.asked += 1
        status = next(self._statuses, 200)
        taken = AnnouncementAnswer(incarnation=1, announce_every_s=0.01).model_dump_json()
        return web.Response(status=status, text=taken if status == 200 else self._text)


@pytest.mark.parametrize("status", [404, 408, 422, 425, 429])
async def test_a_refusal_that_may_pass_is_tried_again(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(announcer, "_RETRY_S", 0.01)
    learner = RefusingLearner(status)

    async with served(learner.handle, "/v1/generators") as url, HttpClient() as client:
        joining = asyncio.create_task(
            announce(
                learner=url,
                client=client,
                announcement=ANNOUNCEMENT,
                serving=_serving(),
                waits=Waiting(),
            )
        )
        await eventually(lambda: joining.done() or learner.asked >= 3)
        assert not joining.done()
        joining.cancel()
        await asyncio.wait([joining])


@pytest.mark.parametrize("status", [401, 403, 409])
@pytest.mark.parametrize(("serves", "code"), [(False, NEVER_SERVED), (True, FAILED)])
async def test_a_refusal_that_would_come_again_ends_it(status: int, serves: bool, code: int) -> None:
    """If it never served, by the code with which a second such end is the last."""
    learner, serving = RefusingLearner(status), _serving()
    if serves:
        serving.holds("1.0")

    async with served(learner.handle, "/v1/generators") as url, HttpClient() as client:
        with pytest.raises(JoinRefusedByLearner) as refused:
            await announce(
                learner=url,
                client=client,
                announcement=ANNOUNCEMENT,
                serving=serving,
                waits=Waiting(),
            )
    assert learner.asked == 1
    assert exit_code_of(refused.value) == code


async def test_one_that_was_expelled_serves_nothing_and_asks_until_it_is_taken_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(announcer, "_EXPELLED_RETRY_S", 0.01)
    expelled = ErrorBody(error=ErrorDetail(kind="expelled", message="generator g was expelled: it was wrong"))
    learner = RefusingLearner(409, times=3, text=expelled.model_dump_json())
    serving, waits = _serving(), Waiting()
    serving.holds("1.4")

    async with served(learner.handle, "/v1/generators") as url, HttpClient() as client:
        joining = asyncio.create_task(
            announce(learner=url, client=client, announcement=ANNOUNCEMENT, serving=serving, waits=waits)
        )
        await eventually(lambda: joining.done() or learner.asked >= 5)
        assert not joining.done(), "it stays, for whoever looks for the fault"
        assert serving.version is None
        joining.cancel()
        await asyncio.wait([joining])


@pytest.mark.parametrize(
    ("shown", "said"),
    [
        ({}, "its certificate is not signed by a CA in "),
        (
            {"client_ca": "ca.pem"},
            "it may want another client certificate, of its http.tls_client_ca_file: none is set",
        ),
    ],
)
async def test_a_certificate_that_does_not_hold_is_named_and_no_address_is_blamed(
    shown: dict[str, str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(announcer, "QUIET_S", 0.2)
    monkeypatch.setattr(announcer, "_RETRY_S", 0.01)
    caplog.set_level("INFO")
    for name in ("ours", "other"):
        (tmp_path / name).mkdir()
        authority = Authority.new()
        authority.write(tmp_path / name)
        authority.issue(tmp_path / name, "learner", hosts=())
    folder = tmp_path / ("ours" if shown else "other")
    client_ca = folder / shown["client_ca"] if shown else None
    files = TlsFiles(cert=folder / "learner.pem", key=folder / "learner.key", client_ca=client_ca)
    app = create_app(
        service="learner", version="0", token=None, readiness=lambda: Readiness(ready=True), metrics=Metrics("learner")
    )
    trusted = client_tls(TlsFiles(ca=tmp_path / "ours/ca.pem"))
    async with asyncio.TaskGroup() as group:
        with Listener(host="127.0.0.1", port=0, tls=files) as listener:
            serving = group.create_task(serve_http(app, listener, finish_s=1))
            async with HttpClient(tls=trusted) as client:
                joining = group.create_task(
                    announce(
                        learner=listener.url, client=client, announcement=ANNOUNCEMENT, serving=_serving(),
                        waits=Waiting(),
                    )
                )  # fmt: skip
                await eventually(lambda: "waiting for the learner" in caplog.text)
                joining.cancel()
                await asyncio.wait([joining])
            serving.cancel()
    (line,) = (text for text in caplog.messages if text.startswith("waiting for the learner"))
    assert said in line
    assert "correct generator.join.learner" not in line
