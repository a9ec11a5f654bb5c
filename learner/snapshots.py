"""Snapshots for the publisher: whole weights; or an adapter alone, and once the base weights that it is added to."""

import logging

import torch

from learner.config import WeightsConfig
from learner.training.config import LoraConfig
from learner.training.trainer import Trainer
from learner.weights.probe import Probe
from learner.weights.published import BaseWeights, Snapshot

logger = logging.getLogger(__name__)


def snapshots_of(trainer: Trainer, weights: WeightsConfig, *, lora: LoraConfig | None) -> "Snapshots":
    """Snapshots as a run's settings have them."""
    shared = weights.senders == "all ranks"
    # Copies from and to a GPU go by way of pinned memory, and that of a file is not.
    on_host = weights.same_host == "auto" and weights.backend == "gloo" and not torch.cuda.is_available()
    asked = weights.same_host == "shared memory"
    return Snapshots(
        trainer,
        bucket_bytes=weights.bucket_mb << 20,
        lora=lora,
        shared=shared,
        mapped=on_host or asked,
        tells_broadcast=asked,
    )


class Snapshots:
    """Made in the trainer's thread, of buckets of about `bucket_bytes`; of adapters alone if `lora` is given. With
    `shared` each rank keeps and sends some of the weights; what rank 0 has all of is in memory that generators of its
    host can map, if they are `mapped`; that they are broadcast nevertheless is said if it `tells_broadcast`.
    """

    def __init__(
        self,
        trainer: Trainer,
        *,
        bucket_bytes: int,
        lora: LoraConfig | None,
        shared: bool = False,
        mapped: bool = False,
        tells_broadcast: bool = False,
    ) -> None:
        self._shared, self._mapped = shared, mapped
        self._tells_broadcast = tells_broadcast
        self._trainer = trainer
        self._bucket_bytes = bucket_bytes
        self._lora = lora
        self._base: BaseWeights | None = None

    def take(self, *, version: int, probe: Probe) -> Snapshot:
        """The weights as they are now."""
        if self._lora is not None and self._base is None:
            self._base = self._copied_base(self._lora)
        if self._base is None:
            copy = self._trainer.host_copy(bucket_bytes=self._bucket_bytes, shared=self._shared, mapped=self._mapped)
            if copy.shares:
                self._tell_broadcast(
                    "ranks send a part each, of which none can be mapped: set weights.senders to rank 0"
                )
            return Snapshot(version=version, buckets=copy.buckets, probe=probe, shares=copy.shares)
        self._tell_broadcast(
            "adapters are, and their base weights once: set weights.lora to merged to have weights mapped"
        )
        copy = self._trainer.host_copy(bucket_bytes=self._bucket_bytes, part="adapter")
        return Snapshot(version=version, buckets=copy.buckets, probe=probe, base=self._base)

    def _tell_broadcast(self, why: str) -> None:
        """Warn once of a setting that has no effect."""
        if self._tells_broadcast:
            self._tells_broadcast = False
            logger.warning("weights.same_host is shared memory, and weights are broadcast nevertheless: %s", why)

    def _copied_base(self, lora: LoraConfig) -> BaseWeights | None:
        """None, and no further try, if the model's adapters cannot be sent alone."""
        why = self._trainer.why_merged
        if why:
            logger.info("generators are sent the model with its adapters merged: %s", why)
            self._lora = None
            return None
        base = self._trainer.host_copy(bucket_bytes=self._bucket_bytes, part="base", shared=self._shared)
        return BaseWeights(buckets=base.buckets, rank=lora.rank, alpha=lora.alpha, shares=base.shares)
