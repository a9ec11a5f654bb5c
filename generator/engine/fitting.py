"""Faults of a model that the installed vLLM cannot serve, found in its config.json before an engine is started.

Heads of a size that attention on a CPU lacks, and types of numbers that its gated delta net does not take, would be
found out by the first request, which ends the engine. Loads neither vllm nor torch, but transformers for an
architecture that vLLM has no code of its own for.
"""

import difflib
import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from generator.engine.installed import architectures, cpu_head_sizes, latent_kinds
from services.model_folder import language_config

_HEAD_KEYS = ("head_dim", "hidden_size_per_head", "attention_head_dim")
_OTHER_HEADS = "global_head_dim"
"""Of those layers of a model that look further than the others."""
_GENERATING = ("ForCausalLM", "ForConditionalGeneration", "ChatModel", "LMHeadModel")
"""vLLM takes a model of one of these names for one of another of them."""
_DELTA_NET_KEY = "linear_key_head_dim"
"""In the config.json of a model with layers of a gated delta net, such as Qwen3-Next and Qwen3.5."""
_NOT_OF_DELTA_NET = ("float32", "float16")
"""Under `auto` vLLM keeps float16 as the model's own type, and takes bfloat16 for float32."""
_ALIKE = 3
_USUAL = ("LlamaForCausalLM", "Qwen3ForCausalLM", "Gemma3ForCausalLM")
_COMPUTED_OTHERWISE = frozenset({"gpt_neox"})
"""Kinds of models whose probabilities in vLLM are not those of transformers: tokens would be trained with others."""
_COMPUTED_OTHERWISE_ON_CPU = frozenset({*_COMPUTED_OTHERWISE, "deepseek_v3", "lfm2"})
_OTHER_CODE = ("model_impl", "hf_overrides", "trust_remote_code")
"""Arguments of vLLM's under which config.json does not say what it runs."""


def engine_faults(model: Path, *, on_cpu: bool, dtype: str, extra: Mapping[str, object]) -> Iterator[str]:
    """Faults of a model that vLLM cannot serve in numbers of type `dtype`, a line each; `extra` are arguments for vLLM.
    Raises ModuleNotFoundError without it.

    A config.json that cannot be read has no fault here.
    """
    if importlib.util.find_spec("vllm") is None:
        raise ModuleNotFoundError("vLLM is not installed here", name="vllm")
    if any(extra.get(name) for name in _OTHER_CODE):
        return
    try:
        config = language_config(model)
    except (OSError, ValueError):
        return
    yield from _architecture_fault(model, config)
    heads = list(_head_faults(model, config)) if on_cpu else []
    yield from heads
    if on_cpu:
        yield from _delta_net_fault(model, config, dtype)
    if not heads:
        yield from _otherwise_fault(model, config.get("model_type"), on_cpu=on_cpu)


def _otherwise_fault(model: Path, kind: object, *, on_cpu: bool) -> Iterator[str]:
    if kind in (_COMPUTED_OTHERWISE_ON_CPU if on_cpu else _COMPUTED_OTHERWISE):
        yield (
            f"model: {model} is of model_type {kind}, and vLLM's probabilities of its tokens{' on a CPU' * on_cpu} are "
            "not those of transformers, by which it is trained: expected a model of another kind"
        )


def _delta_net_fault(model: Path, config: Mapping[str, Any], dtype: str) -> Iterator[str]:
    own = config.get("dtype") or config.get("torch_dtype")
    if dtype == "auto" and own == "float16":
        dtype = "float16"
    if config.get(_DELTA_NET_KEY) and dtype in _NOT_OF_DELTA_NET:
        yield (
            f"engine.dtype: it is {dtype}, and {model} has layers of a gated delta net, which vLLM computes on a CPU "
            f"in bfloat16 alone: its engine would die at the first request. Set engine.dtype to bfloat16, or take a GPU"
        )


def _architecture_fault(model: Path, config: Mapping[str, Any]) -> Iterator[str]:
    known, given = architectures(), config.get("architectures")
    names = [name for name in given if isinstance(name, str)] if isinstance(given, list) else []
    if not known or not names or config.get("auto_map") or any(_is_known(name, known) for name in names):
        return
    if not any(_runs_by_transformers(name) for name in names):
        kind = names[0]
        yield (
            f"model: {model} is a {kind}, and the installed vLLM serves no such model: expected one of its "
            f"{len(known)} architectures, such as {', '.join(_likest(kind, known))}; take a model of one of them"
        )


def _is_known(name: str, known: frozenset[str]) -> bool:
    ends = [end for end in _GENERATING if name.endswith(end)]
    return name in known or any(name.removesuffix(ends[0]) + other in known for other in _GENERATING if ends)


def _runs_by_transformers(name: str) -> bool:
    """True if vLLM runs it with the code of transformers, as it does where it has none of its own."""
    import transformers

    model = getattr(transformers, name, None)
    return model is not None and bool(model.is_backend_compatible() or model._can_set_attn_implementation())


def _likest(name: str, known: frozenset[str]) -> list[str]:
    """The nearest that generate, or some that are in wide use."""
    generating = sorted(one for one in known if one.endswith(_GENERATING))
    return difflib.get_close_matches(name, generating, n=_ALIKE) or list(_USUAL)


def _head_faults(model: Path, config: Mapping[str, Any]) -> Iterator[str]:
    is_latent = config.get("model_type") in latent_kinds() and config.get("kv_lora_rank") is not None
    has_other_latent = config.get("kv_lora_rank") is not None and not is_latent
    can = cpu_head_sizes(latent=is_latent)
    if not can or has_other_latent:
        return
    sizes = _latent_head(config) if is_latent else _heads(config)
    for key, size in sizes.items():
        if size and size not in can:
            yield (
                f"model: the attention heads of {model} have {size} numbers each ({key} in its config.json), and "
                f"vLLM's attention on a CPU has no code for that: its engine would die at the first request; expected "
                f"one of {', '.join(map(str, sorted(can)))}. Take a model with such heads, or a GPU"
            )


def _latent_head(config: Mapping[str, Any]) -> dict[str, int]:
    parts = ("kv_lora_rank", "qk_rope_head_dim")
    return {" + ".join(parts): sum(_whole(config.get(key)) for key in parts)}


def _heads(config: Mapping[str, Any]) -> dict[str, int]:
    """As vLLM itself takes them from a configuration, by where they stand there; none where there is no attention."""
    heads, width = _whole(config.get("num_attention_heads")), _whole(config.get("hidden_size"))
    if not heads:
        return {}
    key = next((key for key in _HEAD_KEYS if _whole(config.get(key))), None)
    usual = {"hidden_size / num_attention_heads": width // heads} if key is None else {key: _whole(config[key])}
    return usual | {_OTHER_HEADS: _whole(config.get(_OTHER_HEADS))}


def _whole(value: object) -> int:
    return value if isinstance(value, int) and value > 0 else 0
