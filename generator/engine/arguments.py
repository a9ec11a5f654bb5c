"""Arguments that vLLM is started with: from our options, and from the config.json of the model's folder."""

import logging
import os
import platform
from collections.abc import Mapping
from typing import Literal

import torch
import vllm
from transformers import AutoConfig, PreTrainedConfig
from vllm.config import VllmConfig
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform

from generator.engine.options import ADAPTER_RANKS, EngineOptions, OwnerTie
from protocol.generation import MAX_TOP_LOGPROBS

logger = logging.getLogger(__name__)

_OF_LAYERS = ("layer_types", "layers_block_type", "block_types")
_WIDER_BY_ONE = frozenset({"cohere2", "cohere2_moe"})
"""Kinds of models whose window in vLLM is a token wider than config.json says, and than it is in transformers."""


def engine_args(options: EngineOptions, *, last_words: str = "") -> AsyncEngineArgs:
    """Arguments that vLLM is started with; its processes note their errors in the file `last_words`, if it is given."""
    return AsyncEngineArgs(
        **{**_adapter_arguments(options), **options.extra, "hf_overrides": _overrides(options)},
        model=options.model,
        dtype=options.dtype,
        max_model_len=options.max_model_len,
        max_num_seqs=options.max_num_seqs,
        scheduling_policy="priority",
        max_num_batched_tokens=options.max_num_batched_tokens,
        kv_cache_memory_bytes=int(options.kv_cache_gb * 2**30) if current_platform.is_cpu() else None,
        use_tqdm_on_load=options.verbose,
        gpu_memory_utilization=options.gpu_memory_fraction,
        tensor_parallel_size=options.tensor_parallel_size,
        distributed_executor_backend="uni" if options.tensor_parallel_size == 1 else "mp",
        seed=options.seed,
        enforce_eager=options.enforce_eager,
        load_format=options.load_format,
        skip_tokenizer_init=not options.tokenizer,
        logprobs_mode="processed_logprobs",
        max_logprobs=_most_logprobs(options.model),
        generation_config="vllm",
        enable_prefix_caching=_caches_prefixes(options),
        # A seeded request whose prompt is cut in two kills the CPU engine: its random generator cannot be rewound.
        enable_chunked_prefill=False if current_platform.is_cpu() else None,
        additional_config=OwnerTie(owner_pid=os.getpid(), last_words=last_words),
        worker_extension_cls="generator.weights.worker.WorkerExtension",
        weight_transfer_config=WeightTransferConfig(backend="headway"),
        # Of vLLM's second model runner, which there is on GPUs only: on a CPU a worker of ours captures them.
        enable_return_routed_experts=options.routed_experts == "on" and not current_platform.is_cpu(),
        disable_log_stats=True,
        enable_log_requests=False,
    )


def _adapter_arguments(options: EngineOptions) -> dict[str, object]:
    """Arguments for the adapters of requests, or for the one that the policy comes as; none without either.

    There is one slot more than is used: with all of them taken, vLLM's CPU kernels compute a request that has no
    adapter with the last one's.
    """
    if options.adapter_slots:
        used, largest = options.adapter_slots, options.max_adapter_rank
    elif options.policy_rank:
        used, largest = 1, options.policy_rank
    else:
        return {}
    slots = used + 1
    rank = next(each for each in ADAPTER_RANKS if each >= largest)
    return {"enable_lora": True, "max_loras": slots, "max_cpu_loras": slots, "max_lora_rank": rank}


def _overrides(options: EngineOptions) -> object:
    """Changes of the model's config.json: those of `extra` beside, and before, the ones that make it compute as in
    transformers.
    """
    given = options.extra.get("hf_overrides", {})
    if not isinstance(given, Mapping):
        return given
    head = {"head_dtype": options.head_dtype} if options.head_dtype != "model" else {}
    return {**_as_in_transformers(options.model), **given, **head}


def _as_in_transformers(model: str) -> dict[str, object]:
    """Changes of the config.json of a model's folder with which vLLM computes what transformers does without them."""
    config = _config_in(model)
    window = getattr(config, "sliding_window", None)
    return {"sliding_window": window - 1} if config and config.model_type in _WIDER_BY_ONE and window else {}


def _most_logprobs(model: str) -> int:
    """Number of likeliest tokens that a request may ask for: one that asked for more than there are would end the
    engine.
    """
    config = _config_in(model, of_text=True)
    return min(MAX_TOP_LOGPROBS, getattr(config, "vocab_size", None) or MAX_TOP_LOGPROBS)


def _caches_prefixes(options: EngineOptions) -> bool:
    """True but for recurrent layers on a CPU, where vLLM caches their states only with prompts that are cut in pieces,
    and `engine_args` has it cut none.
    """
    if not current_platform.is_cpu() or not _has_recurrent_layers(options.model):
        return True
    logger.info(
        "%s has layers with a recurrent state: on a CPU there is no cache of prefixes for it, so that a group's "
        "prompt is computed for each completion",
        options.model,
    )
    return False


def _has_recurrent_layers(model: str) -> bool:
    """True if the config of a model's folder names layers other than attention; False if it cannot be read."""
    config = _config_in(model, of_text=True)
    if config is None:
        return False
    kinds = [kind for name in _OF_LAYERS for kind in getattr(config, name, None) or ()]
    if kinds:
        return any("attention" not in kind or kind == "linear_attention" for kind in kinds)
    return any(name.startswith("mamba_") for name in config.to_dict())


def _config_in(model: str, *, of_text: bool = False) -> PreTrainedConfig | None:
    """The config of a model's folder, or the part of it for text; None if transformers cannot read it."""
    try:
        config = AutoConfig.from_pretrained(model, local_files_only=True)
        return config.get_text_config(decoder=True) if of_text else config
    except (OSError, ValueError):
        return None


def engine_kind(config: VllmConfig) -> str:
    """A label of all that the layout of loaded parameters depends on: releases of vLLM and torch, the device, the
    dtype, and the rank of adapters.
    """
    cpu = current_platform.is_cpu()
    device = torch.backends.cpu.get_cpu_capability() if cpu else current_platform.get_device_name()
    lora = "" if config.lora_config is None else f", LoRA of {config.lora_config.max_lora_rank}"
    return (
        f"vllm {vllm.__version__}, torch {torch.__version__}, {platform.machine()} {device}, {dtype_name(config)}{lora}"
    )


def capture_of_experts(config: VllmConfig) -> Literal["none", "workers", "vllm", "untried"]:
    """The capture that tells the experts of an engine's tokens: none, if it has no experts; that of our workers, on a
    CPU; vLLM's own, on a GPU, if it is on; there it was never tried.
    """
    if config.model_config.get_num_experts() < 1:
        return "none"
    if current_platform.is_cpu():
        return "workers"
    return "vllm" if config.aux_output_config.enabled else "untried"


def dtype_name(config: VllmConfig) -> str:
    """The dtype of weights and activations, such as `bfloat16`."""
    return str(config.model_config.dtype).removeprefix("torch.")
