"""The end of every way by which weights reach a generator: it commits, and its proofs are judged."""

import logging
from collections.abc import Sequence

from pydantic import BaseModel

from learner.weights.fleet import Fleet, Member
from learner.weights.proofs import Proof, Proofs, proof_of
from learner.weights.shelf import Packed
from protocol.fleet import Commit, Committed
from services.http_client import HttpClient, R, ServiceError

log = logging.getLogger(__name__)


class Commits:
    """Asks members to commit, and takes those whose proofs are good into service."""

    def __init__(self, *, fleet: Fleet, client: HttpClient, proofs: Proofs, timeout_s: float) -> None:
        self._fleet = fleet
        self._client = client
        self._proofs = proofs
        self._timeout_s = timeout_s

    async def ask(self, member: Member, what: str, body: BaseModel, answer: type[R], *, deadline_s: float) -> R:
        """One step of a weight sync. Raises ServiceError, which names the member's address."""
        url = f"{member.url}/v1/weights/{what}"
        return await self._client.post(url, body, answer, deadline_s=deadline_s, retries=0)

    async def commit(self, member: Member, packed: Packed, *, epoch: int) -> Proof:
        """The member loads and serves this version; its proof is not judged yet. Raises ServiceError."""
        body = Commit(version=str(packed.version), epoch=epoch, probe_token_ids=packed.probe_token_ids)
        answer = await self.ask(member, "commit", body, Committed, deadline_s=self._timeout_s)
        return proof_of(member, answer, packed)

    async def proof(self, member: Member, packed: Packed, *, epoch: int) -> Proof | None:
        """As `commit`, for one of many: a failure takes the member out of service, and None is returned."""
        try:
            return await self.commit(member, packed, epoch=epoch)
        except ServiceError as error:
            log.warning("generator %s did not commit version %s: %s", member.generator_id, packed.version, error)
            self._fleet.suspend(member)
            return None

    def accept(self, proofs: Sequence[Proof], packed: Packed) -> list[Proof]:
        """Those with good proofs serve the version from now on, and are returned; the others are expelled."""
        present = [proof for proof in proofs if self._fleet.holds(proof.member)]
        faults = self._proofs.faults(present, packed)
        for name, fault in faults.items():
            log.error("generator %s is expelled: %s", name, fault)
            self._fleet.expel(name, reason=fault)
        good = [proof for proof in present if proof.name not in faults]
        for proof in good:
            self._fleet.committed(proof.name, version=packed.version, fingerprint=proof.answer.fingerprint)
        return good
