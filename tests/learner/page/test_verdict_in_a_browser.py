"""The verdict and the processes as Chromium shows them: what the learner says of them, and what is made of it."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from learner.page import routes
from learner.page.routes import shown_machines
from protocol.status import GpuStatus, UsageStatus
from services.diagnosis.asked import Condition
from tests.learner.page.chromium import NEEDS_CHROMIUM, WAIT_MS, Viewed, asked_twice, box_of, chromium, opened, shows
from tests.learner.page.made_run import make_run, write_lines
from tests.learner.page.told_page import ToldPage
from tests.services.diagnosis.statuses import ill, status, well

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = NEEDS_CHROMIUM
STOPPED = {
    "state": "sick", "cause": "culprit", "who": "generator",
    "sentence": "generator localhost:7310: hangs; a signal has stopped it", "remedy": "kill -CONT 4711 lets it go on",
}  # fmt: skip
HOSTILE = "<img src=x onerror='window.broken = 1'>"
HEALTHY = {"state": "healthy", "cause": "", "who": "", "sentence": "Healthy: the learner trains 64%", "remedy": ""}


@pytest.fixture(autouse=True)
def told_often(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_NEWS_EVERY_S", "_STATUS_EVERY_S"):
        monkeypatch.setattr(routes, name, 0.1)


@pytest.fixture(scope="module")
def browser() -> Iterator["Browser"]:
    with chromium() as found:
        yield found


def told(verdict: dict[str, str] | None, **learner: Any) -> dict[str, Any]:
    """The learner's word on its processes."""
    known = {"version": 20, "total": 100, "queues": [], "problems": [], "waits": [], "failures": [], "standing_s": None}
    return {
        "verdict": verdict,
        "learner": {**known, **learner},
        "generators": [],
        "env_services": [],
        "reward_services": [],
    }


def test_the_verdict_of_a_live_run_stands_on_top_and_follows_the_run(browser: "Browser", tmp_path: Path) -> None:
    with ToldPage(make_run(tmp_path / "run", steps=20), told(HEALTHY)) as served:
        page, said = opened(browser, f"{served.url}#/run")
        shows(page, "#verdict.healthy", "Healthy: the learner trains 64%")
        served.told = told(STOPPED)
        shows(page, "#verdict.sick", "a signal has stopped it; kill -CONT 4711 lets it go on")

        first = page.evaluate("document.querySelector('#view-run').firstElementChild.id")
        assert first == "verdict"
        assert said == []
        page.context.close()


def test_no_pace_and_no_time_left_are_shown_while_no_step_ends(browser: "Browser", tmp_path: Path) -> None:
    with ToldPage(make_run(tmp_path / "run", steps=20), told(HEALTHY)) as served:
        page, _ = opened(browser, f"{served.url}#/run")
        shows(page, "#state", "live")
        shows(page, "#tiles", "at this pace")
        served.told = told(STOPPED, standing_s=36.0)
        shows(page, "#state", "no step for 36.0 s")

        tiles = {row.split("\n")[0].lower(): row for row in page.locator("#tiles > div").all_inner_texts()}
        assert "–" in tiles["sampled tokens"]
        assert "–" in tiles["completions"]
        assert "no step for 36.0 s" in tiles["left"]
        assert "/s" not in page.locator("#processes").inner_text()
        page.context.close()


def test_a_run_that_has_ended_shows_its_last_verdict(browser: "Browser", tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=20)
    write_lines(folder, [{"kind": "verdict", "version": 12, "unix_s": 1790000000.0, **STOPPED}])
    with Viewed(folder) as shown:
        page, said = opened(browser, f"{shown.url}#/run")
        shows(page, "#verdict.sick", "At the end: generator localhost:7310: hangs")
        assert page.locator("#verdict").is_visible(timeout=WAIT_MS)
        assert said == []
        page.context.close()


def test_machines_and_logs_are_shown_while_they_are_unfolded(browser: "Browser", tmp_path: Path) -> None:
    usage = UsageStatus(cores=1.25, memory_bytes=3 << 30)
    well_one = status("generator").model_copy(update={"usage": usage, "log": ("12:00:00 ready", f"12:00:01 {HOSTILE}")})
    machines = shown_machines([well(well_one), ill("env-service", Condition.DEAD)])
    with ToldPage(make_run(tmp_path / "run", steps=20), told(HEALTHY), machines=machines) as served:
        page, said = opened(browser, f"{served.url}#/run")
        shows(page, "#verdict", "Healthy")
        assert page.locator("#machines td").count() == 0, "nobody asks for them while they are folded"
        page.locator("#machines > summary").click()
        shows(page, "#machines td", "generator localhost:7310")
        rows = page.locator("#machines tbody tr").all_inner_texts()
        assert rows[0].split("\t") == ["generator localhost:7310", "here, process 7310", "2 min", "1.25", "3 GiB"]
        assert "dead: does not do well" in rows[1]
        page.locator("#logs details summary").click()
        shows(page, "#logs .log", HOSTILE)
        asked_twice(page, "**/page/data/machines*")
        assert page.locator("#logs .log").is_visible(), "it stays unfolded when it is told anew"
        assert page.evaluate("window.broken") is None
        assert said == []
        page.context.close()


