"""The origin of a version: its steps by the run's lines, its trajectories by the journal, and lost futures."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from learner import recovery
from learner.journal.journal import FOLDER, Journal
from learner.journal.segments import LoggedBatch, Record, read_segment
from learner.release_origin import origin_of
from protocol.model import PolicyVersion
from tests.learner.samples import group


def step(number: int, leases: Sequence[int]) -> dict[str, object]:
    return {"kind": "step", "step": number, "lease_ids": list(leases), "reward_mean": 0.5}


def write(run: Path, *lines: dict[str, object]) -> None:
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def journal_of(run: Path, *batches: Sequence[int]) -> None:
    (run / FOLDER).mkdir()
    (run / FOLDER / "segment-00000000.log").touch()
    with Journal.open(run / FOLDER) as journal:
        for version, leases in enumerate(batches):
            for lease in leases:
                journal.append_group(group(lease, version=version))
            journal.append_batch(version=version, lease_ids=leases)


def test_a_version_came_of_the_steps_before_it_and_of_their_trajectories(tmp_path: Path) -> None:
    write(tmp_path, step(1, (0, 1)), step(2, (2, 3)), step(3, (4, 5)))
    journal_of(tmp_path, (0, 1), (2, 3), (4, 5))
    origin = origin_of(tmp_path, PolicyVersion(1, 2))
    assert list(origin.steps) == [1, 2]
    assert (origin.missing, origin.disagree) == ([], ())
    rows = list(origin.trajectories())
    assert {(row["step"], row["lease_id"]) for row in rows} == {(1, 0), (1, 1), (2, 2), (2, 3)}
    assert all(row["versions"] == [f"3.{row['step'] - 1}"] for row in rows)


def test_what_a_later_life_trained_in_place_of_lost_steps_is_not_its_origin(tmp_path: Path) -> None:
    resumed = {"kind": "resume", "version": 1, "incarnation": 2}
    write(tmp_path, step(1, (0, 1)), step(2, (2, 3)), resumed, step(2, (7, 8)))
    journal_of(tmp_path, (0, 1), (7, 8))
    before, after = (origin_of(tmp_path, PolicyVersion(life, 2)) for life in (1, 2))
    assert (before.steps[2]["lease_ids"], after.steps[2]["lease_ids"]) == ([2, 3], [7, 8])
    assert (before.disagree, after.disagree) == ((2,), ())
    assert {row["step"] for row in before.trajectories()} == {1}


def test_a_version_of_an_unknown_past_says_so(tmp_path: Path) -> None:
    write(tmp_path, step(3, (4, 5)))
    origin = origin_of(tmp_path, PolicyVersion(1, 3))
    assert origin.missing == [1, 2]
    assert list(origin.trajectories()) == []


def test_what_is_behind_a_version_in_the_journal_is_not_read_and_damage_before_it_is_said(tmp_path: Path) -> None:
    write(tmp_path, step(1, (0, 1)), step(2, (2, 3)), step(3, (4, 5)))
    journal_of(tmp_path, (0, 1), (2, 3), (4, 5))
    segment = tmp_path / FOLDER / "segment-00000000.log"
    at = [at for record, at in read_segment(segment) if isinstance(record, LoggedBatch)]
    content = bytearray(segment.read_bytes())
    content[at[1] + 20] ^= 1
    segment.write_bytes(content)
    before, behind = (origin_of(tmp_path, PolicyVersion(1, number)) for number in (1, 3))
    assert ([each.version for each in before.logged], before.damage) == ([0], "")
    assert [each.version for each in behind.logged] == [0]
    assert "a record does not match its checksum" in behind.damage


def test_steps_that_a_learner_removes_from_the_journal_meanwhile_have_no_trajectories(tmp_path: Path) -> None:
    write(tmp_path, step(1, (0, 1)), step(2, (2, 3)))
    journal_of(tmp_path, (0, 1))
    with Journal.open(tmp_path / FOLDER) as journal:
        journal.rotate(version=1, groups=[group(2, version=1), group(3, version=1)])
        journal.append_batch(version=1, lease_ids=(2, 3))
        origin = origin_of(tmp_path, PolicyVersion(1, 2))
        journal.trim(version=1)
    assert {row["step"] for row in origin.trajectories()} == {2}


def test_segments_that_vanish_while_they_are_read_are_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, step(1, (0, 1)), step(2, (2, 3)))
    journal_of(tmp_path, (0, 1))
    with Journal.open(tmp_path / FOLDER) as journal:
        journal.rotate(version=1, groups=[group(2, version=1), group(3, version=1)])
        journal.append_batch(version=1, lease_ids=(2, 3))

        def trimmed_first(path: Path) -> Iterator[tuple[Record, int]]:
            journal.trim(version=1)
            return read_segment(path)

        monkeypatch.setattr(recovery, "read_segment", trimmed_first)
        assert [each.version for each in origin_of(tmp_path, PolicyVersion(1, 2)).logged] == [1]
