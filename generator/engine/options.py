"""Settings of an engine, the environment that it starts in, and the end of its processes: with their owner.

Nothing here imports vllm or torch, so that a command can parse its config first.
"""

import logging
import os
import re
import secrets
import select
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from generator.engine.fork_server import changed_environment
from generator.engine.installed import vllm_arguments
from generator.engine.last_words import note_errors
from services.config.options import nearest

ENGINE_NAME = "vllm-engine"
"""Name of an engine's processes in `ps` and `top`."""
ADAPTER_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Largest ranks that vLLM can be started for."""
_SAID_CHARS = 300
_SETTINGS = {
    "model": "generator.model", "tensor_parallel_size": "engine.tensor_parallel_size", "dtype": "engine.dtype",
    "max_model_len": "engine.max_model_len", "max_num_seqs": "engine.max_num_seqs", "seed": "engine.seed",
    "max_num_batched_tokens": "engine.max_num_batched_tokens", "enforce_eager": "engine.enforce_eager",
    "gpu_memory_utilization": "engine.gpu_memory_fraction", "stream_interval": "engine.stream_interval",
    "kv_cache_memory_bytes": "engine.kv_cache_gb", "served_model_name": "generator.served_model_name",
    "enable_lora": "adapters.slots", "max_loras": "adapters.slots", "max_cpu_loras": "adapters.slots",
    "max_lora_rank": "adapters.max_rank", "enable_return_routed_experts": "engine.routed_experts",
}  # fmt: skip
_OURS = (
    "scheduling_policy", "logprobs_mode", "max_logprobs", "generation_config", "enable_prefix_caching",
    "enable_chunked_prefill", "additional_config", "worker_extension_cls", "worker_cls", "weight_transfer_config",
    "load_format", "skip_tokenizer_init", "distributed_executor_backend", "disable_log_stats", "enable_log_requests",
    "use_tqdm_on_load",
)  # fmt: skip
_ELSEWISE = {
    **dict.fromkeys(_OURS, "is set by Headway, whose stamps, logprobs and weight transfer rest on it"),
    "data_parallel_size": "is 1: start another generator for each replica, which is what data parallelism is here",
    "pipeline_parallel_size": "is 1: weights are moved to workers that share layers (engine.tensor_parallel_size)",
    "speculative_config": "is none: under it vLLM 0.32 gives logprobs that are not its tokens' (with n-grams on a CPU "
    "they were off by up to 8 nats; nobody has tried it on a GPU) and leaves out min_p, and a draft model gets none of "
    "the learner's weights",
}
# What vLLM says of arguments that are settings here, in the words of its releases of 2025 and later.
_IN_SETTINGS = (
    (r"max_model_len.*greater than the derived max_model_len", "engine.max_model_len is {max_model_len}, more than the "
     "model has positions for: lower it, or leave it out"),
    (r"max_num_batched_tokens.*smaller than max_model_len", "engine.max_num_batched_tokens is {max_num_batched_tokens},"
     " less than engine.max_model_len {max_model_len}: raise the first or lower the second"),
    (r"max_num_batched_tokens.*max_num_seqs", "engine.max_num_batched_tokens is {max_num_batched_tokens}, less than "
     "engine.max_num_seqs {max_num_seqs}: raise the first or lower the second"),
    (r"KV cache is needed|stored in KV cache|No available memory for the cache blocks", "the cache does not hold one "
     "sequence of engine.max_model_len {max_model_len}: raise engine.kv_cache_gb (on a CPU) or "
     "engine.gpu_memory_fraction, or lower engine.max_model_len"),
    (r"Free memory on device.*less than desired", "engine.gpu_memory_fraction is {gpu_memory_fraction}, more than is "
     "free on the GPU: lower it, or end whoever else uses the GPU (nvidia-smi)"),
    (r"divisible by tensor parallel|attention heads.*tensor.parallel", "engine.tensor_parallel_size is "
     "{tensor_parallel_size}, which does not divide the model's attention heads evenly"),
    (r"architectures?.*not supported", "model {model} is of an architecture that vLLM does not know: take another "
     "model"),
    (r"architectures?.*failed to be inspected", "model {model} is of an architecture whose code in vLLM cannot be "
     "imported here: install what the log above names as missing, or take another model"),
    (r"(bfloat16|float16|dtype).*(not supported|only supported)", "engine.dtype is {dtype}, which this machine or the "
     "model does not take: set another one, such as float32"),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Settings of one engine. Sizes are per engine, not per worker.

    `model` is a local folder. With `head_dtype` float32 products with the output matrix are not rounded to `dtype`.
    `threads` is the number of CPU threads that compute (ignored on a GPU).
    `kv_cache_gb` is the size of the cache of keys and values on a CPU, in GiB; a GPU uses `gpu_memory_fraction`.
    `stream_interval` is how many tokens of a completion are gathered, in the engine's process, before a part is handed
    out, or fewer if that takes two seconds; the OpenAI routes stream each token.
    `staging` says where an update is received: beside the old weights while they serve, or within the pause.
    `tokenizer` says whether to load the model's; our own routes take and give tokens, the OpenAI routes need it.
    `stall_timeout_s` is the longest wait for an answer of the engine, beside what a load takes (`pause_ttl_s`).
    `routed_experts` says whether the experts that a mixture's tokens are sent to are told to who asks: where this is
    known to work, always (or the engine does not start), or never.
    `recompute_on_update` has requests in flight compute their keys and values again at each update.
    `adapter_slots` is how many adapters the engine holds at once, of at most `max_adapter_rank`. `policy_rank`: weights
    may come as an adapter of at most this rank to the base weights; 0: they come whole.
    `extra` are arguments of vLLM's by its names, which are no settings here.
    `initial_version` stamps the tokens that are sampled before the first commit. `instance` is drawn at each start of
    the process, which signs its stamps with it.
    """

    model: str
    dtype: str = "auto"
    head_dtype: Literal["model", "float32"] = "model"
    max_model_len: int = 4096
    max_num_seqs: int = 64
    max_num_batched_tokens: int | None = None
    kv_cache_gb: float = 1.0
    gpu_memory_fraction: float = 0.9
    tensor_parallel_size: int = 1
    threads: int = 1
    seed: int = 0
    enforce_eager: bool = True
    stream_interval: int = 32
    staging: Literal["staging", "none"] = "staging"
    load_format: str = "auto"
    tokenizer: bool = True
    initial_version: str = "0.0"
    instance: str = field(default_factory=lambda: secrets.token_hex(8))
    recompute_on_update: bool = False
    routed_experts: Literal["auto", "on", "off"] = "auto"
    adapter_slots: int = 0
    max_adapter_rank: int = 32
    policy_rank: int = 0
    pause_ttl_s: float = 60.0
    stall_timeout_s: float = 15.0
    verbose: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict)


