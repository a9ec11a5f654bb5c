"""Hashes of what a worker received and of what it holds, computed where the bytes are.

XXH3 reads a host's memory; what is on a device is hashed by torch there, so that nothing crosses the bus for it.
"""

import torch
import xxhash

from generator.weights.plan import WeightSyncError
from protocol.fleet import BucketSpec
from services.tensor_hash import tensor_hash

HOST = frozenset({"cpu"})
"""Types of devices whose memory XXH3 reads."""


def verify_bucket(buffer: torch.Tensor, *, bucket: BucketSpec, index: int) -> None:
    """Raises WeightSyncError if these bytes [nbytes] uint8 are not those of the plan."""
    on_device = bucket.device_hash and buffer.device.type not in HOST
    found = tensor_hash(buffer) if on_device else xxhash.xxh3_64_hexdigest(buffer.cpu().numpy().data)
    planned = bucket.device_hash if on_device else bucket.xxh3
    if found != planned:
        raise WeightSyncError(f"bucket {index} has hash {found}, its plan says {planned}")


def update_digest(digest: xxhash.xxh3_64, tensor: torch.Tensor) -> None:
    """Adds a tensor's bytes to a digest, or their hash if they are on a device."""
    if tensor.device.type in HOST:
        digest.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
    else:
        digest.update(tensor_hash(tensor).encode())
