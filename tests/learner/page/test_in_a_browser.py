"""The page as Chromium shows it. Skipped with one line where playwright or Chromium is not installed."""

import fcntl
import importlib.resources
import itertools
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from headway.report import page as page_of_report
from headway.report import read_run
from learner.page.store import TrajectoryStore
from tests.learner.page.chromium import NEEDS_CHROMIUM, WAIT_MS, Viewed, box_of, chromium, opened, shows
from tests.learner.page.made_run import group as made_group
from tests.learner.page.made_run import huge_run, make_run, step_line, taken, timed_run, write_lines

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, Route

EXPECTED = {
    "#/run": ("#tiles dd", "60"),
    "#/trajectories": ("table.list td", "sums"),
    "#/trajectories?rows=groups": ("table.list td", "sums"),
    "#/settings": ("#view-settings td", "steps"),
}
OF_LONG_RUNS = {
    "lags", "lag_max", "lag_bound", "reused_lag_max", "reused_lag_bound", "unix_s", "time_s", "wait_s", "train_s",
    "copy_s", "reward_mean",
}  # fmt: skip
"""Columns without which the page draws nothing."""
NASTY = "<script>window.broken = 1</script><img src=x onerror='window.broken = 1'>\x00\x1b[31m\u202egnp.exe\u2066 end"

pytestmark = NEEDS_CHROMIUM


@pytest.fixture(scope="module")
def browser() -> Iterator["Browser"]:
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def viewed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Viewed]:
    texts = ("word1 word2", NASTY, "word4 " * 50)
    with Viewed(make_run(tmp_path_factory.mktemp("runs") / "run", steps=60, texts=texts)) as shown:
        yield shown


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Viewed]:
    folder = tmp_path_factory.mktemp("runs")
    one = make_run(folder / "one", steps=60)
    other = make_run(folder / "other", steps=40, texts=("word5", "word6 word7"), settings={"steps": 60, "max_lag": 8})
    with Viewed(one, other) as shown:
        yield shown


SCREENS = pytest.mark.parametrize(
    "options",
    [
        {"viewport": {"width": 1200, "height": 900}, "color_scheme": "light"},
        {"viewport": {"width": 1200, "height": 900}, "color_scheme": "dark"},
        {"viewport": {"width": 390, "height": 844}, "color_scheme": "dark"},
    ],
    ids=["light", "dark", "narrow"],
)


@SCREENS
@pytest.mark.parametrize("view", [*EXPECTED, "#/trajectories?group=1-7&color=entropy"])
def test_every_view_is_shown_without_an_error_and_within_its_width(
    browser: "Browser", viewed: Viewed, view: str, options: dict[str, Any]
) -> None:
    page, said = opened(browser, viewed.url + view, **options)
    shows(page, *EXPECTED.get(view, (".tokens", "word")))

    assert said == []
    assert page.evaluate("document.documentElement.scrollWidth") <= options["viewport"]["width"]
    assert page.evaluate("window.broken") is None
    page.context.close()


BESIDE = {
    "#/run?with=1": ("#runs-table td", "other"),
    "#/trajectories?with=1": (".runs section h2", "other"),
    "#/trajectories?group=1-7&with=1&color=entropy": (".runs section h2", "other"),
    "#/settings?with=1": ("#view-settings td", "max_lag"),
}


@SCREENS
@pytest.mark.parametrize("view", BESIDE)
def test_runs_beside_each_other_are_shown_without_an_error_and_within_its_width(
    browser: "Browser", both: Viewed, view: str, options: dict[str, Any]
) -> None:
    page, said = opened(browser, both.url + view, **options)
    shows(page, *BESIDE[view])

    assert said == []
    assert page.evaluate("document.documentElement.scrollWidth") <= options["viewport"]["width"]
    page.context.close()


def test_a_button_shows_a_run_beside_the_first_one(browser: "Browser", both: Viewed) -> None:
    page, said = opened(browser, both.url)
    shows(page, "#tiles dd", "60")
    assert page.locator("#runs-table").is_hidden()
    page.get_by_role("button", name="other").press("Enter")

    shows(page, "#runs-table td", "other")
    assert page.evaluate("document.activeElement.textContent") == "other", "a pressed button keeps the focus"
    assert page.locator("#runs-table tbody tr td:nth-child(2)").all_inner_texts() == ["60", "40"]
    shows(page, "#charts .u-legend th", "other: mean reward")
    shows(page, "#charts .u-legend th", "other: held out")
    shows(page, "figcaption", "other, which is not drawn")
    page.locator("#to-settings").click()
    shows(page, "#view-settings [role=status]", "1 differ between the runs")
    assert page.locator("#view-settings tr.differs td").all_inner_texts() == ["max_lag", "4", "8"]
    page.locator("#to-run").click()
    page.get_by_role("button", name="other").press("Enter")
    page.locator("#runs-table").wait_for(state="hidden", timeout=WAIT_MS)
    assert said == []
    page.context.close()


