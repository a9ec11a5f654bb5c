"""The page of a server of training loops: what is told of tenants and runs, and to whom."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from learner.page.tenants_page import MOST_CURVES
from learner.tenants.run_records import shown_name
from tests.learner.page.tenants_served import TOKEN, PageOfTenants, page_of_tenants

OF_B = {"X-API-Key": "tml-b"}


@pytest.fixture
async def made(tmp_path: Path) -> AsyncIterator[PageOfTenants]:
    async with page_of_tenants(tmp_path) as found:
        yield found


def reader(made: PageOfTenants, headers: dict[str, str] | None = None) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app=made.app)
    return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", headers=headers)


async def read(made: PageOfTenants, path: str, status: int = 200, headers: dict[str, str] | None = None) -> Any:
    async with reader(made, headers or {"Authorization": f"Bearer {TOKEN}"}) as client:
        answer = await client.get(f"/page/data/{path}")
    assert answer.status_code == status, answer.text
    return answer.json()


async def test_who_has_the_token_sees_all_tenants_and_their_runs(made: PageOfTenants) -> None:
    first, second = await made.trained("a"), await made.trained("b", steps=1)
    told = await read(made, "tenants")

    assert (told["viewer"], told["base_model"], told["run_count"], told["clients"]) == (None, "tiny/bigram", 2, 2)
    assert {each["name"] for each in told["tenants"]} == {"a", "b"}
    runs = {each["name"]: each for each in told["runs"]}
    assert {name: each["steps"] for name, each in runs.items()} == {
        shown_name("a", first): 3, shown_name("b", second): 1,
    }  # fmt: skip
    assert told["with_curves"] == [shown_name("b", second), shown_name("a", first)]
    assert told["peers"][0]["state"] == "answers"
    assert told["verdict"]["state"] == "healthy"


async def test_curves_have_the_loss_first_and_a_point_for_each_step(made: PageOfTenants) -> None:
    name = shown_name("a", await made.trained("a"))
    told = await read(made, f"tenant_curves?run={name}")

    assert [each["heading"] for each in told["figures"]] == ["Loss, a row", "grad_norm", "Rows of a step"]
    (run,) = told["runs"]
    columns = run["columns"]
    assert (run["name"], columns["step"], columns["rows"]) == (name, [1, 2, 3], [1.0, 1.0, 1.0])
    assert columns["loss"][0] > columns["loss"][1] > columns["loss"][2] > 0
    assert columns["time_s"][0] == 0
    assert not any(" " in each["id"] for each in told["figures"]), "ids of elements have no spaces"


async def test_a_tenants_key_shows_its_own_alone(made: PageOfTenants) -> None:
    mine, other = shown_name("b", await made.trained("b")), shown_name("a", await made.trained("a"))
    told = await read(made, "tenants", headers=OF_B)

    assert told["viewer"] == "b"
    assert [each["name"] for each in told["tenants"]] == ["b"]
    assert [each["name"] for each in told["runs"]] == told["with_curves"] == [mine]
    assert "peers" not in told
    assert (await read(made, f"tenant_curves?run={mine}", headers=OF_B))["runs"]
    refused = await read(made, f"tenant_curves?run={other}", 404, headers=OF_B)
    assert refused["error"]["kind"] == "unknown_run"


async def test_runs_of_tenants_that_left_keep_their_curves(made: PageOfTenants) -> None:
    model_id = await made.trained("a")
    await made.client("a").post("unload_model", model_id=model_id)
    told = await read(made, "tenants")

    assert [(each["place"], each["waits_for"]) for each in told["runs"]] == [("unloaded", "nobody: it was unloaded")]
    assert told["with_curves"] == [shown_name("a", model_id)]
    assert (await read(made, f"tenant_curves?run={told['with_curves'][0]}"))["runs"][0]["columns"]["step"] == [1, 2, 3]


async def test_nothing_is_told_without_a_key_and_a_cookie_is_as_good_as_the_key(made: PageOfTenants) -> None:
    for headers in ({"X-API-Key": "tml-c"}, {"Authorization": "Bearer wrong"}, {"Cookie": "headway_page=a:00"}):
        await read(made, "tenants", 401, headers)
    for key, viewer in ((TOKEN, None), ("tml-a", "a")):
        async with reader(made) as client:
            assert (await client.post("/page/login", json={"token": "tml-c"})).status_code == 401
            entered = await client.post("/page/login", json={"token": key})
            assert entered.status_code == 204
            cookie = entered.headers["set-cookie"]
            assert key not in cookie
            assert {"HttpOnly", "Path=/page", "SameSite=strict"} <= set(cookie.split("; "))
            told = await client.get("/page/data/tenants")
            assert (told.status_code, told.json()["viewer"]) == (200, viewer)
            assert (await client.get("/v1/status")).status_code == 401, "no other route knows the cookie"
            assert (await client.get("/api/v1/training_runs")).status_code == 401


async def test_the_page_and_its_files_need_no_key_and_no_file_outside_is_served(made: PageOfTenants) -> None:
    async with reader(made) as client:
        page = await client.get("/")
        assert "Tenants" in page.text
        assert "script-src 'self'" in page.headers["content-security-policy"]
        assert (await client.get("/page/static/tenants.js")).status_code == 200
        assert (await client.get("/page/static/..%2froutes.py")).status_code == 404


async def test_more_curves_than_are_drawn_are_refused_and_unknown_ones_named(made: PageOfTenants) -> None:
    many = "&".join(f"run=r{number}" for number in range(MOST_CURVES + 1))

    assert (await read(made, f"tenant_curves?{many}", 422))["error"]["kind"] == "invalid_field"
    assert "no curves of nobody/1" in (await read(made, "tenant_curves?run=nobody/1", 404))["error"]["message"]
    assert (await read(made, "tenant_curves")) == {"figures": [], "runs": []}


async def test_no_id_that_gives_access_is_told(made: PageOfTenants) -> None:
    model_id = await made.trained("a")
    session = model_id.partition(":")[0]

    for path in ("tenants", f"tenant_curves?run={shown_name('a', model_id)}"):
        assert session.removeprefix("session-") not in str(await read(made, path))
