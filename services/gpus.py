"""The GPUs that a process and its children hold, and how they are used, by NVIDIA's management library.

    /proc/PID/fd ──▶ devices that are open ──▶ NVML ──▶ status, page, metrics

Where no process of the family has a GPU open nothing is imported: the package nvidia-ml-py comes with the CUDA builds.
"""

import importlib
import logging
import os
import re
from collections.abc import Callable, Container, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from protocol.status import GpuStatus
from services.local_processes import family_of

logger = logging.getLogger(__name__)
Library = Any
"""NVML as the module `pynvml` has it, which says no types."""
_DEVICE = re.compile(r"/dev/nvidia(\d+)")


def open_nvml() -> Library:
    """Imports the library and begins with it. Raises ImportError, or an error of its own where there is no driver."""
    library: Library = importlib.import_module("pynvml")
    library.nvmlInit()
    return library


class GpuWatch:
    """Looks at the GPUs of a process. `opened` gives the library; `proc` and `devices` are as in proc(5) and /dev.

    A library that fails is said once, and not asked again.
    """

    def __init__(
        self,
        *,
        opened: Callable[[], Library] = open_nvml,
        proc: Path = Path("/proc"),
        devices: Path = Path("/dev"),
    ) -> None:
        self._opened = opened
        self._proc = proc
        self._devices = devices
        self._library: Library = None
        self._failed = False
        self._own_minors: frozenset[int] = frozenset()
        """Devices that this process had open before the library, which opens all of them here."""

    def look(self, pid: int) -> tuple[GpuStatus, ...]:
        """The GPUs that a process of this machine and its descendants hold, by their number in NVML; none if that
        cannot be known.

        NVML names the processes on a GPU by their numbers outside of a container. Where it names none of the family,
        those count that the family has open.
        """
        if self._failed or not (self._devices / "nvidiactl").exists():
            return ()
        family = family_of(pid, proc=self._proc)
        minors = self._open_in(family)
        if not minors:
            return ()
        try:
            if self._library is None:
                self._own_minors = frozenset(self._open_in([os.getpid()]))
                self._library = self._opened()
            return self._used(family, minors)
        except Exception as error:  # noqa: BLE001 - its errors are the library's own; no process ends of being watched
            self._failed = True
            logger.info("its GPUs are not shown: NVIDIA's management library fails: %r", error)
            return ()

    def _open_in(self, family: Iterable[int]) -> set[int]:
        """The minor numbers of devices that processes have open."""
        found = set[int]()
        for pid in family:
            if self._library is not None and pid == os.getpid():
                found |= self._own_minors
                continue
            with suppress(OSError):  # it has ended meanwhile
                for link in (self._proc / str(pid) / "fd").iterdir():
                    with suppress(OSError):  # it was closed meanwhile
                        if (device := _DEVICE.fullmatch(str(link.readlink()))) is not None:
                            found.add(int(device[1]))
        return found

    def _used(self, family: Sequence[int], minors: Container[int]) -> tuple[GpuStatus, ...]:
        nvml = self._library
        handles = [(index, nvml.nvmlDeviceGetHandleByIndex(index)) for index in range(nvml.nvmlDeviceGetCount())]
        held = [each for each in handles if self._is_used_by(family, each[1])]
        if not held:
            held = [each for each in handles if nvml.nvmlDeviceGetMinorNumber(each[1]) in minors]
        return tuple(self._status(index, handle) for index, handle in held)

    def _is_used_by(self, family: Sequence[int], handle: object) -> bool:
        try:
            found = self._library.nvmlDeviceGetComputeRunningProcesses(handle)
        except self._library.NVMLError:  # not every card tells
            return False
        return any(process.pid in family for process in found)

    def _status(self, index: int, handle: object) -> GpuStatus:
        memory = self._library.nvmlDeviceGetMemoryInfo(handle)
        busy: float | None = None
        with suppress(self._library.NVMLError):  # a card that is parted has no such number
            busy = self._library.nvmlDeviceGetUtilizationRates(handle).gpu / 100
        return GpuStatus(index=index, busy_share=busy, memory_bytes=memory.used, total_bytes=memory.total)
