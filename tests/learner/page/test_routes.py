import asyncio
import json
import os
import tomllib
from hashlib import sha256
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI
from pydantic import SecretStr

from learner.page.curves import _row, message
from learner.page.files import PAGE_PATHS
from learner.page.routes import RunPage, ShownRun
from learner.reports.growing import Mark
from learner.reports.history import RunHistory
from protocol.status import Readiness
from services.http.app import create_app
from services.http.metrics import Metrics
from tests.learner.page.made_run import make_run, step_line, write_lines

_ASKED = ("steps", "figures", "marks", "rows", "made_with", "events", "runs")
STATIC = Path(__file__).parents[3] / "learner" / "page" / "static"


def _app(page: RunPage, token: str | None = None) -> FastAPI:
    app = create_app(
        service="learner", version="1", token=None if token is None else SecretStr(token),
        readiness=lambda: Readiness(ready=True), metrics=Metrics("learner"), open_paths=PAGE_PATHS,
    )  # fmt: skip
    page.add_routes(app)
    return app


def _client(folder: Path, *, token: str | None = None) -> httpx.AsyncClient:
    page = RunPage([ShownRun("one", folder)], token=None if token is None else SecretStr(token))
    transport = httpx.ASGITransport(app=_app(page, token))
    return httpx.AsyncClient(transport=transport, base_url="http://learner")


async def _first_events(page: RunPage, mark: Mark, count: int) -> list[str]:
    found: list[str] = []
    stream = page._stream(0, mark, lambda: True)
    async with asyncio.timeout(60):
        async for part in stream:
            if b"event: status" not in part and b"retry" not in part:
                found.append(part.decode())
            if len(found) == count:
                break
    await stream.aclose()
    return found


async def test_the_page_and_its_files_come_under_a_strict_policy(tmp_path: Path) -> None:
    async with _client(tmp_path) as client:
        page = await client.get("/")
        script = await client.get("/page/static/main.js")
        outside = await client.get("/page/static/../routes.py")
        encoded = await client.get("/page/static/%2e%2e/routes.py")

    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "style=" not in page.text
    assert script.headers["content-type"].startswith("text/javascript")
    assert outside.status_code == encoded.status_code == 404


async def test_steps_are_all_there_and_events_with_them(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=30)

    async with _client(folder) as client:
        found = (await client.get("/page/data/steps")).json()

    assert found["columns"]["step"] == list(range(1, 31))
    assert {event["kind"] for event in found["events"]} == {"publish", "evaluation", "checkpoint", "leave"}


async def test_a_stream_goes_on_from_its_mark_and_waits_for_the_end_of_a_line(tmp_path: Path) -> None:
    write_lines(tmp_path, [step_line(1)])
    page = RunPage([ShownRun("one", tmp_path)], token=None)
    _, mark = page._curves[0].catch_up()
    whole = json.dumps(step_line(2)) + "\n"
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(whole[:100])
        file.flush()
        waiting = asyncio.create_task(_first_events(page, mark, 1))
        await asyncio.sleep(0)
        file.write(whole[100:])

    (event,) = await waiting

    assert json.loads(event.split("data: ")[1])["columns"]["step"] == [2]


async def test_a_cut_or_another_file_resets_the_stream(tmp_path: Path) -> None:
    write_lines(tmp_path, [step_line(1), step_line(2)])
    page = RunPage([ShownRun("one", tmp_path)], token=None)
    _, mark = page._curves[0].catch_up()
    os.truncate(tmp_path / "metrics.jsonl", 10)

    (event,) = await _first_events(page, mark, 1)

    assert event.startswith("event: reset")


async def test_a_resume_takes_back_the_steps_that_were_lost(tmp_path: Path) -> None:
    lost = [step_line(step) for step in range(1, 9)]
    write_lines(tmp_path, [*lost, {"kind": "resume", "version": 5, "incarnation": 2}, step_line(6, reward_mean=7.0)])

    async with _client(tmp_path) as client:
        found = (await client.get("/page/data/steps")).json()

    assert found["columns"]["step"] == [1, 2, 3, 4, 5, 6]
    assert found["columns"]["reward_mean"][-1] == 7.0


async def test_a_resume_resets_the_stream(tmp_path: Path) -> None:
    """The page is told in one place to forget: the file is read anew."""
    write_lines(tmp_path, [step_line(1), step_line(2)])
    page = RunPage([ShownRun("one", tmp_path)], token=None)
    _, mark = page._curves[0].catch_up()
    write_lines(tmp_path, [{"kind": "resume", "version": 1, "incarnation": 2}, step_line(2)])

    (event,) = await _first_events(page, mark, 1)

    assert event.startswith("event: reset")


