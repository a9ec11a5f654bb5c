"""Versions, the GPU, and the speeds that others are held against: of memory, of the bus, and of products."""

import importlib.metadata
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable

import torch

from benchmarks.gpu.rows import rate, rehearses, say

PACKAGES = ("torch", "transformers", "deepspeed", "vllm", "numpy", "peft", "triton", "flash-attn")
ASKED = "name,driver_version,memory.total,power.limit,clocks.max.sm,pcie.link.gen.current,pcie.link.width.current"


def main() -> None:
    """Says all of it."""
    found = {name: _version(name) for name in PACKAGES}
    say("versions", ", ".join(f"{name} {version}" for name, version in found.items()))
    say("Python, cores, host memory", f"{sys.version.split()[0]}, {os.cpu_count()}, {_host_memory()}")
    say("system", platform.platform())
    if torch.cuda.is_available():
        _gpu()
    _speeds(torch.device("cuda" if torch.cuda.is_available() else "cpu"), tiny=rehearses())


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "is not installed"


def _host_memory() -> str:
    return f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB"


def _gpu() -> None:
    of = torch.cuda.get_device_properties(0)
    version: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    nccl = ".".join(map(str, version))
    say("GPU", f"{of.name}, {of.multi_processor_count} multiprocessors, {of.total_memory / 2**30:.1f} GiB")
    cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    say("CUDA, cuDNN, NCCL", f"{torch.version.cuda}, {cudnn}, {nccl}")
    asked = ["nvidia-smi", f"--query-gpu={ASKED}", "--format=csv,noheader"]
    try:
        answer = subprocess.run(asked, capture_output=True, text=True, check=False, timeout=20)
        say(f"nvidia-smi ({ASKED})", answer.stdout.strip() or answer.stderr.strip())
    except OSError as error:
        say("nvidia-smi", str(error), "failed")


def _speeds(device: torch.device, *, tiny: bool) -> None:
    size = 1 << 20 if tiny else 1 << 30
    on_device = torch.ones(size, dtype=torch.uint8, device=device)
    other = torch.empty_like(on_device)
    say("copy on the device, bytes read and written", rate(2 * size, _seconds(lambda: other.copy_(on_device), device)))
    for kind, pinned in (("pageable", False), ("pinned", device.type == "cuda")):
        host = torch.ones(size, dtype=torch.uint8, pin_memory=pinned)
        say(f"to {kind} host memory", rate(size, _seconds(lambda to=host: to.copy_(on_device), device)))  # type: ignore[misc]
        say(f"from {kind} host memory", rate(size, _seconds(lambda of=host: on_device.copy_(of), device)))  # type: ignore[misc]
    width = 256 if tiny else 8192
    for dtype in (torch.bfloat16, torch.float32):
        left, right = (torch.randn(width, width, device=device, dtype=dtype) for _ in range(2))
        seconds = _seconds(lambda a=left, b=right: a @ b, device)  # type: ignore[misc]
        say(f"product of matrices of {width} in {dtype}", f"{2 * width**3 / seconds / 1e12:.1f} TFLOP/s")


def _seconds(work: Callable[[], object], device: torch.device, *, rounds: int = 5) -> float:
    """The median, after two that do not count."""
    took = []
    for _ in range(rounds + 2):
        _wait(device)
        began = time.perf_counter()
        work()
        _wait(device)
        took.append(time.perf_counter() - began)
    return sorted(took[2:])[rounds // 2]


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
