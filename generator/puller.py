"""Published weights, downloaded from the learner over HTTP in chunks whose hashes are checked."""

import asyncio
import logging
import os
from collections.abc import Sequence
from pathlib import Path

import xxhash

from generator.weight_plan import WeightSyncError
from protocol.fleet import CHUNK_HASH_HEADER, PULLED_EPOCH, Prepare, PullPlan
from services.http_client import HttpClient, ServiceError, ServiceRefused

log = logging.getLogger(__name__)

CHUNK_TIMEOUT_S = 10.0
FIRST_REST_S = 0.1
LONGEST_REST_S = 2.0


class Puller:
    """Downloads from one learner. A chunk that fails is asked for again until the caller's own deadline."""

    def __init__(self, *, client: HttpClient, learner: str) -> None:
        self._client = client
        self.learner = learner.rstrip("/")

    async def download(self, version: str, folder: Path) -> tuple[Prepare, Sequence[str]]:
        """Writes one file for each bucket of `version` to `folder`; their plan and their paths.

        Raises WeightSyncError if the learner does not have the version, and OSError if there is no room.
        """
        url = f"{self.learner}/v1/weights/{version}"
        try:
            plan = await self._client.get(f"{url}/plan", PullPlan, deadline_s=CHUNK_TIMEOUT_S, retries=3)
        except ServiceError as error:
            raise WeightSyncError(f"the learner gave no plan of version {version}: {error}") from error
        paths = [str(folder / f"{index}.bucket") for index in range(len(plan.buckets))]
        for index, (bucket, path) in enumerate(zip(plan.buckets, paths, strict=True)):
            await self._bucket(f"{url}/buckets/{index}", path, nbytes=bucket.nbytes, chunk_bytes=plan.chunk_bytes)
        return Prepare(version=version, epoch=PULLED_EPOCH, buckets=plan.buckets), paths

    async def _bucket(self, url: str, path: str, *, nbytes: int, chunk_bytes: int) -> None:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            for offset in range(0, nbytes, chunk_bytes):
                length = min(chunk_bytes, nbytes - offset)
                chunk = await self._chunk(f"{url}?offset={offset}&length={length}", length=length)
                await asyncio.to_thread(_write, file, chunk, offset)
        finally:
            os.close(file)

    async def _chunk(self, url: str, *, length: int) -> bytes:
        rest_s = FIRST_REST_S
        while True:
            try:
                chunk, headers = await self._client.download(url, deadline_s=CHUNK_TIMEOUT_S)
            except ServiceRefused as error:
                raise WeightSyncError(f"the learner refused a chunk: {error}") from error
            except ServiceError as error:
                log.info("a chunk is asked for again: %s", error)
            else:
                if len(chunk) == length and headers.get(CHUNK_HASH_HEADER) == xxhash.xxh3_64_hexdigest(chunk):
                    return chunk
                log.warning("a chunk is asked for again: %s: it arrived damaged, %d bytes", url, len(chunk))
            await asyncio.sleep(rest_s)
            rest_s = min(2 * rest_s, LONGEST_REST_S)


def _write(file: int, chunk: bytes, offset: int) -> None:
    rest = memoryview(chunk)
    while rest:
        written = os.pwrite(file, rest, offset)
        rest, offset = rest[written:], offset + written
