"""Speed of the hash that torch computes where weights are, against XXH3, which reads a host's memory; in alternation.

    .venv/bin/python -m benchmarks.tensor_hash [--megabytes 64] [--rounds 9] [--device cpu]

On a GPU XXH3's time has the copy to pageable memory that it needs first. One thread of torch. The table goes to
benchmarks/results/tensor_hash.md.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import xxhash

from benchmarks.machine import described_machine
from services.tensor_hash import tensor_hash

RESULT = Path(__file__).with_name("results") / "tensor_hash.md"
_DTYPES = (torch.bfloat16, torch.float32)


def by_xxh3(tensor: torch.Tensor) -> str:
    """The host's hash."""
    return str(xxhash.xxh3_64_hexdigest(tensor.view(-1).view(torch.uint8).cpu().numpy().data))


def seconds_of(work: Callable[[torch.Tensor], str], tensor: torch.Tensor) -> float:
    """Seconds until the hash is known; of CPU on a CPU, which other work on the machine changes less."""
    clock = time.process_time if tensor.device.type == "cpu" else time.perf_counter
    start = clock()
    work(tensor)
    return clock() - start


def row_of(dtype: torch.dtype, given: argparse.Namespace) -> str:
    """A row of the table: both hashes of a square matrix, and of a view of it whose rows lie apart."""
    side = int((given.megabytes * 1e6 / dtype.itemsize) ** 0.5)
    tensor = torch.randn(side, side).to(given.device, dtype)
    took: dict[str, list[float]] = {"xxh3": [], "torch": []}
    for number in range(given.rounds + 1):
        order = [("xxh3", by_xxh3), ("torch", tensor_hash)]
        for name, work in order if number % 2 else order[::-1]:
            seconds = seconds_of(work, tensor)
            if number:
                took[name].append(seconds)
    rates = {name: [tensor.nbytes / 1e9 / each for each in seconds] for name, seconds in took.items()}
    ratio = statistics.median(a / b for a, b in zip(took["xxh3"], took["torch"], strict=True))
    cells = [f"{statistics.median(each):.1f} ({min(each):.1f} to {max(each):.1f})" for each in rates.values()]
    kind = str(dtype).removeprefix("torch.")
    return f"| {kind}, {tensor.nbytes / 1e6:.0f} MB, {given.device} | {cells[0]} | {cells[1]} | {ratio:.2f} |"


def main() -> None:
    """Measures, prints and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=64.0)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows = [row_of(dtype, given) for dtype in _DTYPES]
    lines = [
        "# A hash in torch against XXH3",
        "",
        f"`python -m benchmarks.tensor_hash`: GB/s in one thread, medians of {given.rounds} rounds in alternation "
        "(least and most), by CPU time on a CPU and by the clock on a GPU.",
        "",
        "| | XXH3 | torch | torch over XXH3 |",
        "|---|---|---|---|",
        *rows,
        "",
        f"{described_machine()}.",
        "",
    ]
    text = "\n".join(lines)
    print(text)
    RESULT.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
