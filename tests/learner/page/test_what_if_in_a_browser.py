"""The form of a what-if as Chromium shows it, from the settings of a real run to its groups whose pull changed."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from learner.training.ranks import CommandChannel
from tests.learner.page.chromium import NEEDS_CHROMIUM, WAIT_MS, Viewed, chromium, opened, shows
from tests.learner.page.what_if_page import DEADLINE_S, kept_run
from tests.learner.training.tiny_model import write_tiny_llama

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = [NEEDS_CHROMIUM, pytest.mark.timeout(900)]
NARROW_SCREEN = {"width": 390, "height": 844}


@pytest.fixture(scope="module")
def browser() -> Iterator["Browser"]:
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def viewed(tmp_path_factory: pytest.TempPathFactory, commands: CommandChannel) -> Iterator[Viewed]:
    folder = tmp_path_factory.mktemp("what-if")
    model: Path = write_tiny_llama(folder / "llama", tied=True)
    with Viewed(kept_run(folder / "runs", model, commands).folder) as shown:
        yield shown


def fill(page: "Page", **settings: str) -> None:
    for name, value in settings.items():
        page.locator(f'[id="set-algo.{name}"]').fill(value)


def test_a_form_shows_progress_and_then_both_curves_and_the_groups_with_their_links(
    browser: "Browser", viewed: Viewed
) -> None:
    page, said = opened(browser, f"{viewed.url}#/run", viewport=NARROW_SCREEN)
    page.locator("#to-what-if").click()
    page.locator('[id="set-algo.clip_high"]').wait_for(timeout=WAIT_MS)
    assert page.locator('[id="set-algo.clip_high"]').input_value() == "0.01"
    page.get_by_role("button", name="Train by these settings").click()
    shows(page, "#what-if-error", "Nothing is changed yet")
    fill(page, clip_high="1e6", clip_low="1")
    page.get_by_role("button", name="Train by these settings").click()
    page.locator(".what-if progress").wait_for(timeout=WAIT_MS)
    assert "what=what-if-1" in page.url

    page.locator("#what-if-begun").wait_for(timeout=1000 * DEADLINE_S)
    assert page.locator(".what-if progress").count() == 0
    shows(page, "#what-if-begun", "Steps 1 to 4: the first that differs is step 1.")
    shows(page, "#what-if-result p", "the run gives its numbers again, digit for digit")
    shows(page, "#what-if-charts figure h3", "clipped")
    lines = page.locator('figure[data-name="loss"] .u-legend th').all_inner_texts()
    assert [line.strip() for line in lines] == ["step", "run", "what if"]
    assert page.evaluate("document.documentElement.scrollWidth") <= NARROW_SCREEN["width"]
    rows = page.locator("#what-if-groups-table tbody tr").all_inner_texts()
    assert any("lease 7, not kept\t4\t" in row for row in rows), "of the last step no trajectory is kept"
    page.get_by_role("link", name="lease 1", exact=True).click()
    shows(page, "#view-trajectories h2", "step 1 · ")
    shows(page, "#view-trajectories h2", "lease 1 · ")
    page.go_back()
    page.locator("#what-if-begun").wait_for(timeout=WAIT_MS)
    assert page.locator('[id="set-algo.clip_high"]').input_value() == "1e6", "the form is as it was left"
    assert said == []
    page.context.close()


def test_bad_settings_are_told_at_the_form(browser: "Browser", viewed: Viewed) -> None:
    page, said = opened(browser, f"{viewed.url}#/what-if")
    page.locator('[id="set-algo.clip_high"]').wait_for(timeout=WAIT_MS)
    fill(page, clip_high="wide")
    page.get_by_role("button", name="Train by these settings").click()
    shows(page, "#what-if-error", "--set algo.clip_high")
    shows(page, "#what-if-error", "expected a number")
    page.locator("#what-if-find").fill("clip-h")
    left = page.locator("#view-what-if .settings label:visible").all_inner_texts()
    assert [name.strip() for name in left] == ["algo.clip_high"]
    page.locator('[id="what-if-find"]').fill("")
    page.locator('[id="set-algo.type"]').select_option("gspo")
    assert page.locator('[id="set-algo.clip_high"]').is_disabled()
    assert page.locator('[id="set-training.optimizer.learning_rate"]').is_enabled()
    assert len(said) == 1, "the refusal itself"
    page.context.close()
