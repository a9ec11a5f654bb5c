"""Between our records and vLLM's: how an engine is started, how it samples, what it answers."""

import logging
import os
import platform
from collections.abc import Iterator
from typing import TypeVar

import torch
import vllm
from transformers import AutoConfig
from vllm.config import VllmConfig
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.logprobs import FlatLogprobs
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind, SamplingParams

from generator.engine.options import ADAPTER_RANKS, EngineOptions, OwnerTie, ScoredSequence
from protocol.adapters import AdapterSampleAnswer, AdapterSampleRequest, AdapterSequence, AdapterSpan, LikeliestTokens
from protocol.generation import MAX_TOP_LOGPROBS, GeneratePart, Sampling
from protocol.trajectories import FinishReason, VersionSpan

T = TypeVar("T")
logger = logging.getLogger(__name__)

_OF_LAYERS = ("layer_types", "layers_block_type", "block_types")
_WIDER_BY_ONE = frozenset({"cohere2", "cohere2_moe"})
"""Kinds of models whose window in vLLM is a token wider than config.json says, and than it is in transformers."""


def engine_args(options: EngineOptions, *, last_words: str = "") -> AsyncEngineArgs:
    """Arguments that vLLM is started with; its processes note their errors in the file `last_words`, if it is given."""
    return AsyncEngineArgs(
        **{"hf_overrides": _as_in_transformers(options.model), **_adapter_arguments(options), **options.extra},
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
        max_logprobs=MAX_TOP_LOGPROBS,
        generation_config="vllm",
        enable_prefix_caching=_caches_prefixes(options),
        # A seeded request whose prompt is cut in two kills the CPU engine: its random generator cannot be rewound.
        enable_chunked_prefill=False if current_platform.is_cpu() else None,
        additional_config=OwnerTie(owner_pid=os.getpid(), last_words=last_words),
        worker_extension_cls="generator.weights.worker.WorkerExtension",
        weight_transfer_config=WeightTransferConfig(backend="headway"),
        disable_log_stats=True,
        enable_log_requests=False,
    )


def _adapter_arguments(options: EngineOptions) -> dict[str, object]:
    """Arguments for one slot more than are used: with all of them taken, vLLM's CPU kernels compute a request that has
    no adapter with the last one's.
    """
    if not options.adapter_slots and not options.policy_rank:
        return {}
    slots = options.adapter_slots + 1 if options.adapter_slots else 2
    most = options.max_adapter_rank if options.adapter_slots else options.policy_rank
    ranks = [rank for rank in ADAPTER_RANKS if rank >= most]
    return {"enable_lora": True, "max_loras": slots, "max_cpu_loras": slots, "max_lora_rank": ranks[0]}


def _as_in_transformers(model: str) -> dict[str, object]:
    """Changes of the config.json of a model's folder with which vLLM computes what transformers does without them."""
    try:
        config = AutoConfig.from_pretrained(model, local_files_only=True)
    except (OSError, ValueError):
        return {}
    window = getattr(config, "sliding_window", None)
    return {"sliding_window": window - 1} if config.model_type in _WIDER_BY_ONE and window else {}


def _caches_prefixes(options: EngineOptions) -> bool:
    """True but for recurrent layers on a CPU: vLLM caches their states with prompts that are cut alone, see there."""
    if not current_platform.is_cpu() or not has_recurrent_layers(options.model):
        return True
    logger.info(
        "%s has layers with a recurrent state: on a CPU there is no cache of prefixes for it, so that a group's "
        "prompt is computed for each completion",
        options.model,
    )
    return False


def has_recurrent_layers(model: str) -> bool:
    """True if the config of a model's folder names layers other than attention; False if it cannot be read."""
    try:
        config = AutoConfig.from_pretrained(model, local_files_only=True).get_text_config(decoder=True)
    except (OSError, ValueError):
        return False
    kinds = [kind for name in _OF_LAYERS for kind in getattr(config, name, None) or ()]
    if kinds:
        return any("attention" not in kind or kind == "linear_attention" for kind in kinds)
    return any(name.startswith("mamba_") for name in config.to_dict())


def engine_kind(config: VllmConfig) -> str:
    """Determines the layout of loaded parameters: the type, the device, and what this vLLM makes of both."""
    cpu = current_platform.is_cpu()
    device = torch.backends.cpu.get_cpu_capability() if cpu else current_platform.get_device_name()
    lora = "" if config.lora_config is None else f", LoRA of {config.lora_config.max_lora_rank}"
    return (
        f"vllm {vllm.__version__}, torch {torch.__version__}, {platform.machine()} {device}, {dtype_name(config)}{lora}"
    )


def dtype_name(config: VllmConfig) -> str:
    """Of weights and activations, such as `bfloat16`."""
    return str(config.model_config.dtype).removeprefix("torch.")


def sampling_params(*, n: int, sampling: Sampling, stream_interval: int) -> SamplingParams:
    """`behavior_logprobs` will be those of the distribution that `sampling` makes.

    With `n` completions and a seed, the completion of index i draws with seed + i.
    """
    return SamplingParams(
        n=n,
        temperature=sampling.temperature,
        max_tokens=sampling.max_tokens,
        stop_token_ids=list(sampling.stop_token_ids),
        seed=sampling.seed,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        min_tokens=sampling.min_tokens,
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        stream_interval=stream_interval,
        skip_clone=True,
    )