def test_what_a_run_beside_does_not_have_is_no_zero(browser: "Browser", tmp_path: Path) -> None:
    """The folder of a what-if holds what training gives, and so neither reward, lag nor length."""
    what_if = tmp_path / "what-if"
    what_if.mkdir()
    lines: list[dict[str, object]] = [{"kind": "step", "step": step, "entropy": 1.5, "loss": 0.25} for step in (1, 2)]
    write_lines(what_if, lines)
    with Viewed(make_run(tmp_path / "one", steps=2), what_if) as shown:
        page, said = opened(browser, f"{shown.url}#/run?with=1")
        shows(page, "#runs-table td", "what-if")
        cells = page.locator("#runs-table tbody tr").nth(1).locator("td, th").all_inner_texts()
        assert cells[:7] == ["what-if", "2", "–", "–", "–", "1.50", "–"]
        assert page.locator("#runs-table tbody tr").nth(0).locator("td, th").all_inner_texts()[4] == "1.20"
    assert said == []
    page.context.close()


def test_a_group_stands_beside_that_of_the_same_task_in_another_run(browser: "Browser", both: Viewed) -> None:
    page, said = opened(browser, f"{both.url}#/trajectories?with=1&step=30&environment=sums")
    page.locator(".runs section:first-child table.list tbody tr td:nth-child(2) a").first.click(timeout=WAIT_MS)
    shows(page, ".runs section:nth-child(2) .tokens", "word")
    heads = [text.split(" · ")[:3] for text in page.locator(".runs section > h3").all_inner_texts()]
    assert heads == [["step 30", "sums", "task 5"], ["step 30", "sums", "task 5"]]
    assert page.locator(".runs section > h2").all_inner_texts() == ["one", "other"]

    page.goto(f"{both.url}#/trajectories?with=1&step=58&environment=sums")
    page.locator(".runs section:first-child table.list tbody tr td:nth-child(2) a").first.click(timeout=WAIT_MS)
    shows(page, ".runs section:nth-child(2) p", "No group of this task is kept of its step 58: this one is of step 37")
    assert said == []
    page.context.close()


def test_text_that_would_run_or_turn_around_is_shown_as_it_is(browser: "Browser", viewed: Viewed) -> None:
    page, said = opened(browser, f"{viewed.url}#/trajectories?words=script")
    shows(page, "table.list .excerpt", "<script>")
    text = page.locator("table.list .excerpt").first.inner_text()

    assert "\\u202e" in text
    assert "\u202e" not in text
    assert page.evaluate("window.broken") is None
    assert said == []
    page.context.close()


def test_what_is_huge_is_shown_by_its_ends_and_nothing_of_it_runs(browser: "Browser", tmp_path: Path) -> None:
    """A prompt, a token and a completion of a megabyte each."""
    with Viewed(huge_run(tmp_path / "run", nasty=NASTY)) as shown:
        page, said = opened(browser, f"{shown.url}#/trajectories?environment=huge")
        page.locator("table.list tbody tr td:nth-child(2) a").first.click(timeout=WAIT_MS)
        shows(page, ".siblings .tokens", "characters …")
        page.locator("summary", has_text="Prompt").click()
        shows(page, ".tokens.given", "tokens …")
        most = page.evaluate("document.body.textContent.length")
        links = page.get_by_role("link", name="the whole text, as a file")
        with page.expect_download() as kept:
            links.first.click()
        page.get_by_role("link", name="tokens: show them").first.click()
        shows(page, ".siblings .bar", "tokens 200,000 to 265,536 of 370,000")
        page.get_by_role("link", name="later tokens").click()
        shows(page, ".siblings .bar", "tokens 265,536 to 331,072 of 370,000")
        page.get_by_role("link", name="later tokens").click()
        shows(page, ".siblings .bar", "tokens 331,072 to 370,000 of 370,000")
        page.go_back()
        page.go_back()
        page.go_back()
        page.get_by_role("link", name="tokens: show them").last.click()
        shows(page, ".siblings .tokens", "characters …")

        assert most < 200_000
        assert Path(kept.value.path()).stat().st_size > 1 << 20
        assert page.evaluate("window.broken") is None
        assert said == []
        page.context.close()


@SCREENS
def test_the_life_of_a_lease_is_drawn_in_lanes(browser: "Browser", tmp_path: Path, options: dict[str, Any]) -> None:
    with Viewed(timed_run(tmp_path / "run")) as shown:
        page, said = opened(browser, f"{shown.url}#/trajectories?group=5-1&at=5-2", **options)
        shows(page, ".life summary", "Life of its lease, 12.0 s")
        shows(page, "h2", "greedy answer 0.25")

        names = page.locator(".lane > span:first-child").all_inner_texts()
        assert names == ["queue", "turn 1", "turn 2", "score", "delivery", "buffer", "step"]
        assert page.locator(".lane > span:last-child").all_inner_texts()[:2] == ["500 ms", "2.50 s"]
        lane = page.locator(".lane:nth-child(3)")
        places = [
            [float(bar.get_attribute(name) or 0) for name in ("x", "width")] for bar in lane.locator("rect").all()
        ]
        assert places == [[1000 * 2.5 / 12, 1000 * 1.5 / 12], [1000 * 3.5 / 12, 1000 * 2.5 / 12]]
        assert lane.locator("rect.own title").text_content() == (
            "turn 2, trajectory 1: 3.50 s to 6.00 s, version 1.4 by gen-0"
        )
        assert float(lane.locator("line").get_attribute("x1") or 0) == 250
        assert "version 4 after 3.00 s." in page.locator(".life p").inner_text()
        assert "turn 2 2.50 s to 6.00 s" in (page.locator(".lanes").get_attribute("aria-label") or "")
        box = box_of(lane.locator("rect").first)
        assert box["width"] > 10
        assert page.evaluate("document.documentElement.scrollWidth") <= options["viewport"]["width"]
        assert said == []
        page.context.close()


