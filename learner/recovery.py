"""Taking up a run: the newest checkpoint, the batches logged after it, and the groups that no batch has used yet.

What was logged is read twice, and never held whole: once to learn where each group stands, and each group once more
when its step is trained again. What is damaged is named, moved aside and done without: a checkpoint, by going back to
the one before it (or to the initial model) and replaying the batches since; the journal, by going on from where its
good part ends.
"""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from learner.config import LearnerConfig
from learner.journal.checkpoints import Checkpoint, checkpoints_of
from learner.journal.files import unused
from learner.journal.journal import FOLDER
from learner.journal.manifest import Signer
from learner.journal.records import JournalDamaged
from learner.journal.run_folder import History, NothingToResume, changed_settings, resume_history
from learner.journal.segments import (
    JournalUnknown,
    LoggedBatch,
    LoggedFilter,
    LoggedGroup,
    LoggedUse,
    Record,
    Segment,
    group_at,
    read_segment,
    segments_of,
    set_aside,
    teaching_at,
)
from learner.journal.teaching import LoggedTeaching
from learner.leases.dead_letters import DEAD_LETTERS, dead_lettered_since
from learner.leases.intake import TakenBatch
from learner.leases.worth import worth_of
from learner.ledger import Ledger, LedgerConfig, ReusableGroup
from learner.teachers.teachers import GroupScores, TextRefused
from learner.training.guard import NEW_GUARD, GuardState
from learner.weights.provenance import LoggedDistrust, LoggedProof, is_recalled
from protocol.model import PolicyVersion
from protocol.trajectories import TrajectoryGroup
from services.config.made_with import Difference, at_defaults

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Place:
    """Place of a group's record, the version of its oldest token, and its worth."""

    path: Path
    at: int
    oldest_version: int
    worth: float = 0.0

    def read(self) -> TrajectoryGroup:
        return group_at(self.path, self.at)


@dataclass(frozen=True)
class LoggedStep:
    """A batch to train again. Its groups stay on the disk until they are read, or a resume would hold all at once.

    `lags` are those of the leases and then of the `reused` ones, whose groups had been trained before. `taught` are
    places of what teachers said, by lease id.
    """

    version: int
    lease_ids: tuple[int, ...]
    lags: tuple[int, ...]
    places: tuple[_Place, ...] = field(repr=False)
    reused: tuple[int, ...] = ()
    taught: Mapping[int, tuple[Path, int]] = field(default_factory=dict, repr=False)

    @property
    def is_taught(self) -> bool:
        """True if an answer of its teacher is noted for each of its groups, so that none has to be asked."""
        return set(self.lease_ids) <= self.taught.keys()

    def told(self) -> dict[int, GroupScores | TextRefused]:
        """Answers of teachers for its groups, as far as they were noted, by lease id."""
        return {lease_id: teaching_at(path, at).told for lease_id, (path, at) in self.taught.items()}

    def read(self) -> TakenBatch:
        """The batch, as it was taken."""
        groups = tuple(place.read() for place in self.places)
        return TakenBatch(version=self.version, groups=groups, lags=self.lags, reused=len(self.reused))


@dataclass(frozen=True)
class RecoveryPoint:
    """Beginning of a learner: at `version`, with `batches` to train again and spare groups for later ones.

    `history` tells which versions that former lives published belong to these weights. `guard` is its state at
    `version`. The ledger begins with the configured bound: the logged batches were taken under that of their time.
    `proofs` are those that former lives got of generators.
    """

    ledger: Ledger
    version: int
    history: History
    checkpoint: Checkpoint | None = None
    batches: tuple[LoggedStep, ...] = ()
    guard: GuardState = NEW_GUARD
    proofs: tuple[LoggedProof, ...] = ()
    spare: tuple[_Place, ...] = field(default=(), repr=False)
    used: tuple[_Place, ...] = field(default=(), repr=False)

    @property
    def replayed_version(self) -> int:
        """The version once the batches are trained again."""
        return self.version + len(self.batches)

    @property
    def trainer_folder(self) -> Path | None:
        """The trainer's files; None for the initial model."""
        return None if self.checkpoint is None else self.checkpoint.trainer

    def spare_groups(self) -> Iterator[TrajectoryGroup]:
        """The groups that no batch has used, read one by one: to be done before the journal goes on."""
        return (place.read() for place in self.spare)

    def used_groups(self) -> Iterator[TrajectoryGroup]:
        """The groups that batches have used and later ones may use again, read one by one, as early."""
        return (place.read() for place in self.used)


