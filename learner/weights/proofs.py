"""Proves that a generator serves what it was sent: it commits, and its proofs are judged.

Three proofs, each of something else. The hashes of the buckets, checked on arrival, prove the bytes. The checksum of
the loaded parameters agrees between generators of one kind, and changes when the weights do (by more than a rounding of
the engine's may hide): it catches a load that did not take place. The logprobs of the policy's own texts agree with the
learner's, better than with the version before, and as well as those of like generators do: they catch a wrong load, and
weights that are old.

    a fault that another generator of this version does not have  ─▶ an outlier: it is expelled
    a fault of the probe that all have, so far                    ─▶ doubted: they serve nothing, until one is right
    a gap that like generators share, within `probe_tolerance`    ─▶ numerics: nobody's fault
    logprobs of the learner's own that are not finite             ─▶ its own fault: the probe judges nobody

What a generator sampled under a version counts once its proof is good (`provenance`). Without an answer to the probe
there is no proof: it is asked for again, and after `_PROBE_TRIES` without one the commit has failed.
"""

import asyncio
import logging
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pydantic import BaseModel

from learner.weights.fleet import FleetMember, FleetMembers
from learner.weights.probe import HIGH_QUANTILE, ProbeGap
from learner.weights.provenance import InstanceMemory, Provenance
from learner.weights.published import PackedWeights
from protocol.fleet import INSTANCE_HEADER, Commit, CommitResult, Reprobe, ReprobeResult, WeightForm
from protocol.model import PolicyVersion
from services.http.client import HttpClient, R, ServiceError

logger = logging.getLogger(__name__)

TOLERANCES = {"float32": 0.02, "": 0.5}
"""Nats, of the mean gap; others than float32 are half as wide. Two implementations of one model differed by 1e-5 and
0.05, a wrong load by 0.5 to 2.5 (benchmarks/results/probe.md).
"""
_FLOORS = {"float32": 1e-4, "": 0.01}
_TIMES = 3.0
"""A generator whose gap is larger than so many times that of like ones, and the floor, is an outlier."""
_HIGH_TOLERANCE = 5.0
"""The high quantile may be so many times as large as the mean."""
SURE = 14.0
"""Evidence in nats that weights are old, at which it is believed: about one in a million is wrong."""
_VERSIONS_KEPT = 4
_PROBE_TRIES = 3
_PROBE_REST_S = 1.0


class ProbeUnanswered(ServiceError):
    """A generator serves a version, and its engine did not come to the probe of it: nobody knows what it serves."""


@dataclass(frozen=True)
class Proof:
    """A member's answer to a commit, and how far its logprobs of the probe are from the learner's."""

    member: FleetMember
    answer: CommitResult
    gap: ProbeGap
    form: WeightForm = "whole"
    sent_bytes: int | None = None

    @property
    def name(self) -> str:
        return self.member.generator_id

    @property
    def likeness(self) -> tuple[str, str, int]:
        """Generators that agree on this have equal checksums of equal weights."""
        announcement = self.member.announcement
        return announcement.kind, announcement.backend, announcement.world_size

    @property
    def process(self) -> tuple[str, str]:
        return self.name, self.member.announcement.instance

    def received_bytes(self, packed: PackedWeights) -> int:
        """The bytes that were sent to the member for it."""
        return packed.nbytes(self.form) if self.sent_bytes is None else self.sent_bytes


def proof_of(member: FleetMember, answer: CommitResult, packed: PackedWeights) -> Proof:
    """The gap is infinite if the answer is not one of this probe."""
    probe = packed.probe.within(member.announcement.max_model_len)
    if answer.version != str(packed.version):
        gap = ProbeGap.of(probe, ()) if probe.texts else ProbeGap()
    elif not probe.usable and not answer.probe_logprobs:
        gap = ProbeGap()
    else:
        gap = ProbeGap.of(probe, answer.probe_logprobs)
    return Proof(member=member, answer=answer, gap=gap, form=member.form, sent_bytes=member.sent_bytes)


@dataclass(frozen=True)
class ProbeVerdict:
    """Members that serve something else than was sent, and why: `outliers` for certain, `doubted` as far as is known;
    and by process the version since which each of them may do so.
    """

    outliers: Mapping[FleetMember, str]
    doubted: Mapping[FleetMember, str]
    since: Mapping[str, PolicyVersion]


@dataclass(frozen=True)
class _Age:
    """Evidence in nats that a process serves old weights, and the version at which it began to gather."""

    evidence: float
    since: PolicyVersion


@dataclass
class _VersionFacts:
    """The known facts of a version: the checksum that is believed for each kind, and who stood the test."""

    checksums: dict[tuple[str, str, int], str] = field(default_factory=dict)
    good: dict[tuple[str, str], Proof] = field(default_factory=dict)