@SCREENS
def test_a_task_is_shown_at_other_steps_with_the_differences(
    browser: "Browser", tmp_path: Path, options: dict[str, Any]
) -> None:
    folder = make_run(tmp_path / "run", steps=1, texts=("one", "the old answer"))
    for step, text in {8: f"the new answer {NASTY}", 15: "word " * 2000}.items():
        with TrajectoryStore(folder, budget_bytes=1 << 30, share=1.0) as store:
            store.put(taken(step, made_group(2, step=step, texts=("one", text))))
            store.wait_idle()
    with Viewed(folder) as shown:
        page, said = opened(browser, f"{shown.url}#/trajectories?environment=words&task=2", **options)
        page.locator("table.list tbody tr td:nth-child(2) a").first.click(timeout=WAIT_MS)
        page.get_by_role("link", name="this task at other steps").click(timeout=WAIT_MS)
        shows(page, "h2", "words · task 2 at 3 of 3 kept steps")
        assert page.locator(".runs h3").all_inner_texts() == ["Step 1", "Step 8", "Step 15"]
        second = page.locator(".runs section").nth(1)
        assert second.locator("del").all_text_contents() == [" old"]
        assert second.locator("ins").first.text_content() == " new"
        assert "<script>" in second.locator("ins").last.inner_text()
        assert "\\u202e" in second.locator("ins").last.inner_text()
        shows(page, ".runs section:nth-child(3) p", "5,001 more characters are neither shown nor compared.")
        assert page.evaluate("document.documentElement.scrollWidth") <= options["viewport"]["width"]

        page.get_by_role("button", name="without step 8").click()
        shows(page, "h2", "at 2 of 3 kept steps")
        page.locator("#same-member").select_option("worst")
        shows(page, ".runs section:nth-child(2) .difference span", "one")
        page.locator("#same-1").select_option("8")
        shows(page, ".runs h3", "Step 8")
        page.get_by_role("link", name="Step 8").click()
        shows(page, "h2", "step 8 · words · task 2")
        assert page.evaluate("window.broken") is None
        assert said == []
        page.context.close()


def test_a_run_that_notes_no_times_says_which_lanes_are_missing(browser: "Browser", viewed: Viewed) -> None:
    page, said = opened(browser, f"{viewed.url}#/trajectories?group=1-7")
    shows(page, ".life p", "Not drawn: opening, turns; its env_service noted no times of turns.")

    assert page.locator(".lane").count() == 0
    assert said == []
    page.context.close()


def test_the_keyboard_goes_on_inside_of_the_filter(browser: "Browser", viewed: Viewed) -> None:
    page, _ = opened(browser, f"{viewed.url}#/trajectories?environment=sums")
    page.locator("table.list tbody tr td:nth-child(2) a").first.click(timeout=WAIT_MS)
    shows(page, "h2", "step 60 · sums")
    page.keyboard.press("j")
    shows(page, "h2", "step 59 · sums")
    page.keyboard.press("k")
    shows(page, "h2", "step 60 · sums")
    page.keyboard.press("u")
    shows(page, "h2", "Trajectories")
    page.context.close()


def _tab_to(page: "Page", name: str) -> None:
    """By the Tab key alone, which shows where it is."""
    for _ in range(80):
        page.keyboard.press("Tab")
        text, outline = page.evaluate(
            "() => { const e = document.activeElement, s = getComputedStyle(e);"
            " return [(e.labels?.[0] ?? e).innerText || e.getAttribute('aria-label') || '',"
            " s.outlineStyle !== 'none' && parseFloat(s.outlineWidth) > 0]; }"
        )
        assert outline, f"nobody sees that {text!r} has the focus"
        if text.strip().startswith(name):
            return
    raise AssertionError(f"the Tab key does not come to {name!r}")


def _focused(page: "Page") -> str:
    text: str = page.evaluate("document.activeElement.innerText")
    return text


def test_the_curves_are_set_by_the_keyboard_alone(browser: "Browser", viewed: Viewed) -> None:
    page, said = opened(browser, viewed.url)
    shows(page, "#tiles dd", "60")
    _tab_to(page, "To the content")
    _tab_to(page, "Smoothing")
    page.keyboard.press("ArrowDown")
    _tab_to(page, "Log scale")
    page.keyboard.press("Enter")
    assert page.locator("#smooth").input_value() == "0.15"
    assert page.locator("#log").get_attribute("aria-pressed") == "true"
    _tab_to(page, "+")
    page.keyboard.press("Enter")
    _tab_to(page, "The last steps as a table")
    page.keyboard.press("Enter")
    shows(page, "#table td", "60")

    assert said == []
    page.context.close()


