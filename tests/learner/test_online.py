"""The order of what a step of online training does, with a scripted trainer."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from learner.online import OnlineTraining
from learner.page.store import TakenStep
from learner.training.trainer import NotFinite


def test_the_step_at_which_training_gives_up_is_kept_for_the_viewer() -> None:
    kept: list[TakenStep] = []
    skipped = SimpleNamespace(skipped_updates=1, skipped_in_row=3)
    training = cast("Any", OnlineTraining.__new__(OnlineTraining))
    training._trainer = SimpleNamespace(train_step=lambda _, version: skipped, tokens=None, tokens_s=0.0)
    training._samples = SimpleNamespace(put=kept.append)
    training._config = SimpleNamespace(training=SimpleNamespace(max_skipped_updates=3))

    with pytest.raises(NotFinite, match="3 updates in a row"):
        training._train(SimpleNamespace(version=6, groups=()), [])

    assert [taken.step for taken in kept] == [7]