class Proofs:
    """Judges proofs. `probe_tolerance` bounds the mean gap in nats; None for the usual one of the numbers' type.

    `dtype` and `as_computed` are as in `PublisherOptions`, `provenance` knows what each process has proven before.
    """

    def __init__(
        self, *, probe_tolerance: float | None, dtype: str, provenance: Provenance, as_computed: bool = True
    ) -> None:
        self._probe_tolerance = probe_tolerance
        self._dtype = dtype
        self._as_computed = as_computed
        self._provenance = provenance
        self._age: InstanceMemory[_Age] = InstanceMemory()
        self._seen: dict[PolicyVersion, _VersionFacts] = {}

    def judge(self, proofs: Sequence[Proof], packed: PackedWeights) -> ProbeVerdict:
        """The proofs are of commits of one version. One with a fault has no say in which checksum is right."""
        seen = self._seen_of(packed.version)
        outliers = {proof.member: fault for proof in proofs if (fault := self._load_fault(proof, packed)) is not None}
        doubted = self._probe_faults([proof for proof in proofs if proof.member not in outliers], packed)
        fine = [proof for proof in proofs if proof.member not in outliers | doubted]
        for kind in {proof.likeness for proof in fine}:
            alike = [proof for proof in fine if proof.likeness == kind]
            outliers |= self._other_checksums(alike, packed, seen=seen)
            outliers |= self._other_gaps(alike, packed, seen=seen)
        for proof in fine:
            if proof.member not in outliers:
                seen.good[proof.process] = proof
        wrong = outliers | doubted
        if wrong:
            seen.good = {process: proof for process, proof in seen.good.items() if proof.member not in wrong}
        ages = {proof.member: self._since(proof, packed) for proof in proofs}
        since = {member.instance: ages.get(member, packed.version) for member in wrong}
        if any(proof.gap.tokens for proof in seen.good.values()):  # so it is not the learner's fault, nor numerics
            return ProbeVerdict(outliers=outliers | doubted, doubted={}, since=since)
        return ProbeVerdict(outliers=outliers, doubted=doubted, since=since)

    def _since(self, proof: Proof, packed: PackedWeights) -> PolicyVersion:
        """From which version on a process that has a fault now may have had it."""
        age = self._age.get(proof.process)
        return packed.version if age is None or age.evidence <= SURE else age.since

    def _seen_of(self, version: PolicyVersion) -> _VersionFacts:
        seen = self._seen.setdefault(version, _VersionFacts())
        for old in sorted(self._seen)[:-_VERSIONS_KEPT]:
            if old != version:
                del self._seen[old]
        return seen

    def _load_fault(self, proof: Proof, packed: PackedWeights) -> str | None:
        """By what the learner remembers of it, and by what it remembers itself: after a loss of power the learner's
        memory may be of an earlier version than it has, or be gone.
        """
        for before in (self._provenance.last(proof.member.instance), proof.answer.former):
            if before and before.fingerprint == proof.answer.fingerprint and before.digest != packed.digest:
                return (
                    f"the checksum of its loaded weights is {before.fingerprint} at version {packed.version} as it was "
                    f"at {before.version}, but other weights were sent: it did not load them"
                )
        return None

    def _probe_faults(self, proofs: Sequence[Proof], packed: PackedWeights) -> dict[FleetMember, str]:
        if not packed.probe.usable:
            logger.error(
                "the learner's own logprobs of the probe are not finite at version %s: its weights are broken, and no "
                "generator is judged by them",
                packed.version,
            )
            return {}
        return {proof.member: fault for proof in proofs if (fault := self._probe_fault(proof, packed)) is not None}

    def _probe_fault(self, proof: Proof, packed: PackedWeights) -> str | None:
        gap, allowed = proof.gap, self._allowed(proof)
        if not gap.finite:
            return f"it did not answer the probe of version {packed.version} with a finite logprob for each token"
        if gap.mean > allowed or gap.high > _HIGH_TOLERANCE * allowed:
            return (
                f"its logprobs of the probe differ by {gap.mean:.3g} nats in the mean, and by {gap.high:.3g} at the "
                f"{HIGH_QUANTILE:.0%} quantile, from the learner's at version {packed.version}; at most {allowed:.3g} "
                f"and {_HIGH_TOLERANCE * allowed:.3g} are allowed"
            )
        evidence = self._gather(proof, packed).evidence
        if evidence > SURE:
            return (
                f"its logprobs of the probe are not those of version {packed.version} but of the one before or an "
                f"older one (evidence {evidence:.3g} nats, {SURE:g} are believed): it serves old weights"
            )
        return None

    def _gather(self, proof: Proof, packed: PackedWeights) -> _Age:
        before = self._age.get(proof.process)
        age = proof.gap.age if self._tells_age(proof) else 0.0
        evidence = max(0.0, (before.evidence if before else 0.0) + age)
        since = before.since if before and before.evidence else packed.version
        found = self._age[proof.process] = _Age(evidence, since)
        return found

    def _tells_age(self, proof: Proof) -> bool:
        """True if its logprobs can tell which of two versions it serves. What is rounded after the learner's step stays
        for some steps as it was, and then moves more: the right weights are often nearer to those before.
        """
        return self._as_computed and len(set(self._types(proof))) == 1

    def _allowed(self, proof: Proof) -> float:
        return self._probe_tolerance or max(TOLERANCES.get(t, TOLERANCES[""]) for t in self._types(proof))

    def _types(self, proof: Proof) -> tuple[str, str]:
        """Of the learner's numbers, and of the generator's."""
        return self._dtype, proof.member.announcement.dtype or self._dtype

    def _floor(self, proof: Proof) -> float:
        return max(_FLOORS.get(t, _FLOORS[""]) for t in self._types(proof))

    def _other_gaps(
        self, alike: Sequence[Proof], packed: PackedWeights, *, seen: _VersionFacts
    ) -> dict[FleetMember, str]:
        """The generators that are much further from the learner than like generators are at this version."""
        kind = alike[0].likeness
        all_alike = {proof.process: proof.gap for proof in (*seen.good.values(), *alike) if proof.likeness == kind}
        compared = {process: gap for process, gap in all_alike.items() if gap.tokens}
        means, highs = sorted(gap.mean for gap in compared.values()), sorted(gap.high for gap in compared.values())
        floor = self._floor(alike[0])
        found = {}
        for proof in alike:
            own = compared.get(proof.process)
            if len(compared) == (own is not None):
                continue  # there is nobody else
            mean = _TIMES * median_of_others(means, None if own is None else own.mean) + floor
            high = _TIMES * median_of_others(highs, None if own is None else own.high) + _HIGH_TOLERANCE * floor
            if proof.gap.mean > mean or proof.gap.high > high:
                found[proof.member] = (
                    f"its logprobs of the probe differ by {proof.gap.mean:.3g} nats in the mean, and by "
                    f"{proof.gap.high:.3g} at the {HIGH_QUANTILE:.0%} quantile, from the learner's at version "
                    f"{packed.version}; from like generators at most {mean:.3g} and {high:.3g} are expected"
                )
        return found

    def _other_checksums(
        self, alike: Sequence[Proof], packed: PackedWeights, *, seen: _VersionFacts
    ) -> dict[FleetMember, str]:
        """The generators whose checksum is not the one that is believed; they may have proven this version before."""
        kind = alike[0].likeness
        all_alike = [*(proof for proof in seen.good.values() if proof.likeness == kind), *alike]
        believed = seen.checksums[kind] = self._believed(all_alike, before=seen.checksums.get(kind))
        return {
            proof.member: f"the checksum of its loaded weights at version {packed.version} is "
            f"{proof.answer.fingerprint}; the other generators' is {believed}"
            for proof in all_alike
            if proof.answer.fingerprint != believed
        }

    def _believed(self, alike: Sequence[Proof], *, before: str | None) -> str:
        """The checksum that was believed before, or else the commonest, and of equally common ones that of the smallest
        gap; unless another one's gap is smaller by as much as makes an outlier: then most, or the first, were wrong.
        """
        counts = Counter(proof.answer.fingerprint for proof in alike)
        most = max(alike, key=lambda proof: (counts[proof.answer.fingerprint], -proof.gap.mean))
        believed = before or most.answer.fingerprint
        compared = [proof for proof in alike if proof.gap.tokens]
        ours = min((proof.gap.mean for proof in compared if proof.answer.fingerprint == believed), default=None)
        if ours is None:
            return believed
        best = min(compared, key=lambda proof: proof.gap.mean)
        return best.answer.fingerprint if ours > _TIMES * best.gap.mean + self._floor(best) else believed


