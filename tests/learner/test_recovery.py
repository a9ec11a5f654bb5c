"""Taking up a run after a crash: the same weights come of it, and no group is lost or trained twice."""

import gc
import json
import shutil
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from learner.journal.checkpoints import Checkpoints, checkpoints_of
from learner.journal.journal import FOLDER, Journal, JournalUnknown, LoggedDistrust, LoggedProof, LoggedUse
from learner.journal.run_folder import History, NothingToResume
from learner.journal.segments import read_segment, segments_of
from learner.leases.worth import worth_of
from learner.ledger import Batch, GroupVerdict, Ledger, LedgerConfig, ReusePriority
from learner.recovery import RecoveryPoint, recover
from learner.training.guard import NEW_GUARD, GuardState
from protocol.model import PolicyVersion
from protocol.trajectories import TrajectoryGroup
from tests.learner.samples import INSTANCE, LEDGER, group

PER_STEP = LEDGER.groups_per_step


@dataclass
class FakeTrainer:
    """Its weights are the row of batches that it was trained on."""

    weights: list[list[int]] = field(default_factory=list)

    def train(self, lease_ids: tuple[int, ...]) -> None:
        self.weights.append(list(lease_ids))

    def save(self, folder: Path) -> None:
        folder.mkdir()
        (folder / "weights.json").write_text(json.dumps(self.weights))

    def load(self, folder: Path) -> None:
        self.weights = json.loads((folder / "weights.json").read_text())


@dataclass
class Life:
    """A learner without its sockets, from a start to a crash."""

    folder: Path
    trainer: FakeTrainer
    ledger: Ledger
    journal: Journal
    incarnation: int
    buffer: dict[int, TrajectoryGroup] = field(default_factory=dict)
    used: dict[int, TrajectoryGroup] = field(default_factory=dict)

    def sample(self) -> None:
        """Rolls out whatever may be granted, or, where groups are trained again, what a step lacks: those that lie
        ready for long are too old for that. The last groups come first.
        """
        version = self.ledger.next_version
        room = PER_STEP - len(self.buffer) if self.ledger.config.reused_per_step else 100
        for grant in reversed(self.ledger.grant(now=0.0, holder="e", room=room)):
            done = stamped(group(grant.lease_id, version=version, attempt=grant.attempt), self.incarnation)
            self.journal.append_group(done)
            self.buffer[grant.lease_id] = done
            answer = self.ledger.accept(
                lease_id=grant.lease_id,
                attempt=grant.attempt,
                oldest_version=version,
                size=1,
                worth=worth_of(done),
            )
            assert answer.verdict is GroupVerdict.ACCEPTED

    def take(self) -> Batch:
        batch = self.ledger.take(now=0.0)
        assert isinstance(batch, Batch), batch
        for lease_id in batch.lease_ids:
            self.used[lease_id] = self.buffer[lease_id]
        for lease_id in (*batch.lease_ids, *(dropped.lease_id for dropped in batch.dropped)):
            self.buffer.pop(lease_id, None)
        self.journal.append_batch(version=batch.version, lease_ids=batch.lease_ids, reused=batch.reused)
        return batch

    def train(self, lease_ids: tuple[int, ...]) -> None:
        self.trainer.train(lease_ids)
        self.ledger.trained(self.ledger.version + 1)
        self.ledger.served_changed(self.ledger.version)

    def step(self) -> None:
        self.sample()
        batch = self.take()
        self.train((*batch.lease_ids, *batch.reused))

    def rotate(self) -> None:
        used = [(self.used[lease_id], each.reuses) for lease_id, each in self.ledger.reusable.items()]
        self.journal.prepare(version=self.ledger.version, groups=(), used=used)
        self.journal.rotate(version=self.ledger.version, groups=self.buffer.values())

    def checkpoint(self, guard: GuardState = NEW_GUARD) -> None:
        ledger = self.ledger.snapshot()
        self.rotate()
        Checkpoints(self.folder, keep=2, journal=self.journal).write(
            version=self.ledger.version, ledger=ledger, save_trainer=self.trainer.save, guard=guard
        )


