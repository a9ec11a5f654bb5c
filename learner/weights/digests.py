"""Hashes of what is published: of each bucket, to check its arrival, and of all values, to tell versions apart.

A version's digest is made of one of each tensor, so that it does not depend on which rank has hashed what.
"""

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial

import torch
import xxhash

from learner.weights.process_group import Bucket, LaidOut, NamedTensors, in_thread
from services.process import DaemonThreads

_DIGEST_ELEMENTS = 1 << 20


def tensor_digest(tensor: torch.Tensor) -> str:
    """XXH3 over the values at half precision, hexadecimal: a finer change may be lost by rounding in an engine."""
    digest = xxhash.xxh3_64()
    flat = tensor.detach().contiguous().view(-1)
    for start in range(0, flat.numel(), _DIGEST_ELEMENTS):  # not all of it twice
        part = flat[start : start + _DIGEST_ELEMENTS]
        value = part.to(torch.bfloat16) if part.is_floating_point() else part
        digest.update(value.view(torch.uint8).numpy().data)
    return str(digest.hexdigest())


def combined_digest(digests: Mapping[str, str]) -> str:
    """The digest of a version, by the digests of its tensors by name, in whatever order.

    Versions of different digests have to be different in an engine of whatever type.
    """
    told = "\n".join(f"{name} {digests[name]}" for name in sorted(digests))
    return str(xxhash.xxh3_64_hexdigest(told.encode()))


def digest_of(tensors: NamedTensors) -> str:
    """The digest of a version of these tensors."""
    return combined_digest({name: tensor_digest(tensor) for name, tensor in tensors})


def _digests(laid_out: LaidOut) -> dict[str, str]:
    return {name: tensor_digest(tensor) for name, tensor in laid_out.named()}


async def hashed(
    laid_outs: Sequence[LaidOut], *, threads: DaemonThreads, sender: int = 0, for_devices: bool = False
) -> tuple[Sequence[Bucket], dict[str, str]]:
    """Buckets, and the digests of their tensors by name, made beside each other by two threads: both let go of the
    GIL. Nothing is copied. `for_devices` as in `LaidOut.hashed`.
    """
    buckets: list[Bucket] = []
    digests: dict[str, str] = {}
    for laid_out in laid_outs:
        bucket, found = await asyncio.gather(
            in_thread(partial(laid_out.hashed, sender=sender, for_devices=for_devices), threads=threads),
            in_thread(partial(_digests, laid_out), threads=threads),
        )
        buckets.append(bucket)
        digests |= found
    return buckets, digests
