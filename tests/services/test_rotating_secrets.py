"""Tokens that change while they are used: over real sockets, in the order in which files reach the processes."""

import asyncio
import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from pydantic import BaseModel, SecretStr

from env_service.hosting.remote import RemoteOptions
from headway.certificates import Authority
from learner.page import routes
from learner.page.files import PAGE_PATHS
from learner.page.routes import RunPage, ShownRun
from protocol.status import Readiness
from reward_service.config import RewardServiceConfig
from reward_service.endpoints.config import EndpointConfig
from reward_service.endpoints.endpoint import api_key
from services import watched_files
from services.config.models import load_config
from services.config.sources import ConfigError
from services.http.app import create_app
from services.http.client import HttpClient, ServiceRefused
from services.http.metrics import Metrics
from services.http.server import Listener, serve_http
from services.rotating_secrets import RotatingSecret, is_shown
from services.secret_files import SecretFileError, write_secret

FORMER, NEW = "the-former-token-0123456789", "the-new-token-0123456789"


class Greeting(BaseModel):
    text: str


@pytest.fixture(autouse=True)
def looks_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched_files, "LOOK_EVERY_S", 0.0)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    write_secret(tmp_path / "token", FORMER)
    return tmp_path / "token"


@asynccontextmanager
async def serving(token: SecretStr, *, page: RunPage | None = None) -> AsyncIterator[str]:
    with Listener(host="127.0.0.1", port=0) as listener:
        app = create_app(
            service="learner", version="0", token=token, readiness=lambda: Readiness(ready=True),
            metrics=Metrics("learner"), open_paths=PAGE_PATHS if page else frozenset(),
        )  # fmt: skip
        if page is not None:
            page.add_routes(app)

        @app.get("/greeting")
        async def greeting() -> Greeting:
            return Greeting(text="good day")

        async with asyncio.TaskGroup() as tasks:
            server = tasks.create_task(serve_http(app, listener, finish_s=1))
            try:
                yield listener.url
            finally:
                server.cancel()


async def test_in_three_steps_a_token_is_exchanged_and_no_call_is_refused_whoever_hears_first(tmp_path: Path) -> None:
    theirs, ours = tmp_path / "server", tmp_path / "client"
    write_secret(theirs, FORMER)
    write_secret(ours, FORMER)
    async with serving(RotatingSecret(theirs)) as url, HttpClient(token=RotatingSecret(ours)) as client:

        async def greeted() -> bool:
            return (await client.get(f"{url}/greeting", Greeting, deadline_s=10)).text == "good day"

        assert await greeted()
        for number, step in enumerate((f"{FORMER}\n{NEW}", f"{NEW}\n{FORMER}", NEW)):
            for path in (ours, theirs) if number % 2 else (theirs, ours):
                write_secret(path, step)
                assert await greeted(), (step, path)
        async with HttpClient(token=SecretStr(FORMER)) as late:
            with pytest.raises(ServiceRefused, match="got another"):
                await late.get(f"{url}/greeting", Greeting, deadline_s=10)


async def test_bytes_and_headers_of_a_call_come_with_the_newest_token(file: Path) -> None:
    async with serving(SecretStr(NEW)) as url, HttpClient(token=RotatingSecret(file)) as client:
        own = {"Authorization": f"Bearer {NEW}"}
        assert (await client.download(f"{url}/greeting", deadline_s=10, headers=own))[0] == b'{"text":"good day"}'
        write_secret(file, NEW)
        assert (await client.download(f"{url}/greeting", deadline_s=10))[0] == b'{"text":"good day"}'


