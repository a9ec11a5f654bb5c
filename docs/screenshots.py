"""Pictures of a run's page for the documentation, made by `make screenshots`: python -m docs.screenshots RUN FOLDER."""

import shutil
import subprocess
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

PORT = "7398"
VIEWS = {
    "page-run": ("#/run", 1240, 1480),
    "page-trajectories": ("#/trajectories", 1240, 760),
}


def main(run: Path, pictures: Path) -> None:
    """Serves the run and writes one picture of each view; the newest group stands for all."""
    pictures.mkdir(exist_ok=True)
    chromium = shutil.which("chromium-headless-shell") or shutil.which("chromium")
    headway = Path(sys.executable).with_name("headway")
    with subprocess.Popen([headway, "view", run, "--port", PORT], stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        assert any("listening" in line for line in server.stderr), "headway view did not start"
        try:
            with sync_playwright() as playwright:
                browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
                page = browser.new_page(viewport={"width": 1240, "height": 900})
                for name, (view, width, height) in VIEWS.items():
                    page.set_viewport_size({"width": width, "height": height})
                    page.goto(f"http://127.0.0.1:{PORT}/{view}")
                    page.wait_for_timeout(2000)
                    page.screenshot(path=pictures / f"{name}.png")
                page.locator("table.list tbody tr td:nth-child(2) a").first.click()
                page.get_by_role("button", name="Entropy").click()
                page.wait_for_timeout(1500)
                page.screenshot(path=pictures / "page-group.png")
        finally:
            server.terminate()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
