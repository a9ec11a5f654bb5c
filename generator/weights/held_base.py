"""Base weights that a worker keeps in host memory, and the weights that adapters make of them."""

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from generator.weights.plan import WeightSyncError, tensor_bytes
from protocol.fleet import FACTOR_ENDS, FACTOR_PREFIX, BucketSpec, LowRank, Prepare, TensorSpec, is_factor


class HeldBase:
    """Kept as it was sent, so that a merged weight is what the learner's own merge would make of it."""

    def __init__(self) -> None:
        self.digest = ""
        self._buckets: Sequence[tuple[BucketSpec, Tensor]] = ()

    def keep(self, digest: str, buckets: Sequence[tuple[BucketSpec, Tensor]]) -> None:
        """These are the base weights from now on: bytes in host memory."""
        self.digest, self._buckets = digest, buckets

    @property
    def buckets(self) -> Sequence[tuple[BucketSpec, Tensor]]:
        """As they were given."""
        return self._buckets

    def merged(
        self, factors: Mapping[str, Tensor], adapter: LowRank, *, room: Callable[[int], Tensor]
    ) -> Iterator[tuple[BucketSpec, Tensor]]:
        """Bucket for bucket, each in a `room` of so many bytes."""
        for bucket, base in self._buckets:
            made = room(bucket.nbytes).copy_(base)
            for tensor in bucket.tensors:
                names = factor_names(tensor.name)
                if names[0] in factors:
                    down, up = (factors[name].to("cpu", torch.float32) for name in names)
                    weight = view_of(base, tensor)
                    added = torch.addmm(weight.float(), up, down, alpha=adapter.alpha / adapter.rank)
                    view_of(made, tensor).copy_(added)
            yield bucket, made


def check_factors(plan: Prepare, base: Sequence[BucketSpec]) -> None:
    """Raises WeightSyncError for factors of a plan that belong to none of the base weights: they would be left out. And
    for one without the other.
    """
    pairs = [factor_names(tensor.name) for bucket in base for tensor in bucket.tensors]
    sent = {tensor.name for bucket in plan.buckets for tensor in bucket.tensors if is_factor(tensor.name)}
    unknown = sorted(sent - {name for pair in pairs for name in pair})
    if unknown:
        raise WeightSyncError(f"the base weights have none that {len(unknown)} factors belong to: {unknown[0]}")
    lone = [name for pair in pairs for name in pair if len(sent.intersection(pair)) == 1 and name not in sent]
    if lone:
        raise WeightSyncError(f"the adapter has one factor of {len(lone)} weights, and lacks the other: {lone[0]}")


def factor_names(weight: str) -> tuple[str, str]:
    """The names of the factors, down and up, of an adapted weight."""
    layer = weight.removesuffix(".weight")
    down, up = (f"{FACTOR_PREFIX}{layer}{end}" for end in FACTOR_ENDS)
    return down, up


def view_of(buffer: Tensor, tensor: TensorSpec) -> Tensor:
    """A tensor where it lies in its bucket."""
    raw = buffer[tensor.offset : tensor.offset + tensor_bytes(tensor)]
    return raw.view(getattr(torch, tensor.dtype)).view(tensor.shape)