def test_the_way_past_the_navigation_leads_to_the_view_that_is_shown(browser: "Browser", viewed: Viewed) -> None:
    page, said = opened(browser, f"{viewed.url}#/trajectories")
    shows(page, "table.list td", "sums")
    _tab_to(page, "To the content")
    page.keyboard.press("Enter")
    _tab_to(page, "Words")

    assert page.locator("h2").filter(visible=True).first.inner_text() == "Trajectories"
    assert said == []
    page.context.close()


def test_a_token_is_reached_by_the_keyboard_alone(browser: "Browser", viewed: Viewed) -> None:
    page, said = opened(browser, viewed.url)
    shows(page, "#tiles dd", "60")
    _tab_to(page, "Trajectories")
    page.keyboard.press("Enter")
    shows(page, "table.list td", "sums")
    _tab_to(page, "Words")
    page.keyboard.type("word2")
    page.keyboard.press("Enter")
    shows(page, "table.list .excerpt mark", "word2")
    assert page.evaluate("document.activeElement.id") == "f-words"
    _tab_to(page, "0")
    page.keyboard.press("Enter")
    shows(page, "h2", "step 60 · sums")
    assert _focused(page).startswith("step 60 · sums")
    _tab_to(page, "Entropy")
    page.keyboard.press("Enter")
    shows(page, ".group button[aria-pressed=true]", "Entropy")
    assert _focused(page) == "Entropy", "a press of the button takes nobody away from it"
    page.locator(".tokens[tabindex]").first.wait_for(timeout=WAIT_MS)
    while page.evaluate("document.activeElement.getAttribute('role')") != "group":
        page.keyboard.press("Tab")
    page.keyboard.press("ArrowRight")
    first = page.locator(".told", has_text="token 3 (id").inner_text()
    page.keyboard.press("ArrowRight")
    second = page.locator(".told", has_text="token 4 (id").inner_text()
    page.keyboard.press("End")
    page.locator(".told", has_text="token 8 (id").wait_for(timeout=WAIT_MS)
    _tab_to(page, "Reward and turns")
    page.keyboard.press("Enter")
    shows(page, "dl.facts dd", "exact")
    page.keyboard.press("u")
    shows(page, "h2", "Trajectories")

    assert "version 58" in first
    assert "entropy" in second
    assert said == []
    page.context.close()


def test_a_step_comes_by_itself_and_the_page_outlives_its_server(browser: "Browser", tmp_path: Path) -> None:
    with Viewed(make_run(tmp_path / "run", steps=5)) as shown:
        page, said = opened(browser, shown.url)
        shows(page, "#state", "ended")

        write_lines(shown.folders[0], [step_line(6)])
        shows(page, "#tiles dd", "6")
        before = list(said)
        shown.end(signal.SIGKILL)
        shows(page, "#state", "does not answer")
        write_lines(shown.folders[0], [{"kind": "resume", "version": 4, "incarnation": 2}, step_line(5)])
        shown.start()
        shows(page, "#events td", "resume")
        shows(page, "#tiles dd", "5")
        code = shown.end()

    assert before == []
    assert all("Failed to load resource" in line or "net::ERR" in line for line in said), said
    assert code == 0
    page.context.close()


def test_a_run_that_is_read_from_its_files_is_called_ended_only_if_it_has_ended(
    browser: "Browser", tmp_path: Path
) -> None:
    folder = make_run(tmp_path / "run", steps=5, settings={"steps": 9})
    lock = (folder / "run.lock").open("w")
    with Viewed(folder) as shown:
        page, said = opened(browser, shown.url)
        shows(page, "#state", "stopped after step 5 of 9: from its files")
        fcntl.flock(lock, fcntl.LOCK_EX)
        shows(page, "#state", "goes on: from its files")
        shows(page, "#tiles small", "goes on")
        (folder / "lease-1.json").write_text("{}")
        os.utime(folder / "lease-1.json", (0, 0))
        lock.close()
        shows(page, "#state", "died after step 5: from its files")
        (folder / "lease-1.json").unlink()
        write_lines(folder, [step_line(step) for step in range(6, 10)])
        shows(page, "#state", "ended: from its files")
        shows(page, "#tiles small", "ended")
        assert said == []
        page.context.close()


def _legend(page: "Page", figure: str) -> dict[str, str]:
    """Names of the figure's lines, with the legend's text for each where the pointer is at the last step."""
    found: dict[str, str] = page.evaluate(
        """async id => {
          const over = document.querySelector(`figure[aria-labelledby=h-${id}] .u-over`);
          const { right, top } = over.getBoundingClientRect();
          over.dispatchEvent(new MouseEvent("mousemove", { clientX: right - 1, clientY: top + 5 }));
          await new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)));
          const rows = [...over.closest("figure").querySelectorAll(".u-legend tr")].slice(1);
          return Object.fromEntries(rows.map(row => ["th", "td"].map(cell => row.querySelector(cell).innerText)));
        }""",
        figure,
    )
    return found


RAW = {"mean reward", "held out"}
SMOOTHED = {"mean reward, raw", "mean reward", "held out"}


