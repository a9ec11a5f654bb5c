"""Taking up a run after a crash: the same weights come of it, and no group is lost or trained twice."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from learner.history.checkpoints import Checkpoints
from learner.history.journal import Journal, JournalDamaged
from learner.ledger import Batch, Ledger, Verdict
from learner.recovery import Recovered, recover
from tests.learner.samples import LEDGER, group

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

    def sample(self) -> None:
        """Rolls out whatever may be granted; the last groups come first."""
        version = self.ledger.next_version
        for grant in reversed(self.ledger.grant(now=0.0, holder="e", room=100)):
            done = group(grant.lease_id, version=version, attempt=grant.attempt)
            self.journal.append_group(done)
            answer = self.ledger.accept(lease_id=grant.lease_id, attempt=grant.attempt, oldest_version=version, size=1)
            assert answer.verdict is Verdict.ACCEPTED

    def take(self) -> Batch:
        batch = self.ledger.take(now=0.0)
        assert isinstance(batch, Batch), batch
        self.journal.append_batch(version=batch.version, lease_ids=batch.lease_ids)
        return batch

    def train(self, lease_ids: tuple[int, ...]) -> None:
        self.trainer.train(lease_ids)
        self.ledger.trained(self.ledger.version + 1)
        self.ledger.served_changed(self.ledger.version)

    def step(self) -> None:
        self.sample()
        self.train(self.take().lease_ids)

    def checkpoint(self) -> None:
        Checkpoints(self.folder, keep=2).write(
            version=self.ledger.version, ledger=self.ledger.snapshot(), save_trainer=self.trainer.save
        )


class Lives:
    """The lives of one run. The next one may begin at any moment: nothing is tidied up at a crash."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        self._stack = stack

    def begin(self) -> Life:
        ledger = Ledger(LEDGER)
        ledger.served_changed(0)
        return self._life(ledger)

    def resume(self) -> tuple[Life, Recovered]:
        recovered = recover(self.folder, config=LEDGER, resume=True)
        life = self._life(recovered.ledger)
        if recovered.trainer_folder is not None:
            life.trainer.load(recovered.trainer_folder)
        for one in recovered.spare_groups:
            assert one.oldest_version is not None
            life.ledger.readmit(lease_id=one.lease_id, oldest_version=one.oldest_version, size=1)
        for batch in recovered.batches:
            assert batch.version == life.ledger.version
            life.train(tuple(member.lease_id for member in batch.groups))
        return life, recovered

    def _life(self, ledger: Ledger) -> Life:
        journal = self._stack.enter_context(Journal.open(self.folder / "journal.log"))
        return Life(self.folder, FakeTrainer(), ledger, journal)


@pytest.fixture
def lives(tmp_path: Path) -> Iterator[Lives]:
    with ExitStack() as stack:
        yield Lives(tmp_path, stack)


def used(trainer: FakeTrainer) -> list[int]:
    return [lease_id for batch in trainer.weights for lease_id in batch]


def test_a_fresh_run_starts_at_version_0_with_nothing(lives: Lives) -> None:
    recovered = recover(lives.folder, config=LEDGER, resume=False)
    assert (recovered.version, recovered.batches, recovered.spare_groups, recovered.trainer_folder) == (0, (), (), None)


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


def test_groups_that_no_batch_has_used_are_taken_up_and_none_is_trained_twice(lives: Lives) -> None:
    first = lives.begin()
    first.step()
    first.checkpoint()
    first.step()
    first.sample()
    waiting = first.ledger.books().buffered

    second, recovered = lives.resume()
    assert len(recovered.spare_groups) == waiting == PER_STEP * 2
    assert second.ledger.books().buffered == waiting
    for _ in range(4):
        second.step()
    assert sorted(used(second.trainer)) == list(range(6 * PER_STEP))
    second.ledger.books().check()

    third, _ = lives.resume()
    assert third.trainer.weights == second.trainer.weights, "a second crash replays both lives' batches"


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
    assert all(one.lease_id not in trained for one in recovered.spare_groups)


def test_leases_that_were_filtered_or_given_up_stay_closed(lives: Lives) -> None:
    first = lives.begin()
    first.journal.append_group(group(0))
    first.journal.append_filtered(0)
    first.journal.append_group(group(2))
    (lives.folder / "dead_letters.jsonl").write_text('{"lease_id": 1, "reason": "x"}\n{"lease_id": 3, "rea')
    second, recovered = lives.resume()
    books = recovered.ledger.books()
    assert (books.filtered, books.dead_lettered) == (1, 1)
    assert [one.lease_id for one in recovered.spare_groups] == [2]
    second.ledger.served_changed(0)
    assert [grant.lease_id for grant in second.ledger.grant(now=0.0, holder="e", room=2)] == [3, 4]
    books.check()


def test_a_spare_group_that_has_become_too_old_is_rolled_out_again(lives: Lives) -> None:
    first = lives.begin()
    first.journal.append_group(group(9, version=0))
    for _ in range(2):
        first.step()
    first.checkpoint()
    second, recovered = lives.resume()
    assert 9 in [one.lease_id for one in recovered.spare_groups]
    assert second.ledger.books().pending >= 1
    second.ledger.books().check()


def test_a_journal_of_another_run_is_refused(lives: Lives) -> None:
    first = lives.begin()
    first.sample()
    first.take()
    first.journal.append_batch(version=5, lease_ids=(2, 3))
    with pytest.raises(JournalDamaged, match=r"holds batches of versions \[0, 5\], expected 0, 1 and so on"):
        recover(lives.folder, config=LEDGER, resume=True)
