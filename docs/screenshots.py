"""Pictures of a run's page for the documentation, made by `make screenshots`: of a run that goes on, and of two runs.

    python -m docs.screenshots RUN OTHER FOLDER

RUN is a folder that is not there yet: the demo is trained into it, and its learner's page is looked at in the middle of
the run. OTHER is a run that has ended; both are shown beside each other by `headway view` when RUN has ended, too.
"""

import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

HEADWAY = Path(sys.executable).with_name("headway")
LEARNER, VIEW = 7300, 7398  # the first is of examples/addition
STEPS, LOOKED_AT = 300, 150
MAX_BYTES = 200_000
START_S = 300.0
GROUP = "table.list tbody tr td:nth-child(2) a"


def main(run: Path, other: Path, pictures: Path) -> None:
    """Writes one picture of each view; the newest group stands for all."""
    pictures.mkdir(exist_ok=True)
    chromium = shutil.which("chromium-headless-shell") or shutil.which("chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        with _training(run) as training:
            _wait_for_step(LOOKED_AT, run, training)
            _take_live(browser, pictures)
            assert training.poll() is None, f"the run of {STEPS} steps ended before its pictures were taken"
            assert training.wait() == 0, f"headway up ended with {training.returncode}"
        with _viewing(run, other):
            _take_beside(browser, pictures)
    for path in pictures.glob("page-*.png"):
        assert path.stat().st_size < MAX_BYTES, f"{path} has {path.stat().st_size} bytes, over {MAX_BYTES}"


@contextmanager
def _training(run: Path) -> "Iterator[subprocess.Popen[bytes]]":
    settings = {
        "run.directory": run.parent.absolute(), "run.name": run.name,
        "learner.steps": STEPS, "learner.training.optimizer.total-updates": 4 * STEPS,
        "learner.evaluation.every-steps": 50,
    }  # fmt: skip
    options = [word for key, value in settings.items() for word in (f"--{key}", str(value))]
    with subprocess.Popen([HEADWAY, "up", "examples/addition/run.toml", *options]) as training:
        try:
            yield training
        finally:
            training.terminate()


@contextmanager
def _viewing(run: Path, other: Path) -> Iterator[None]:
    with subprocess.Popen(
        [HEADWAY, "view", run, other, "--port", str(VIEW)], stderr=subprocess.PIPE, text=True
    ) as page:
        assert page.stderr is not None
        try:
            assert any("listening" in line for line in page.stderr), "headway view did not start"
            yield
        finally:
            page.terminate()


def _wait_for_step(step: int, run: Path, training: "subprocess.Popen[bytes]") -> None:
    metrics, began = run / "metrics.jsonl", time.monotonic()
    while not metrics.exists() or metrics.read_bytes().count(b'"kind": "step"') < step:
        assert training.poll() is None, f"headway up ended with {training.returncode} before step {step}"
        assert time.monotonic() - began < START_S, f"step {step} was not reached in {START_S:.0f} s"
        time.sleep(0.5)


def _take_live(browser: Any, pictures: Path) -> None:
    light = _page(browser, "light", 1240, 1240)
    _open(light, LEARNER, "#/run", "#charts canvas")
    light.screenshot(path=pictures / "page-run.png")
    dark = _page(browser, "dark", 1240, 1240)
    _open(dark, LEARNER, "#/run", "#charts canvas")
    dark.screenshot(path=pictures / "page-run-dark.png")
    narrow = _page(browser, "light", 390, 844)
    _open(narrow, LEARNER, "#/run", "#charts canvas")
    narrow.screenshot(path=pictures / "page-narrow.png")
    light.set_viewport_size({"width": 1240, "height": 760})
    _open(light, LEARNER, "#/trajectories", GROUP)
    light.screenshot(path=pictures / "page-trajectories.png")
    _open_group(light)
    light.screenshot(path=pictures / "page-group.png")


def _take_beside(browser: Any, pictures: Path) -> None:
    page = _page(browser, "light", 1240, 1200)
    _open(page, VIEW, "#/run?with=1", "#charts canvas")
    page.screenshot(path=pictures / "page-beside.png")


def _page(browser: Any, scheme: str, width: int, height: int) -> Any:
    return browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme).new_page()


def _open(page: Any, port: int, view: str, whole: str) -> None:
    page.goto(f"http://127.0.0.1:{port}/{view}")
    page.locator(whole).first.wait_for()
    page.wait_for_timeout(2000)


def _open_group(page: Any) -> None:
    page.locator(GROUP).first.click()
    page.get_by_role("button", name="Entropy").click()
    page.wait_for_timeout(1500)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:4]))
