"""A run of the four processes without vLLM: the real learner trains on the GPU, and publishes over gloo to a stand-in.

**The generator's engine is a stand-in**: a tiny torch model on the CPU (benchmarks/soak/torch_engine.py), behind the
generator's own gate, routes, weight transfer, checksums and probe. Its learner is the real one; what the run shows is
that a learner on a GPU trains, publishes, is proved right by another device's logprobs, and ends well.
"""

import json
import sys
import tempfile
import time
import urllib.request
import uuid
from pathlib import Path

from benchmarks.gpu.rows import rehearses, say
from benchmarks.soak.run_files import SoakPorts, write_run_file
from benchmarks.soak.system import (
    ENV,
    GENERATOR,
    LEARNER,
    NAMES,
    REWARDS,
    SoakProcess,
    SoakSystem,
    StepReader,
    ports,
    run_folder,
)
from services.network import LOOPBACK

STEPS = 40 if rehearses() else 300
LIMIT_S = 90.0
_MODULES = {ENV: "env_service", REWARDS: "reward_service", LEARNER: "learner"}
_TAIL = 800
_TOLD = (
    "step", "version", "members", "total_s", "pause_s", "probe_gap", "behavior_kl", "grad_norm", "tokens",
    "forward_backward_s", "optimizer_s",
)  # fmt: skip


def command_of(name: str) -> tuple[str, ...]:
    """Of one of the four, as it is in this folder, installed or not."""
    if name == GENERATOR:
        return (sys.executable, "-m", "benchmarks.soak.generator")
    return (sys.executable, "-c", f"from {_MODULES[name]}.command import main; main()")


def system_in(folder: Path, places: SoakPorts) -> SoakSystem:
    """All four at these ports, not started yet."""
    run_file = write_run_file(folder, steps=STEPS, seed=0, ports=places)
    (folder / "logs").mkdir()
    where = ("--config", str(run_file))
    processes = {name: SoakProcess(name, (*command_of(name), *where)) for name in NAMES}
    return SoakSystem(folder, uuid.uuid4().hex, processes, StepReader(run_folder(folder) / "metrics.jsonl"))


def uses_a_gpu(pid: int) -> bool:
    """True if the process has an NVIDIA GPU open."""
    opened = (str(entry.readlink()) for entry in Path(f"/proc/{pid}/fd").iterdir() if entry.is_symlink())
    return any(target.startswith("/dev/nvidia") and target[-1].isdecimal() for target in opened)


def main() -> int:
    """1 if the run does not come to its end."""
    with tempfile.TemporaryDirectory() as place:
        where = ports()
        system = system_in(Path(place), where)
        try:
            return _ran(system, page=where.learner)
        finally:
            system.end()


def _ran(system: SoakSystem, *, page: int) -> int:
    began = time.monotonic()
    for name in NAMES:
        system.start(name)
    learner, on_gpu, first_s = system.processes[LEARNER].now, False, 0.0
    metrics: list[str] = []
    while learner.alive and time.monotonic() - began < LIMIT_S:
        time.sleep(0.2)
        if system.progress.read() and not first_s:
            first_s = time.monotonic() - began
            on_gpu = uses_a_gpu(learner.pid)
        metrics = _gpu_metrics(page) or metrics
    steps, seconds = system.progress.read(), time.monotonic() - began
    say("the learner has a GPU open", str(on_gpu), "measured" if on_gpu or rehearses() else "failed")
    say(
        f"{steps} of {STEPS} steps (the generator's engine is a stand-in)",
        f"the first after {first_s:.1f} s, {seconds:.1f} s in all",
    )
    say("GPU metrics of the learner, as last served", ", ".join(metrics) or "none")
    for kind, record in _last_records(system.run / "metrics.jsonl").items():
        say(f"the last {kind}", ", ".join(f"{name} {record[name]}" for name in _TOLD if name in record))
    well = not learner.alive and learner.wait(timeout_s=1) == 0
    if not well:
        for process in system.processes.values():
            say(f"output of {process.name}", process.now.text()[-_TAIL:], "failed")
    return 0 if well else 1


def _gpu_metrics(port: int) -> list[str]:
    """The series about GPUs at a process's /metrics; none if it does not answer."""
    try:
        with urllib.request.urlopen(f"http://{LOOPBACK}:{port}/metrics", timeout=1) as answer:
            lines: list[str] = answer.read().decode().splitlines()
    except OSError:
        return []
    return [line.removeprefix("headway_learner_") for line in lines if line.startswith("headway_learner_gpu")]


def _last_records(metrics: Path) -> dict[str, dict[str, object]]:
    """The last one of each kind."""
    if not metrics.exists():
        return {}
    records = map(json.loads, metrics.read_text(encoding="utf-8").splitlines())
    return {str(record["kind"]): record for record in records}


if __name__ == "__main__":
    sys.exit(main())
