"""Times to write, read and show 100,000 kept trajectories: python -m benchmarks.trajectory_pages [--output MD].

Prints, or writes as Markdown, tables of milliseconds: the median and the largest of several repetitions, with the files
in the page cache. The second table is of the whole page in headless Chromium, for a run of 5,000 steps; it is left out
where playwright or Chromium is not installed.
"""

import argparse
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.machine import described_machine
from learner.page.reading import Filter, Key, group, overview, page, parts_of
from learner.page.store import SequencePlace, TakenStep, TrajectoryStore
from protocol.trajectories import RewardRecord, Trajectory, TrajectoryGroup, Turn, VersionSpan
from tests.learner.page.made_run import step_line, write_lines

try:
    from playwright.sync_api import sync_playwright
except ImportError:
    sync_playwright = None

GROUP, GROUPS, TOKENS, PROMPT = 8, 8, 300, 60
REPEATS = 15
STEPS = 5000
VISITS = 7
PORT = 7397
PAINTED = "() => performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? null"
# Each view is whole when this is there.
VIEWS = {"#/run": "#tiles dd", "#/trajectories": "table.list td", "#/settings": "#view-settings td"}


def _trajectory(drawn: np.random.Generator, prompt: np.ndarray, step: int) -> Trajectory:
    ids = np.concatenate([prompt, drawn.integers(0, 50_000, TOKENS - PROMPT)]).astype(np.int32)
    mask = (np.arange(TOKENS) >= PROMPT).astype(np.uint8)
    words = " ".join(f"w{number}" for number in ids[PROMPT : PROMPT + 60])
    return Trajectory(
        token_ids=ids,
        loss_mask=mask,
        behavior_logprobs=(-drawn.random(TOKENS) * mask).astype(np.float32),
        version_spans=(VersionSpan(version=f"1.{max(0, step - 1)}", start=PROMPT, end=TOKENS),),
        turns=(Turn(start=0, completion_start=PROMPT, end=TOKENS, finish_reason="stop", generator_ids=("g",)),),
        reward=RewardRecord(reward=float(drawn.random() > 0.5), verifier="v"),
        completion_text=words,
    )


def _step(drawn: np.random.Generator, step: int) -> TakenStep:
    groups = []
    for number in range(GROUPS):
        prompt = drawn.integers(0, 50_000, PROMPT)
        made = tuple(_trajectory(drawn, prompt, step) for _ in range(GROUP))
        groups.append(
            TrajectoryGroup(
                incarnation=1,
                lease_id=step * GROUPS + number,
                attempt=0,
                purpose="train",
                environment=f"environment-{number % 4}",
                task_index=int(drawn.integers(1000)),
                trajectories=made,
            )
        )
    places = [SequencePlace(g, t, 0, TOKENS) for g in range(GROUPS) for t in range(GROUP)]
    values = {
        name: drawn.random(TOKENS * len(places), dtype=np.float32)
        for name in ("learner_logprobs", "entropies", "advantages")
    }
    return TakenStep(step=step, groups=groups, places=places, values=values)


def _write(folder: Path, trajectories: int) -> float:
    """Milliseconds of its thread's CPU that a step of 64 trajectories takes."""
    drawn = np.random.default_rng(0)
    steps = trajectories // (GROUP * GROUPS)
    with TrajectoryStore(folder, budget_bytes=1 << 40, share=1.0) as store:
        for step in range(1, steps + 1):
            store.put(_step(drawn, step))
            store.wait_idle()
    return 1000 * store.spent_s / steps


def _measured(work: Callable[[], object]) -> tuple[float, float, float]:
    """Milliseconds: the median, the largest, and the median of the thread's own CPU, which others disturb less."""
    taken, own = [], []
    for _ in range(REPEATS):
        began, own_began = time.perf_counter(), time.thread_time()
        work()
        own.append(1000 * (time.thread_time() - own_began))
        taken.append(1000 * (time.perf_counter() - began))
    return statistics.median(taken), max(taken), statistics.median(own)


