"""A service that is slow, busy, broken or gone, asked over a real socket."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from pydantic import BaseModel

from reward_service.endpoints.config import EndpointConfig
from reward_service.endpoints.endpoint import Endpoint, InputRefused, open_endpoint
from reward_service.verifier.lanes import make_metrics
from reward_service.verifier.submission import InfrastructureError, UserError
from services import watched_files
from services.http.breakers import Breakers, BreakerSettings
from services.http.client import HttpClient
from services.http.metrics import Metrics
from services.secret_files import write_secret
from tests.reward_service.scripted_api import BREAK, HANG, Answer, JsonObject, Refusal, ScriptedApi


class TextQuestion(BaseModel):
    text: str = "?"


class Reply(BaseModel):
    text: str


def config_of(url: str, **limits: object) -> EndpointConfig:
    return EndpointConfig.model_validate({"name": "judge", "url": url, "limits": limits})


@asynccontextmanager
async def endpoint(api: ScriptedApi, **limits: object) -> AsyncIterator[Endpoint]:
    """Rests and pauses are so short that a test with many failures is over soon."""
    async with api.running() as url, HttpClient() as http:
        yield Endpoint(
            config_of(url, **limits),
            http=http,
            key=None,
            metrics=make_metrics(Metrics("reward-service")),
            breakers=Breakers("judge", settings=BreakerSettings(rest_s=0.001, rest_max_s=0.01)),
            backoff_s=0.001,
        )


async def ask(asked: Endpoint, *, within_s: float = 60.0) -> str:
    deadline = asyncio.get_running_loop().time() + within_s
    return (await asked.ask("/answers", TextQuestion(), Reply, deadline=deadline)).text


def well(number: int, body: JsonObject) -> Answer:
    return {"text": f"{number}"}


def first(trouble: Answer, *, times: int = 1) -> ScriptedApi:
    return ScriptedApi(lambda number, body: trouble if number < times else well(number, body))


async def test_the_answer_comes_back_as_its_model() -> None:
    api = ScriptedApi(well)
    async with endpoint(api) as asked:
        assert await ask(asked) == "0"
    assert (api.paths, api.bodies) == (["/answers"], [{"text": "?"}])


@pytest.mark.parametrize("trouble", [Refusal(500), Refusal(503), Refusal(408), BREAK, "no JSON", {"other": 1}])
async def test_what_may_pass_is_tried_again(trouble: Answer) -> None:
    async with endpoint(first(trouble, times=3)) as asked:
        assert await ask(asked) == "3"


async def test_attempts_end_with_what_went_wrong_last() -> None:
    api = ScriptedApi(lambda number, body: Refusal(500, f"trouble {number}"))
    async with endpoint(api, attempts=3) as asked:
        with pytest.raises(InfrastructureError, match=r"3 attempts failed, last: .*500.*trouble 2"):
            await ask(asked)
    assert len(api.bodies) == 3


@pytest.mark.parametrize("status", [400, 413, 422])
async def test_a_refused_input_is_an_error_of_the_data_at_once(status: int) -> None:
    api = ScriptedApi(lambda number, body: Refusal(status, "too long"))
    async with endpoint(api) as asked:
        with pytest.raises(InputRefused, match="too long"):
            await ask(asked)
    assert len(api.bodies) == 1


async def test_a_refused_key_is_told_with_its_remedy_and_not_tried_again() -> None:
    api = ScriptedApi(lambda number, body: Refusal(401, "who are you"))
    async with endpoint(api) as asked:
        with pytest.raises(InfrastructureError, match="who are you; check api_key_env or api_key_file"):
            await ask(asked)
    assert len(api.bodies) == 1


async def test_a_busy_service_is_left_alone_for_as_long_as_it_says_and_costs_no_attempt() -> None:
    api = first(Refusal(429, headers={"Retry-After": "1"}), times=2)
    async with endpoint(api, attempts=1) as asked:
        assert await ask(asked) == "2"
    assert [after - before >= 0.99 for before, after in zip(api.times, api.times[1:], strict=False)] == [True, True]


async def test_everybody_pauses_when_one_is_told_to() -> None:
    api = first(Refusal(429, headers={"Retry-After": "2"}))
    async with endpoint(api) as asked:
        with pytest.raises(InfrastructureError, match="busy"):
            await ask(asked, within_s=1.0)
        await asyncio.gather(*(ask(asked) for _ in range(3)))
    assert all(at - api.times[0] >= 1.99 for at in api.times[1:])
    assert len(api.times) == 4


async def test_a_pause_beyond_the_deadline_is_an_error_at_once() -> None:
    api = ScriptedApi(lambda number, body: Refusal(429, headers={"Retry-After": "3600"}))
    async with endpoint(api) as asked:
        for _ in range(2):
            with pytest.raises(InfrastructureError, match=r"busy: the service wants to be left alone for 3[56]"):
                await ask(asked, within_s=600.0)
    assert len(api.bodies) == 1


async def test_a_service_that_hangs_costs_its_request_timeout_and_is_asked_again() -> None:
    api = first(HANG)
    async with endpoint(api, request_timeout_s=0.2) as asked:
        assert await ask(asked) == "1"


async def test_requests_at_once_are_bounded() -> None:
    hold = asyncio.Event()
    api = ScriptedApi(well, hold=hold)
    async with endpoint(api, concurrency=2) as asked, asyncio.TaskGroup() as tasks:
        for _ in range(6):
            tasks.create_task(ask(asked))
        await api.requests_under_way(2)
        hold.set()
    assert (api.most_under_way, len(api.bodies)) == (2, 6)


async def test_requests_begin_no_faster_than_the_rate() -> None:
    api = ScriptedApi(well)
    async with endpoint(api, requests_per_s=20.0) as asked:
        began = asyncio.get_running_loop().time()
        await asyncio.gather(*(ask(asked) for _ in range(5)))
        assert asyncio.get_running_loop().time() - began >= 4 / 20 - 0.001


async def test_a_budget_of_requests_ends_in_an_error_that_says_so() -> None:
    api = ScriptedApi(well)
    async with endpoint(api, most_requests=2) as asked:
        await ask(asked)
        await ask(asked)
        with pytest.raises(InfrastructureError, match=r"budget: 2 requests are spent, .*most_requests is 2"):
            await ask(asked)
    assert len(api.bodies) == 2


async def test_a_budget_of_tokens_ends_in_an_error_that_says_so() -> None:
    api = ScriptedApi(well)
    async with endpoint(api, most_tokens=100) as asked:
        await ask(asked)
        asked.spend(tokens=130)
        with pytest.raises(InfrastructureError, match=r"budget: 130 tokens are spent, .*most_tokens is 100"):
            await ask(asked)


async def test_a_service_that_is_gone_rests_and_is_found_again() -> None:
    api = first(BREAK, times=8)
    async with endpoint(api, attempts=20) as asked:
        answers = await asyncio.gather(*(ask(asked) for _ in range(4)))
    assert len(answers) == 4


async def test_the_key_is_shown_to_the_service_and_in_no_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("A_KEY", "sk-secret")
    api = ScriptedApi(lambda number, body: Refusal(401, "wrong key sk-secret"))
    async with api.running() as url:
        config = EndpointConfig(name="judge", url=url, api_key_env="A_KEY")
        async with open_endpoint(config, metrics=make_metrics(Metrics("reward-service"))) as asked:
            with pytest.raises(InfrastructureError, match=r"wrong key \[the key\]") as raised:
                await ask(asked)
    assert api.headers[0]["Authorization"] == "Bearer sk-secret"
    assert "sk-secret" not in str(raised.value)
    assert "sk-secret" not in caplog.text


async def test_a_key_that_is_exchanged_during_a_call_is_in_no_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(watched_files, "LOOK_EVERY_S", 0.0)
    file = tmp_path / "key"
    write_secret(file, "sk-former-0123456789")

    def exchanged(number: int, body: JsonObject) -> Answer:
        write_secret(file, "sk-former-0123456789-and-more")
        return Refusal(401, "sk-former-0123456789 is not sk-former-0123456789-and-more")

    api = ScriptedApi(exchanged)
    async with api.running() as url:
        config = EndpointConfig(name="judge", url=url, api_key_file=file)
        async with open_endpoint(config, metrics=make_metrics(Metrics("reward-service"))) as asked:
            with pytest.raises(InfrastructureError, match=r"\[the key\] is not \[the key\];"):
                await ask(asked)


async def test_a_key_is_read_from_a_file_that_only_its_owner_can_read(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("sk-file\n")
    file.chmod(0o600)
    api = ScriptedApi(well)
    async with api.running() as url:
        config = EndpointConfig(name="judge", url=url, api_key_file=file)
        async with open_endpoint(config, metrics=make_metrics(Metrics("reward-service"))) as asked:
            await ask(asked)
        assert api.headers[0]["Authorization"] == "Bearer sk-file"
        file.chmod(0o644)
        with pytest.raises(UserError, match=r"api_key_file.*chmod 600"):
            async with open_endpoint(config, metrics=make_metrics(Metrics("reward-service"))):
                pass


async def test_a_variable_without_a_key_is_named_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMPTY_KEY", " ")
    config = EndpointConfig(name="judge", url="http://127.0.0.1:1", api_key_env="EMPTY_KEY")
    with pytest.raises(UserError, match="api_key_env names EMPTY_KEY, which is not set or empty"):
        async with open_endpoint(config, metrics=make_metrics(Metrics("reward-service"))):
            pass


@pytest.mark.parametrize(
    ("url", "named"),
    [
        ("host:80", "is no address"),
        ("ftp://host", "is no address"),
        ("http://host/v1?key=1", "is no address"),
        ("http://me:secret@host/v1", "url holds a password"),
    ],
)
def test_what_is_no_address_is_refused(url: str, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        config_of(url)


def test_two_places_for_one_key_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="api_key_env and api_key_file are both set"):
        EndpointConfig(name="judge", url="http://host", api_key_env="KEY", api_key_file=tmp_path)
