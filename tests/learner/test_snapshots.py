"""Weights that were to be mapped and are broadcast: refused by the settings, or said once by ranks and models."""

import logging
from types import SimpleNamespace
from typing import cast

import pytest
from pydantic import ValidationError

from learner.config import LearnerConfig, WeightsConfig
from learner.snapshots import snapshots_of
from learner.training.config import LoraConfig
from learner.training.trainer import Trainer
from learner.weights.probe import Probe

ASKED = "shared memory"


class CopyingTrainer:
    """Copies nothing; `shares` are those of other ranks."""

    why_merged = ""

    def __init__(self, *, shares: tuple[str, ...] = ()) -> None:
        self._shares = shares

    def host_copy(self, **_: object) -> SimpleNamespace:
        return SimpleNamespace(buckets=(), shares=self._shares)


@pytest.mark.parametrize(
    ("settings", "taken"),
    [
        ({"same_host": ASKED}, False),
        ({"same_host": ASKED, "senders": "rank 0"}, True),
        ({"same_host": "auto"}, True),
        ({"same_host": "broadcast"}, True),
    ],
)
def test_memory_of_one_process_is_not_promised_where_each_rank_sends(settings: dict[str, str], taken: bool) -> None:
    given = {"model": "nowhere", "ranks": 2, "weights": settings}
    assert LearnerConfig.model_validate({**given, "ranks": 1}).weights.same_host == settings["same_host"]
    if taken:
        assert LearnerConfig.model_validate(given).ranks == 2
    else:
        with pytest.raises(ValidationError, match=r'same_host is "shared memory", ranks is 2.*Set weights.senders to'):
            LearnerConfig.model_validate(given)


@pytest.mark.parametrize(
    ("same_host", "shares", "lora", "said"),
    [
        (ASKED, ("of rank 1",), None, "set weights.senders to rank 0"),
        (ASKED, (), LoraConfig(), "set weights.lora to merged"),
        (ASKED, (), None, ""),
        ("auto", ("of rank 1",), None, ""),
    ],
)
def test_a_broadcast_in_place_of_shared_memory_is_said_once(
    same_host: str, shares: tuple[str, ...], lora: LoraConfig | None, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = cast("Trainer", CopyingTrainer(shares=shares))
    snapshots = snapshots_of(trainer, WeightsConfig.model_validate({"same_host": same_host}), lora=lora)
    with caplog.at_level(logging.WARNING):
        for version in range(2):
            snapshots.take(version=version, probe=cast("Probe", None))
    assert [said in message for message in caplog.messages] == ([True] if said else [])