async def test_every_figure_has_its_curves_and_each_is_a_column(tmp_path: Path) -> None:
    write_lines(tmp_path, [step_line(1)])
    async with _client(tmp_path) as client:
        figures = (await client.get("/page/data/figures")).json()
        columns = (await client.get("/page/data/steps")).json()["columns"]

    curves = [curve["name"] for figure in figures for curve in figure["curves"]]
    assert curves[0] == "reward_mean"
    assert set(curves) < set(columns)
    assert all(figure["heading"].startswith(figure["title"]) for figure in figures)


async def test_of_a_long_run_neighbours_are_one_point_with_their_mean_or_their_largest(tmp_path: Path) -> None:
    history = RunHistory(_row)
    for step in range(1, 8):
        history.add(json.dumps(step_line(step, reward_mean=float(step), lag_max=step % 4, loss=None)).encode())

    columns = message(history, most=4)["columns"]

    assert columns["step"] == [1, 3, 5, 7]
    assert columns["reward_mean"] == [1.5, 3.5, 5.5, 7.0]
    assert columns["lag_max"] == [2, 3, 2, 3]
    assert columns["loss"] == [None] * 4
    assert columns["lags"][0] == {"0": 4, "1": 8, "2": 4}


async def test_of_a_curve_by_name_neighbours_are_joined_name_by_name() -> None:
    history = RunHistory(_row)
    for step, rewards in enumerate(({"math": 1.0}, {"math": 0.0, "code": 0.5}, {"code": 1 / 3}, None), start=1):
        history.add(json.dumps(step_line(step, reward_by_verifier=rewards)).encode())

    columns = message(history, most=2)["columns"]

    assert columns["reward_by_verifier"] == [{"math": 0.5, "code": 0.5}, {"code": 0.333333}]


async def test_an_event_tells_the_second_in_which_it_was(tmp_path: Path) -> None:
    write_lines(tmp_path, [{"kind": "leave", "version": 5, "generator_id": "g", "unix_s": 1790000123.456}])

    async with _client(tmp_path) as client:
        found = (await client.get("/page/data/steps")).json()

    assert found["events"] == [
        {"kind": "leave", "step": 5, "unix_s": 1790000123.456, "generator_id": "g", "expelled": None}
    ]


async def test_marks_are_told_with_the_steps_and_with_what_comes_after(tmp_path: Path) -> None:
    left = {"kind": "leave", "version": 5, "generator_id": "g", "unix_s": 1790000123.456}
    write_lines(tmp_path, [{"kind": "publish", "version": 5}, left])

    async with _client(tmp_path) as client:
        whole = (await client.get("/page/data/steps")).json()
        kinds = (await client.get("/page/data/marks")).json()
    page = RunPage([ShownRun("one", tmp_path)], token=None)
    _, mark = page._curves[0].catch_up()
    write_lines(tmp_path, [{**left, "version": 6}])
    (news,) = await _first_events(page, mark, 1)

    told = {"kind": "leave", "symbol": "×", "text": "generator g has gone", "unix_s": 1790000123.456}
    assert whole["marks"] == [{**told, "step": 5}]
    assert json.loads(news.split("data: ")[1])["marks"] == [{**told, "step": 6}]
    assert {"kind": "leave", "title": "generators gone", "symbol": "×", "color": "red", "regular": False} in kinds


async def test_streams_end_with_the_page(tmp_path: Path) -> None:
    write_lines(tmp_path, [step_line(1)])
    page = RunPage([ShownRun("one", tmp_path)], token=None)
    life = asyncio.create_task(page.run())
    reading = asyncio.create_task(_first_events(page, Mark(), 100))
    await asyncio.sleep(0)
    life.cancel()

    events = await asyncio.wait_for(reading, 60)

    assert len(events) <= 1


async def test_with_a_token_data_are_for_who_logged_in(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=2)

    async with _client(folder, token="secret") as client:
        page = await client.get("/")
        without = [await client.get(f"/page/data/{name}") for name in _ASKED]
        wrong = await client.post("/page/login", json={"token": "guess"})
        with_header = await client.get("/page/data/steps", headers={"Authorization": "Bearer secret"})
        right = await client.post("/page/login", json={"token": "secret"})
        with_cookie = await client.get("/page/data/steps")
        elsewhere = [await client.get("/v1/status"), await client.get("/openapi.json")]

    assert page.status_code == 200
    assert {each.status_code for each in without} == {401}
    assert wrong.status_code == 401
    assert with_header.status_code == with_cookie.status_code == 200
    cookie = right.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    assert "secret" not in cookie
    assert {each.status_code for each in elsewhere} == {401}