def stamped(one: TrajectoryGroup, incarnation: int) -> TrajectoryGroup:
    """The group, as if this incarnation's versions had sampled it."""
    trajectories = []
    for each in one.trajectories:
        spans = [
            span.model_copy(update={"version": f"{incarnation}.{PolicyVersion.parse(span.version).number}"})
            for span in each.version_spans
        ]
        trajectories.append(each.model_copy(update={"version_spans": tuple(spans)}))
    return one.model_copy(update={"trajectories": tuple(trajectories)})


class Lives:
    """The lives of one run. The next one may begin at any moment: nothing is tidied up at a crash."""

    def __init__(self, folder: Path, stack: ExitStack, config: LedgerConfig = LEDGER) -> None:
        self.folder = folder
        self.folder.mkdir(exist_ok=True)
        self.config = config
        self._stack = stack
        self._incarnation = 1

    def begin(self) -> Life:
        ledger = Ledger(self.config)
        ledger.served_changed(0)
        return self._life(ledger)

    def resume(self) -> tuple[Life, RecoveryPoint]:
        self._incarnation += 1
        recovered = recover(self.folder, config=self.config, resume=True, incarnation=self._incarnation)
        life = self._life(recovered.ledger)
        if recovered.trainer_folder is not None:
            life.trainer.load(recovered.trainer_folder)
        for one in recovered.spare_groups():
            assert one.oldest_version is not None
            answer = life.ledger.readmit(
                lease_id=one.lease_id, oldest_version=one.oldest_version, size=1, worth=worth_of(one)
            )
            if answer.verdict is GroupVerdict.ACCEPTED:
                life.buffer[one.lease_id] = one
        life.used = {one.lease_id: one for one in recovered.used_groups()}
        for batch in recovered.batches:
            assert batch.version == life.ledger.version
            life.train(tuple(member.lease_id for member in batch.read().groups))
        life.ledger.served_changed(life.ledger.version)
        return life, recovered

    def _life(self, ledger: Ledger) -> Life:
        journal = self._stack.enter_context(Journal.open(self.folder / FOLDER))
        return Life(self.folder, FakeTrainer(), ledger, journal, self._incarnation)

    def copied(self, folder: Path) -> "Lives":
        """The same run as it is now, elsewhere; its next life is the same one."""
        shutil.copytree(self.folder, folder)
        other = Lives(folder, self._stack, self.config)
        other._incarnation = self._incarnation
        return other


@pytest.fixture
def lives(tmp_path: Path) -> Iterator[Lives]:
    with ExitStack() as stack:
        yield Lives(tmp_path / "run", stack)


def used(trainer: FakeTrainer) -> list[int]:
    return [lease_id for batch in trainer.weights for lease_id in batch]


def test_a_fresh_run_starts_at_version_0_with_nothing(lives: Lives) -> None:
    recovered = recover(lives.folder, config=LEDGER, resume=False)
    assert (recovered.version, recovered.batches, recovered.spare, recovered.trainer_folder) == (0, (), (), None)


def test_logged_batches_are_replayed_in_order_after_the_newest_checkpoint(lives: Lives) -> None:
    first = lives.begin()
    for _ in range(3):
        first.step()
    first.checkpoint()
    first.step()
    first.step()
    first.sample()
    in_flight = first.take()

    second, recovered = lives.resume()
    assert recovered.version == 3
    assert [batch.version for batch in recovered.batches] == [3, 4, 5]
    assert [batch.lags for batch in recovered.batches] == [(1, 1), (1, 1), (1, 1)]
    assert second.trainer.weights == [*first.trainer.weights, list(in_flight.lease_ids)]
    assert second.ledger.version == 6
    second.ledger.books().check()