@pytest.mark.parametrize(
    ("content", "mode", "reason"),
    [
        ("", 0o600, "got an empty file"), ("\n \n", 0o600, "got an empty file"), ("two words", 0o600, "one word"),
        (NEW, 0o644, "lets others use it"), (f"{NEW}\nshort", 0o600, "fewer than 16"), ("\xe9" * 20, 0o600, "ASCII"),
        (None, 0, "cannot read"), (f"{NEW}\n" * 200, 0o600, "got more"),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_used_leaves_the_former_token_in_force_and_is_named_once(
    file: Path, caplog: pytest.LogCaptureFixture, content: str | None, mode: int, reason: str
) -> None:
    secret = RotatingSecret(file)
    file.unlink()
    if content is not None:
        file.write_text(content)
        file.chmod(mode)
    assert [secret.get_secret_value() for _ in range(3)] == [FORMER] * 3
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert str(file) in record.message
    assert reason in record.message
    assert NEW not in record.message
    write_secret(file, NEW)
    assert is_shown(NEW, secret)
    assert not is_shown(FORMER, secret)


def test_a_file_that_was_refused_is_tried_again_though_what_it_holds_stays(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    secret = RotatingSecret(file)
    for mended, token in enumerate((NEW, FORMER), 1):
        write_secret(file, token)
        file.chmod(0o644)
        assert not is_shown(token, secret)
        file.chmod(0o600)
        assert is_shown(token, secret)
        assert [record.levelname for record in caplog.records] == ["ERROR"] * mended


def test_conversations_that_begin_during_a_change_show_what_was_read_before(file: Path) -> None:
    Authority.new().write(file.parent)
    files = {"token_file": file, "tls_ca_file": file.parent / "ca.pem"}

    def begun() -> RemoteOptions:
        return RemoteOptions.model_validate({"urls": ["https://host"], **files})

    before = begun().tls
    assert begun().token == SecretStr(FORMER)
    for path in files.values():
        path.write_text("")
    assert begun().token == SecretStr(FORMER)
    assert begun().tls is before
    write_secret(file, NEW)
    assert begun().token == SecretStr(NEW)


def test_a_change_is_said_once_without_the_tokens(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    secret = RotatingSecret(file)
    write_secret(file, f"{FORMER}\n\n  {NEW}\n")
    assert secret.lines() == secret.lines() == (FORMER, NEW)
    write_secret(file, f"{FORMER}\n{NEW}")
    secret.renew()
    (record,) = caplog.records
    assert record.message == f"{file} has changed, and is in use; the first of its 2 lines is shown, each is accepted"
    assert NEW not in repr(secret) + str(secret)


def test_a_mounted_secret_changes_by_a_link_to_another_folder(tmp_path: Path) -> None:
    for name, token in (("..one", FORMER), ("..two", NEW)):
        (tmp_path / name).mkdir()
        write_secret(tmp_path / name / "token", token)
    os.symlink("..one", tmp_path / "..data")
    os.symlink("..data/token", tmp_path / "token")
    secret = RotatingSecret(tmp_path / "token")
    os.symlink("..two", tmp_path / "..new")
    os.rename(tmp_path / "..new", tmp_path / "..data")
    assert secret.get_secret_value() == NEW


async def test_a_login_to_the_page_lasts_as_long_as_the_token_that_it_was_made_with(file: Path) -> None:
    token = RotatingSecret(file)
    app = create_app(
        service="learner", version="1", token=token, readiness=lambda: Readiness(ready=True),
        metrics=Metrics("learner"), open_paths=PAGE_PATHS,
    )  # fmt: skip
    RunPage([ShownRun("one", file.parent)], token=token).add_routes(app)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://learner") as client:

        async def enters(word: str) -> int:
            return (await client.post("/page/login", json={"token": word})).status_code

        async def reads() -> int:
            return (await client.get("/page/data/runs")).status_code

        assert (await enters(NEW), await enters(FORMER), await reads()) == (401, 204, 200)
        write_secret(file, f"{NEW}\n{FORMER}")
        assert await reads() == 200
        write_secret(file, NEW)
        assert (await reads(), await enters(FORMER), await enters(NEW), await reads()) == (401, 401, 204, 200)


async def test_a_stream_of_events_ends_with_the_token_that_it_was_asked_for_with(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "_NEWS_EVERY_S", 0.01)
    monkeypatch.setattr(routes, "_STATUS_EVERY_S", 0.02)
    token = RotatingSecret(file)
    page = RunPage([ShownRun("one", file.parent)], token=token)
    async with serving(token, page=page) as url, httpx.AsyncClient(base_url=url, timeout=20) as client:
        shown = {"Authorization": f"Bearer {FORMER}"}
        async with client.stream("GET", "/page/data/events", headers=shown) as answer:
            lines = answer.aiter_lines()
            assert "event: status" in [await anext(lines) for _ in range(3)]
            write_secret(file, f"{NEW}\n{FORMER}")
            while await anext(lines) != "event: status":
                pass
            write_secret(file, NEW)
            async with asyncio.timeout(20):
                assert "event: reset" not in [line async for line in lines]
        assert (await client.get("/page/data/events", headers=shown)).status_code == 401


def test_settings_and_keys_of_judges_follow_their_files(file: Path) -> None:
    given = ["--http.host", "0.0.0.0", "--http.token-file", str(file)]
    config = load_config(RewardServiceConfig, process="reward-service", argv=given, environ={})
    key = api_key(EndpointConfig(name="judge", url="http://judge", api_key_file=file))
    write_secret(file, NEW)
    assert config.http.token == SecretStr(NEW) == key
    write_secret(file, f"{NEW}\nshort")
    with pytest.raises(ConfigError, match="the token has 5 characters"):
        load_config(RewardServiceConfig, process="reward-service", argv=given, environ={})


def test_a_file_that_cannot_be_used_at_the_start_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SecretFileError, match="cannot read"):
        RotatingSecret(tmp_path / "none")
