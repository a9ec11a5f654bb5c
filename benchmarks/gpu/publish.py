"""The way of weights from the learner's GPU to a generator's, in GB/s: 1 to 8 GB of random weights in bfloat16.

The learner's own host copy, packing and broadcast over gloo; at the other end the generator's own transfer engine in a
process of its own on the same GPU, which receives into pinned memory, verifies, loads onto the GPU and fingerprints.
vLLM's engine is not in it: a transformers model takes the weights (see benchmarks/weight_sync.py).
"""

import os
import statistics
import tempfile
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoModelForCausalLM

from benchmarks.gpu.rows import rate, rehearses, say
from benchmarks.weight_sync import GeneratorChild, ProcessPair, config_of
from learner.training.finite import all_finite
from services.nccl import interface_of
from services.network import LOOPBACK

DTYPE = "bfloat16"
SIZES = {6: 3, 80: 3}
"""Layers of the shape of Qwen2.5-1.5B, about 1 and 8 GB, and the rounds timed: two versions are
in use at a time, so that the first of these still asks for memory."""
BUCKET_BYTES = 64 << 20
TIMED = {
    "host_copy_s": "host copy into pinned buckets, with the look for NaN",
    "pack_s": "hashes and digest",
    "broadcast_s": "gloo: broadcast into pinned memory, verified",
    "load_s": "load onto the GPU (serving paused)",
    "copy_s": "plain copy on the receiver's GPU, for comparison",
    "fingerprint_s": "fingerprint of the loaded weights (beside serving)",
    "raw_s": "gloo: plain broadcast of the same bytes, for comparison",
}


def measure(layers: int, *, device: torch.device, shape: str, rounds: int) -> None:
    """Says the rows of one size. The first version is told by itself: it asks for the memory."""
    config = config_of(shape, layers)
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        child = GeneratorChild(folder, DTYPE, device=device.type)
    try:
        with device:
            model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, DTYPE))
        nbytes = sum(parameter.nbytes for parameter in model.parameters())
        size = f"{nbytes / 1e9:.1f} GB"
        _singly(model, size, nbytes)
        pair = ProcessPair(model, child, dtype=DTYPE, bucket_bytes=BUCKET_BYTES, clock=time.perf_counter)
        pair.round(0, counts=True)
        say(f"{size}: the first host copy", rate(nbytes, pair.took["host_copy_s"][0]))
        pair.took.clear()
        for number in range(1, rounds + 1):
            pair.round(number, counts=True)
        for key, what in TIMED.items():
            say(f"{size}: {what}", rate(nbytes, statistics.median(pair.took[key])))
        say(f"{size}: most host memory of the receiver", f"{pair.peak_generator / nbytes:.1f} times the weights")
    finally:
        child.end()
        if dist.is_initialized():
            dist.destroy_process_group()


def _singly(model: nn.Module, size: str, nbytes: int) -> None:
    """Rows of parts of the way, one by one, in the learner's process."""
    parameters = [parameter.detach() for parameter in model.parameters()]
    say(f"{size}: look for NaN where the weights are", rate(nbytes, _seconds(lambda: [*map(all_finite, parameters)])))
    bucket = torch.zeros(BUCKET_BYTES, dtype=torch.uint8, device=parameters[0].device)
    pageable = _seconds(lambda: bucket.cpu())
    say(f"{size}: a bucket to fresh pageable memory", rate(BUCKET_BYTES, pageable))


def _seconds(work: Callable[[], object]) -> float:
    took = []
    for _ in range(3):
        _wait()
        began = time.perf_counter()
        work()
        _wait()
        took.append(time.perf_counter() - began)
    return statistics.median(took)


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def main() -> None:
    """Says all sizes, the smallest first."""
    torch.set_num_threads(1)
    tiny = rehearses()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for layers, rounds in ({1: 1} if tiny else SIZES).items():
        measure(layers, device=device, shape="135m" if tiny else "1.5b", rounds=rounds)


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface_of(LOOPBACK) or "lo")
    main()