def test_the_guard_comes_back_and_batches_are_replayed_that_were_taken_under_a_wider_bound(lives: Lives) -> None:
    first = lives.begin()
    for _ in range(3):
        first.step()
    held = GuardState(max_lag=0, healthy=19, tightened=1)
    first.checkpoint(held)
    first.step()  # the bound has risen again meanwhile
    first.sample()

    second, recovered = lives.resume()
    assert recovered.guard == held
    assert [batch.lags for batch in recovered.batches] == [(1, 1)]
    assert second.ledger.max_lag == LEDGER.max_lag
    waiting = second.ledger.books().buffered
    ended = second.ledger.bound_lag(0)
    assert 0 < len(ended) < waiting, "after the replay the guard's bound drops what is of older versions"
    second.ledger.books().check()
    assert recover(lives.folder, config=LEDGER, resume=False).guard == NEW_GUARD


def test_groups_that_no_batch_has_used_are_taken_up_and_none_is_trained_twice(lives: Lives) -> None:
    first = lives.begin()
    first.step()
    first.checkpoint()
    first.step()
    first.sample()
    waiting = first.ledger.books().buffered

    second, recovered = lives.resume()
    assert len(recovered.spare) == waiting == PER_STEP * 2
    assert second.ledger.books().buffered == waiting
    for _ in range(4):
        second.step()
    assert sorted(used(second.trainer)) == list(range(6 * PER_STEP))
    second.ledger.books().check()

    third, _ = lives.resume()
    assert third.trainer.weights == second.trainer.weights, "a second crash replays both lives' batches"


def test_a_group_whose_sampler_was_found_to_serve_old_weights_is_not_taken_up(lives: Lives) -> None:
    first = lives.begin()
    first.step()
    first.sample()
    spare = sorted(first.buffer)
    assert spare, "groups of version 1 wait for their batch"
    for number in range(2):
        first.journal.append_provenance(LoggedProof(PolicyVersion(1, number), "d", {INSTANCE: "f", "other": "f"}))
    first.journal.append_provenance(LoggedDistrust(INSTANCE, PolicyVersion(1, 1)))
    again = max(spare)
    first.journal.append_group(stamped(group(again, version=1), 1))  # the process has proven itself to a later life

    _, recovered = lives.resume()
    assert len(recovered.batches) == 1, "what was trained before stays in the history of the weights"
    assert sorted(each.lease_id for each in recovered.spare_groups()) == [
        lease_id for lease_id in spare if first.buffer[lease_id].oldest_version == 0 or lease_id == again
    ]
    assert [sorted(proof.fingerprints) for proof in recovered.proofs] == [sorted(["other", INSTANCE]), ["other"]]


def test_without_a_checkpoint_everything_is_replayed_from_the_start(lives: Lives) -> None:
    first = lives.begin()
    first.step()
    first.step()
    second, recovered = lives.resume()
    assert (recovered.version, recovered.trainer_folder) == (0, None)
    assert second.trainer.weights == first.trainer.weights


def test_what_the_checkpoint_covers_is_neither_replayed_nor_held(lives: Lives) -> None:
    first = lives.begin()
    for _ in range(3):
        first.step()
    first.checkpoint()
    _, recovered = lives.resume()
    assert recovered.batches == ()
    trained = set(used(first.trainer))
    assert all(one.lease_id not in trained for one in recovered.spare_groups())


def test_leases_that_were_filtered_or_given_up_stay_closed(lives: Lives) -> None:
    first = lives.begin()
    first.journal.append_group(stamped(group(0), 1), filtered=True)
    first.journal.append_group(stamped(group(2), 1))
    (lives.folder / "dead_letters.jsonl").write_text('{"lease_id": 1, "reason": "x"}\n{"lease_id": 3, "rea')
    second, recovered = lives.resume()
    books = recovered.ledger.books()
    assert (books.filtered, books.dead_lettered) == (1, 1)
    assert [one.lease_id for one in recovered.spare_groups()] == [2]
    second.ledger.served_changed(0)
    assert [grant.lease_id for grant in second.ledger.grant(now=0.0, holder="e", room=2)] == [3, 4]
    books.check()


