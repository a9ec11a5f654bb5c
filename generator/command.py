"""The command `generator`."""

import logging
import os
import signal
from types import FrameType
from urllib.parse import urlsplit

from generator.config import GeneratorConfig
from generator.engine.fitting import engine_faults
from generator.engine.fork_server import close_fork_server, open_fork_server
from generator.engine.options import EngineOptions, prepare_environment
from services.config.devices import visible
from services.config.models import load_or_exit
from services.logs import configure_logging
from services.nccl import keep_to_interface_of
from services.network import LOOPBACK, address_to
from services.own_imports import own_imports
from services.process import WRONG_SETTINGS, leave, run_process
from services.standard_output import standard_output

logger = logging.getLogger(__name__)


@standard_output()
def main() -> None:
    """Reads the config, sets what vllm reads from the environment, then imports vllm and serves."""
    config = load_or_exit(GeneratorConfig, process="generator", description="Serves the policy with vLLM.")
    configure_logging("generator", level=config.log.level, format=config.log.format)
    if config.collective == "nccl" and config.join.learner is not None:
        keep_to_interface_of(address_to(config.join.learner) or urlsplit(config.join.learner).hostname or LOOPBACK)
    _refuse_what_vllm_lacks(config)
    options = engine_options(config)
    prepare_environment(options)
    os.nice(config.engine.niceness)
    for number in (signal.SIGINT, signal.SIGTERM):
        # The import takes some ten seconds, and nothing has been started that needs to be ended.
        signal.signal(number, _exit)
    with own_imports("generator"):
        from generator.service import serve
    if not visible(os.environ):
        open_fork_server()

    try:
        status = run_process("generator", lambda stop: serve(config, options, stop), finish_s=config.drain_s + 5.0)
    finally:
        close_fork_server()
    leave(status)


def _refuse_what_vllm_lacks(config: GeneratorConfig) -> None:
    """Ends the process where its engine would die, or could not be started: loading it takes ten seconds and more."""
    on_cpu = not visible(os.environ)
    faults = list(engine_faults(config.model, on_cpu=on_cpu, dtype=config.engine.dtype, extra=config.engine.extra))
    if faults:
        logger.critical("stopped by an error: [generator] %s", "; ".join(faults))
        leave(WRONG_SETTINGS)


def _exit(number: int, frame: FrameType | None) -> None:
    os._exit(0)


def engine_options(config: GeneratorConfig) -> EngineOptions:
    """The engine's part of the config."""
    engine = config.engine
    return EngineOptions(
        model=str(config.model),
        dtype=engine.dtype,
        head_dtype=engine.head_dtype,
        max_model_len=config.context_tokens,
        max_num_seqs=engine.max_num_seqs,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        kv_cache_gb=engine.kv_cache_gb,
        gpu_memory_fraction=engine.gpu_memory_fraction,
        tensor_parallel_size=engine.tensor_parallel_size,
        threads=engine.threads,
        seed=engine.seed,
        enforce_eager=engine.enforce_eager,
        stream_interval=engine.stream_interval,
        staging=config.staging,
        recompute_on_update=engine.recompute_on_update,
        routed_experts=engine.routed_experts,
        tokenizer=config.openai or config.adapters.are_taken,
        adapter_slots=config.adapters.slots,
        max_adapter_rank=config.adapters.max_rank,
        policy_rank=engine.lora_rank if config.join.learner is not None else 0,
        pause_ttl_s=config.join.pause_ttl_s,
        stall_timeout_s=engine.stall_timeout_s,
        verbose=engine.verbose,
        extra=engine.extra,
    )


if __name__ == "__main__":
    main()
