from pathlib import Path

import pytest

from learner.reports.what_if_folder import NOTE_FILE, PROGRESS_FILE, ProgressNotes, WhatIfProgress, note_of


def test_the_first_step_and_the_end_of_each_phase_are_noted(tmp_path: Path) -> None:
    notes = ProgressNotes(tmp_path, steps=1000)
    notes.note("run", 1)
    assert WhatIfProgress.read(tmp_path) == WhatIfProgress("run", 1, 1000)
    notes.note("run", 1000)
    assert WhatIfProgress.read(tmp_path) == WhatIfProgress("run", 1000, 1000)
    notes.note("what-if", 1, unlike="step 3")
    assert WhatIfProgress.read(tmp_path) == WhatIfProgress("what-if", 1, 1000, "step 3")
    notes.note("done", 1000, unlike="step 3")
    assert WhatIfProgress.read(tmp_path) == WhatIfProgress("done", 1000, 1000, "step 3")
    assert [path.name for path in tmp_path.iterdir()] == [PROGRESS_FILE]


def test_without_a_folder_nothing_is_noted() -> None:
    ProgressNotes(None, steps=1).note("done", 1)


@pytest.mark.parametrize("text", ["", "[]", '{"phase": "run"', '{"phase": "run", "more": 1}'])
def test_a_file_that_cannot_be_read_tells_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / PROGRESS_FILE).write_text(text)
    (tmp_path / NOTE_FILE).write_text(text if text != '{"phase": "run", "more": 1}' else "3")
    assert WhatIfProgress.read(tmp_path) is None
    assert note_of(tmp_path) == {}