def median_of_others(ordered: Sequence[float], left_out: float | None) -> float:
    """The median of the values in order, one `left_out` of them; they are more than that one."""
    count = len(ordered) - (left_out is not None)
    gap = len(ordered) if left_out is None else bisect_left(ordered, left_out)
    low, high = (at + (at >= gap) for at in ((count - 1) // 2, count // 2))
    return (ordered[low] + ordered[high]) / 2


class Commits:
    """Asks members to commit, and takes those whose proofs are good into service."""

    def __init__(self, *, fleet: FleetMembers, client: HttpClient, proofs: Proofs, timeout_s: float) -> None:
        self._fleet = fleet
        self._client = client
        self._proofs = proofs
        self._timeout_s = timeout_s

    async def ask(self, member: FleetMember, what: str, body: BaseModel, answer: type[R], *, deadline_s: float) -> R:
        """Takes a step of a weight sync. Raises ServiceError, which names the member's address."""
        url = f"{member.url}/v1/weights/{what}"
        # A network may hold a request back until another process listens at the address.
        meant_for = {INSTANCE_HEADER: instance} if (instance := member.announcement.instance) else None
        return await self._client.post(url, body, answer, deadline_s=deadline_s, retries=0, headers=meant_for)

    async def commit(self, member: FleetMember, packed: PackedWeights, *, epoch: int, receive_s: float = 0.0) -> Proof:
        """The member loads and serves this version; its proof is not judged yet. Raises ServiceError, also where its
        engine does not come to the probe.

        `receive_s` is what it may take beside, for one that receives within its commit.
        """
        probe = packed.probe.within(member.announcement.max_model_len)
        body = Commit(version=str(packed.version), epoch=epoch, probe=probe.texts, digest=packed.digest)
        self._fleet.asked_to_commit(member, packed.version)
        try:
            answer = await self.ask(member, "commit", body, CommitResult, deadline_s=self._timeout_s + receive_s)
            if member.sent_bytes is None:  # after slices it tells none
                member.slices = answer.slices
            answer = await self._with_probe(member, answer, packed)
        except BaseException:
            self._fleet.not_committed(member, packed.version)
            raise
        return proof_of(member, answer, packed)

    async def _with_probe(self, member: FleetMember, answer: CommitResult, packed: PackedWeights) -> CommitResult:
        """The answer with the probe's logprobs, asked for again where it has none. Raises ProbeUnanswered."""
        probe = packed.probe.within(member.announcement.max_model_len)
        if not probe.usable or answer.version != str(packed.version):
            return answer
        for tries in range(1, _PROBE_TRIES + 1):
            if answer.probe_logprobs or not probe.logprobs:
                return answer
            logger.warning(
                "generator %s did not come to the probe of version %s (%d of %d tries)",
                member.generator_id, packed.version, tries, _PROBE_TRIES,
            )  # fmt: skip
            if tries < _PROBE_TRIES:
                await asyncio.sleep(_PROBE_REST_S)
                body = Reprobe(version=answer.version, probe=probe.texts)
                again = await self.ask(member, "probe", body, ReprobeResult, deadline_s=self._timeout_s)
                answer = answer.model_copy(update={"probe_logprobs": again.probe_logprobs})
        raise ProbeUnanswered(
            member.url, f"no answer to the probe of version {packed.version} in {_PROBE_TRIES} tries: it is not proven"
        )

    async def proof(self, member: FleetMember, packed: PackedWeights, *, epoch: int) -> Proof | None:
        """As `commit`, for one of many: a failure takes the member out of service, and None is returned."""
        try:
            return await self.commit(member, packed, epoch=epoch)
        except ServiceError as error:
            logger.warning("generator %s did not commit version %s: %s", member.generator_id, packed.version, error)
            self._fleet.suspend(member)
            return None

    def accept(self, proofs: Sequence[Proof], packed: PackedWeights) -> list[Proof]:
        """Accepts good proofs: their generators serve the version from now on, and are returned; outliers are expelled.

        Where no generator is right so far, nobody can say who is wrong: those in doubt serve nothing until one is.
        """
        present = [proof for proof in proofs if self._fleet.holds(proof.member)]
        verdict = self._proofs.judge(present, packed)
        for instance, since in verdict.since.items():
            self._fleet.distrust(instance, since=since)
        expelled = {member.generator_id: why for member, why in verdict.outliers.items() if self._fleet.holds(member)}
        for name, fault in expelled.items():
            self._fleet.expel(name, reason=fault)
        for member, fault in verdict.doubted.items():
            name = member.generator_id
            logger.warning("generator %s is doubted, and serves nothing until another one is right: %s", name, fault)
            self._fleet.doubt(name, reason=fault)
        good = [proof for proof in present if proof.member not in {*verdict.outliers, *verdict.doubted}]
        expelled |= self._fleet.expel_doubted() if any(proof.gap.tokens for proof in good) else {}
        for name, fault in expelled.items():
            logger.error("generator %s is expelled: %s", name, fault)
        for proof in good:
            self._fleet.committed(
                proof.name, version=packed.version, fingerprint=proof.answer.fingerprint, digest=packed.digest,
                base="" if packed.adapter is None else packed.adapter.base,
            )  # fmt: skip
        for proof in proofs:
            if all(proof is not other for other in good):
                self._fleet.not_committed(proof.member, packed.version)
        return good