@pytest.mark.parametrize("smoothing", ["0", "0.02", "0.05", "0.15"])
def test_a_page_that_is_left_open_calls_each_line_by_its_name(
    browser: "Browser", tmp_path: Path, smoothing: str
) -> None:
    """It is opened before the smoothed line is there, and sees it come, and go with steps that a resume takes back."""
    with Viewed(make_run(tmp_path / "run", steps=3)) as shown:
        page, said = opened(browser, shown.url)
        shows(page, "#tiles dd", "3")
        page.locator("#smooth").select_option(smoothing)
        last = 3
        for step in (9, 10, 11, 20, 29, 30, 31, 60, 74, 75, 76):
            lines = [step_line(each, reward_mean=0.5) for each in range(last + 1, step)]
            write_lines(shown.folders[0], [*lines, step_line(step, reward_mean=0.5), _evaluation(step)])
            last = step
            shows(page, "#tiles small", f"version {step}")
            legend = _legend(page, "reward")

            assert set(legend) == (SMOOTHED if round_half_up(float(smoothing) * step) > 1 else RAW), step
            assert legend["held out"] == "0.125", f"step {step}: held out shows another line's value"
        write_lines(shown.folders[0], [{"kind": "resume", "version": 9, "incarnation": 2}, step_line(10)])
        shows(page, "#events td", "resume")
        shows(page, "#tiles dd", "10")
        assert set(_legend(page, "reward")) == (SMOOTHED if smoothing == "0.15" else RAW)
        assert said == []
        page.context.close()


def _evaluation(step: int) -> dict[str, object]:
    return {"kind": "evaluation", "version": step, "accuracy": 0.125, "tasks": 8}


def round_half_up(value: float) -> int:
    """As JavaScript rounds."""
    return int(value + 0.5)


def test_what_was_not_measured_has_no_figure_until_it_is(browser: "Browser", tmp_path: Path) -> None:
    with Viewed(make_run(tmp_path / "run", steps=5)) as shown:
        page, said = opened(browser, shown.url)
        shows(page, "#charts .u-legend th", "mean reward")
        assert page.locator("figure[aria-labelledby=h-ratio]").is_hidden()

        write_lines(shown.folders[0], [step_line(6, importance_ratio_mean=1.0, importance_ratio_max=7.0)])
        shows(page, "#charts .u-legend th", "largest ratio")
        assert page.locator("figure[aria-labelledby=h-ratio]").is_visible()
        assert said == []
        page.context.close()


def test_a_figure_by_name_comes_with_the_second_name(browser: "Browser", tmp_path: Path) -> None:
    with Viewed(make_run(tmp_path / "run", steps=5)) as shown:
        page, said = opened(browser, shown.url)
        page.locator("#smooth").select_option("0")
        write_lines(shown.folders[0], [step_line(6, reward_by_verifier={"math": 0.25})])
        shows(page, "#tiles dd", "6")
        assert page.locator("figure[aria-labelledby=h-verifiers]").is_hidden()

        write_lines(shown.folders[0], [step_line(7, reward_by_verifier={"math": 0.5, "nim/first": 0.75})])
        shows(page, "#charts .u-legend th", "nim/first")
        assert _legend(page, "verifiers") == {"math": "0.500", "nim/first": "0.750"}
        words = page.locator("figure[aria-labelledby=h-verifiers] figcaption").inner_text()
        assert words == "math: – at first, 0.500 at last; nim/first: – at first, 0.750 at last"
        assert said == []
        page.context.close()


def _axis_ends(page: "Page") -> list[str]:
    """Least and largest place of the reward's x axis, by what the legend says at both ends."""
    found: list[str] = page.evaluate(
        """async () => {
          const over = document.querySelector("figure[aria-labelledby=h-reward] .u-over"), ends = [];
          const { left, right, top } = over.getBoundingClientRect();
          for (const x of [left + 1, right - 1]) {
            over.dispatchEvent(new MouseEvent("mousemove", { clientX: x, clientY: top + 5 }));
            await new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)));
            ends.push(over.closest("figure").querySelector(".u-legend tr td").innerText);
          }
          return ends;
        }"""
    )
    return found


def test_the_x_axis_is_steps_tokens_time_or_the_clock(browser: "Browser", tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=0)
    began = 1_790_000_000.0
    write_lines(folder, [step_line(step, unix_s=began + 60 * step, time_s=60 * step) for step in range(1, 41)])
    write_lines(folder, [{**_evaluation(20), "accuracy_low": 0.1, "accuracy_high": 0.15}])
    with Viewed(folder) as shown:
        page, said = opened(browser, f"{shown.url}#/run?smooth=0")
        shows(page, "#tiles dd", "40")
        steps = _axis_ends(page)
        page.locator("#axis").select_option("tokens")
        tokens = _axis_ends(page)
        page.locator("#axis").select_option("time")
        minutes = _axis_ends(page)
        page.locator("#axis").select_option("clock")
        clock = _axis_ends(page)
        at_step = page.evaluate("location.hash")

        assert steps == ["0", "40"]
        assert tokens == ["0, step 0", "4,000, step 40"]
        assert minutes == ["0 ms, step 0", "40 min, step 40"]
        assert clock[1].endswith("step 40")
        assert clock[0] != clock[1]
        assert "x=clock" in at_step
        assert said == []
        page.context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_lags_are_told_apart_by_lightness_alone(browser: "Browser", viewed: Viewed, scheme: Any) -> None:
    page, _ = opened(browser, viewed.url, color_scheme=scheme)
    colors = page.evaluate(
        "[0, 1, 2, 3, 4].map(i => getComputedStyle(document.documentElement).getPropertyValue(`--lag${i}`).trim())"
    )
    weights = (0.2126, 0.7152, 0.0722)
    lightness = [sum(w * int(one[1 + 2 * i : 3 + 2 * i], 16) for i, w in enumerate(weights)) for one in colors]

    order = sorted(lightness, reverse=scheme == "light")
    assert lightness == order, "the oldest is the farthest from the paper"
    assert all(abs(a - b) > 25 for a, b in itertools.pairwise(lightness))
    page.context.close()


