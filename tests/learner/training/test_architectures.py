"""Models other than Llama: a packed row gives what each sequence gives in transformers, or is refused by name."""

from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig

from learner.training.attention import build_packed_index, packed_attention
from learner.training.batch import flatten
from learner.training.packing import pack, shared_prefixes
from learner.training.policy import load_causal_lm, predicting_states
from learner.training.score_model import load_score_model
from tests.learner.training.tiny_model import VOCABULARY, random_sequences

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": VOCABULARY,
    "pad_token_id": None,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "initializer_range": 0.2,
}
WINDOW = 6  # sequences have up to 24 tokens
ALTERNATING = ["sliding_attention", "full_attention"]
RIGHT: dict[str, dict[str, object]] = {
    "Mistral": {"sliding_window": WINDOW},
    "Qwen2": {"use_sliding_window": True, "sliding_window": WINDOW, "layer_types": ALTERNATING},
    "Qwen3": {},
    "Gemma3Text": {"sliding_window": WINDOW, "layer_types": ALTERNATING},
    "Gemma2": {"sliding_window": WINDOW, "final_logit_softcapping": None, "attn_logit_softcapping": 2.0},
    "Phi3": {"sliding_window": WINDOW},
    "Olmo3": {"sliding_window": WINDOW, "layer_types": ALTERNATING},
    "GptOss": {
        "sliding_window": WINDOW,
        "layer_types": ALTERNATING,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
    },
}
REFUSED: dict[str, tuple[str, dict[str, object], str]] = {
    "Gemma 2": ("Gemma2", {}, "final_logit_softcapping = 30.0"),
    "Granite": ("Granite", {"logits_scaling": 8.0}, "logits_scaling = 8.0"),
    "Cohere": ("Cohere", {}, "logit_scale = 0.0625"),
    "Cohere 2": ("Cohere2", {}, "logit_scale = 0.0625"),
    "Qwen3-Next": ("Qwen3Next", {"layer_types": ["linear_attention", "full_attention"]}, "linear_attention"),
    "Qwen3.5": ("Qwen3_5Text", {"layer_types": ["linear_attention", "full_attention"]}, "linear_attention"),
    "LFM2": ("Lfm2", {"layer_types": ["conv", "full_attention"]}, "conv"),
    "Granite hybrid": (
        "GraniteMoeHybrid",
        {"layer_types": ["mamba", "attention"], "mamba_n_heads": 4},
        "linear_attention|mamba",
    ),
    "Falcon-H1": ("FalconH1", {}, "hybrid|mamba"),
    "Phi-3.5-MoE": ("Phimoe", {"num_local_experts": 4, "num_experts_per_tok": 2}, "model_type phimoe"),
    "Mixtral with noise": ("Mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise = 0.1"),
    "Llama 4": ("Llama4Text", {}, "chunked_attention"),
}


def config_of(name: str, changes: dict[str, object]) -> PreTrainedConfig:
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **changes})
    assert isinstance(config, PreTrainedConfig)
    return config


def written(name: str, folder: Path) -> Path:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(name, RIGHT[name]))
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "sinks" in parameter_name or "bias" in parameter_name:
                parameter.normal_()
    model.save_pretrained(folder)
    return folder


def gradients(model: nn.Module, states: Tensor) -> dict[str, Tensor]:
    slopes = torch.linspace(-1, 1, states.numel(), dtype=states.dtype).view(states.shape)
    (slopes.sin() * states).sum().backward()  # type: ignore[no-untyped-call]
    return {name: known.grad for name, known in model.named_parameters() if known.grad is not None}


@pytest.mark.parametrize("name", RIGHT)
def test_a_packed_row_and_its_gradients_are_those_of_each_sequence_in_plain_transformers(
    name: str, tmp_path: Path
) -> None:
    folder = written(name, tmp_path)
    sequences = random_sequences(6, seed=3)
    assert max(len(sequence.token_ids) for sequence in sequences) > 2 * WINDOW
    dtype = torch.float32 if name == "GptOss" else torch.float64  # experts have no product of float64
    model = load_causal_lm(folder, dtype=dtype)
    batch = flatten(sequences)
    found, _ = predicting_states(model, pack(batch, torch.arange(6).numpy(), prefixes=shared_prefixes(batch)))
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").train()
    parts = []
    for sequence in sequences:
        ids = torch.from_numpy(sequence.token_ids).long()
        states = plain.base_model(input_ids=ids[None], use_cache=False).last_hidden_state[0]
        parts.append(states[torch.from_numpy(sequence.loss_mask).nonzero()[:, 0] - 1])
    expected = torch.cat(parts)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    ours, theirs = gradients(model, found), gradients(plain, expected)
    assert ours.keys() == theirs.keys()
    for parameter, gradient in theirs.items():
        torch.testing.assert_close(ours[parameter], gradient, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("name", "changes", "said"), REFUSED.values(), ids=REFUSED)
def test_a_model_that_would_be_wrong_is_refused_by_what_its_config_says(
    name: str, changes: dict[str, object], said: str, tmp_path: Path
) -> None:
    config_of(name, changes).save_pretrained(tmp_path)
    for load in (load_causal_lm, load_score_model):
        with pytest.raises(ValueError, match=f"its config has .*({said}).*Name another model"):
            load(tmp_path, dtype=torch.float32)


def test_a_model_with_attention_of_its_own_is_refused(tmp_path: Path) -> None:
    config = transformers.BloomConfig(hidden_size=32, n_layer=1, n_head=2, vocab_size=VOCABULARY)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError):
        load_causal_lm(tmp_path, dtype=torch.float32)


@pytest.mark.parametrize("argument", [{"position_bias": torch.zeros(1)}, {"is_causal": False}])
def test_attention_refuses_arguments_that_it_does_not_know(argument: dict[str, object]) -> None:
    index = build_packed_index([torch.arange(3).numpy()], tokens=3)
    states = torch.zeros(1, 2, 3, 4)
    with pytest.raises(ValueError, match=next(iter(argument))):
        packed_attention(nn.Module(), states, states, states, None, packed_index=index, **argument)  # type: ignore[arg-type]
