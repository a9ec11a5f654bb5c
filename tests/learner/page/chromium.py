"""Chromium, and `headway view` for it to look at."""

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import pytest

CHROMIUM = os.environ.get("HEADWAY_CHROMIUM") or shutil.which("chromium-headless-shell") or shutil.which("chromium")
REQUIRED = os.environ.get("HEADWAY_PAGE_TESTS") == "required"
WAIT_MS = 60_000
HURRIED_VIEW = """\
from headway.command import main
from learner.page import routes
routes._NEWS_EVERY_S = routes._STATUS_EVERY_S = 0.1
main()
"""
"""`headway`, of which a page that is open hears ten times as often."""
HURRIED_PAGE = "{ const wait = setTimeout; window.setTimeout = (done, ms, ...more) => wait(done, ms / 10, ...more); }"
"""Has a page wait a tenth of the time before it asks again."""

try:
    from playwright.sync_api import Browser, FloatRect, Locator, Page, sync_playwright
except ImportError:
    sync_playwright = None

NEEDS_CHROMIUM = pytest.mark.skipif(
    not REQUIRED and (sync_playwright is None or CHROMIUM is None),
    reason="needs Chromium and playwright: make test-tools page-tests",
)


class Viewed:
    """`headway view` of folders, as a process that can be killed and started again at the same port; a context manager,
    after which it is gone.
    """

    def __init__(self, *folders: Path) -> None:
        self.folders = folders
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.end()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    def start(self) -> None:
        words = [sys.executable, "-c", HURRIED_VIEW, "view", *map(str, self.folders), "--port", str(self.port)]
        self.process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if "listening" in line:
                return
        raise AssertionError("it did not start")

    def end(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        self.process.communicate(timeout=60)
        return self.process.returncode


@contextmanager
def chromium() -> Iterator["Browser"]:
    """The browser, until the end of the body."""
    assert sync_playwright is not None, "playwright is not installed: pip install playwright"
    assert CHROMIUM is not None, "Chromium is not installed: apt-get install chromium-headless-shell"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


def opened(browser: "Browser", url: str, **options: Any) -> tuple["Page", list[str]]:
    """A page of its own, and what it says on its console, as it comes."""
    context = browser.new_context(**options)
    context.add_init_script(HURRIED_PAGE)
    page = context.new_page()
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: said.append(str(error)))
    page.goto(url)
    return page, said


def shows(page: "Page", selector: str, text: str) -> None:
    """Waits for an element with the text."""
    page.locator(selector).filter(has_text=text).first.wait_for(timeout=WAIT_MS)


def box_of(locator: "Locator") -> "FloatRect":
    """Place and size of an element, in pixels. One that the page draws anew while it is asked for has none: then it is
    asked for again.
    """
    for _ in range(20):
        if (box := locator.bounding_box(timeout=WAIT_MS)) is not None:
            return box
    raise AssertionError(f"{locator} is not shown")


def asked_twice(page: "Page", url: str) -> None:
    """Waits for two answers from there: before it asks for the second one, a page has shown the first."""
    for _ in range(2):
        with page.expect_response(url, timeout=WAIT_MS):
            pass
