"""The parts of `make gpu`, in order: those that tell right from wrong run beside each other, those that time alone."""

from benchmarks.gpu.runner import GpuPart

_HERE = "benchmarks.gpu"

PARTS = (
    GpuPart("machine", "versions, GPU, speeds of memory and products", (f"{_HERE}.machine",), 60),
    GpuPart("tests", "tests that are marked gpu", (f"{_HERE}.marked_tests",), 240, timed=False),
    GpuPart("packed", "packed rows against single sequences", (f"{_HERE}.packed",), 180, timed=False),
    GpuPart(
        "steps", "a step of each algorithm on GPU and CPU", (f"{_HERE}.steps",), 180, ("cuda", "deepspeed"), timed=False
    ),
    GpuPart("loop", "a run without vLLM: see there", (f"{_HERE}.loop",), 120, ("cuda", "deepspeed"), timed=False),
    GpuPart("nccl", "process groups, time-outs, deaths", (f"{_HERE}.nccl",), 120),
    GpuPart("publish", "from a GPU's weights to another process's", (f"{_HERE}.publish",), 150),
    GpuPart("attention", "a row's attention in one call", (f"{_HERE}.attention",), 60, ("cuda",)),
    GpuPart("training", "tokens/s, MFU, memory, kernels", (f"{_HERE}.training",), 300, ("cuda", "deepspeed")),
    GpuPart("demo", "a whole run with vLLM on the GPU", (f"{_HERE}.demo",), 300, ("cuda", "vllm", "deepspeed")),
)
