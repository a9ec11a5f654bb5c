"""Cost of the look for NaN and infinities before each publish: one pass, and the way it was, in alternation.

    .venv/bin/python -m benchmarks.finite_check [--rounds N] [--threads N] [--dtype bfloat16]

Tensors of the shapes of SmolLM2-135M, in bfloat16 as they are published. Each round times, in changing order, the check
by `isfinite().all()` of every tensor and the learner's own (`all_finite`), and beside them what else a publish of such
weights does in the learner's process: the copy into buckets, and their hashes. So the gain is known in milliseconds and
as a share of that. Times are CPU seconds, which other load disturbs little; of one thread on an idle machine they are
the time that it takes. Results go to benchmarks/results/finite_check.md.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from benchmarks.machine import described_machine
from learner.training.finite import all_finite
from learner.weights.process_group import BucketWriter, LaidOut, Rooms

RESULTS = Path(__file__).with_name("results")
_BUCKET_BYTES = 64 << 20
_LAYERS, _WIDTH, _KEYS, _INNER, _VOCABULARY = 30, 576, 192, 1536, 49152
_WAYS = ("isfinite().all()", "one pass")


def main() -> None:
    """Runs all rounds, prints and writes the table."""
    arguments = _arguments()
    torch.set_num_threads(arguments.threads)
    dtype: torch.dtype = getattr(torch, arguments.dtype)
    weights = [torch.randn(shape).to(dtype) for shape in shapes()]
    rooms = Rooms()
    timed: dict[str, list[float]] = {name: [] for name in (*_WAYS, "copy", "hash")}
    for number in range(arguments.rounds + 1):
        found = _round(weights, rooms, reverse=number % 2 == 1)
        for name, seconds in found.items() if number else ():  # the first one warms up
            timed[name].append(seconds)
    nbytes = sum(weight.nbytes for weight in weights)
    report = _report(timed, arguments=arguments, nbytes=nbytes, tensors=len(weights))
    print(report)
    (RESULTS / "finite_check.md").write_text(report, encoding="utf-8")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    return parser.parse_args()


def shapes() -> Sequence[tuple[int, ...]]:
    """Of SmolLM2-135M's weights, whose head is tied to the embedding."""
    attention = [(_WIDTH, _WIDTH), (_KEYS, _WIDTH), (_KEYS, _WIDTH), (_WIDTH, _WIDTH)]
    mlp = [(_INNER, _WIDTH), (_INNER, _WIDTH), (_WIDTH, _INNER)]
    layer: list[tuple[int, ...]] = [*attention, *mlp, (_WIDTH,), (_WIDTH,)]
    return [(_VOCABULARY, _WIDTH), *layer * _LAYERS, (_WIDTH,)]


def _round(weights: Sequence[torch.Tensor], rooms: Rooms, *, reverse: bool) -> dict[str, float]:
    """CPU seconds of each part. What is checked is what lies in the buckets, as at a publish."""
    began = time.process_time()
    writer = BucketWriter(bucket_bytes=_BUCKET_BYTES, rooms=rooms)
    copies = [writer.add(str(number), weight, dtype=weight.dtype) for number, weight in enumerate(weights)]
    buckets = writer.buckets()
    found = {"copy": time.process_time() - began}
    checks: dict[str, Callable[[torch.Tensor], bool]] = {_WAYS[0]: _looked_at, _WAYS[1]: all_finite}
    for name in _WAYS[::-1] if reverse else _WAYS:
        began = time.process_time()
        assert all(map(checks[name], copies)), "random numbers are finite"
        found[name] = time.process_time() - began
    found["hash"] = _hashed(buckets)
    return found


def _looked_at(tensor: torch.Tensor) -> bool:
    return bool(tensor.isfinite().all())


def _hashed(buckets: Sequence[LaidOut]) -> float:
    began = time.process_time()
    for bucket in buckets:
        bucket.hashed()
    return time.process_time() - began


def _report(timed: dict[str, list[float]], *, arguments: argparse.Namespace, nbytes: int, tensors: int) -> str:
    middle = {name: statistics.median(seconds) for name, seconds in timed.items()}
    before, now = (middle[name] for name in _WAYS)
    rest = middle["copy"] + middle["hash"]
    ratios = [old / new for old, new in zip(timed[_WAYS[0]], timed[_WAYS[1]], strict=True)]
    rows = [
        f"| {name} | {1e3 * middle[name]:.1f} ({1e3 * min(seconds):.1f} to {1e3 * max(seconds):.1f}) "
        f"| {nbytes / middle[name] / 1e9:.1f} |"
        for name, seconds in timed.items()
    ]
    return "\n".join(
        [
            "# The look for NaN and infinities before a publish",
            "",
            f"`benchmarks/finite_check.py`: {tensors} tensors of SmolLM2-135M's shapes, {arguments.dtype}, "
            f"{nbytes / 1e6:.0f} MB, {arguments.threads} thread(s), {arguments.rounds} alternated rounds.",
            "",
            "| part of a publish | CPU ms, median (least to most) | GB/s |",
            "|---|---|---|",
            *rows,
            "",
            f"Ratio of the two checks, round by round: median **{statistics.median(ratios):.1f}** "
            f"({min(ratios):.1f} to {max(ratios):.1f}).",
            "",
            f"Gain of a publish: **{1e3 * (before - now):.0f} ms** of CPU; copy, check and hashes take "
            f"{1e3 * (rest + now):.0f} ms where they took {1e3 * (rest + before):.0f} ms.",
            "",
            f"{described_machine()}.",
            "",
        ]
    )


if __name__ == "__main__":
    main()
