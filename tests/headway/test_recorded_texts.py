"""Tokens that a learner computes of a group, by hand-worked texts."""

import sqlite3
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from headway.measured_rates import LearnedCosts
from headway.recorded_texts import GroupTexts, LearningPasses, group_texts
from learner.page.store import COLUMNS, packed

Text = tuple[int, ...]
FOUR: Sequence[tuple[Text, float]] = [
    ((1, 2, 5, 6), 1.0),
    ((1, 2, 5, 6), 1.0),
    ((1, 2, 7, 8), 0.0),
    ((1, 2, 5, 9), 0.0),
]
"""Beginnings without the last tokens: 1, 12, 125, 127. Of the first half 1, 12, 125 and of the second all four."""
ALIKE: Sequence[tuple[Text, float]] = [((3, 4), 1.0)] * 4


def keep(folder: Path, groups: Sequence[Sequence[tuple[Text, float]]]) -> Path:
    (folder / "trajectories").mkdir(parents=True)
    database = sqlite3.connect(folder / "trajectories" / "part-0000000001.db")
    database.execute("CREATE TABLE groups(id INTEGER PRIMARY KEY, step INT, size INT, tokens BLOB)")
    database.execute("CREATE TABLE rows(grp INT, place INT, reward REAL)")
    for number, group in enumerate(groups):
        columns = [{name: np.zeros(len(text), dtype=kind) for name, kind in COLUMNS.items()} for text, _ in group]
        for each, (text, _) in zip(columns, group, strict=True):
            each["token_ids"] = np.array(text, dtype="<i4")
        database.execute("INSERT INTO groups VALUES(?, 5, ?, ?)", (number, len(group), packed(columns)))
        rows = [(number, place, reward) for place, (_, reward) in enumerate(group)]
        database.executemany("INSERT INTO rows VALUES(?, ?, ?)", rows)
    database.commit()
    database.close()
    return folder


def test_what_texts_begin_with_alike_counts_once(tmp_path: Path) -> None:
    found = group_texts(keep(tmp_path, [FOUR, ALIKE] * 20))
    assert found is not None
    assert (found.size, found.tokens, found.alike) == pytest.approx((4, (4 + 1) / 2, 0.5))
    # Halves of the first: 3 and 4 tokens, one of the two with equal rewards and the other, too; of the second 1 token.
    assert found.tokens_doubled == pytest.approx(2.5 / ((3.5 + 1) / 2))
    assert found.alike_doubled == pytest.approx(0.5 / 1.0)


def test_too_few_groups_and_none_tell_nothing(tmp_path: Path) -> None:
    assert group_texts(keep(tmp_path / "few", [FOUR] * 19)) is None
    assert group_texts(keep(tmp_path / "earlier", [FOUR] * 30), after_step=5) is None
    assert group_texts(tmp_path / "none") is None


def test_each_doubling_of_a_group_changes_alike() -> None:
    texts = GroupTexts(size=4, tokens=10.0, alike=0.2, tokens_doubled=1.2, alike_doubled=0.5)
    assert texts.tokens_of(8) == pytest.approx(12.0)
    assert texts.tokens_of(2) == pytest.approx(10 / 1.2)
    assert (texts.alike_of(8), texts.alike_of(2)) == pytest.approx((0.1, 0.4))
    assert texts.alike_of(1) == pytest.approx(0.8)
    assert GroupTexts(size=4, tokens=10.0, alike=0.6, alike_doubled=0.5).alike_of(2) == 1.0


PASSES = LearningPasses(updates=2, epochs=2)


def test_tokens_pass_once_and_six_times_more_if_their_group_is_trained_on() -> None:
    """Of ten tokens in a group, a tenth of the groups alike: with the pass before two updates 1 + 0.1 + 6 x 0.9."""
    texts = GroupTexts(size=4, tokens=10.0, alike=0.1)
    assert PASSES.tokens(texts, groups=64, group_size=4) == pytest.approx(640 * 6.5)
    once = LearningPasses(updates=1, epochs=1)
    assert once.tokens(texts, groups=64, group_size=4) == pytest.approx(640 * (0.1 + 3 * 0.9))


def test_an_update_without_anything_to_train_on_trains_on_all() -> None:
    alike = GroupTexts(size=4, tokens=10.0, alike=1.0)
    assert PASSES.tokens(alike, groups=64, group_size=4) == pytest.approx(640 * 7)


def test_a_step_costs_its_passes_their_tokens_and_its_trajectories() -> None:
    texts = GroupTexts(size=4, tokens=10.0, alike=0.0)
    costs = LearnedCosts(pass_s=0.005, token_s=1e-5, trajectory_s=2e-4, passes=17, counted=PASSES, texts=texts)
    # 17 x 5 ms; 64 groups x 10 tokens x 7 x 10 us; 256 x 0.2 ms.
    assert costs.of_step(texts, groups=64, group_size=4) == pytest.approx(0.085 + 0.0448 + 0.0512)
