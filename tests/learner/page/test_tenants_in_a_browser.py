"""The page of a server of training loops as Chromium shows it, of real operations on a bigram model."""

import importlib.resources
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from learner.tenants.run_records import shown_name
from tests.learner.page.chromium import NEEDS_CHROMIUM, WAIT_MS, asked_twice, chromium, opened, shows
from tests.learner.page.tenants_served import TOKEN, TenantsInAThread

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = NEEDS_CHROMIUM
HOSTILE = "<img src=x onerror='window.broken = 1'>"


@pytest.fixture(scope="module")
def browser() -> Iterator["Browser"]:
    with chromium() as found:
        yield found


def entered(browser: "Browser", url: str, key: str, **options: Any) -> tuple["Page", list[str]]:
    """The page after the login."""
    page, said = opened(browser, url, **options)
    page.locator("#token").wait_for(timeout=WAIT_MS)
    page.locator("#token").fill(key)
    page.get_by_role("button", name="Show the runs").click()
    shows(page, "#state", "live")
    return page, [text for text in said if "401" not in text]


def cells(page: "Page", table: str, column: int) -> list[str]:
    return [text.strip() for text in page.locator(f"#{table} tbody td:nth-child({column})").all_inner_texts()]


async def loop_with_a_title(served: TenantsInAThread, title: str) -> str:
    client = served.made.client("a")
    opened_session = await client.post("create_session", tags=[], sdk_version="0.38", display_name=title)
    client.session_id = opened_session["session_id"]
    return await client.model()


@pytest.mark.parametrize("width", [1200, 390])
def test_tenants_runs_queue_and_curves_are_shown_and_follow_what_happens(
    browser: "Browser", tmp_path: Path, width: int
) -> None:
    with TenantsInAThread(tmp_path) as served:
        first = served.do(served.made.trained("a", steps=4))
        second = served.do(served.made.trained("b", steps=2))
        served.do(loop_with_a_title(served, HOSTILE))
        page, said = entered(browser, served.url, TOKEN, viewport={"width": width, "height": 900})
        shows(page, "#verdict.healthy", "Healthy")
        shows(page, "#tenants td", "b")
        assert sorted(cells(page, "tenants", 1)) == ["a", "b"]
        shows(page, "#runs td", HOSTILE)
        assert page.evaluate("window.broken") is None

        newest = shown_name("b", second)
        pressed = page.locator("#runs button[aria-pressed=true]")
        assert pressed.all_inner_texts() == [newest], "the one that was used last is drawn"
        shows(page, "#charts h3", "Loss, a row")
        shows(page, "#charts figcaption", "loss:")
        page.get_by_role("button", name=shown_name("a", first)).click()
        shows(page, "#charts .u-legend th", f"{shown_name('a', first)}: loss")

        served.do(served.made.trained("a", number=7, steps=3))
        page.locator("#runs tbody tr").nth(3).wait_for(timeout=WAIT_MS)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert said == []
        page.context.close()


def test_a_queue_names_who_waits_behind_whom(browser: "Browser", tmp_path: Path) -> None:
    with TenantsInAThread(tmp_path) as served:
        trainer = served.made.parts.trainer
        a, b = served.made.client("a"), served.made.client("b")
        first, second = served.do(a.model()), served.do(b.model())
        page, said = entered(browser, served.url, TOKEN)
        shows(page, "#processes .trainer", "has nothing in hand")
        trainer.released.clear()
        try:
            served.do(a.train(first, 1))
            assert trainer.entered.wait(60)
            served.do(b.train(second, 1))
            shows(page, "#processes .queue", f"{shown_name('b', second)}: its turn, behind a")
            shows(page, "#processes .trainer", "a: forward_backward")
        finally:
            trainer.released.set()
        shows(page, "#processes .trainer", "has nothing in hand")
        assert said == []
        page.context.close()


def test_heads_of_columns_sort_and_keep_the_focus_while_the_page_is_told_anew(
    browser: "Browser", tmp_path: Path
) -> None:
    with TenantsInAThread(tmp_path) as served:
        for number, steps in enumerate((2, 5, 1)):
            served.do(served.made.trained("a", number=number, steps=steps))
        page, said = entered(browser, served.url, TOKEN)
        page.locator("#runs tbody tr").nth(2).wait_for(timeout=WAIT_MS)
        head = page.locator("#runs th").filter(has_text="steps").get_by_role("button")
        head.focus()
        head.press("Enter")
        assert cells(page, "runs", 4) == ["5", "2", "1"]
        assert page.locator("#runs th[aria-sort=descending]").inner_text().startswith("steps")
        page.locator("#runs th[aria-sort=descending] button").press("Enter")
        assert cells(page, "runs", 4) == ["1", "2", "5"]

        asked_twice(page, "**/page/data/tenants*")
        assert page.evaluate("document.activeElement.textContent") == "steps"
        assert "order_runs=steps" in page.url
        page.reload()
        shows(page, "#state", "live")
        assert cells(page, "runs", 4) == ["1", "2", "5"], "the address holds the order"
        assert said == []
        page.context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_of_tenants_is_accessible(browser: "Browser", tmp_path: Path, scheme: str) -> None:
    axe = importlib.resources.files("axe_playwright_python") / "axe.min.js"
    with TenantsInAThread(tmp_path) as served:
        served.do(served.made.trained("a"))
        page, _ = entered(browser, served.url, TOKEN, color_scheme=scheme, bypass_csp=True)
        shows(page, "#charts h3", "Loss, a row")
        page.add_script_tag(content=axe.read_text(encoding="utf-8"))
        found = page.evaluate("async () => (await axe.run()).violations.map(v => [v.id, v.nodes[0].html])")
        assert found == []
        page.context.close()


def test_a_tenant_logs_in_with_its_key_and_sees_no_other(browser: "Browser", tmp_path: Path) -> None:
    with TenantsInAThread(tmp_path) as served:
        served.do(served.made.trained("a"))
        mine = shown_name("b", served.do(served.made.trained("b")))
        page, said = opened(browser, served.url)
        page.locator("#token").wait_for(timeout=WAIT_MS)
        page.locator("#token").fill("tml-nobody")
        page.get_by_role("button", name="Show the runs").click()
        shows(page, "#login-error", "neither a tenant's key nor the learner's token")
        page.locator("#token").fill("tml-b")
        page.get_by_role("button", name="Show the runs").click()
        shows(page, "#name", "serve, as b sees it")

        assert cells(page, "tenants", 1) == ["b"]
        assert cells(page, "runs", 1) == [mine]
        assert not re.search(r"\ba/", page.locator("main").inner_text())
        assert [text for text in said if "401" not in text] == []
        page.context.close()