def extra_fault(extra: Mapping[str, object]) -> str | None:
    """The fault of arguments for vLLM, as far as their names tell; None if nothing is, or vLLM is not there."""
    known = vllm_arguments()
    for name in extra:
        if name in _SETTINGS:
            return f"engine.extra: {name} is a setting: set {_SETTINGS[name]}"
        if name in _ELSEWISE:
            return f"engine.extra: {name} {_ELSEWISE[name]}; leave it out"
        if known and name not in known:
            guess = nearest(name, known)
            hint = f"; did you mean {guess}?" if guess else ": expected a field of vLLM's AsyncEngineArgs"
            return f"engine.extra: vLLM has no argument {name}{hint}"
    return None


def in_settings(error: BaseException, options: EngineOptions) -> str | None:
    """An error of vLLM's in the keys of [generator], with its own words; None for one of no setting."""
    said = " ".join(str(error).split())
    for pattern, meaning in _IN_SETTINGS:
        if re.search(pattern, said, re.IGNORECASE):
            return f"[generator] {meaning.format(**vars(options))} (vLLM: {said[:_SAID_CHARS]})"
    return None


def prepare_environment(options: EngineOptions) -> None:
    """Set what vllm reads from the environment. Call it before vllm or torch is first imported.

    A variable that the user has set already is left alone.
    """
    for name, value in _defaults(options).items():
        os.environ.setdefault(name, value)
    if not options.verbose:
        # vLLM sets this level itself, but only after its first modules have said something.
        logging.getLogger("vllm").setLevel(logging.ERROR)


def _defaults(options: EngineOptions) -> dict[str, str]:
    threads = str(options.threads)
    # Eager mode alone leaves a few small functions to torch.compile: 15 s at the first request, and no gain.
    compile_nothing = {"TORCHDYNAMO_DISABLE": "1"} if options.enforce_eager else {}
    quiet = {
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "TORCH_LOGS": "-torch._library.triton",
        "PYTHONWARNINGS": "ignore",
    }
    return {
        **compile_nothing,
        **({} if options.verbose else quiet),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        # With more than one worker vLLM binds its threads to cores, which hurts where the cores are shared.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        # Read as "the engine core and its one worker share a process" on a CPU, which otherwise insists on two.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        # A thread that spins while it waits takes the core from the learner.
        "OMP_WAIT_POLICY": "PASSIVE",
        "GOMP_SPINCOUNT": "0",
        "TOKENIZERS_PARALLELISM": "false",
    }


class OwnerTie:
    """A value of vLLM's `additional_config`. Unpickled in another process than `owner_pid`'s, it ties that process, and
    has it note its errors in the owner's file `last_words`, if that is given.

    vLLM leaves the processes of an engine behind. The tie travels within its config and takes hold when a child
    unpickles that: before the child waits for its parent, which it otherwise does for minutes after an early death.
    """

    def __init__(self, *, owner_pid: int, last_words: str = "") -> None:
        self._owner_pid = owner_pid
        self._last_words = last_words

    def compute_hash(self) -> str:
        """vLLM asks what this changes in a compiled model: nothing."""
        return ""

    def __reduce__(self) -> "tuple[Callable[[int, str, dict[str, str]], OwnerTie], tuple[int, str, dict[str, str]]]":
        return tied_to, (self._owner_pid, self._last_words, changed_environment())


def tied_to(owner_pid: int, last_words: str = "", environment: Mapping[str, str] | None = None) -> OwnerTie:
    """Watch the owner from a thread of this process, and note errors for it, unless this process is the owner.

    A process that was forked early has the environment of then, and vLLM has set some of it since.
    """
    if owner_pid != os.getpid():
        os.environ.update(environment or {})
        _name_process()
        if last_words:
            note_errors(last_words)
        threading.Thread(target=_exit_after, args=(owner_pid,), name="headway-owner", daemon=True).start()
    return OwnerTie(owner_pid=owner_pid, last_words=last_words)


def _name_process() -> None:
    """For `ps` and `top`: a fork has its parent's command line, and vLLM's own way to name it does nothing there."""
    name = Path("/proc/self/comm")
    with suppress(OSError):
        if not name.read_text(encoding="ascii", errors="replace").startswith("VLLM"):
            name.write_text(ENGINE_NAME, encoding="ascii")


def _exit_after(owner_pid: int) -> None:
    try:
        watch = os.pidfd_open(owner_pid)
    except ProcessLookupError:
        os._exit(1)
    poll = select.poll()
    poll.register(watch, select.POLLIN)
    poll.poll()
    os._exit(1)
