"""Weights prove themselves: whether a generator serves what it was sent.

Three proofs, each of something else. The hashes of the buckets, checked on arrival, prove the bytes. The checksum of
the loaded parameters agrees between generators of one kind, and changes when the weights do (by more than a rounding of
the engine's may hide): it catches a load that did not take place. The logprobs of a fixed text agree with the
learner's: they catch a wrong load, not an old version.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from learner.weights.fleet import Member
from learner.weights.shelf import Packed
from protocol.fleet import Committed
from protocol.versions import PolicyVersion


@dataclass(frozen=True)
class Proof:
    """A member's answer to a commit, and its gap in nats to the learner's logprobs of the probe."""

    member: Member
    answer: Committed
    gap: float

    @property
    def name(self) -> str:
        return self.member.generator_id

    @property
    def likeness(self) -> tuple[str, str, int]:
        """Generators that agree on this have equal checksums of equal weights."""
        announcement = self.member.announcement
        return announcement.kind, announcement.backend, announcement.world_size


def proof_of(member: Member, answer: Committed, packed: Packed) -> Proof:
    """The gap is the largest over the probe's tokens; infinite if the answer is not one of this probe."""
    ours, theirs = np.array(packed.probe_logprobs), np.array(answer.probe_logprobs)
    fits = ours.shape == theirs.shape and answer.version == str(packed.version)
    gap = float(np.abs(ours - theirs).max(initial=0.0)) if fits else float("inf")
    return Proof(member=member, answer=answer, gap=gap)


@dataclass(frozen=True)
class _Loaded:
    """What a process proved last."""

    version: PolicyVersion
    digest: str
    fingerprint: str


class Proofs:
    """Judges proofs. `probe_tolerance` bounds the gap in nats; where it is larger, three times the gap at join does."""

    def __init__(self, *, probe_tolerance: float) -> None:
        self._probe_tolerance = probe_tolerance
        self._first_gaps: dict[tuple[str, str], float] = {}
        self._loaded: dict[tuple[str, str], _Loaded] = {}
        self._believed: dict[tuple[str, str, int], tuple[PolicyVersion, str]] = {}

    def faults(self, proofs: Sequence[Proof], packed: Packed) -> dict[str, str]:
        """Who does not serve what was sent, and why, by id. The proofs are of commits of one version.

        One with a wrong probe, or a checksum that did not change, has no say in which checksum is right.
        """
        found = {proof.name: fault for proof in proofs if (fault := self._own_fault(proof, packed)) is not None}
        for kind in {proof.likeness for proof in proofs}:
            alike = [proof for proof in proofs if proof.likeness == kind and proof.name not in found]
            found |= self._odd_ones_out(alike, packed)
        for proof in proofs:
            if proof.name not in found:
                self._loaded[_process(proof)] = _Loaded(packed.version, packed.digest, proof.answer.fingerprint)
        return found

    def _own_fault(self, proof: Proof, packed: Packed) -> str | None:
        first = self._first_gaps.setdefault(_process(proof), proof.gap)
        allowed = self._probe_tolerance if first == proof.gap else max(3 * first, self._probe_tolerance)
        if not proof.gap <= allowed:
            return (
                f"its logprobs of the probe differ by {proof.gap:.3g} nats from the learner's at version "
                f"{packed.version}; at most {allowed:.3g} is allowed"
            )
        before = self._loaded.get(_process(proof))
        if before and before.fingerprint == proof.answer.fingerprint and before.digest != packed.digest:
            return (
                f"the checksum of its loaded weights is {before.fingerprint} at version {packed.version} as it was at "
                f"{before.version}, but other weights were sent: it did not load them"
            )
        return None

    def _odd_ones_out(self, alike: Sequence[Proof], packed: Packed) -> dict[str, str]:
        """Those whose checksum is not that of an earlier proof of this version, or else the commonest one.

        Among equally common ones that of the smallest probe gap is believed.
        """
        if not alike:
            return {}
        version, fingerprint = self._believed.get(alike[0].likeness, (None, ""))
        if version != packed.version:
            counts = Counter(proof.answer.fingerprint for proof in alike)
            most = max(alike, key=lambda proof: (counts[proof.answer.fingerprint], -proof.gap))
            fingerprint = most.answer.fingerprint
            self._believed[alike[0].likeness] = packed.version, fingerprint
        return {
            proof.name: f"the checksum of its loaded weights at version {packed.version} is "
            f"{proof.answer.fingerprint}; the other generators' is {fingerprint}"
            for proof in alike
            if proof.answer.fingerprint != fingerprint
        }


def _process(proof: Proof) -> tuple[str, str]:
    return proof.name, proof.member.announcement.instance
