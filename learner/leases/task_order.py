"""The order of tasks: each once in an epoch, shuffled by a seed."""

from functools import lru_cache

import numpy as np
import numpy.typing as npt

_SEED_LIMIT = 1 << 63


class TaskOrder:
    """Maps the endless row of leases onto `count` tasks. Pure: the same seed gives the same order after a restart."""

    def __init__(self, *, count: int, seed: int) -> None:
        assert count > 0, count
        self.count = count
        self._seed = seed
        self._epoch = lru_cache(maxsize=4)(self._permutation)

    def task_index(self, lease_id: int) -> int:
        """The task of a lease, in 0..count-1."""
        epoch, position = divmod(lease_id, self.count)
        return int(self._epoch(epoch)[position])

    def lease_seed(self, lease_id: int, *, attempt: int) -> int:
        """A seed for the rollouts of one attempt, in 0..2**63-1."""
        words = np.random.SeedSequence((self._seed, lease_id, attempt)).generate_state(1, dtype=np.uint64)
        return int(words[0]) % _SEED_LIMIT

    def _permutation(self, epoch: int) -> npt.NDArray[np.int64]:
        return np.random.default_rng((self._seed, epoch)).permutation(self.count)