def test_a_held_out_point_has_its_interval(browser: "Browser", tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=20)
    write_lines(folder, [{**_evaluation(20), "accuracy_low": 0.0625, "accuracy_high": 0.25}])
    with Viewed(folder) as shown:
        page, said = opened(browser, shown.url)
        shows(page, "#charts .u-legend th", "held out")
        assert _legend(page, "reward")["held out"] == "0.125 (0.0625 to 0.250)"
        assert said == []
        page.context.close()


def test_every_number_of_the_steps_is_found_by_its_name_and_drawn(browser: "Browser", tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=5)
    write_lines(folder, [step_line(6, means={"pair_accuracy": 0.75}, trained_tokens=96, clip_fraction=0.125)])
    with Viewed(folder) as shown:
        page, said = opened(browser, shown.url)
        shows(page, "#charts .u-legend th", "pair_accuracy")
        page.locator("#more summary").click()
        shows(page, "#more .u-legend th", "trained tokens")
        page.locator("#find").fill("clip_fraction")
        shows(page, "#found", "1 of")
        heads = page.locator("figure:has(.plot):visible h3").all_inner_texts()
        assert heads == ["Optimizer: clipped"]
        page.locator("#find").fill("pair_acc")
        shows(page, "#charts h3", "Means of the algorithm")
        page.locator("#find").fill("no such number")
        shows(page, "#found", "0 of")
        assert "find=no" in page.evaluate("location.hash")
        page.locator("summary", has_text="The last steps").click()
        assert "[object" not in page.locator("#table").inner_text()
        assert said == []
        page.context.close()


def test_the_zoom_is_in_the_address_and_comes_with_it(browser: "Browser", viewed: Viewed) -> None:
    page, said = opened(browser, f"{viewed.url}#/run?from=20&to=40&log=1&smooth=0.15")
    shows(page, "#tiles dd", "60")
    assert _axis_ends(page) == ["20", "40"]
    assert page.locator("#log").get_attribute("aria-pressed") == "true"
    assert page.locator("#smooth").input_value() == "0.15"
    page.locator("#zoom-in").press("Enter")
    assert "from=25&to=35" in page.evaluate("location.hash")
    page.reload()
    shows(page, "#tiles dd", "60")
    assert _axis_ends(page) == ["25", "35"]
    page.locator("#zoom-whole").press("Enter")
    assert "from" not in page.evaluate("location.hash")
    assert said == []
    page.context.close()


def _click_at(page: "Page", figure: str, share: float) -> None:
    """Clicks on a figure, so far along its x axis."""
    over = page.locator(f"figure[aria-labelledby=h-{figure}] .u-over")
    over.scroll_into_view_if_needed()
    box = box_of(over)
    over.click(position={"x": box["width"] * share, "y": box["height"] / 2})


def test_a_point_of_a_curve_leads_to_the_groups_behind_it_and_their_part_in_it(
    browser: "Browser", viewed: Viewed
) -> None:
    """Three clicks: the point, the first row, what it was rewarded for."""
    page, said = opened(browser, f"{viewed.url}#/run?from=20&to=40&smooth=0")
    shows(page, "#charts .u-legend th", "KL with lag")
    _click_at(page, "kl", 0.5)
    shows(page, "#view-trajectories [role=status]", "Of step 30, 2 of 2 groups are kept")
    assert page.locator("#f-order").input_value() == "ratio"
    ratios = [float(text) for text in page.locator("table.list tbody tr td:nth-child(5)").all_inner_texts()]
    assert ratios == sorted(ratios, reverse=True)
    page.locator("table.list tbody tr td:nth-child(2) a").first.click()
    shows(page, "h2", "step 30")
    page.locator("summary", has_text="Reward and turns").first.click()
    shows(page, "dl.facts dd", "exact")
    page.go_back()
    page.go_back()
    shows(page, "#state", "ended")  # its curves are drawn then
    _click_at(page, "reward", 0.25)
    shows(page, "#view-trajectories [role=status]", "Of step 25,")
    rewards = [float(text) for text in page.locator("table.list tbody tr td:nth-child(2)").all_inner_texts()]
    assert rewards == sorted(rewards)
    assert said == []
    page.context.close()