def test_gpus_stand_beside_the_memory_where_a_process_holds_some(browser: "Browser", tmp_path: Path) -> None:
    gpus = (
        GpuStatus(index=1, busy_share=0.87, memory_bytes=61 << 30, total_bytes=80 << 30),
        GpuStatus(index=3, memory_bytes=0, total_bytes=80 << 30),
    )
    usage = UsageStatus(cores=1.25, memory_bytes=3 << 30, gpus=gpus)
    without = UsageStatus(cores=0.5, memory_bytes=1 << 30)
    machines = shown_machines(
        [
            well(status("generator").model_copy(update={"usage": usage})),
            well(status("env-service").model_copy(update={"usage": without})),
            ill("learner", Condition.DEAD),
        ]
    )
    with ToldPage(make_run(tmp_path / "run", steps=20), told(HEALTHY), machines=machines) as served:
        page, said = opened(browser, f"{served.url}#/run")
        shows(page, "#verdict", "Healthy")
        page.locator("#machines > summary").click()
        shows(page, "#machines th", "GPUs")
        cells = page.locator("#machines tbody tr td:nth-child(6)").all_inner_texts()
        assert cells == ["1: 87 % busy, 61 GiB of 80 GiB\n3: – busy, 0 MiB of 80 GiB", "", ""]
        assert said == []
        page.context.close()


def generators(count: int, **odd: dict[str, Any]) -> list[dict[str, Any]]:
    """So many alike; `odd` are what differs, by name."""
    usual = {
        "url": "", "last_heard_s": 0.4, "state": "serving", "version": "1.20", "tokens_per_s": 1000.0,
        "idle_share": 0.25, "running": 30,
    }  # fmt: skip
    return [{"name": f"g{number}", **usual, **odd.get(f"g{number}", {})} for number in range(count)]


def test_of_64_generators_the_odd_ones_are_shown_beside_a_summary_and_the_rest_is_folded(
    browser: "Browser", tmp_path: Path
) -> None:
    odd = generators(64, g7={"state": "behind", "version": "1.9"}, g40={"tokens_per_s": 50.0}, g63={"last_heard_s": 9})
    with ToldPage(make_run(tmp_path / "run", steps=20), {**told(HEALTHY), "generators": odd}) as served:
        page, said = opened(browser, f"{served.url}#/run")
        shows(page, ".generator", "64: 63 serving, 1 behind")
        card = page.locator(".card.generator")
        lines = card.locator("> ul > li").all_inner_texts()

        assert lines[0].startswith("64: 63 serving, 1 behind, 63,050 tokens/s, idle 25 %")
        assert [line.split(":")[0] for line in lines[1:-1]] == ["g7", "g40", "g63"]
        assert lines[-1] == "all 64"
        box = box_of(card)
        assert box["height"] < 400
        card.locator("summary").click()
        assert card.locator("ul.all li").count() == 64
        for each in odd:
            each["tokens_per_s"] = 500.0
        shows(page, ".generator", "32,000 tokens/s")
        assert card.locator("ul.all li").first.is_visible(), "it stays unfolded when the page is told anew"
        assert said == []
        page.context.close()


def test_a_few_generators_are_shown_one_by_one_and_alike_ones_of_many_are_not_odd(
    browser: "Browser", tmp_path: Path
) -> None:
    newer = {f"g{number}": {"version": "1.21"} for number in range(32)}
    with ToldPage(make_run(tmp_path / "run", steps=20), {**told(HEALTHY), "generators": generators(3)}) as served:
        page, _ = opened(browser, f"{served.url}#/run")
        shows(page, ".generator", "g2: serving 1.20, 1,000 tokens/s")
        assert page.locator(".card.generator > ul > li").count() == 3
        served.told = {**told(HEALTHY), "generators": generators(64, **newer)}
        shows(page, ".generator", "64: 64 serving")
        assert page.locator(".card.generator > ul > li").count() == 2, "a publish under way makes nobody odd"
        page.context.close()