def recover(
    folder: Path, *, config: LedgerConfig, resume: bool, incarnation: int = 1, signer: Signer | None = None
) -> RecoveryPoint:
    """The start of a run, or its resumption from the newest whole checkpoint and the journal.

    With a `signer`, a checkpoint that the same key did not sign is not whole.

    Raises NothingToResume, and JournalUnknown for a journal that this run or this release cannot have written.
    """
    if not resume:
        return RecoveryPoint(Ledger(config), version=0, history=History(incarnation=incarnation, last_valid={}))
    checkpoint = _base(folder, signer)
    version = 0 if checkpoint is None else checkpoint.ledger().version
    segments = [segment for segment in segments_of(folder / FOLDER) if segment.start >= version]
    logged = _read(segments, version=version)
    ledger = Ledger(config)
    if checkpoint is not None:
        ledger = Ledger.restore(config, checkpoint.ledger(), reusable=logged.reusable())
    history = resume_history(folder, incarnation=incarnation, version=logged.version)
    _move_aside(folder, logged, segments=segments, base=version)
    for batch in logged.batches:
        ledger.replay(batch.lease_ids, groups=_first_uses(batch), reused=batch.reused)
    ledger.forget_reusable(lease_id for lease_id, place in logged.groups.items() if place in logged.recalled)
    ledger.replay_filtered(logged.filtered)
    ledger.replay_dead_lettered(dead_lettered_since(version, folder / DEAD_LETTERS))
    spare = _spare(logged, history)
    logger.info(
        "resuming at version %d: %d logged batches to replay, %d groups at hand",
        version,
        len(logged.batches),
        len(spare),
    )
    return RecoveryPoint(
        ledger=ledger,
        version=version,
        history=history,
        checkpoint=checkpoint,
        batches=tuple(logged.batches),
        spare=spare,
        used=tuple(
            place
            for lease_id, place in logged.groups.items()
            # What the batches to come train again they read themselves: held is what later ones may draw.
            if ledger.may_reuse(lease_id) and logged.version - place.oldest_version <= config.reused_lag
        ),
        proofs=tuple(logged.proofs),
        guard=NEW_GUARD if checkpoint is None else checkpoint.guard(),
    )


def changes_of_this_start(config: LearnerConfig, settings: Mapping[str, object]) -> list[Difference]:
    """Differences of a start, with the settings of its `made_with`, from the run's last one, if it resumes that. Raises
    WrongSettings if it would be another training, and that is not accepted.
    """
    return changed_settings(
        config.run.folder,
        settings,
        resume=config.resume is True,
        accepted=config.accept_changes,
        usual=at_defaults(config),
    )


def expected_signer(config: LearnerConfig) -> Signer | None:
    """The key that must have signed a checkpoint to be resumed; None where any is taken. Raises SecretFileError."""
    return Signer.read(config.leases.secret_key_file) if config.checkpoint.check_signature else None


def logged_steps(folder: Path, *, version: int) -> tuple[LoggedStep, ...]:
    """The steps in the journal of a run from a version on, whose segment is there; the folder is only read.

    Raises JournalDamaged, and JournalUnknown for a journal that this release cannot have written.
    """
    steps, damage = readable_steps(folder, version=version)
    if damage is not None:
        raise damage
    return steps


def readable_steps(
    folder: Path, *, version: int, until: int | None = None
) -> tuple[tuple[LoggedStep, ...], JournalDamaged | None]:
    """The same up to where the journal is damaged, if it is, and no further than the step that makes version `until`.

    Raises JournalUnknown, and FileNotFoundError if a learner removes a segment meanwhile.
    """
    logged = _read(
        [each for each in segments_of(folder / FOLDER) if each.start >= version], version=version, until=until
    )
    return tuple(logged.batches), logged.damage


def _base(folder: Path, signer: Signer | None) -> Checkpoint | None:
    """The newest checkpoint that is whole and that the journal follows; None for the initial model."""
    faults: list[str] = []
    checkpoints = checkpoints_of(folder)
    begun = {segment.start for segment in segments_of(folder / FOLDER)}
    for checkpoint in reversed(checkpoints):
        fault = checkpoint.fault(signer=signer)
        if fault is None and checkpoint.version in begun:
            return checkpoint
        missing = Segment.named(folder / FOLDER, checkpoint.version).path
        faults.append(fault or f"{checkpoint.path} is whole, but the journal after it is gone: {missing} is missing")
        logger.error("checkpoint %s cannot be used: %s", checkpoint.path.name, faults[-1])
    if 0 in begun or not (checkpoints or begun):
        return None
    found = "; ".join(faults) or f"there is no checkpoint, and the journal begins at version {min(begun)}"
    raise NothingToResume(
        f"the run in {folder} cannot be resumed: {found}. Restore one of these files; or go on from a whole "
        "checkpoint without what followed it, by making an empty file of the missing journal segment's name; or start "
        "without --resume"
    )