def test_a_line_of_given_up_leases_that_a_power_loss_left_empty_ends_no_resume(
    lives: Lives, caplog: pytest.LogCaptureFixture
) -> None:
    lives.begin()
    holed = b'{"lease_id": 0, "version": 0}\n' + bytes(40) + b'\n{"lease_id": 3, "version": 0}\n[]\n'
    (lives.folder / "dead_letters.jsonl").write_bytes(holed)
    _, recovered = lives.resume()
    assert recovered.ledger.books().dead_lettered == 2
    assert "dead_letters.jsonl: 2 lines cannot be read; the leases that they name are granted again" in caplog.text


def test_a_spare_group_that_has_become_too_old_is_rolled_out_again(lives: Lives) -> None:
    first = lives.begin()
    first.buffer[9] = stamped(group(9, version=0), 1)
    first.journal.append_group(first.buffer[9])
    for _ in range(2):
        first.step()
    first.checkpoint()
    second, recovered = lives.resume()
    assert 9 in [one.lease_id for one in recovered.spare_groups()]
    assert second.ledger.books().pending >= 1
    second.ledger.books().check()


def test_a_journal_of_another_run_is_refused(lives: Lives) -> None:
    first = lives.begin()
    first.sample()
    first.take()
    first.journal.append_batch(version=5, lease_ids=(2, 3))
    with pytest.raises(
        JournalUnknown, match=r"at byte \d+ it holds a batch of version 5, expected 1: is it of another"
    ):
        lives.resume()


def finishes(life: Life, *, steps: int) -> None:
    """Trains on, and ends with every lease trained exactly once so far, in a ledger whose books balance."""
    for _ in range(steps):
        life.step()
    trained = used(life.trainer)
    assert sorted(trained) == list(range(len(trained))), trained
    life.ledger.books().check()


def versions_in(folder: Path) -> list[int]:
    return [each.version for each in checkpoints_of(folder)]


def begun_in(folder: Path) -> list[int]:
    return [segment.start for segment in segments_of(folder / FOLDER)]


def test_a_run_that_was_killed_before_it_had_written_anything_begins(lives: Lives) -> None:
    second, recovered = lives.resume()
    assert (recovered.version, recovered.batches, recovered.trainer_folder) == (0, (), None)
    second.ledger.served_changed(0)
    finishes(second, steps=2)


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x20
    path.write_bytes(data)


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_taken(
    lives: Lives, caplog: pytest.LogCaptureFixture
) -> None:
    first = lives.begin()
    for _ in range(2):
        for _ in range(3):
            first.step()
        first.checkpoint()
    first.step()
    flip(lives.folder / "checkpoint-00000006" / "trainer" / "weights.json", 3)
    second, recovered = lives.resume()
    assert "weights.json has the hash" in caplog.text
    assert (recovered.version, recovered.replayed_version) == (3, 7)
    assert second.trainer.weights == first.trainer.weights
    assert versions_in(lives.folder) == [3]
    assert (lives.folder / "checkpoint-00000006.damaged").is_dir()
    second.checkpoint()
    finishes(second, steps=3)
    third, recovered = lives.resume()
    assert recovered.version == 7
    assert third.trainer.weights == second.trainer.weights


def test_with_no_whole_checkpoint_everything_is_replayed_from_the_initial_model(lives: Lives) -> None:
    first = lives.begin()
    first.step()
    first.step()
    first.checkpoint()
    first.step()
    (lives.folder / "checkpoint-00000002" / "manifest.json").unlink()
    second, recovered = lives.resume()
    assert (recovered.version, recovered.trainer_folder, recovered.replayed_version) == (0, None, 3)
    assert second.trainer.weights == first.trainer.weights
    finishes(second, steps=2)


def test_where_no_base_is_left_the_error_says_what_was_found(lives: Lives) -> None:
    first = lives.begin()
    for _ in range(3):
        first.step()
        first.checkpoint()
    flip(lives.folder / "checkpoint-00000002" / "ledger.json", 3)
    (lives.folder / FOLDER / "segment-00000003.log").unlink()
    with pytest.raises(NothingToResume, match=r"checkpoint-00000003 is whole, but the journal after it is gone: .*"
                       r"segment-00000003.log is missing; .*ledger.json has the hash"):  # fmt: skip
        lives.resume()
    (lives.folder / FOLDER / "segment-00000003.log").touch()
    second, recovered = lives.resume()
    assert (recovered.version, recovered.batches) == (3, ())
    finishes(second, steps=2)