def test_the_list_is_ordered_by_the_head_of_a_column_and_page_by_page(browser: "Browser", viewed: Viewed) -> None:
    from playwright.sync_api import expect

    page, said = opened(browser, f"{viewed.url}#/trajectories")
    page.get_by_role("link", name="reward", exact=True).click(timeout=WAIT_MS)
    expect(page.locator("table.list tbody tr td:nth-child(2)")).to_have_text(["2"] * 50, timeout=WAIT_MS)
    page.get_by_role("link", name="more ▶").first.click()
    page.get_by_role("link", name="◀ before").first.wait_for(timeout=WAIT_MS)
    page.get_by_role("link", name="sums", exact=True).first.click()
    page.get_by_role("link", name="◀ before").first.wait_for(state="detached", timeout=WAIT_MS)
    shows(page, "#view-trajectories [role=status]", "50 shown")
    page.goto(f"{viewed.url}#/trajectories?step=900")
    shows(page, "#view-trajectories p", "The nearest that are kept: step 60")
    assert said == []
    page.context.close()


def test_a_group_is_one_row_that_leads_to_its_completions(browser: "Browser", tmp_path: Path) -> None:
    """Its prompt and its answer would break out of the page, and out of the picture of its rewards."""
    with Viewed(make_run(tmp_path / "run", steps=60, texts=("word1 word2", NASTY, "word4"), prompt=NASTY)) as shown:
        page, said = opened(browser, f"{shown.url}#/trajectories")
        shows(page, "#view-trajectories [role=status]", "50 shown")
        page.locator("#f-rows").select_option("a group")
        shows(page, "table.list thead th", "mean")
        first = page.locator("table.list tbody tr").first
        steps = page.locator("table.list tbody tr td:nth-child(1)").all_inner_texts()
        page.get_by_role("link", name="older ▶").first.click()
        shows(page, "#view-trajectories a", "◀ newer")
        steps += page.locator("table.list tbody tr td:nth-child(1)").all_inner_texts()
        page.go_back()
        shows(page, "table.list td", "60")

        assert steps == [str(step) for step in range(60, 10, -1) for _ in range(2)], "each group is there once"
        assert first.locator(".dots").get_attribute("aria-label") == "rewards 0, 1, 2"
        assert first.locator(".dot").count() == 3
        assert "\\u202e" in first.locator("a.excerpt").inner_text()
        assert "expected: an answer 2" in first.inner_text()
        assert first.locator("td:nth-child(6)").inner_text() == "1.28", "the same for all: one number, no range"
        unfold = first.get_by_role("button", name="its trajectories")
        unfold.press("Enter")
        shows(page, "tr.member td", "word4")
        members = page.locator("tr.member")
        assert members.locator("td:nth-child(2)").all_inner_texts() == ["2", "1", "0"]
        assert "\\u202e" in members.nth(1).locator("a.excerpt").inner_text()
        assert unfold.get_attribute("aria-expanded") == "true"
        unfold.press("Enter")
        assert members.count() == 0
        first.locator("a.excerpt").click()
        shows(page, "h2", "step 60 · sums")
        assert page.locator(".siblings article").count() == 3
        page.get_by_role("link", name="▲ list").click()
        shows(page, "table.list thead th", "mean")
        page.get_by_role("link", name="rewards", exact=True).click()
        page.wait_for_url("**order=reward*")
        assert "rows=groups" in page.url
        assert page.evaluate("window.broken") is None
        assert said == []
        page.context.close()


def test_a_part_of_the_prompt_is_searched_for_by_form_and_by_address(browser: "Browser", viewed: Viewed) -> None:
    page, said = opened(browser, f"{viewed.url}#/trajectories?prompt=PROMPT&step=9")
    shows(page, "table.list td", "9")
    assert page.locator("#f-prompt").input_value() == "PROMPT"
    page.locator("#f-prompt").fill("<b>another")
    page.locator("#f-prompt").press("Enter")
    shows(page, "#view-trajectories [role=status]", "None that fits.")
    assert "prompt=%3Cb%3Eanother" in page.url
    assert said == []
    page.context.close()


def test_the_list_of_a_run_beside_is_in_the_same_order(browser: "Browser", both: Viewed) -> None:
    page, said = opened(browser, f"{both.url}#/trajectories?with=1&order=-reward&max_step=30")
    shows(page, ".runs section:nth-child(2) table.list td", "sums")
    rewards = page.locator(".runs section:nth-child(2) table.list tbody tr td:nth-child(2)").all_inner_texts()
    steps = page.locator(".runs section:nth-child(2) table.list tbody tr td:nth-child(1)").all_inner_texts()
    assert rewards == sorted(rewards)
    assert max(map(int, steps)) <= 30
    assert len(rewards) == 50
    assert said == []
    page.context.close()


def test_a_report_is_as_wide_as_the_screen_whatever_its_settings_are_called(browser: "Browser", tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=20, settings={"training.optimizer.a_setting_with_a_long_name": "x" * 90})
    report = tmp_path / "report.html"
    report.write_text(page_of_report([read_run(folder)]), encoding="utf-8")
    page, said = opened(browser, report.as_uri(), viewport={"width": 390, "height": 844})

    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert said == []
    page.context.close()