@dataclass
class _LoggedSteps:
    """Steps that a checkpoint does not cover. `version` is that after the batches; `damage` is where the good part
    ends.
    """

    version: int
    groups: dict[int, _Place] = field(default_factory=dict)
    batches: list[LoggedStep] = field(default_factory=list)
    filtered: list[int] = field(default_factory=list)
    uses: dict[int, int] = field(default_factory=dict)
    proofs: list[LoggedProof] = field(default_factory=list)
    recalled: set[_Place] = field(default_factory=set)
    taught: dict[int, dict[int, tuple[Path, int]]] = field(default_factory=dict)
    damage: JournalDamaged | None = None

    def add(self, record: Record, *, path: Path, at: int) -> None:
        match record:
            case LoggedGroup(group=group):
                assert group.oldest_version is not None, "the journal holds admissible groups only"
                self.groups[group.lease_id] = _Place(
                    path=path, at=at, oldest_version=group.oldest_version, worth=worth_of(group)
                )
            case LoggedBatch():
                self.batches.append(self._taken(record, path=path, at=at))
                self.version += 1
            case LoggedFilter(lease_id=lease_id):
                self.filtered.append(lease_id)
            case LoggedUse(lease_id=lease_id, reuses=reuses):
                if not self.batches:  # a later segment says of its beginning what follows from the batches before it
                    self.uses[lease_id] = reuses
            case LoggedProof():
                self.proofs.append(record)
            case LoggedDistrust(instance=instance, since=since):
                self._distrust(instance, since=since)
            case LoggedTeaching(version=version, lease_id=lease_id):
                self.taught.setdefault(version, {})[lease_id] = path, at

    def _distrust(self, instance: str, *, since: PolicyVersion) -> None:
        """Of what was accepted so far: what the process proves after this to a later life counts again."""
        self.recalled |= {place for place in self.groups.values() if is_recalled(place.read(), {instance: since}.get)}
        self.proofs = [
            replace(proof, fingerprints={each: of for each, of in proof.fingerprints.items() if each != instance})
            if proof.version >= since
            else proof
            for proof in self.proofs
        ]

    def _taken(self, batch: LoggedBatch, *, path: Path, at: int) -> LoggedStep:
        if batch.version != self.version:
            raise JournalUnknown(
                f"{path}: at byte {at} it holds a batch of version {batch.version}, expected {self.version}: is it of "
                "another run than the checkpoint?"
            )
        lease_ids = (*batch.lease_ids, *batch.reused)
        missing = [lease_id for lease_id in lease_ids if lease_id not in self.groups]
        if missing:
            raise JournalDamaged(path, at, what=f"a batch names lease {missing[0]}, whose group is not in the journal")
        places = tuple(self.groups[lease_id] for lease_id in lease_ids)
        lags = tuple(batch.version - place.oldest_version for place in places)
        return LoggedStep(
            version=batch.version, lease_ids=batch.lease_ids, lags=lags, places=places, reused=batch.reused
        )

    def reusable(self) -> dict[int, ReusableGroup]:
        """Groups that batches before the first one here had used, as they were then."""
        return {
            lease_id: ReusableGroup(version=place.oldest_version, worth=place.worth, reuses=reuses)
            for lease_id, reuses in self.uses.items()
            if (place := self.groups.get(lease_id)) is not None
        }


def _first_uses(step: LoggedStep) -> dict[int, ReusableGroup]:
    """The groups of a step that it trained for the first time."""
    return {
        lease_id: ReusableGroup(version=place.oldest_version, worth=place.worth)
        for lease_id, place in zip(step.lease_ids, step.places, strict=False)
    }


def _read(segments: list[Segment], *, version: int, until: int | None = None) -> _LoggedSteps:
    logged = _LoggedSteps(version=version)
    try:
        for segment in segments:
            if segment.start != logged.version:
                what = f"batches of versions {logged.version} to {segment.start - 1} are missing before it"
                raise JournalDamaged(segment.path, 0, what=what)
            for record, at in read_segment(segment.path):
                logged.add(record, path=segment.path, at=at)
                if logged.version == until:
                    return logged
    except JournalDamaged as damage:
        logged.damage = damage
    logged.batches = [replace(batch, taught=logged.taught.get(batch.version, {})) for batch in logged.batches]
    return logged


def _move_aside(folder: Path, logged: _LoggedSteps, *, segments: list[Segment], base: int) -> None:
    """Nothing of another future may stand where this life will write its own."""
    if logged.damage is not None:
        logger.error(
            "the journal is damaged: %s. It is good up to version %d; the rest is kept in *.damaged files, and what "
            "later versions sampled is sampled again",
            logged.damage,
            logged.version,
        )
        set_aside(logged.damage, segments=segments, keep_empty=logged.damage.path == segments[0].path)
    for checkpoint in checkpoints_of(folder):
        if checkpoint.version > base:
            aside = unused(checkpoint.path.with_name(f"{checkpoint.path.name}.damaged"))
            checkpoint.path.rename(aside)
            checkpoint.evaluation.unlink(missing_ok=True)
            logger.warning("%s is kept as %s", checkpoint.path, aside.name)


def _spare(logged: _LoggedSteps, history: History) -> tuple[_Place, ...]:
    used = {lease_id for batch in logged.batches for lease_id in batch.lease_ids}
    used |= {*logged.filtered, *logged.uses}
    left = [place for lease_id, place in logged.groups.items() if lease_id not in used]
    spare = tuple(place for place in left if place not in logged.recalled and history.sampled(place.read()))
    if len(spare) < len(left):
        logger.warning(
            "%d groups were sampled by versions that are lost, or by generators that served something else: they are "
            "left out",
            len(left) - len(spare),
        )
    return spare