def test_a_resume_recovers_from_a_kill_at_any_byte_of_the_journal(lives: Lives, tmp_path: Path) -> None:
    """The records of the last two steps, and of the segment that the checkpoint before them began."""
    first = lives.begin()
    first.step()
    first.step()
    first.checkpoint()
    first.step()
    first.step()
    path = segments_of(lives.folder / FOLDER)[-1].path
    records = [(record, at) for record, at in read_segment(path)]
    size = path.stat().st_size
    sizes = [*range(0, size, 311), *(at + off for _, at in records for off in (-1, 0, 1, 17) if 0 <= at + off < size)]
    for number, cut in enumerate(sizes):
        copy = lives.copied(tmp_path / f"copy-{number}")
        with segments_of(copy.folder / FOLDER)[-1].path.open("r+b") as file:
            file.truncate(cut)
        second, recovered = copy.resume()
        assert recovered.version == 2
        assert second.trainer.weights == first.trainer.weights[: recovered.replayed_version], cut
        finishes(second, steps=2)


REUSING = replace(LEDGER, max_lag=2, reused_per_step=2, max_reuses=2)


@pytest.mark.parametrize(("priority", "of_reused"), [("uniform", None), ("advantage", None), ("uniform", 4)])
def test_a_learner_that_is_killed_anywhere_trains_the_same_groups_again_as_one_that_is_not(
    tmp_path: Path, priority: ReusePriority, of_reused: int | None
) -> None:
    """At each record of the segment behind its beginning, which is on the disk before the checkpoint is whole."""
    with ExitStack() as stack:
        config = replace(REUSING, reuse_priority=priority, max_lag_of_reused=of_reused)
        lives = Lives(tmp_path / "run", stack, config)
        first = lives.begin()
        for _ in range(2):
            first.step()
            first.step()
            first.checkpoint()
        path = segments_of(lives.folder / FOLDER)[-1].path
        begun = path.stat().st_size
        for _ in range(3):
            first.step()
        weights = first.trainer.weights
        assert sum(map(len, weights)) == 7 * PER_STEP + first.ledger.books().reused
        assert {record.lease_id for record, _ in read_segment(path) if isinstance(record, LoggedUse)}
        cuts = [at for _, at in read_segment(path) if at >= begun] + [path.stat().st_size]
        for number, cut in enumerate(cuts):
            copy = lives.copied(tmp_path / f"copy-{number}")
            with segments_of(copy.folder / FOLDER)[-1].path.open("r+b") as file:
                file.truncate(cut)
            second, recovered = copy.resume()
            assert recovered.version == 4
            while second.ledger.version < first.ledger.version:
                second.step()
            assert second.trainer.weights == weights, cut
            assert second.ledger.books() == first.ledger.books()


@pytest.mark.parametrize(("lost", "base"), [((4,), 2), ((2, 4), 0)])
def test_a_resume_from_an_older_checkpoint_or_from_none_draws_the_same(
    tmp_path: Path, lost: Sequence[int], base: int
) -> None:
    with ExitStack() as stack:
        lives = Lives(tmp_path / "run", stack, REUSING)
        first = lives.begin()
        for version in range(6):
            if version in lost:
                first.rotate()
            elif version == base:
                first.checkpoint()
            first.step()
        second, recovered = lives.resume()
        assert recovered.version == base
        assert (second.trainer.weights, second.ledger.books()) == (first.trainer.weights, first.ledger.books())
        first.step()
        second.step()
        assert second.trainer.weights == first.trainer.weights


def test_a_resume_holds_only_groups_that_later_steps_may_draw_however_many_it_replays(tmp_path: Path) -> None:
    with ExitStack() as stack:
        lives = Lives(tmp_path / "run", stack, REUSING)
        first = lives.begin()
        for _ in range(8):
            first.step()
        second, recovered = lives.resume()
        assert (recovered.version, recovered.replayed_version) == (0, 8)
        assert {place.oldest_version for place in recovered.used} == {6, 7}
        assert second.used.keys() >= second.ledger.reusable.keys() != set()


