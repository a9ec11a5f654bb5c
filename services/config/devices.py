"""GPUs of a process, chosen from those that it sees, before torch is imported."""

import os
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from services.config.sources import ConfigError
from services.model_folder import hidden_size

VISIBLE = "CUDA_VISIBLE_DEVICES"
_CHOSEN = "DEVICES_CHOSEN_BY"
_DRIVER = Path("/proc/driver/nvidia/gpus")
_WIDTH_FOR_THREADS = 256


@dataclass(frozen=True)
class Need:
    """GPUs that a process wants: `count` GPUs, or just those of `devices`; `collective` is that of its weight
    broadcasts.
    """

    process: str
    count: int
    devices: tuple[int, ...] = ()
    collective: str = ""


def visible(environ: Mapping[str, str], *, driver: Path = _DRIVER) -> list[str]:
    """The GPUs that a process with this environment sees, by the names that CUDA knows them under."""
    given = environ.get(VISIBLE)
    if given is not None:
        names = [name.strip() for name in given.split(",")]
        # CUDA itself takes nothing from the first one on that does not exist.
        return names[: names.index("-1")] if "-1" in names else [name for name in names if name]
    return [str(number) for number in range(len(list(driver.iterdir())))] if driver.is_dir() else []


def is_worth_threads(model: Path) -> bool:
    """True if a model is large enough to be worth more than one thread: for its products on a CPU; beside a GPU for
    what stays on the CPU, such as copies of weights, their hashes, and an optimizer that is offloaded.

    Below a width of some hundreds, sharing a product out takes longer than what it saves, and threads of one process
    keep the others from the cores.
    """
    return (hidden_size(model) or 0) >= _WIDTH_FOR_THREADS


def chosen(devices: Sequence[int], *, seen: Sequence[str], process: str) -> list[str]:
    """The names of these GPUs. Raises ConfigError that counts those that are there."""
    beyond = [device for device in devices if device >= len(seen)]
    if beyond and not seen:
        remedy = (
            "give the container one (nvidia-container-toolkit), load the driver, or leave devices out to use the CPU"
        )
        raise ConfigError(
            [f"{process}: devices: got {beyond[0]}: this process sees 0 GPUs; expected an NVIDIA GPU: {remedy}"]
        )
    if beyond:
        raise ConfigError(
            [f"[{process}] devices: got {beyond[0]}: this process sees {len(seen)} GPUs; expected numbers below that"]
        )
    return [seen[device] for device in devices]


def use_devices(devices: Sequence[int], *, process: str, environ: MutableMapping[str, str] = os.environ) -> None:
    """Has this process and its children see these GPUs only; all that there are if none is named. Raises ConfigError.

    A child that reads the same config, such as another rank, does not choose once more among those that were chosen.
    """
    if devices and _CHOSEN not in environ:
        environ[VISIBLE] = ",".join(chosen(devices, seen=visible(environ), process=process))
        environ[_CHOSEN] = process


def shared_out(needs: Sequence[Need], *, seen: Sequence[str]) -> dict[str, list[str]]:
    """The GPUs of each process: those that it names, and to the others, in order, those that nobody names.

    Empty without GPUs. Where they do not suffice, processes share them if their collective is not NCCL, which refuses
    two ranks on one GPU. Raises ConfigError that counts them.
    """
    named = {need.process: chosen(need.devices, seen=seen, process=need.process) for need in needs if need.devices}
    if not seen:
        return {}
    taken = {name for names in named.values() for name in names}
    free = [name for name in seen if name not in taken]
    given = dict(named)
    for need in needs:
        if need.process not in named and need.count:
            given[need.process], free = free[: need.count], free[need.count :]
    short = [need for need in needs if need.process not in named and len(given.get(need.process, ())) < need.count]
    if any(need.collective == "nccl" for need in short) or any(need.count > len(seen) for need in short):
        raise ConfigError([_too_few(needs, seen=seen)])
    for need in short:
        given[need.process] = list(seen[: need.count])
    _check_nccl(needs, given)
    return given


def enough(needs: Sequence[Need]) -> list[str]:
    """The GPUs of a machine that has as many as these processes want, and as high a number as they name."""
    highest = max((device for need in needs for device in need.devices), default=-1)
    return [str(number) for number in range(highest + 1 + sum(need.count for need in needs))]


def _too_few(needs: Sequence[Need], *, seen: Sequence[str]) -> str:
    each = ", ".join(f"{need.process} {len(need.devices) or need.count}" for need in needs)
    total = sum(len(need.devices) or need.count for need in needs)
    return (
        f"{total} GPUs are wanted ({each}), and {len(seen)} are there: lower learner.ranks or "
        "generator.engine.tensor_parallel_size; or have processes share a GPU, which NCCL refuses: set "
        "learner.weights.backend and generator.join.backend to gloo, and generator.engine.gpu_memory_fraction lower"
    )


def _check_nccl(needs: Sequence[Need], given: Mapping[str, Sequence[str]]) -> None:
    owners: dict[str, str] = {}
    for need in needs:
        for name in given.get(need.process, ()) if need.collective == "nccl" else ():
            other = owners.setdefault(name, need.process)
            if other != need.process:
                raise ConfigError(
                    [
                        f"{other} and {need.process} are both on GPU {name}, and NCCL refuses two ranks on one: give "
                        "them different devices, or set learner.weights.backend and generator.join.backend to gloo"
                    ]
                )