def test_zoom_smoothing_and_log_scale_are_buttons(browser: "Browser", viewed: Viewed) -> None:
    page, said = opened(browser, viewed.url)
    shows(page, "#tiles dd", "60")
    for button in ("#log", "#zoom-in", "#zoom-on", "#zoom-back", "#zoom-out", "#zoom-whole"):
        page.locator(button).press("Enter")
    page.locator("#smooth").select_option("0")

    assert page.locator("#log").get_attribute("aria-pressed") == "true"
    assert page.locator("#charts canvas[role=img]").count() >= 8
    assert said == []
    page.context.close()


def test_a_token_is_asked_for_and_then_known(browser: "Browser", tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=3)
    (tmp_path / "token").write_text("a secret token")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [str(Path(sys.executable).with_name("headway")), "view", str(folder), "--port", str(port)]
    with subprocess.Popen(
        [*words, "--token-file", str(tmp_path / "token")], stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        assert any("listening" in line for line in process.stderr)
        page, said = opened(browser, f"http://127.0.0.1:{port}/")
        shows(page, "h2", "Log in")
        page.locator("#token").fill("another")
        page.locator("#token").press("Enter")
        shows(page, "#login-error", "not the learner's token")
        page.locator("#token").fill("a secret token")
        page.locator("#token").press("Enter")
        shows(page, "#tiles dd", "3")
        page.reload()
        shows(page, "#tiles dd", "3")
        process.terminate()
    assert [text for text in said if "401" not in text] == [], "a refusal is what Chromium itself tells of"
    page.context.close()


ALONE = (*EXPECTED, "#/trajectories?group=1-7&color=gap")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("view", [*ALONE, *BESIDE])
def test_every_view_is_accessible(browser: "Browser", viewed: Viewed, both: Viewed, view: str, scheme: str) -> None:
    axe = importlib.resources.files("axe_playwright_python") / "axe.min.js"
    options: dict[str, Any] = {"color_scheme": scheme, "bypass_csp": True}
    page, _ = opened(browser, (viewed if view in ALONE else both).url + view, **options)
    shows(page, *(EXPECTED | BESIDE).get(view, (".tokens", "word")))
    page.add_script_tag(content=axe.read_text(encoding="utf-8"))
    found = page.evaluate("async () => (await axe.run()).violations.map(v => [v.id, v.nodes[0].html])")
    assert found == []
    page.context.close()


def test_a_page_that_is_open_for_days_asks_anew_before_it_has_more_steps_than_it_can_draw(
    browser: "Browser", tmp_path: Path
) -> None:
    folder = make_run(tmp_path / "run", steps=2)
    asked: list[int] = []

    def long_run(route: "Route") -> None:
        answer = route.fetch()
        told = answer.json()
        if not asked:  # as it is after days in which each step came alone
            kept = {name: column[-1:] * 39_999 for name, column in told["columns"].items() if name in OF_LONG_RUNS}
            told["columns"] = {**kept, "step": list(range(-39_996, 3))}
        asked.append(len(told["columns"]["step"]))
        route.fulfill(response=answer, json=told)

    with Viewed(folder) as shown:
        page = browser.new_page()
        page.route("**/page/data/steps?*", long_run)
        page.goto(shown.url)
        shows(page, "#tiles dd", "2")
        with page.expect_response("**/page/data/steps?*", timeout=WAIT_MS):
            write_lines(folder, [step_line(3), step_line(4)])
        shows(page, "#tiles dd", "4")
        assert (asked[0], max(asked[1:])) == (39_999, 4)
        page.context.close()


def test_the_list_of_trajectories_says_what_is_kept_by_now(browser: "Browser", tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=2)
    with Viewed(folder) as shown:
        page, said = opened(browser, f"{shown.url}#/trajectories")
        shows(page, "#view-trajectories p", "Steps 1 to 2:")
        with TrajectoryStore(folder, budget_bytes=64 << 20, share=1.0) as store:
            store.put(taken(3, made_group(7, step=3)))
        page.get_by_role("button", name="Show").press("Enter")
        page.locator("#to-settings").click()
        page.locator("#to-trajectories").click()
        shows(page, "#view-trajectories p", "Steps 1 to 3:")
        assert said == []
        page.context.close()


def test_settings_that_come_late_are_not_shown_as_those_of_another_run(browser: "Browser", both: Viewed) -> None:
    page, said = opened(browser, f"{both.url}#/run")
    shows(page, "#tiles dd", "60")
    late: list[Route] = []
    page.route("**/page/data/made_with?run=0", lambda route: late.append(route))
    page.locator("#to-settings").click()
    deadline = time.monotonic() + WAIT_MS / 1000
    while not late and time.monotonic() < deadline:
        page.wait_for_timeout(10)
    page.evaluate("location.hash = '#/settings?run=1'")
    page.locator("#settings-differs").uncheck(timeout=WAIT_MS)
    shows(page, "#view-settings td", "8")
    with page.expect_response("**/page/data/made_with?run=0", timeout=WAIT_MS):
        late[0].continue_()
    page.evaluate("new Promise((done) => requestAnimationFrame(done))")

    assert page.locator("#view-settings tr", has_text="max_lag").locator("td").all_inner_texts() == ["max_lag", "8"]
    assert said == []
    page.context.close()