def test_segments_that_no_checkpoint_needs_hold_nothing_that_is_drawn(tmp_path: Path) -> None:
    with ExitStack() as stack:
        lives = Lives(tmp_path / "run", stack, REUSING)
        life = lives.begin()
        for _ in range(8):
            life.step()
            life.checkpoint()
        assert [segment.start for segment in segments_of(lives.folder / FOLDER)] == [7, 8]
        second, recovered = lives.resume()
        assert (recovered.batches, recovered.spare) == ((), ())
        assert sorted(second.used) == sorted(life.ledger.reusable) != []
        for each in (life, second):
            each.step()
        assert second.trainer.weights == life.trainer.weights


def test_a_group_that_was_trained_by_a_liar_is_not_trained_again_after_a_resume(tmp_path: Path) -> None:
    with ExitStack() as stack:
        lives = Lives(tmp_path / "run", stack, REUSING)
        first = lives.begin()
        first.step()
        first.step()
        assert first.ledger.reusable
        first.journal.append_provenance(LoggedDistrust(INSTANCE, PolicyVersion(1, 0)))
        second, recovered = lives.resume()
        assert recovered.replayed_version == 2
        assert not second.ledger.reusable


def test_a_resume_does_without_what_follows_damage_at_any_place(lives: Lives, tmp_path: Path) -> None:
    first = lives.begin()
    first.step()
    first.checkpoint()
    for _ in range(3):
        first.step()
    first.rotate()  # its checkpoint failed
    first.step()
    segments = segments_of(lives.folder / FOLDER)
    assert [segment.start for segment in segments] == [0, 1, 4]
    for segment in segments[1:]:
        for number, at in enumerate(range(0, segment.path.stat().st_size, 211)):
            copy = lives.copied(tmp_path / f"copy-{segment.start}-{number}")
            flip(copy.folder / FOLDER / segment.path.name, at)
            second, recovered = copy.resume()
            assert 1 <= recovered.replayed_version <= 5
            assert second.trainer.weights == first.trainer.weights[: recovered.replayed_version]
            finishes(second, steps=3)
            third, again = copy.resume()
            assert third.trainer.weights == second.trainer.weights
            finishes(third, steps=1)
            assert again.history.last_valid[1] == recovered.replayed_version
            for one in (*again.spare_groups(), *(one for batch in again.batches for one in batch.read().groups)):
                assert again.history.sampled(one)


def test_what_lost_versions_sampled_is_left_out_and_sampled_again(
    lives: Lives, caplog: pytest.LogCaptureFixture
) -> None:
    first = lives.begin()
    for _ in range(4):
        first.step()
    first.sample()
    path = lives.folder / FOLDER / "segment-00000000.log"
    batches = [at for record, at in read_segment(path) if not hasattr(record, "group")]
    flip(path, batches[2])
    second, recovered = lives.resume()
    assert f"segment-00000000.log: at byte {batches[2]} a record does not match its checksum" in caplog.text
    assert recovered.replayed_version == 2
    assert (lives.folder / FOLDER / "segment-00000000.log.damaged").is_file()
    history = recovered.history
    assert [history.contains(PolicyVersion(1, number)) for number in (0, 2, 3, 4)] == [True, True, False, False]
    assert history.contains(PolicyVersion(2, 99))
    assert not history.contains(PolicyVersion(3, 0)), "of a life that is yet to come"
    assert all(history.sampled(one) for one in recovered.spare_groups())
    finishes(second, steps=4)

    third, recovered = lives.resume()
    assert recovered.replayed_version == 6
    assert dict(recovered.history.last_valid) == {1: 2, 2: 6}
    finishes(third, steps=1)