def adapter_sampling_params(request: AdapterSampleRequest) -> SamplingParams:
    """The logprobs of sampled tokens are of what is sampled from, those of the prompt at temperature 1.

    Completions at temperature 0 are all the same, and vLLM makes no more than one.
    """
    scores_prompt = request.prompt_logprobs or request.top_of_prompt > 0
    return SamplingParams(
        n=request.n if request.temperature else 1,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        seed=request.seed,
        max_tokens=request.max_tokens,
        stop=list(request.stop_texts) or None,
        stop_token_ids=list(request.stop_token_ids),
        ignore_eos=request.ignore_ends,
        include_stop_str_in_output=True,
        logprobs=request.top_of_samples,
        prompt_logprobs=request.top_of_prompt if scores_prompt else None,
        flat_logprobs=True,
        detokenize=bool(request.stop_texts),
        skip_special_tokens=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,
    )


def adapter_answer(output: RequestOutput, request: AdapterSampleRequest, *, generator_id: str) -> AdapterSampleAnswer:
    """The answer to a request of the completions that have ended."""
    ended = [_adapter_sequence(each, request) for each in sorted(output.outputs, key=lambda one: one.index)]
    return AdapterSampleAnswer(
        generator_id=generator_id,
        sequences=tuple(ended if request.temperature else ended * request.n),
        prompt_logprobs=_first_of_rows(output.prompt_logprobs, skip=1) if request.prompt_logprobs else (),
        top_of_prompt=_likeliest(output.prompt_logprobs, skip=1) if request.top_of_prompt else None,
    )


def _adapter_sequence(completion: CompletionOutput, request: AdapterSampleRequest) -> AdapterSequence:
    token_ids = tuple(completion.token_ids)
    whole = (AdapterSpan(version=0, start=0, end=len(token_ids)),) if token_ids else ()
    return AdapterSequence(
        token_ids=token_ids,
        logprobs=_first_of_rows(completion.logprobs),
        spans=completion.adapter_spans if request.adapter is not None else whole,
        finish_reason=_finish_reason(completion.finish_reason) or "abort",
        top=_likeliest(completion.logprobs) if request.top_of_samples else None,
    )


def _rows(logprobs: FlatLogprobs, skip: int = 0) -> list[tuple[int, int]]:
    return list(zip(logprobs.start_indices[skip:], logprobs.end_indices[skip:], strict=True))


def _first_of_rows(logprobs: FlatLogprobs | None, skip: int = 0) -> tuple[float, ...]:
    """The logprobs of the tokens themselves, which stand before the likeliest ones."""
    return () if logprobs is None else tuple(logprobs.logprobs[start] for start, _ in _rows(logprobs, skip))


def _likeliest(logprobs: FlatLogprobs | None, skip: int = 0) -> LikeliestTokens | None:
    if logprobs is None:
        return None
    rows = _rows(logprobs, skip)
    return LikeliestTokens(
        token_ids=tuple(_after_the_first(logprobs.token_ids, rows)),
        logprobs=tuple(_after_the_first(logprobs.logprobs, rows)),
    )


def generate_part(completion: CompletionOutput, *, instance: str, oldest_cache: str) -> GeneratePart:
    """A part of one completion: its new tokens, and the version spans of all of it so far, signed by `instance`. No
    keys and values of its prompt are older than version `oldest_cache`, or than any of its tokens if that is empty.
    """
    spans = completion.weight_versions or ()
    return GeneratePart(
        index=completion.index,
        token_ids=tuple(completion.token_ids),
        behavior_logprobs=_sampled(completion.logprobs),
        version_spans=tuple(
            VersionSpan(
                version=span.version,
                start=span.start,
                end=span.end,
                instance=instance,
                cache=None if oldest_cache in ("", span.version) else oldest_cache,
            )
            for span in spans
        ),
        finish_reason=_finish_reason(completion.finish_reason),
    )


def _sampled(logprobs: "FlatLogprobs | list[float] | None") -> tuple[float, ...]:
    """The logprobs of a part's tokens, packed on their way or not."""
    if logprobs is None:
        return ()
    return tuple(logprobs if isinstance(logprobs, list) else logprobs.logprobs)


def _finish_reason(reason: str | None) -> FinishReason | None:
    """Whatever else ends a completion in vLLM leaves it as useless as an abort."""
    match reason:
        case None | "stop" | "length":
            return reason
        case _:
            return "abort"


def scoring_params(*, top: int) -> SamplingParams:
    """For the logprobs of a prompt alone, which the prefix cache must not answer: it holds no logits.

    vLLM gives those of a prompt at temperature 1, whatever the sampling.
    """
    return SamplingParams(
        max_tokens=1,
        prompt_logprobs=top,
        flat_logprobs=True,
        detokenize=False,
        skip_reading_prefix_cache=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,
    )


def scored_sequence(output: RequestOutput, *, length: int, top: int, entered_under: str) -> ScoredSequence | None:
    """The scores that `scoring_params` brings for a prompt of `length` tokens, which came in under a version; None if
    it was ended before it was scored.

    vLLM stamps the token that it samples after the prompt, in the step that ends the prompt.
    """
    found = output.prompt_logprobs
    stamps = {span.version for span in output.outputs[0].weight_versions or ()}
    if found is None or len(found) != length or not stamps:
        return None
    rows = _rows(found, 1)
    return ScoredSequence(
        logprobs=_first_of_rows(found, 1),
        top_token_ids=tuple(_after_the_first(found.token_ids, rows)) if top else (),
        top_logprobs=tuple(_after_the_first(found.logprobs, rows)) if top else (),
        version=entered_under if stamps == {entered_under} else None,
    )


def _after_the_first(values: list[T], rows: list[tuple[int, int]]) -> Iterator[tuple[T, ...]]:
    """The first of each row is the prompt's own token; then come the likeliest ones, the likeliest first."""
    return (tuple(values[start + 1 : end]) for start, end in rows)
