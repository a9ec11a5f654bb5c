"""What training never does with numbers that are not finite: apply them, publish them, write them to a checkpoint."""

from __future__ import annotations

import math

from learner.training.step_metrics import StepMetrics
from learner.training.weights import WeightSnapshot


class NotFinite(RuntimeError):
    """Weights, logprobs or too many gradients in a row are not finite. The text says which, and what to look at.

    A new start would come to the same point: the batches are replayed as they were.
    """


def check_snapshot(snapshot: WeightSnapshot) -> WeightSnapshot:
    """The snapshot itself. Raises NotFinite with the name of a weight that is not."""
    wrong = next((tensor.name for tensor in snapshot.tensors if not tensor.value.isfinite().all()), None)
    if wrong is not None:
        raise NotFinite(
            f"the learner's weight {wrong} is not finite: it is neither published nor written. Resume from an earlier "
            "checkpoint, with a lower learning rate, or start from another model"
        )
    return snapshot


def check_probe(logprobs: list[float]) -> list[float]:
    """The logprobs themselves, which the learner's weights, finite as they are, give of a text."""
    wrong = sum(not math.isfinite(logprob) for logprob in logprobs)
    if wrong:
        raise NotFinite(
            f"{wrong} of the learner's own {len(logprobs)} logprobs of the probe text are not finite: its weights are "
            "not published. Resume from an earlier checkpoint with a lower learning rate, or set training.dtype to "
            "float32"
        )
    return logprobs


def stop_after_skips(metrics: StepMetrics, *, most: int) -> None:
    """Raises NotFinite if `most` updates in a row were left out, this step's the last of them."""
    if metrics.skipped_in_row >= most:
        raise NotFinite(
            f"{metrics.skipped_in_row} updates in a row had a gradient that is not finite, and were left out; "
            f"training.max_skipped_updates is {most}. Look at the rewards and leases that the log names, lower the "
            "learning rate, or set training.dtype to float32"
        )
