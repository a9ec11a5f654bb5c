"""Proofs of versions by processes: over a learner's restart, and when a later proof shows that one was wrong."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from learner.journal.journal import Journal, LoggedDistrust, LoggedProof, read_journal
from learner.weights.fleet import FleetMember, FleetMembers
from learner.weights.probe import Probe
from learner.weights.proofs import Commits, Proofs, proof_of
from learner.weights.provenance import LoadedWeights, Provenance, Standing
from learner.weights.published import PackedWeights
from protocol.fleet import CommitResult
from protocol.model import PolicyVersion
from protocol.trajectories import GreedyBaseline, RewardRecord, TrajectoryGroup, VersionSpan
from tests.learner.generators import FINGERPRINTS, announcement
from tests.learner.samples import group, trajectory

SIX_TEXTS = Probe(texts=tuple((number, number + 1) for number in range(6)), logprobs=(-1.0,) * 6)


@dataclass
class Weights:
    """A learner's fleet and its proofs, without the network."""

    fleet: FleetMembers = field(
        default_factory=lambda: FleetMembers(
            fingerprints=FINGERPRINTS, incarnation=1, announce_every_s=1.0, silence_s=60.0, changed=lambda: None
        )
    )

    def __post_init__(self) -> None:
        proofs = Proofs(probe_tolerance=None, dtype="float32", provenance=self.fleet.provenance)
        nobody: Any = None
        self.commits = Commits(fleet=self.fleet, client=nobody, proofs=proofs, timeout_s=1.0)

    def member(self, name: str) -> FleetMember:
        self.fleet.announce(announcement(name, "http://127.0.0.1:1"), now=0.0)
        return next(member for member in self.fleet.members() if member.generator_id == name)

    def proves(
        self, member: FleetMember, version: PolicyVersion, *, checksum: str, gap: float = 0.0, age: float | None = None
    ) -> bool:
        """A commit is answered, and judged: whether the proof is good. `age`: logprobs of the version before."""
        before = () if age is None else tuple(each - age for each in SIX_TEXTS.logprobs)
        probe = Probe(texts=SIX_TEXTS.texts, logprobs=SIX_TEXTS.logprobs, before=before)
        packed = PackedWeights(version=version, buckets=(), digest=f"sent as {version.number}", probe=probe)
        self.fleet.asked_to_commit(member, version)
        said = tuple(each - gap for each in SIX_TEXTS.logprobs)
        answer = CommitResult(version=str(version), fingerprint=checksum, probe_logprobs=said, load_s=0.0, pause_s=0.0)
        return bool(self.commits.accept([proof_of(member, answer, packed)], packed))

    def standing(self, name: str, version: PolicyVersion) -> Standing:
        sampled = group(0, trajectory(version.number, incarnation=version.incarnation, instance=f"{name}-1"))
        return self.fleet.provenance.standing(sampled)


def test_a_version_counts_from_the_good_proof_on() -> None:
    ours, version = Weights(), PolicyVersion(1, 0)
    member = ours.member("a")
    assert ours.standing("a", version) is Standing.UNPROVEN
    ours.fleet.asked_to_commit(member, version)
    assert ours.standing("a", version) is Standing.AWAITED
    assert ours.proves(member, version, checksum="right")
    assert ours.standing("a", version) is Standing.PROVEN


def test_what_a_process_says_is_believed_from_its_proof_on_until_it_is_distrusted() -> None:
    ours, version = Weights(), PolicyVersion(1, 5)
    member, told = ours.member("a"), ours.fleet.provenance.believed
    assert told("a-1", version) is False
    ours.fleet.asked_to_commit(member, version)
    assert told("a-1", version) is None
    assert ours.proves(member, version, checksum="right")
    assert told("a-1", version) is True
    assert told("b-1", version) is False
    ours.fleet.provenance.forget(below=7)
    assert told("a-1", version) is True, "nobody knows any more"
    ours.fleet.distrust("a-1", since=version)
    assert told("a-1", version) is False
    assert told("a-1", PolicyVersion(1, 4)) is True


