"""Pictures of a run's page for the documentation, made by `make screenshots`, and of another one's beside it.

python -m docs.screenshots RUN OTHER FOLDER
"""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

PORT = "7398"
MAX_BYTES = 200_000
GROUP = "table.list tbody tr td:nth-child(2) a"


def main(run: Path, other: Path, pictures: Path) -> None:
    """Serves the runs and writes one picture of each view; the newest group stands for all."""
    pictures.mkdir(exist_ok=True)
    chromium = shutil.which("chromium-headless-shell") or shutil.which("chromium")
    headway = Path(sys.executable).with_name("headway")
    with subprocess.Popen([headway, "view", run, other, "--port", PORT], stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        assert any("listening" in line for line in server.stderr), "headway view did not start"
        try:
            with sync_playwright() as playwright:
                browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
                _take(browser, pictures)
        finally:
            server.terminate()
    for path in pictures.glob("page-*.png"):
        assert path.stat().st_size < MAX_BYTES, f"{path} has {path.stat().st_size} bytes, over {MAX_BYTES}"


def _take(browser: Any, pictures: Path) -> None:
    light = _page(browser, "light", 1240, 1240)
    _open(light, "#/run", "#charts canvas")
    light.screenshot(path=pictures / "page-run.png")
    light.set_viewport_size({"width": 1240, "height": 760})
    _open(light, "#/trajectories", GROUP)
    light.screenshot(path=pictures / "page-trajectories.png")
    _open_group(light)
    light.screenshot(path=pictures / "page-group.png")
    light.set_viewport_size({"width": 1240, "height": 1200})
    _open(light, "#/run?with=1", "#charts canvas")
    light.screenshot(path=pictures / "page-beside.png")
    dark = _page(browser, "dark", 1240, 1240)
    _open(dark, "#/run", "#charts canvas")
    dark.screenshot(path=pictures / "page-run-dark.png")
    narrow = _page(browser, "light", 390, 844)
    _open(narrow, "#/run", "#charts canvas")
    narrow.screenshot(path=pictures / "page-narrow.png")


def _page(browser: Any, scheme: str, width: int, height: int) -> Any:
    return browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme).new_page()


def _open(page: Any, view: str, whole: str) -> None:
    page.goto(f"http://127.0.0.1:{PORT}/{view}")
    page.locator(whole).first.wait_for()
    page.wait_for_timeout(2000)


def _open_group(page: Any) -> None:
    page.locator(GROUP).first.click()
    page.get_by_role("button", name="Entropy").click()
    page.wait_for_timeout(1500)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:4]))
