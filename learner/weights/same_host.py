"""Members of the fleet that map new weights from this process's memory, and take no part in a broadcast.

    asked once ─▶ the secret in a file of ours? ─▶ prepare, with the buckets' files ─▶ commit
                        └ no: another host, or container, or user: the broadcast

The answer is the proof: names and addresses of hosts play no part. Hashes, fingerprint and probe are as after a
broadcast.
"""

import asyncio
import logging
from collections.abc import Sequence

from learner.weights.fleet import FleetMember
from learner.weights.process_group import Bucket
from learner.weights.proofs import Commits
from learner.weights.provenance import InstanceMemory
from learner.weights.published import PackedWeights
from learner.weights.shared_files import HostProof, SharedFile
from protocol.fleet import PULLED_EPOCH, Prepare, PrepareResult, SharedMemoryAnswer
from services.http.client import ServiceError, ServiceRefused
from services.model_folder import SLOWEST_BYTES_PER_S

logger = logging.getLogger(__name__)

_ASK_S = 3.0


class SameHost:
    """Knows which members can map this process's memory, and has them do so."""

    def __init__(self, *, commits: Commits) -> None:
        self._commits = commits
        self._maps: InstanceMemory[bool] = InstanceMemory()
        self._proof: HostProof | None = None

    async def among(self, members: Sequence[FleetMember], packed: PackedWeights) -> list[FleetMember]:
        """The members that can map this version. Those that were not asked before are: 3 s at most.

        Adapters are small; workers that share a model read slices, which are cut for the broadcast alone.
        """
        if not members or packed.adapter is not None or packed.links or not _files_of(packed):
            return []
        alone = [member for member in members if member.announcement.world_size == 1]
        unknown = [member for member in alone if self._maps.get(_process(member)) is None]
        await asyncio.gather(*(self._ask(member) for member in unknown))
        return [member for member in alone if self._maps.get(_process(member))]

    async def prepare(self, member: FleetMember, packed: PackedWeights, *, grace_s: float) -> PrepareResult:
        """The member maps and verifies the version. Raises ServiceError: it is broadcast to from then on."""
        files = _files_of(packed)
        member.form, member.sent_bytes = "whole", 0
        body = Prepare(
            version=str(packed.version), epoch=PULLED_EPOCH, buckets=tuple(bucket.spec for bucket in packed.buckets),
            files=tuple(file.path for file in files),
        )  # fmt: skip
        deadline_s = grace_s + packed.nbytes("whole") / SLOWEST_BYTES_PER_S
        for file in files:
            file.lend()
        try:
            return await self._commits.ask(member, "prepare", body, PrepareResult, deadline_s=deadline_s)
        except ServiceError:
            self._maps[_process(member)] = False
            raise

    def loaded(self, packed: PackedWeights) -> None:
        """A member that has mapped this version has loaded it, and reads it no more."""
        for file in _files_of(packed):
            file.take_back()

    async def _ask(self, member: FleetMember) -> None:
        try:
            if self._proof is None:
                self._proof = HostProof()
            answer = await self._commits.ask(
                member, "host", self._proof.question, SharedMemoryAnswer, deadline_s=_ASK_S
            )
        except (ServiceRefused, OSError) as error:
            logger.info("generator %s is broadcast to: it does not map shared memory: %s", member.generator_id, error)
            self._maps[_process(member)] = False
        except ServiceError as error:  # silent, or not there: the meeting will tell
            logger.debug("generator %s does not say if it is on this host: %s", member.generator_id, error)
        else:
            self._maps[_process(member)] = maps = self._proof.is_shown_by(answer)
            if maps:
                logger.info("generator %s is on this host, and maps new weights from memory", member.generator_id)


def _files_of(packed: PackedWeights) -> Sequence[SharedFile]:
    """The files of all its buckets; none if one of them has none."""
    files = [bucket.file for bucket in packed.buckets if isinstance(bucket, Bucket) and bucket.file is not None]
    return files if len(files) == len(packed.buckets) else []


def _process(member: FleetMember) -> tuple[str, str]:
    return member.generator_id, member.instance