def compared_with(name: str, version: PolicyVersion, *, own: PolicyVersion) -> TrajectoryGroup:
    """A group that was sampled by process a-1, with a greedy answer of another."""
    spans = (VersionSpan(version=str(version), start=2, end=3, instance=f"{name}-1"),)
    record = RewardRecord(verifier="test", reward=1.0)
    greedy = GreedyBaseline(reward=record, version_spans=spans, sampled_tokens=1, generator_ids=(name,))
    sampled = group(0, trajectory(own.number, incarnation=own.incarnation, instance="a-1"))
    return sampled.model_copy(update={"greedy_baseline": greedy})


def test_an_unproven_greedy_answer_is_told_of_its_own_generator() -> None:
    ours, version = Weights(), PolicyVersion(1, 0)
    assert ours.proves(ours.member("a"), version, checksum="right")
    sampled = compared_with("b", version, own=version)
    assert ours.fleet.provenance.standing(sampled) is Standing.UNPROVEN
    said = ours.fleet.provenance.fault(sampled)
    assert "did not prove to serve it (the greedy answer was sampled by b): they are sampled again" in said
    ours.fleet.asked_to_commit(ours.member("b"), version)
    assert ours.fleet.provenance.standing(sampled) is Standing.AWAITED
    neither = compared_with("b", version, own=PolicyVersion(1, 1))
    assert "version 1.1 were sampled by a generator that did not prove to serve it (the group was sampled by g)" in (
        ours.fleet.provenance.fault(neither)
    )


def test_a_greedy_answer_of_a_version_whose_proofs_are_forgotten_is_not_proven() -> None:
    """Its tokens are trained by nobody, so nobody drops it for its age: its reward would count unproven. A group that
    is too old itself is not asked for any proof.
    """
    ours, old, new = Weights(), PolicyVersion(1, 0), PolicyVersion(1, 2)
    provenance = ours.fleet.provenance
    for version in (old, new):
        assert ours.proves(ours.member("a"), version, checksum=f"of {version}")
    sampled = compared_with("a", old, own=new)
    assert provenance.standing(sampled) is Standing.PROVEN
    provenance.forget(below=1)
    assert provenance.standing(sampled) is Standing.UNPROVEN
    assert "version 1.0 were sampled by a generator that may have proven to serve it, too long" in provenance.fault(
        sampled
    )
    assert "the greedy answer was sampled by a" in provenance.fault(sampled)
    assert provenance.standing(compared_with("a", old, own=old)) is Standing.PROVEN
    assert provenance.standing(compared_with("a", new, own=new)) is Standing.PROVEN


def test_a_first_proof_that_a_far_better_one_contradicts_is_withdrawn() -> None:
    """A generator with the weights of one step before: within the tolerance, and the first to commit."""
    ours, version = Weights(), PolicyVersion(1, 6)
    old, right = ours.member("old"), ours.member("right")
    assert ours.proves(old, version, checksum="that of 5", gap=0.014)
    assert ours.standing("old", version) is Standing.PROVEN, "nobody knows better"
    assert ours.proves(right, version, checksum="that of 6")
    assert [member.generator_id for member in ours.fleet.members()] == ["right"]
    assert ours.standing("old", version) is Standing.UNPROVEN
    assert ours.standing("right", version) is Standing.PROVEN
    sampled = group(0, trajectory(6, incarnation=1, instance="old-1"))
    assert ours.fleet.provenance.recalled([sampled]) == [sampled]
    assert ours.fleet.provenance.recalled([sampled]) == [], "it is said once"


def test_a_later_proof_that_is_as_good_does_not_overturn_the_first() -> None:
    ours, version = Weights(), PolicyVersion(1, 6)
    first, second = ours.member("first"), ours.member("second")
    assert ours.proves(first, version, checksum="x", gap=1e-5)
    assert not ours.proves(second, version, checksum="y")
    assert [member.generator_id for member in ours.fleet.members()] == ["first"]


