"""The marks on the curves as Chromium shows them: where they stand, what they tell, and which are shown."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.learner.page.chromium import NEEDS_CHROMIUM, WAIT_MS, Viewed, box_of, chromium, opened, shows
from tests.learner.page.made_run import make_run, step_line, write_lines

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

BEGAN = 1_790_000_000.0
HOSTILE = "<img src=x onerror='window.broken = 1'>"

pytestmark = NEEDS_CHROMIUM


@pytest.fixture(scope="module")
def browser() -> Iterator["Browser"]:
    with chromium() as found:
        yield found


def step_after(number: int) -> dict[str, object]:
    """A step a minute."""
    return step_line(number, unix_s=BEGAN + 60 * number, time_s=60 * number)


def made(folder: Path, *, steps: int) -> Path:
    """A run without the events that `make_run` adds."""
    make_run(folder, steps=0)
    (folder / "metrics.jsonl").write_text("")
    write_lines(folder, [step_after(number) for number in range(1, steps + 1)])
    return folder


def gone(version: int, *, minutes: float, name: str = "g1") -> dict[str, object]:
    return {"kind": "leave", "version": version, "generator_id": name, "unix_s": BEGAN + 60 * minutes}


def told_at(page: "Page", figure: str) -> dict[str, float]:
    """The words on marks while the pointer goes along a figure, from left to right, with their share of its axis."""
    found: dict[str, float] = page.evaluate(
        """async id => {
          const figure = document.querySelector(`figure[aria-labelledby=h-${id}]`);
          const over = figure.querySelector(".u-over"), found = {};
          const { left, top, width } = over.getBoundingClientRect();
          for (let x = 0; x <= width; x++) {
            over.dispatchEvent(new MouseEvent("mousemove", { clientX: left + x, clientY: top + 5 }));
            const told = figure.querySelector(".told-mark");
            if (!told.hidden) (found[[...told.children].map(one => one.textContent).join("\\n")] ??= []).push(x);
          }
          over.dispatchEvent(new MouseEvent("mouseleave"));
          if (!figure.querySelector(".told-mark").hidden) return { "it stays when the pointer is gone": 0 };
          return Object.fromEntries(Object.entries(found).map(([text, at]) =>
            [text, (at[0] + at.at(-1)) / 2 / width]));
        }""",
        figure,
    )
    return found


def test_a_mark_stands_where_it_happened_on_every_axis(browser: "Browser", tmp_path: Path) -> None:
    """A generator leaves half a minute after step 10 of 40; version 20 is measured a quarter of an hour later."""
    folder = made(tmp_path / "run", steps=40)
    late = {"kind": "evaluation", "version": 20, "accuracy": 0.5, "tasks": 8, "unix_s": BEGAN + 60 * 35}
    write_lines(folder, [gone(10, minutes=10.5, name=HOSTILE), late])
    with Viewed(folder) as shown:
        page, said = opened(browser, shown.url)
        shows(page, "#tiles dd", "40")
        for axis, left in (("steps", 0.25), ("tokens", 0.25), ("time", 0.2625), ("clock", 0.2625)):
            page.locator("#axis").select_option(axis)
            for figure in ("reward", "kl", "time"):
                found = told_at(page, figure)

                assert list(found) == [
                    f"× step 10: generator {HOSTILE} has gone", "○ step 20: evaluation: accuracy 0.5",
                ]  # fmt: skip
                assert list(found.values()) == pytest.approx([left, 0.5], abs=0.005), (axis, figure)
        assert page.evaluate("window.broken") is None
        assert said == []
        page.context.close()


def test_a_resume_that_takes_steps_back_moves_the_marks_of_an_open_page(browser: "Browser", tmp_path: Path) -> None:
    folder = made(tmp_path / "run", steps=30)
    write_lines(folder, [gone(6, minutes=6.2), gone(25, minutes=25.2, name="g2")])
    with Viewed(folder) as shown:
        page, said = opened(browser, f"{shown.url}#/run?x=clock")
        shows(page, "#tiles dd", "30")
        before = told_at(page, "reward")
        resumed = {"kind": "resume", "version": 12, "incarnation": 2, "unix_s": BEGAN + 60 * 40}
        later = [step_line(12 + n, unix_s=BEGAN + 60 * (40 + n), time_s=60 * (40 + n)) for n in range(1, 21)]
        write_lines(folder, [resumed, *later])
        shows(page, "#tiles dd", "32")
        clock = told_at(page, "reward")
        page.locator("#axis").select_option("steps")
        steps = told_at(page, "reward")

        went, back = "× step 6: generator g1 has gone", "↻ step 12: the learner was started again, from version 12"
        assert list(before) == [went, "× step 25: generator g2 has gone"]
        assert clock == pytest.approx({went: 6.2 / 60, back: 40 / 60}, abs=0.005)
        assert steps == pytest.approx({went: 6 / 32, back: 12 / 32}, abs=0.005)
        assert said == []
        page.context.close()


def test_marks_are_switched_off_kind_by_kind_and_the_address_holds_it(browser: "Browser", tmp_path: Path) -> None:
    folder = made(tmp_path / "run", steps=40)
    checkpoint = {"kind": "checkpoint", "version": 20, "seconds": 1.5}
    write_lines(folder, [gone(10, minutes=10.5), checkpoint])
    column = """() => {
      const over = document.querySelector("figure[aria-labelledby=h-reward] .u-over");
      const canvas = over.closest("figure").querySelector("canvas"), ratio = devicePixelRatio;
      const x = (over.offsetLeft + Math.round(over.clientWidth / 4)) * ratio;
      return [...canvas.getContext("2d").getImageData(x, 0, 1, canvas.height).data].join();
    }"""
    with Viewed(folder) as shown:
        page, said = opened(browser, f"{shown.url}#/run?smooth=0")
        shows(page, "#tiles dd", "40")
        names = page.locator("#marks button").filter(visible=True).all_inner_texts()
        with_line = page.evaluate(column)
        button = page.get_by_role("button", name="generators gone")
        button.press("Enter")
        without_line = page.evaluate(column)

        assert names == ["× generators gone", "◆ checkpoints"]
        assert with_line != without_line, "nothing was drawn"
        assert list(told_at(page, "reward")) == ["◆ step 20: checkpoint, written in 1.5 s"]
        assert "unmarked=leave" in page.evaluate("location.hash")
        page.reload()
        shows(page, "#tiles dd", "40")
        assert button.get_attribute("aria-pressed") == "false"
        assert list(told_at(page, "reward")) == ["◆ step 20: checkpoint, written in 1.5 s"]
        button.press("Enter")
        assert len(told_at(page, "reward")) == 2
        assert "unmarked" not in page.evaluate("location.hash")
        assert said == []
        page.context.close()


def test_thousands_of_marks_are_a_few_lines_and_the_rare_one_among_them_is_drawn(
    browser: "Browser", tmp_path: Path
) -> None:
    folder = made(tmp_path / "run", steps=3000)
    kept = [{"kind": "checkpoint", "version": version, "seconds": 1} for version in range(1, 3001)]
    measured = [{"kind": "evaluation", "version": version, "accuracy": 0.5} for version in range(1, 3001)]
    write_lines(folder, [*kept, *measured, gone(1500, minutes=1500)])
    with Viewed(folder) as shown:
        page, said = opened(browser, f"{shown.url}#/run", viewport={"width": 1200, "height": 900})
        shows(page, "#tiles dd", "3,000")
        found = told_at(page, "reward")

        assert 50 < len(found) < 1200 / 12
        (rare,) = (text for text in found if "g1" in text)
        first, *_, last = rare.split("\n")
        assert first == "× step 1,500: generator g1 has gone"
        assert last.startswith("and ")
        assert found[rare] == pytest.approx(0.5, abs=0.005)
        assert said == []
        page.context.close()


def test_what_is_told_stays_within_a_narrow_screen_and_the_histogram_of_lag_has_marks_too(
    browser: "Browser", tmp_path: Path
) -> None:
    folder = made(tmp_path / "run", steps=40)
    write_lines(folder, [gone(39, minutes=39, name="g" * 100)])
    with Viewed(folder) as shown:
        page, said = opened(browser, shown.url, viewport={"width": 390, "height": 844})
        shows(page, "#tiles dd", "40")
        canvas = page.locator("figure[aria-labelledby=h-lags] canvas")
        canvas.scroll_into_view_if_needed()
        box = box_of(canvas)
        page.mouse.move(box["x"] + 52 + (box["width"] - 60) * 39 / 40, box["y"] + 30)
        told = page.locator("figure[aria-labelledby=h-lags] .told-mark")
        told.wait_for(timeout=WAIT_MS)
        place = box_of(told)

        assert place["x"] >= 0
        assert place["x"] + place["width"] <= 390
        assert told.inner_text() == f"× step 39: generator {'g' * 100} has gone"
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        assert said == []
        page.context.close()
