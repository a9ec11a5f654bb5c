"""Policy versions as text, as an order, and of what was sampled."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from protocol.model import PolicyVersion, VersionText
from protocol.trajectories import RewardRecord, Trajectory, TrajectoryGroup, Turn, VersionSpan

PARTS = st.integers(0, 999_999_999)
TEXT = TypeAdapter(VersionText)


@given(incarnation=PARTS, number=PARTS)
def test_a_version_reads_back_what_it_writes(incarnation: int, number: int) -> None:
    version = PolicyVersion(incarnation=incarnation, number=number)
    assert PolicyVersion.parse(TEXT.validate_python(str(version))) == version


@pytest.mark.parametrize(
    "text", ["", "1", "1.", ".1", "1.2.3", "-1.2", "01.2", "1.02", "1.2\n", " 1.2", "1,2", "1.²", "a.b"]
)
def test_text_of_another_form_is_refused_on_the_wire(text: str) -> None:
    with pytest.raises(ValidationError):
        TEXT.validate_python(text)


@pytest.mark.parametrize("text", ["", "1", "1.", ".1", "1.2.3", "-1.2", "1.²", "a.b"])
def test_parsing_another_form_names_the_text(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not of the form incarnation\.number"):
        PolicyVersion.parse(text)


def test_a_later_incarnation_is_newer_whatever_its_number() -> None:
    assert PolicyVersion(2, 0) > PolicyVersion(1, 99) > PolicyVersion(1, 98)


def sampled_by(*versions: str, mask: Sequence[int]) -> Trajectory:
    """A trajectory of as many tokens, one for each version."""
    return Trajectory(
        token_ids=np.arange(len(mask), dtype=np.int32),
        loss_mask=np.array(mask, dtype=np.uint8),
        behavior_logprobs=np.zeros(len(mask), dtype=np.float32),
        version_spans=tuple(VersionSpan(version=each, start=at, end=at + 1) for at, each in enumerate(versions)),
        turns=(Turn(start=0, completion_start=0, end=len(mask), finish_reason="stop", generator_ids=("g",)),),
        reward=RewardRecord(reward=1.0, verifier="v"),
    )


def test_the_oldest_version_is_that_of_a_sampled_token_wherever_it_stands() -> None:
    newest_first = sampled_by("1.7", "2.9", "1.5", mask=[1, 1, 1])
    oldest_given = sampled_by("1.3", "1.8", mask=[0, 1])
    group = TrajectoryGroup(
        incarnation=2, lease_id=0, attempt=0, purpose="train", environment="e", task_index=0,
        trajectories=(newest_first, oldest_given),
    )  # fmt: skip
    moved = oldest_given.version_spans[0].model_copy(update={"cache": "1.2", "instance": "i"}).moved(3)
    assert (moved.start, moved.end, moved.cache, moved.instance) == (3, 4, "1.2", "i")
    assert (newest_first.oldest_version, oldest_given.oldest_version, group.oldest_version) == (5, 8, 5)
