"""Start and end of the page's what-ifs, with a shell that does as it is told in place of the process that trains."""

import asyncio
import fcntl
from collections.abc import Callable
from pathlib import Path

import pytest

from learner.page import what_if_runs
from learner.page.what_if_results import listed
from learner.page.what_if_routes import WhatIfRoutes, WhatIfSettings
from learner.page.what_if_runs import FOLDER, LOCK, WhatIfBusy, WhatIfNotOwn, WhatIfRunner

DEADLINE_S = 300.0
NAP = "sleep 0.1"
WILLING = f"trap 'echo told; exit 0' TERM; echo ready; while :; do {NAP}; done"
NOTHING = WhatIfSettings(form=lambda _: {}, check=lambda *_: [])


@pytest.fixture
def acts(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Has the next process run these words of a shell."""

    def set_words(words: str) -> None:
        monkeypatch.setattr(what_if_runs, "replay_words", lambda *_, **__: ["/bin/sh", "-c", words])

    return set_words


def after(gate: Path) -> str:
    """Words of a shell that ends only after the file is there, once it was told to."""
    return f"trap 'echo told; until [ -e {gate} ]; do {NAP}; done; echo ended; exit 0' TERM; echo ready; " + (
        f"while :; do {NAP}; done"
    )


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while True:
            if holds():
                return
            await asyncio.sleep(0.1)


async def started(runner: WhatIfRunner) -> str:
    name = await runner.start(["algo.clip_high=0.3"])
    await until(lambda: "ready" in runner.log_of(name))
    return name


async def test_a_stop_ends_the_one_that_it_names_and_no_other(tmp_path: Path, acts: Callable[[str], None]) -> None:
    acts(WILLING)
    runner, beside = WhatIfRunner(tmp_path), WhatIfRunner(tmp_path)
    assert await started(runner) == "what-if-1"
    with pytest.raises(WhatIfNotOwn, match="what-if-1 is being trained by another page of this run"):
        beside.stop("what-if-1")
    runner.stop("what-if-1")
    await until(lambda: runner.running() is None)
    assert runner.log_of("what-if-1") == "ready\ntold"

    assert await started(runner) == "what-if-2"
    with pytest.raises(WhatIfNotOwn, match="what-if-1 is not being trained, or no longer"):
        runner.stop("what-if-1")
    assert runner.running() == "what-if-2"
    await runner.end()
    with pytest.raises(WhatIfNotOwn, match="what-if-2 is not being trained, or no longer"):
        runner.stop("what-if-2")


async def test_a_second_order_kills_only_who_has_had_time_to_end(
    tmp_path: Path, acts: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    acts(after(tmp_path / "gate"))
    runner = WhatIfRunner(tmp_path)
    monkeypatch.setattr(what_if_runs, "_KILL_AFTER_S", DEADLINE_S)
    name = await started(runner)
    runner.stop(name)
    await until(lambda: "told" in runner.log_of(name))
    runner.stop(name)
    assert runner.running() == name
    (tmp_path / "gate").touch()
    await until(lambda: runner.running() is None)
    assert runner.log_of(name) == "ready\ntold\nended"

    acts(after(tmp_path / "never"))
    monkeypatch.setattr(what_if_runs, "_KILL_AFTER_S", 0.0)
    name = await started(runner)
    runner.stop(name)
    await until(lambda: "told" in runner.log_of(name))
    runner.stop(name)
    await until(lambda: runner.running() is None)
    assert runner.log_of(name) == "ready\ntold"


async def test_the_what_ifs_of_all_runs_end_at_once_with_their_page(
    tmp_path: Path, acts: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each ends only after all three were told to."""
    monkeypatch.setattr(what_if_runs, "_END_S", 60.0)
    (tmp_path / "told").mkdir()
    waits = f"until [ $(ls {tmp_path}/told | wc -l) = 3 ]; do {NAP}; done"
    acts(f"trap 'touch {tmp_path}/told/$$; {waits}; echo ended; exit 0' TERM; echo ready; while :; do {NAP}; done")
    folders = [tmp_path / name for name in ("one", "two", "three")]
    for folder in folders:
        folder.mkdir()
    routes = WhatIfRoutes(folders, NOTHING)
    for runner in routes._runners:
        await started(runner)
    await routes.end()
    assert [runner.log_of("what-if-1") for runner in routes._runners] == ["ready\nended"] * 3


async def test_what_a_killed_one_has_left_goes_with_the_next_start(tmp_path: Path, acts: Callable[[str], None]) -> None:
    root = tmp_path / FOLDER
    for path in (root / "held-abc/checkpoint-00000002/weights", root / "what-if-1/pulls-abc/0.npz"):
        path.parent.mkdir(parents=True)
        path.touch()
    acts(WILLING)
    runner = WhatIfRunner(tmp_path)
    assert await started(runner) == "what-if-2"
    assert sorted(path.name for path in root.iterdir()) == [LOCK, "what-if-1", "what-if-2.json", "what-if-2.log"]
    assert list((root / "what-if-1").iterdir()) == []
    await runner.end()


async def test_a_lock_that_is_only_looked_at_refuses_no_start(tmp_path: Path, acts: Callable[[str], None]) -> None:
    acts(WILLING)
    runner = WhatIfRunner(tmp_path)
    (tmp_path / FOLDER).mkdir()
    with (tmp_path / FOLDER / LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        starting = asyncio.create_task(started(runner))
        await asyncio.sleep(0)  # it has found the lock held
        fcntl.flock(lock, fcntl.LOCK_UN)
        assert await starting == "what-if-1"
        await runner.end()
        fcntl.flock(lock, fcntl.LOCK_SH)
        with pytest.raises(WhatIfBusy):
            await runner.start([])


async def test_the_newest_is_named_as_running_from_the_moment_that_the_lock_is_held(
    tmp_path: Path, acts: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    named: list[str | None] = []
    monkeypatch.setattr(WhatIfRunner, "_remove_leftovers", lambda _: named.append(WhatIfRunner(tmp_path).running()))
    acts(WILLING)
    runner = WhatIfRunner(tmp_path)
    for _ in range(2):
        await started(runner)
        await runner.end()
    assert named == ["what-if-1", "what-if-2"]


async def test_one_that_fails_before_it_has_a_folder_is_listed_with_its_changes(
    tmp_path: Path, acts: Callable[[str], None]
) -> None:
    acts("echo that cannot be; exit 1")
    runner = WhatIfRunner(tmp_path)
    name = await runner.start(["algo.clip_high=0.3"], told=["algo.clip_high: 0.2 → 0.3"])
    await until(lambda: runner.running() is None)
    (found,) = listed(runner)
    assert found == {
        "name": name, "state": "ended", "changes": ["algo.clip_high: 0.2 → 0.3"], "progress": None,
        "why": "that cannot be",
    }  # fmt: skip
    (tmp_path / FOLDER / f"{name}.json").write_text("3")
    assert runner.changes_of(name) == []
