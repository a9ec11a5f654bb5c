"""Folders of runs that nothing has trained, and of what-ifs of them, as the page reads them. Loads no torch."""

import json
from pathlib import Path
from typing import Any

from learner.config import LearnerConfig
from learner.page.what_if_runs import FOLDER
from learner.reports.what_if_folder import GROUPS_FILE, NOTE_FILE, PROGRESS_FILE, Phase
from services.config import made_with
from tests.learner.page.made_run import step_line, write_lines

NARROW = {"algo": {"type": "grpo", "clip_high": 0.01, "clip_low": 0.01}, "training": {"epochs_per_step": 2}}


def untrained(folder: Path, model: Path, **tables: Any) -> Path:
    """A folder with the settings of a run and one step alone."""
    run = {"directory": folder.parent, "name": folder.name}
    config = LearnerConfig.model_validate({"model": model, "run": run, **NARROW, **tables})
    folder.mkdir(parents=True)
    made_with.write(folder, config.made_with())
    write_lines(folder, [step_line(1)])
    return folder


def what_if_of(
    run: Path, name: str, *, phase: Phase, trained: int, unlike: str = "", pulls: tuple[float, ...] = (), **more: Any
) -> Path:
    """A what-if of four steps that the process behind the page left in this phase, with `trained` steps of it.

    With groups, of these changes of their pulls; `more` are numbers of its steps that are not those of `step_line`.
    """
    folder = run / FOLDER / name
    folder.mkdir(parents=True)
    (folder / NOTE_FILE).write_text(json.dumps({"changes": ["algo.clip_high: 0.01 → 0.3"], "caveat": "off-policy"}))
    place = {"phase": phase, "trained": trained, "steps": 4, "unlike": unlike}
    (folder / PROGRESS_FILE).write_text(json.dumps(place))
    by_others = 0 if phase == "run" else trained
    (folder / "metrics.jsonl").touch()
    write_lines(folder, [step_line(step, **more) for step in range(1, by_others + 1)])
    rest = {"environment": "sums", "task_index": 0, "rewards": [0.0], "pull_run": 1.0, "advantage_run": 1.0}
    lines = [
        {"step": 1, "lease_id": lease, "pull_change": pull, "pull": pull, "advantage": 1.0, **rest}
        for lease, pull in enumerate(pulls)
    ]
    (folder / GROUPS_FILE).write_text("".join(json.dumps(each) + "\n" for each in lines))
    (folder.parent / f"{name}.log").write_text("it was told to end\n")
    return folder
