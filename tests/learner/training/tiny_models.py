"""Tiny random models of many architectures of transformers, each with the traits that tell them apart: windows shorter
than the sequences of tests, softcaps, sinks, experts, scaled logits, layers with a recurrent state.
"""

from __future__ import annotations

from pathlib import Path

import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig

from tests.learner.training.tiny_model import VOCABULARY

WINDOW = 6  # sequences of `random_sequences` have up to 24 tokens
SIZES: dict[str, object] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 128,
    "pad_token_id": None,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "initializer_range": 0.2,
}
_ALTERNATING: dict[str, object] = {
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"],
}
_EXPERTS: dict[str, object] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_ROUTED: dict[str, object] = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
_LATENT: dict[str, object] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "head_dim": 4,
}
_LINEAR: dict[str, object] = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_MAMBA: dict[str, object] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 8,
}
ARCHITECTURES: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("Llama", {}),
    "qwen2 with a window": ("Qwen2", {"use_sliding_window": True, **_ALTERNATING}),
    "qwen3": ("Qwen3", {}),
    "smollm3": ("SmolLM3", {}),
    "mistral": ("Mistral", {"sliding_window": WINDOW}),
    "starcoder2": ("Starcoder2", {"sliding_window": WINDOW}),
    "phi3": ("Phi3", {"sliding_window": WINDOW}),
    "olmo2": ("Olmo2", {}),
    "olmo3": ("Olmo3", _ALTERNATING),
    "exaone4": ("Exaone4", _ALTERNATING),
    "glm4": ("Glm4", {}),
    "gemma2": ("Gemma2", {"sliding_window": WINDOW, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    "gemma3": ("Gemma3Text", _ALTERNATING),
    "gemma3 with a cap": ("Gemma3Text", {**_ALTERNATING, "final_logit_softcapping": 3.0}),
    "gemma4": (
        "Gemma4Text",
        {
            **_ALTERNATING,
            "global_head_dim": 8,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCABULARY,
        },
    ),
    "granite": ("Granite", {"logits_scaling": 4.0}),
    "cohere": ("Cohere", {"logit_scale": 0.3}),
    "cohere2": ("Cohere2", {"logit_scale": 0.3, **_ALTERNATING}),
    "qwen3 moe": ("Qwen3Moe", _EXPERTS),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "phimoe": ("Phimoe", {"sliding_window": WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "gpt-oss": ("GptOss", {**_ALTERNATING, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "glm4 moe": ("Glm4Moe", _ROUTED),
    "deepseek v3": ("DeepseekV3", {**_ROUTED, **_LATENT}),
    "granite moe": ("GraniteMoe", {"logits_scaling": 4.0, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "llama4": (
        "Llama4Text",
        {
            "num_local_experts": 4,
            "intermediate_size_mlp": 48,
            "attention_chunk_size": WINDOW,
            "layer_types": ["chunked_attention", "full_attention"],
            "no_rope_layers": [1, 0],
        },
    ),
    "qwen3.5": ("Qwen3_5Text", _LINEAR),
    "qwen3.5 moe": ("Qwen3_5MoeText", {**_LINEAR, **_EXPERTS, "shared_expert_intermediate_size": 16}),
    "qwen3-next": ("Qwen3Next", {**_LINEAR, **_EXPERTS, "shared_expert_intermediate_size": 16}),
    "lfm2": ("Lfm2", {"layer_types": ["conv", "full_attention"]}),
    "granite hybrid": (
        "GraniteMoeHybrid",
        {
            **_MAMBA,
            "layer_types": ["mamba", "attention"],
            "num_local_experts": 0,
            "shared_intermediate_size": 48,
            "logits_scaling": 4.0,
        },
    ),
    "falcon-h1": ("FalconH1", {**_MAMBA, "mamba_d_ssm": 64}),
    "bamba": ("Bamba", {**_MAMBA, "attn_layer_indices": [1]}),
    "mamba2": ("Mamba2", {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1, "chunk_size": 8}),
    "bloom": ("Bloom", {"n_layer": 2, "n_head": 4}),
    "gpt2": ("GPT2", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}),
    "gpt-neox": ("GPTNeoX", {}),
    "phi": ("Phi", {}),
    "nemotron": ("Nemotron", {}),
}

_SERVED: dict[str, object] = {
    "hidden_size": 128,
    "intermediate_size": 64,
    "head_dim": 32,
    "initializer_range": 0.1,
}
_SERVED_EXPERTS: dict[str, object] = {"moe_intermediate_size": 32}
_SERVED_BESIDE_SHARED: dict[str, object] = {**_SERVED_EXPERTS, "shared_expert_intermediate_size": 32}
_SERVED_OF: dict[str, dict[str, object]] = {
    "gpt2": {"n_embd": 128},
    "gemma4": {"global_head_dim": 32},
    "qwen3 moe": _SERVED_EXPERTS,
    "glm4 moe": _SERVED_EXPERTS,
    "qwen3.5 moe": _SERVED_BESIDE_SHARED,
    "qwen3-next": _SERVED_BESIDE_SHARED,
    "llama4": {"intermediate_size_mlp": 64, "attention_chunk_size": 128, "max_position_embeddings": 256},
    "lfm2": {"conv_dim": 128, "conv_dim_out": 128, "block_dim": 128},
    "deepseek v3": {
        **_SERVED_EXPERTS,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "head_dim": 64,
        "v_head_dim": 32,
        "topk_method": "noaux_tc",
    },
    "granite hybrid": {"mamba_d_head": 32, "mamba_d_state": 16, "shared_intermediate_size": 64},
    "falcon-h1": {"mamba_d_head": 32, "mamba_d_state": 16, "mamba_d_ssm": 256},
    "bamba": {"mamba_d_head": 32, "mamba_d_state": 16},
    "mamba2": {"head_dim": 32, "state_size": 16, "intermediate_size": 256},
}


def tiny_config(name: str, **changes: object) -> PreTrainedConfig:
    """The config of one of `ARCHITECTURES`."""
    kind, traits = ARCHITECTURES[name]
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **traits, **changes})
    assert isinstance(config, PreTrainedConfig)
    return config


def tiny_causal_lm(name: str, **changes: object) -> nn.Module:
    """A random model of one of `ARCHITECTURES`; what transformers begins with zeros is random, too."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(name, **changes))
    assert isinstance(model, nn.Module)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "sinks" in parameter_name or "bias" in parameter_name:
                parameter.normal_()
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("e_score_correction_bias"):
                buffer.normal_()
    return model


def write_tiny_model(name: str, folder: Path, **changes: object) -> Path:
    """Writes a random model of one of `ARCHITECTURES` into `folder`; there is no tokenizer."""
    model = tiny_causal_lm(name, **changes)
    save = model.save_pretrained
    assert callable(save)
    save(folder)
    return folder


def served_sizes(name: str) -> dict[str, object]:
    """Changes of one of `ARCHITECTURES` for vLLM on a CPU: heads and experts of sizes that its kernels have."""
    return _SERVED | _SERVED_OF.get(name, {})
