"""Answers of teachers for a batch, in the journal and out of it again."""

from pathlib import Path

import numpy as np

from learner.journal.journal import Journal, LoggedTeaching, read_journal
from learner.teachers.teachers import GroupScores, TeacherScores, TeacherTopTokens, TextRefused

LOGPROBS = np.array([0.0, 0.0, -1.5, -0.25, 0.0, -7e-7], np.float32)
LIKELIEST = TeacherTopTokens(
    token_ids=np.array([[0, 0], [0, 0], [7, 1], [0, 9], [0, 0], [3, 0]], np.int32),
    logprobs=np.array([[0, 0], [0, 0], [-0.5, -1.5], [0, -30], [0, 0], [-0.125, -8]], np.float32),
)


def test_scores_come_out_of_the_journal_as_they_were_put_in(tmp_path: Path) -> None:
    compared = (
        TeacherScores(LOGPROBS, "1.4", LIKELIEST, "g-1"),
        TeacherScores(LOGPROBS[:3], "2.5", instance="g-2"),
        TeacherScores.nothing(3, top=2),
    )
    untaught = TextRefused("teacher self refuses its text: é")
    with Journal.open(tmp_path) as journal:
        journal.append_teaching([LoggedTeaching(4, 11, compared), LoggedTeaching(5, 12, untaught)])
    first, second = read_journal(tmp_path)
    assert isinstance(first, LoggedTeaching)
    assert isinstance(second, LoggedTeaching)
    assert ((first.version, first.lease_id), (second.version, second.lease_id)) == ((4, 11), (5, 12))
    assert isinstance(first.told, tuple)
    assert_equal(first.told, compared)
    assert (type(second.told), str(second.told)) == (TextRefused, str(untaught))


def assert_equal(found: GroupScores, expected: GroupScores) -> None:
    """To the last bit, and of the same types."""
    for one, other in zip(found, expected, strict=True):
        assert (one.version, one.instance, one.logprobs.dtype) == (other.version, other.instance, other.logprobs.dtype)
        assert one.taught == other.taught
        assert one.logprobs.tobytes() == other.logprobs.tobytes()
        assert (one.top is None) == (other.top is None)
        if one.top is not None and other.top is not None:
            assert one.top.token_ids.dtype == other.top.token_ids.dtype
            assert one.top.logprobs.dtype == other.top.logprobs.dtype
            assert one.top.token_ids.tobytes() == other.top.token_ids.tobytes()
            assert one.top.logprobs.tobytes() == other.top.logprobs.tobytes()


def test_the_journal_holds_rows_of_trained_places_alone(tmp_path: Path) -> None:
    long = np.zeros(100_000, np.float32)
    long[5:9] = -1.0
    with Journal.open(tmp_path) as journal:
        journal.append_teaching([LoggedTeaching(0, 1, (TeacherScores(long, "1.0"),))])
        assert journal.size() < 300
