"""Published weights: which are kept for downloads, for how long, and how they are served."""

import asyncio
from collections.abc import Iterator

import pytest
import torch
import xxhash
from fastapi import FastAPI
from fastapi.testclient import TestClient

from learner.weights.digests import combined_digest, digest_of, tensor_digest
from learner.weights.probe import Probe
from learner.weights.process_group import lay_out, pack_buckets
from learner.weights.published import (
    CHUNK_BYTES,
    PackedWeights,
    Packer,
    PublishedWeights,
    Snapshot,
    VersionNotPublished,
    add_weight_routes,
)
from learner.weights.senders import own_buckets
from protocol.fleet import CHUNK_HASH_HEADER, PullPlan
from protocol.model import PolicyVersion
from protocol.status import Readiness
from services.http.app import create_app
from services.http.metrics import Metrics
from services.process import DaemonThreads


def packed(number: int) -> PackedWeights:
    buckets = pack_buckets([("w", torch.full((100,), float(number)))], bucket_bytes=1 << 20)
    return PackedWeights(version=PolicyVersion(1, number), buckets=buckets, digest="", probe=Probe())


@pytest.fixture
def shelf() -> PublishedWeights:
    return PublishedWeights()


@pytest.fixture
def client(shelf: PublishedWeights) -> Iterator[TestClient]:
    app: FastAPI = create_app(
        service="learner", version="1", token=None, readiness=lambda: Readiness(ready=True), metrics=Metrics("learner")
    )
    add_weight_routes(app, shelf=shelf)
    with TestClient(app) as client:
        yield client


def test_only_the_newest_version_is_kept_and_what_somebody_still_downloads(shelf: PublishedWeights) -> None:
    first = packed(1)
    shelf.put(first)
    with shelf.lent(first):
        shelf.put(packed(2))
        shelf.put(packed(3))
        assert shelf.plan("1.1").total_bytes == 400
        with pytest.raises(VersionNotPublished, match=r"version 1\.2 is not kept here any more, .*; kept: 1\.1, 1\.3"):
            shelf.plan("1.2")
    with pytest.raises(VersionNotPublished, match=r"kept: 1\.3"):
        shelf.plan("1.1")


def test_a_digest_tells_apart_what_differs_at_half_precision_and_nothing_finer() -> None:
    def digest(value: float) -> str:
        return digest_of([("w", torch.full((100,), value)), ("count", torch.tensor([3]))])

    assert digest(1.0) == digest(1.0) == digest(1.0 + 1e-6) != digest(1.01)


def test_packing_hashes_the_buckets_of_the_host_copy_where_they_are() -> None:
    tensors = [(str(number), torch.full((1001,), number + 0.1, dtype=torch.bfloat16)) for number in range(9)]
    expected, digest = pack_buckets(tensors, bucket_bytes=4096), digest_of(tensors)
    snapshot = Snapshot(version=5, buckets=lay_out(tensors, bucket_bytes=4096), probe=Probe())

    packed = asyncio.run(Packer(incarnation=2, threads=DaemonThreads(name="pack")).pack(snapshot))

    assert (str(packed.version), packed.digest) == ("2.5", digest)
    assert [bucket.spec for bucket in packed.buckets] == [bucket.spec for bucket in expected]
    assert [bucket.data.data_ptr() for bucket in own_buckets(packed.buckets)] == [
        laid_out.data.data_ptr() for laid_out in snapshot.buckets
    ], "no second copy of the model is made"


def test_a_digest_does_not_depend_on_the_parts_in_which_it_is_made() -> None:
    large = torch.arange((1 << 20) + 7, dtype=torch.float32)
    expected = xxhash.xxh3_64(large.to(torch.bfloat16).view(torch.uint8).numpy().tobytes())
    assert tensor_digest(large) == expected.hexdigest()


def test_a_digest_is_the_same_whoever_has_hashed_which_tensors_and_another_with_other_names() -> None:
    tensors = [(name, torch.full((100,), float(number))) for number, name in enumerate("abc")]
    assert digest_of(tensors) == digest_of(tensors[::-1]) == combined_digest({n: tensor_digest(t) for n, t in tensors})
    swapped = [(name, tensor) for (name, _), (_, tensor) in zip(tensors, tensors[::-1], strict=True)]
    assert digest_of(swapped) != digest_of(tensors)


def test_chunks_make_up_the_bucket_and_carry_their_hash(shelf: PublishedWeights, client: TestClient) -> None:
    shelf.put(packed(7))
    plan = PullPlan.model_validate_json(client.get("/v1/weights/1.7/plan").content)
    assert plan.chunk_bytes == CHUNK_BYTES
    chunks = [client.get(f"/v1/weights/1.7/buckets/0?offset={offset}&length=200") for offset in (0, 200)]
    assert [chunk.headers["content-type"] for chunk in chunks] == ["application/octet-stream"] * 2
    assert [chunk.headers[CHUNK_HASH_HEADER] for chunk in chunks] == [
        xxhash.xxh3_64_hexdigest(chunk.content) for chunk in chunks
    ]
    whole = b"".join(chunk.content for chunk in chunks)
    assert xxhash.xxh3_64_hexdigest(whole) == plan.buckets[0].xxh3


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("1.6/plan", "version 1.6 is not kept"),
        ("1.7/buckets/1?offset=0&length=4", "has no bucket 1"),
        ("1.7/buckets/0?offset=300&length=200", "no 200 bytes at 300"),
        ("1.7/buckets/0?offset=-1&length=2", "no 2 bytes at -1"),
        ("1.7/buckets/0?offset=0&length=0", "no 0 bytes at 0"),
    ],
)
def test_what_is_not_there_is_refused_and_what_there_is_is_told(
    shelf: PublishedWeights, client: TestClient, path: str, text: str
) -> None:
    shelf.put(packed(7))
    answer = client.get(f"/v1/weights/{path}")
    assert (answer.status_code, answer.json()["error"]["kind"]) == (404, "not_kept")
    assert text in answer.json()["error"]["message"]