@contextmanager
def _served(folder: Path) -> Iterator[str]:
    """The address of `headway view` of a run's folder, while it runs."""
    headway = Path(sys.executable).with_name("headway")
    with subprocess.Popen([headway, "view", folder, "--port", str(PORT)], stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            assert any("listening" in line for line in server.stderr), "headway view did not start"
            yield f"http://127.0.0.1:{PORT}/"
        finally:
            server.terminate()


def _visit(browser: Any, url: str, selector: str) -> tuple[float, float]:
    """Milliseconds until the first paint and until what is looked for is shown, in a browser that has seen nothing."""
    context = browser.new_context(viewport={"width": 1240, "height": 900})
    page = context.new_page()
    began = time.perf_counter()
    page.goto(url)
    page.locator(selector).first.wait_for(timeout=60_000)
    whole = 1000 * (time.perf_counter() - began)
    painted = page.evaluate(PAINTED)
    context.close()
    return float(painted), whole


def _shown(folder: Path) -> list[str]:
    """The second table's lines; none without a browser."""
    chromium = shutil.which("chromium-headless-shell") or shutil.which("chromium")
    if sync_playwright is None or chromium is None:
        return []
    write_lines(folder, [step_line(step) for step in range(1, STEPS + 1)])
    (folder / "made_with.json").write_text('{"settings": {"steps": 5000}, "differs": ["steps"]}', encoding="utf-8")
    lines = [
        "",
        f"The page of a run of {STEPS:,} steps with these trajectories, each visit by a fresh browser profile:",
        "",
    ]
    lines += ["| view | first paint, median, ms | largest | whole, median, ms | largest |", "|---|---|---|---|---|"]
    with _served(folder) as url, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for view, selector in VIEWS.items():
            paints, wholes = zip(*(_visit(browser, url + view, selector) for _ in range(VISITS)), strict=True)
            numbers = [statistics.median(paints), max(paints), statistics.median(wholes), max(wholes)]
            lines.append(f"| `{view}` | " + " | ".join(f"{number:.0f}" for number in numbers) + " |")
        browser.close()
    return lines


def _read(folder: Path) -> list[str]:
    """The first table's lines."""
    parts = parts_of(folder)
    middle = Key(int(parts[len(parts) // 2].stem.removeprefix("part-")), 100)
    reads: dict[str, Callable[[], object]] = {
        "newest 50": lambda: page(folder, Filter()),
        "50 in the middle": lambda: page(folder, Filter(), start=middle),
        "environment, reward and length": lambda: page(
            folder, Filter(environment="environment-1", min_reward=0.5, max_length=290)
        ),
        "a word that is rare": lambda: page(folder, Filter(words="w17")),
        "a word that is nowhere": lambda: page(folder, Filter(words="nowhere")),
        "the beginning of a word": lambda: page(folder, Filter(words="w49*")),
        "one task": lambda: page(folder, Filter(task=17)),
        "no reward fits": lambda: page(folder, Filter(min_reward=2.0)),
        "no length fits": lambda: page(folder, Filter(min_length=10**6)),
        "a group's tokens": lambda: group(folder, middle, decode=None),
        "what there is": lambda: overview(folder),
    }
    lines = ["| read | median, ms | largest, ms | CPU, median, ms |", "|---|---|---|---|"]
    for label, work in reads.items():
        lines.append(f"| {label} | " + " | ".join(f"{number:.1f}" for number in _measured(work)) + " |")
    return lines


def main() -> None:
    """Writes a store into a temporary folder, reads it in several ways, shows it, and removes it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trajectories", type=int, default=100_000)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        spent = _write(folder, given.trajectories)
        size = sum(path.stat().st_size for path in (folder / "trajectories").iterdir()) / 2**20
        lines = [
            "# Pages of many kept trajectories",
            "",
            f"`python -m benchmarks.trajectory_pages`: {given.trajectories:,} trajectories of {TOKENS} random tokens, "
            f"{size:.0f} MiB in {len(parts_of(folder))} parts; writing took {spent:.2f} ms of CPU a step of "
            f"{GROUP * GROUPS}.",
            "",
            *_read(folder),
            *_shown(folder),
            "",
            f"{described_machine()}.",
        ]
    text = "\n".join(lines) + "\n"
    if given.output is None:
        print(text)
    else:
        given.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
