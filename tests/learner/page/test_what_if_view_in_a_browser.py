"""The view of what-ifs in Chromium: endings before the end, answers that are lost, and orders that are refused."""

import fcntl
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from learner.page.what_if_runs import FOLDER, LOCK
from tests.learner.page.chromium import NEEDS_CHROMIUM, WAIT_MS, Viewed, chromium, opened, shows
from tests.learner.page.untrained_run import untrained, what_if_of

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Route

pytestmark = [NEEDS_CHROMIUM, pytest.mark.timeout(600)]
CLIP = '[id="set-algo.clip_high"]'


@pytest.fixture(scope="module")
def browser() -> Iterator["Browser"]:
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def viewed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Viewed]:
    folder = tmp_path_factory.mktemp("what-if")
    first, second = (untrained(folder / name, folder / "model") for name in ("first", "second"))
    what_if_of(first, "what-if-1", phase="run", trained=3)
    what_if_of(first, "what-if-2", phase="what-if", trained=1, pulls=(0.0,))
    what_if_of(first, "what-if-3", phase="what-if", trained=1, unlike="step 1 is the first that differs", loss=0.2)
    (second / FOLDER).mkdir()
    (second / FOLDER / "what-if-1.log").touch()
    with Viewed(first, second) as shown:
        yield shown


def test_one_that_ended_early_says_no_more_than_what_it_has_tried(browser: "Browser", viewed: Viewed) -> None:
    page, said = opened(browser, f"{viewed.url}#/what-if?what=what-if-1")
    shows(page, "#what-if-begun", "It ended before it had trained a step by the other settings.")
    result = page.locator("#what-if-result")
    assert "digit for digit" not in result.inner_text()
    assert "pull" not in result.inner_text()

    page.goto(f"{viewed.url}#/what-if?what=what-if-2")
    shows(page, "#what-if-begun", "No number of the steps 1 to 1 differs. It ended before it had trained the others.")
    assert "digit for digit" in result.inner_text()
    assert "No group's pull on the policy changed in the steps that were trained." in result.inner_text()
    assert "change nothing" not in result.inner_text()

    page.goto(f"{viewed.url}#/what-if?what=what-if-3")
    shows(page, "#what-if-begun", "Steps 1 to 1: the first that differs is step 1.")
    assert "do not give its numbers here" in result.inner_text()
    assert "digit for digit" not in result.inner_text()

    page.goto(f"{viewed.url}#/what-if?what=what-if-9")
    shows(page, "#what-if-result", "what-if-9 is no what-if of this run, or no longer.")
    assert said == []
    page.context.close()


def test_a_form_outlives_answers_that_are_lost(browser: "Browser", viewed: Viewed) -> None:
    page, _ = opened(browser, f"{viewed.url}#/run")
    lost: list[str] = []

    def lose(route: "Route") -> None:
        lost.append(route.request.url)
        route.fulfill(status=500, json={"error": {"message": "it is starting again"}})

    page.route("**/page/data/what_if_form*", lose, times=1)
    page.route("**/page/data/what_ifs*", lose, times=1)
    page.locator("#to-what-if").click()
    page.locator(CLIP).wait_for(timeout=WAIT_MS)
    page.locator(CLIP).fill("0.3")
    page.locator("#what-if-begun").wait_for(timeout=WAIT_MS)
    assert len(lost) == 2
    page.route("**/page/data/what_ifs*", lose, times=1)
    page.locator("#to-run").click()
    page.locator("#to-what-if").click()
    shows(page, "#what-ifs h3", "what-if-3")
    assert page.locator(CLIP).input_value() == "0.3"
    page.context.close()


def test_a_form_is_there_again_after_a_run_that_was_chosen_for_a_moment(browser: "Browser", viewed: Viewed) -> None:
    page, said = opened(browser, f"{viewed.url}#/what-if")
    page.locator(CLIP).wait_for(timeout=WAIT_MS)
    asked: list[Route] = []
    page.route("**/page/data/what_if_form?run=1", lambda route: asked.append(route))
    with page.expect_request("**/page/data/what_if_form?run=1"):
        page.locator("#runs").select_option("1")
    page.locator("#runs").select_option("0")
    page.locator(CLIP).wait_for(timeout=WAIT_MS)
    assert len(asked) == 1, "it has had no answer"
    assert said == []
    page.context.close()


def test_the_refusal_of_a_stop_is_shown(browser: "Browser", viewed: Viewed) -> None:
    with (viewed.folders[1] / FOLDER / LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        page, _ = opened(browser, f"{viewed.url}#/what-if?run=1")
        page.get_by_role("button", name="Stop it").click()
        shows(page, "#what-if-refusal", "what-if-1 is being trained by another page of this run: stop it there")
        page.context.close()
