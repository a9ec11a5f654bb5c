"""New weights to a generator of the same host: by shared memory and by the broadcast over gloo, in turns.

    python -m benchmarks.same_host [--shape 135m 1.5b] [--dtype bfloat16 float32] [--rounds N]

Both sides are those of `benchmarks/weight_sync.py`. In each round both ways bring a version of their own, whose every
weight has changed, first the one and then the other; each is hashed by the generator, loaded, and fingerprinted, and a
round fails unless that is the learner's. Copies, hashes and loads are seconds of CPU. `brought and verified` is by the
clock, from the request to the generator's word that all is staged, and beside it the CPU time of both processes in it.
The table goes to benchmarks/results/same_host.md.
"""

import argparse
import ctypes
import statistics
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from benchmarks.machine import described_machine
from benchmarks.result_files import print_and_write
from benchmarks.weight_sync import GeneratorChild, ProcessPair, config_of, like_a_learner
from learner.weights.process_group import Rooms
from learner.weights.published import PackedWeights

RESULT = Path(__file__).with_name("results") / "same_host.md"
WARM_UP = 3
"""Rounds until the memory of both versions of each way has been written to."""
PARTS = ("host_copy_s", "pack_s", "broadcast_s", "cpu_s", "load_s")


def measured(shape: str, dtype: str, given: argparse.Namespace) -> list[str]:
    """The rows of one model."""
    with tempfile.TemporaryDirectory() as folder:
        config = config_of(shape, given.layers)
        config.save_pretrained(folder)
        child = GeneratorChild(folder, dtype)
    took: dict[str, list[dict[str, float]]] = {"broadcast": [], "shared memory": []}
    try:
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
        nbytes = sum(parameter.nbytes for parameter in model.parameters())
        ctypes.CDLL(None).malloc_trim(0)  # what the model was made in
        pair = ProcessPair(model, child, dtype=dtype, bucket_bytes=64 << 20)
        ways = {
            "broadcast": (Rooms(), pair.by_broadcast),
            "shared memory": (Rooms(shared=True), pair.by_shared_memory),
        }
        kept: dict[str, PackedWeights | None] = {}  # each way has the memory of two versions, as a learner has
        for number in range(given.rounds + WARM_UP):
            for way, (rooms, bring) in sorted(ways.items(), reverse=number % 2 == 1):
                seconds = pair.version(number, rooms=rooms, bring=bring)
                kept[way] = pair.packed
                if number >= WARM_UP:
                    took[way].append(seconds)
    finally:
        child.end()
        if dist.is_initialized():
            dist.destroy_process_group()
    pairs = zip(took["broadcast"], took["shared memory"], strict=True)
    ratios = [other["broadcast_s"] / ours["broadcast_s"] for other, ours in pairs]
    name = f"{shape if shape == '135m' else f'{shape}, {given.layers} of 28 layers'}, {dtype}, {nbytes / 1e6:.0f} MB"
    times = {
        "broadcast": "",
        "shared memory": f"**{statistics.median(ratios):.1f}** ({min(ratios):.1f} to {max(ratios):.1f})",
    }
    return [
        f"| {name} | {way} | {times[way]} | "
        + " | ".join(f"{statistics.median(each[part] for each in found):.3f}" for part in PARTS)
        + " |"
        for way, found in took.items()
    ]


def main() -> None:
    """Measures, prints and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", choices=("135m", "1.5b"), default=["135m", "1.5b"])
    parser.add_argument("--dtype", nargs="+", choices=("bfloat16", "float32"), default=["bfloat16", "float32"])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--layers", type=int, default=4, help="of the 1.5b shape")
    given = parser.parse_args()
    rows: list[str] = []
    for shape in given.shape:
        for dtype in given.dtype:
            with ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=like_a_learner) as process:
                rows += process.submit(measured, shape, dtype, given).result()
            print(*rows[-2:], sep="\n", flush=True)
    lines = [
        "# New weights to a generator of the same host",
        "",
        f"`python -m benchmarks.same_host`, which says what is measured; {given.rounds} rounds in turns, medians.",
        "",
        "| model | way | times as fast as the broadcast | host copy, s of CPU | hashes and digest, s of CPU | brought "
        "and verified, s | CPU time of both in it, s | load (serving paused), s of CPU |",
        "|---|---|---|---|---|---|---|---|",
        *rows,
        "",
        f"{described_machine()}.",
        "",
    ]
    print_and_write("\n".join(lines), RESULT)


if __name__ == "__main__":
    main()