def test_evidence_of_old_weights_speaks_against_all_versions_under_which_it_gathered() -> None:
    ours = Weights()
    member = ours.member("a")
    versions = [PolicyVersion(1, number) for number in range(6)]
    for version in versions[:2]:
        assert ours.proves(member, version, checksum=f"of {version}", age=0.01)
    good = 0
    for version in versions[2:]:
        if not ours.proves(member, version, checksum=f"of {version}", gap=0.012, age=0.01):
            break
        good += 1
    assert good >= 1, "one probe is not enough"
    for version in versions[2 : 3 + good]:
        assert ours.standing("a", version) is Standing.UNPROVEN
    assert ours.standing("a", versions[1]) is Standing.PROVEN


def test_what_was_proven_is_known_to_the_learners_next_life(tmp_path: Path) -> None:
    before = Weights()
    member = before.member("a")
    assert before.proves(member, PolicyVersion(1, 5), checksum="of 5")
    with Journal.open(tmp_path / "journal") as journal:
        for news in before.fleet.provenance.untold():
            journal.append_provenance(news)
    proofs = [record for record in read_journal(tmp_path / "journal") if isinstance(record, LoggedProof)]

    after = Weights()
    after.fleet.provenance.restore(proofs)
    assert after.standing("a", PolicyVersion(1, 5)) is Standing.PROVEN
    assert not after.proves(after.member("a"), PolicyVersion(2, 6), checksum="of 5", gap=0.001), "it did not load them"
    assert after.standing("a", PolicyVersion(2, 6)) is Standing.UNPROVEN
    assert after.standing("a", PolicyVersion(1, 5)) is Standing.PROVEN


def test_news_that_the_journal_did_not_take_are_told_again() -> None:
    ours = Weights()
    for name in "ab":
        assert ours.proves(ours.member(name), PolicyVersion(1, 0), checksum="x")
    told = ours.fleet.provenance.untold()
    assert set(next(told).fingerprints) == {"a-1", "b-1"}  # type: ignore[union-attr]
    told.close()  # type: ignore[attr-defined]
    assert len(list(ours.fleet.provenance.untold())) == 1
    assert list(ours.fleet.provenance.untold()) == []
    ours.fleet.provenance.tell_again()
    assert len(list(ours.fleet.provenance.untold())) == 1


def test_what_is_too_old_to_be_trained_is_forgotten() -> None:
    provenance = Provenance()
    ours = Weights(FleetMembers(
        fingerprints=FINGERPRINTS, incarnation=1, announce_every_s=1.0, silence_s=60.0, changed=lambda: None,
        provenance=provenance,
    ))  # fmt: skip
    for number in range(3):
        assert ours.proves(ours.member("a"), PolicyVersion(1, number), checksum=f"of {number}")
    list(provenance.untold())
    provenance.forget(below=2)
    provenance.tell_again()
    assert [news.version.number for news in provenance.untold() if isinstance(news, LoggedProof)] == [2]


def test_a_distrust_is_told_to_the_next_segment_too_unless_the_process_has_proven_itself_since() -> None:
    provenance, since = Provenance(), PolicyVersion(1, 1)
    for instance in ("a", "b"):
        for number in range(3):
            provenance.prove(instance, LoadedWeights(PolicyVersion(1, number), "d", "f"))
        provenance.distrust(instance, since=since)
    provenance.prove("b", LoadedWeights(PolicyVersion(1, 3), "d", "f"))
    list(provenance.untold())
    provenance.tell_again()
    first, *proofs = provenance.untold()
    assert first == LoggedDistrust("a", since)
    assert proofs == [
        LoggedProof(PolicyVersion(1, 0), "d", {"a": "f", "b": "f"}),
        LoggedProof(PolicyVersion(1, 3), "d", {"b": "f"}),
    ]
    provenance.tell_again()
    assert list(provenance.untold()) == proofs, "no group of it is copied any more"
