"""The GPUs of a process: which are its own, what is told of them, and that nothing is imported without one.

NVML is a scripted stand-in here, and so are /proc and /dev; the test marked `gpu` asks the real ones.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from prometheus_client import generate_latest

from protocol.status import GpuStatus
from services.gpus import GpuWatch
from services.http.gpu_metrics import GpuMetrics
from services.http.metrics import Metrics

GIB = 1 << 30


@dataclass(frozen=True)
class ScriptedGpu:
    minor: int
    busy: int | None = 0
    used: int = 0
    pids: Sequence[int] = ()
    tells_pids: bool = True


class ScriptedNvml:
    """The functions of NVML that are asked for, over cards that a test has set."""

    class NVMLError(Exception):
        pass

    def __init__(self, *gpus: ScriptedGpu) -> None:
        self.gpus = gpus
        self.opened = 0

    def open(self) -> "ScriptedNvml":
        self.opened += 1
        return self

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> ScriptedGpu:
        return self.gpus[index]

    def nvmlDeviceGetMinorNumber(self, gpu: ScriptedGpu) -> int:
        return gpu.minor

    def nvmlDeviceGetComputeRunningProcesses(self, gpu: ScriptedGpu) -> list[Any]:
        if not gpu.tells_pids:
            raise self.NVMLError("Not Supported")
        return [SimpleNamespace(pid=pid, usedGpuMemory=None) for pid in gpu.pids]

    def nvmlDeviceGetUtilizationRates(self, gpu: ScriptedGpu) -> Any:
        if gpu.busy is None:
            raise self.NVMLError("Not Supported")
        return SimpleNamespace(gpu=gpu.busy, memory=1)

    def nvmlDeviceGetMemoryInfo(self, gpu: ScriptedGpu) -> Any:
        return SimpleNamespace(used=gpu.used, total=80 * GIB, free=80 * GIB - gpu.used)


def machine(folder: Path, families: Mapping[int, Sequence[int]], opened: Mapping[int, Sequence[str]]) -> None:
    """/proc of processes with their children, and the files that each has open; /dev of a machine with GPUs."""
    (folder / "dev").mkdir()
    (folder / "dev/nvidiactl").touch()
    (folder / f"proc/self/task/{os.getpid()}").mkdir(parents=True)
    (folder / f"proc/self/task/{os.getpid()}/children").touch()
    for pid, children in families.items():
        (folder / f"proc/{pid}/task/{pid}").mkdir(parents=True)
        (folder / f"proc/{pid}/task/{pid}/children").write_text(" ".join(map(str, children)))
        (folder / f"proc/{pid}/fd").mkdir()
        for number, target in enumerate(opened.get(pid, ())):
            (folder / f"proc/{pid}/fd/{number}").symlink_to(target)


def watch(folder: Path, opened: Callable[[], Any]) -> GpuWatch:
    return GpuWatch(opened=opened, proc=folder / "proc", devices=folder / "dev")


ALL_OPEN = ("/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia0", "/dev/nvidia1", "/dev/nvidia2")


def test_gpus_are_those_on_which_the_process_or_a_child_of_it_works(tmp_path: Path) -> None:
    """The child has all three cards open and works on the second one, of which another process has the third."""
    machine(tmp_path, {10: [11], 11: [], 20: []}, {11: ALL_OPEN, 20: ALL_OPEN})
    nvml = ScriptedNvml(
        ScriptedGpu(0), ScriptedGpu(1, busy=87, used=61 * GIB, pids=[11]), ScriptedGpu(2, busy=5, pids=[20])
    )
    watched = watch(tmp_path, nvml.open)

    assert watched.look(10) == (GpuStatus(index=1, busy_share=0.87, memory_bytes=61 * GIB, total_bytes=80 * GIB),)
    assert [gpu.index for gpu in watched.look(20)] == [2]
    assert nvml.opened == 1


def test_in_a_container_that_hides_its_processes_those_count_that_it_has_open(tmp_path: Path) -> None:
    """Its only card is the fourth one of its host: NVML counts from 0 there, and files are named as outside."""
    machine(tmp_path, {10: []}, {10: ["/dev/nvidia3", "/dev/null", "socket:[7]"]})
    nvml = ScriptedNvml(ScriptedGpu(3, busy=40, pids=[4711]), ScriptedGpu(5, busy=99, pids=[4712]))

    assert [(gpu.index, gpu.busy_share) for gpu in watch(tmp_path, nvml.open).look(10)] == [(0, 0.4)]


def test_devices_that_the_library_opens_here_are_not_taken_for_the_process_own(tmp_path: Path) -> None:
    own = os.getpid()
    machine(tmp_path, {own: []}, {own: ["/dev/nvidia1"]})
    nvml = ScriptedNvml(ScriptedGpu(0), ScriptedGpu(1), ScriptedGpu(2))

    def opened() -> ScriptedNvml:
        for minor in range(3):
            (tmp_path / f"proc/{own}/fd/1{minor}").symlink_to(f"/dev/nvidia{minor}")
        return nvml

    watched = watch(tmp_path, opened)

    assert [[gpu.index for gpu in watched.look(own)] for _ in range(2)] == [[1], [1]]


def test_what_a_card_does_not_tell_is_left_open(tmp_path: Path) -> None:
    machine(tmp_path, {10: []}, {10: ["/dev/nvidia0"]})
    nvml = ScriptedNvml(ScriptedGpu(0, busy=None, used=7, tells_pids=False))

    (gpu,) = watch(tmp_path, nvml.open).look(10)

    assert (gpu.busy_share, gpu.memory_bytes) == (None, 7)


def test_a_process_without_a_gpu_opens_no_library(tmp_path: Path) -> None:
    machine(tmp_path, {10: [11], 11: [], 20: []}, {10: ["/dev/nvidiactl", "/dev/null"], 20: ALL_OPEN})
    nvml = ScriptedNvml(ScriptedGpu(0, pids=[20]))

    assert watch(tmp_path, nvml.open).look(10) == ()
    assert nvml.opened == 0
    (tmp_path / "dev/nvidiactl").unlink()
    assert watch(tmp_path, nvml.open).look(20) == (), "a machine without a driver has no GPU"
    assert nvml.opened == 0


def test_without_a_gpu_nothing_is_imported() -> None:
    looks = "import os, sys, services.load as load; load.GpuWatch().look(os.getpid())"
    code = f"{looks}; print(sorted({{'pynvml', 'torch'}} & sys.modules.keys()))"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert told.stdout == "[]\n"


def test_a_library_that_fails_is_said_once_and_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    machine(tmp_path, {10: []}, {10: ["/dev/nvidia0"]})
    tried = []

    def absent() -> Any:
        tried.append(1)
        raise ImportError("No module named 'pynvml'")

    watched = watch(tmp_path, absent)
    with caplog.at_level("INFO"):
        assert [watched.look(10) for _ in range(3)] == [(), (), ()]

    assert len(tried) == 1
    assert [record.getMessage() for record in caplog.records] == [
        "its GPUs are not shown: NVIDIA's management library fails: ImportError(\"No module named 'pynvml'\")"
    ]


def test_metrics_show_the_gpus_that_are_held_now() -> None:
    registry = Metrics("generator")
    shown = GpuMetrics(registry)
    first = GpuStatus(index=0, busy_share=0.5, memory_bytes=7, total_bytes=9)
    second = GpuStatus(index=1, busy_share=None, memory_bytes=8, total_bytes=9)

    def series() -> list[str]:
        text = generate_latest(registry.registry).decode()
        return [line for line in text.splitlines() if line.startswith("headway_generator_gpu")]

    assert series() == []
    shown.show((first, second))
    assert series() == [
        'headway_generator_gpu_busy_ratio{gpu="0"} 0.5',
        'headway_generator_gpu_memory_bytes{gpu="0"} 7.0', 'headway_generator_gpu_memory_bytes{gpu="1"} 8.0',
    ]  # fmt: skip
    shown.show((second,))
    assert series() == ['headway_generator_gpu_memory_bytes{gpu="1"} 8.0']
    shown.show(())
    assert series() == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_gpu_of_this_process_is_told_with_its_memory() -> None:
    before = GpuWatch().look(os.getpid())
    held = torch.zeros(1 << 30, dtype=torch.uint8, device="cuda:0")
    torch.cuda.synchronize()
    found = GpuWatch().look(os.getpid())

    assert len(found) >= 1
    assert max(gpu.memory_bytes for gpu in found) >= held.numel()
    assert sum(gpu.memory_bytes for gpu in found) > sum(gpu.memory_bytes for gpu in before)
    assert all(gpu.memory_bytes <= gpu.total_bytes for gpu in found)
    assert all(gpu.busy_share is None or 0 <= gpu.busy_share <= 1 for gpu in found)