@pytest.mark.parametrize(
    ("path", "status"),
    [
        (f"rows?step={1 << 80}", 422), (f"rows?start=1-{1 << 80}", 422), (f"rows?rows=groups&step={1 << 80}", 422),
        (f"rows?order=reward&step={1 << 80}", 422),
        ("rows?rows=runs", 422), ("rows?start=x", 422), ("rows?min_reward=many", 422),
        ("group?key=1-99999", 404), ("group?key=..-1", 422),
        ("group?key=7777-1", 404), ("steps?run=9", 404), ("events?at=nowhere", 422), ("text?key=1-1&place=9", 404),
        ("text?key=7777-1", 404), ("text?key=x", 422), (f"group?key=1-{1 << 80}", 422),
        (f"text?key=1-1&place={1 << 80}", 422),
        *((f"{route}?key={'9' * 300}-1", 422) for route in ("group", "life", "text")),
        (f"rows?start={'9' * 300}-1", 422),
    ],
)  # fmt: skip
async def test_what_cannot_be_answered_is_refused(tmp_path: Path, path: str, status: int) -> None:
    folder = make_run(tmp_path / "run", steps=1)

    async with _client(folder) as client:
        answer = await client.get(f"/page/data/{path}")

    assert answer.status_code == status


async def test_a_login_at_one_port_of_a_host_ends_none_at_another(tmp_path: Path) -> None:
    """A browser sends a host's cookies to all of its ports, and `kubectl port-forward` has several runs at loopback."""
    cookies = {}
    for port, token in ((7300, "s" * 16), (7400, "t" * 16)):
        async with _client(tmp_path, token=token) as client:
            answer = await client.post(f"http://127.0.0.1:{port}/page/login", json={"token": token})
            name, _, value = answer.headers["set-cookie"].partition(";")[0].partition("=")
            cookies[name] = value
    both = {"Cookie": "; ".join(f"{name}={value}" for name, value in cookies.items())}
    for port, token in ((7300, "s" * 16), (7400, "t" * 16)):
        async with _client(tmp_path, token=token) as client:
            assert (await client.get(f"http://127.0.0.1:{port}/page/data/runs", headers=both)).status_code == 200


@pytest.mark.parametrize("name", ["%00", "a" * 300, f"{'a' * 300}/main.js"])
async def test_a_name_that_no_file_can_have_is_that_of_no_file(tmp_path: Path, name: str) -> None:
    async with _client(tmp_path) as client:
        assert (await client.get(f"/page/static/{name}")).status_code == 404


def test_what_stands_here_of_others_is_what_they_published() -> None:
    vendored = tomllib.loads((STATIC / "vendor" / "VENDORED.toml").read_text())

    for name, told in vendored.items():
        found = {path.name: sha256(path.read_bytes()).hexdigest() for path in (STATIC / "vendor" / name).iterdir()}
        assert found == told["files"]


async def test_a_text_comes_as_a_file_that_no_browser_shows(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=1, texts=("<script>alert(1)</script>", "word3"))

    async with _client(folder) as client:
        texts = [await client.get(f"/page/data/text?key=%201-1%0A{place}") for place in ("", "&place=0")]

    assert [each.text for each in texts] == ["a prompt", "<script>alert(1)</script>"]
    for each, name in zip(texts, ("1-1-prompt.txt", "1-1-0.txt"), strict=True):
        assert each.headers["content-disposition"] == f'attachment; filename="{name}"'
        assert each.headers["content-type"] == "text/plain; charset=utf-8"
        assert each.headers["x-content-type-options"] == "nosniff"


async def test_rows_are_trajectories_or_groups_newest_first_or_in_an_order(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=4)

    async with _client(folder) as client:

        async def keys(query: str) -> list[tuple[str, str]]:
            rows = (await client.get(f"/page/data/rows?limit=3&{query}")).json()["rows"]
            return [(row["key"], row["group"]) for row in rows]

        assert await keys("") == [("1-16", "1-8"), ("1-15", "1-8"), ("1-14", "1-7")]
        assert await keys("rows=groups") == [("1-16", "1-8"), ("1-14", "1-7"), ("1-12", "1-6")]
        assert await keys("rows=groups&start=1-6") == [("1-10", "1-5"), ("1-8", "1-4"), ("1-6", "1-3")]
        assert await keys("rows=groups&start=1-6&direction=newer") == [("1-15", "1-8"), ("1-13", "1-7")]
        assert await keys("rows=groups&order=-reward&skip=6") == [("1-13", "1-7"), ("1-15", "1-8")]