def test_a_group_of_a_lost_version_that_the_good_part_holds_is_left_out(lives: Lives) -> None:
    first = lives.begin()
    first.step()
    first.journal.append_group(stamped(group(50, version=1), 1))
    first.journal.append_group(stamped(group(51, version=2), 1))
    _, recovered = lives.resume()
    assert 50 in {one.lease_id for one in recovered.spare_groups()}
    assert 51 not in {one.lease_id for one in recovered.spare_groups()}


def test_a_missing_segment_in_the_middle_ends_the_good_part(lives: Lives) -> None:
    first = lives.begin()
    for _ in range(3):
        first.step()
        first.rotate()
    (lives.folder / FOLDER / "segment-00000001.log").unlink()
    second, recovered = lives.resume()
    assert recovered.replayed_version == 1
    assert begun_in(lives.folder) == [0]
    finishes(second, steps=3)


def test_a_damaged_history_is_an_error_that_names_the_file(lives: Lives) -> None:
    lives.begin().step()
    lives.resume()
    (lives.folder / "history.json").write_text("{")
    with pytest.raises(ValueError, match=r"history\.json is damaged .*: restore it"):
        lives.resume()


def crash_between_rotation_and_checkpoint(life: Life) -> None:
    life.rotate()


def crash_while_the_checkpoint_is_written(life: Life) -> None:
    life.rotate()
    life.trainer.save(life.folder / f"draft-{life.ledger.version}")


def crash_before_old_files_are_removed(life: Life) -> None:
    """The journal and an older checkpoint are as they were before the removal."""
    removed = [*life.folder.glob(f"{FOLDER}/*"), *life.folder.glob("checkpoint-*")]
    before = life.folder.with_name("before")
    shutil.copytree(life.folder, before)
    life.checkpoint()
    for path in removed:
        source = before / path.relative_to(life.folder)
        if not path.exists():
            (shutil.copytree if source.is_dir() else shutil.copy)(source, path)
    shutil.rmtree(before)


@pytest.mark.parametrize(
    "crash",
    [
        crash_between_rotation_and_checkpoint,
        crash_while_the_checkpoint_is_written,
        crash_before_old_files_are_removed,
    ],
)
def test_a_crash_at_a_checkpoint_loses_nothing(tmp_path: Path, crash: Callable[[Life], None]) -> None:
    with ExitStack() as stack:
        lives = Lives(tmp_path / "run", stack)
        first = lives.begin()
        for _ in range(2):
            first.step()
            first.step()
            first.checkpoint()
        first.step()
        first.sample()
        waiting = first.ledger.books().buffered
        crash(first)
        second, _ = lives.resume()
        assert second.trainer.weights == first.trainer.weights
        assert second.ledger.books().buffered == waiting
        second.checkpoint()
        finishes(second, steps=3)
        third, _ = lives.resume()
        assert third.trainer.weights == second.trainer.weights
        for _ in range(2):
            third.step()
            third.checkpoint()
        assert len(versions_in(lives.folder)) == 2
        assert begun_in(lives.folder) == versions_in(lives.folder)


def test_a_fresh_run_knows_its_own_versions_only() -> None:
    history = History(incarnation=1, last_valid={})
    assert history.contains(PolicyVersion(1, 7))
    assert not history.contains(PolicyVersion(2, 0))


def groups_in_memory() -> int:
    gc.collect()
    with warnings.catch_warnings():  # some module's objects warn when they are asked for their class
        warnings.simplefilter("ignore")
        return sum(isinstance(each, TrajectoryGroup) for each in gc.get_objects())


def test_a_resume_holds_no_more_than_the_batch_that_it_reads(lives: Lives) -> None:
    life = lives.begin()
    for _ in range(5):
        life.step()
    life.sample()
    before = groups_in_memory()
    recovered = recover(lives.folder, config=LEDGER, resume=True, incarnation=2)
    assert len(recovered.batches) == 5
    assert groups_in_memory() == before
    for batch in recovered.batches:
        taken = batch.read()
        assert groups_in_memory() == before + PER_STEP
        assert tuple(group.lease_id for group in taken.groups) == batch.lease_ids
        del taken
    assert len(list(recovered.spare_groups())) > 0
    assert groups_in_memory() == before
