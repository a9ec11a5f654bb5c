"""Models that the installed vLLM cannot serve are named from their config.json."""

import json
from pathlib import Path
from typing import Any

import pytest

from generator.engine.fitting import engine_faults
from generator.engine.installed import architectures

LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 128, "num_attention_heads": 4}


def faults(
    folder: Path, *, on_cpu: bool = True, dtype: str = "auto", extra: dict[str, object] | None = None, **config: Any
) -> list[str]:
    pytest.importorskip("vllm")
    (folder / "config.json").write_text(json.dumps(LLAMA | config))
    return list(engine_faults(folder, on_cpu=on_cpu, dtype=dtype, extra=extra or {}))


@pytest.mark.parametrize(
    ("config", "where"),
    [
        ({"head_dim": 16}, "have 16 numbers each (head_dim in"),
        ({"num_attention_heads": 8, "hidden_size": 192}, "have 24 numbers each (hidden_size / num_attention_heads in"),
        ({"head_dim": 64, "text_config": {"head_dim": 8}}, "have 8 numbers each (head_dim in"),
        ({"head_dim": 64, "global_head_dim": 72}, "have 72 numbers each (global_head_dim in"),
        (
            {"model_type": "deepseek_v3", "kv_lora_rank": 32, "qk_rope_head_dim": 16, "head_dim": 64},
            "have 48 numbers each (kv_lora_rank + qk_rope_head_dim in",
        ),
    ],
)
def test_heads_that_attention_on_a_cpu_lacks_are_named_and_taken_on_a_gpu(
    config: dict[str, Any], where: str, tmp_path: Path
) -> None:
    (fault,) = faults(tmp_path, **config)
    assert where in fault
    assert "would die at the first request; expected one of" in fault
    assert faults(tmp_path, on_cpu=False, **config) == []


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"head_dim": 128},
        {"head_dim": None},
        {"num_attention_heads": None, "head_dim": 16},  # no attention
        {"model_type": "deepseek_v2", "kv_lora_rank": 512, "qk_rope_head_dim": 64, "head_dim": 16},
        {"model_type": "minicpm3", "kv_lora_rank": 32, "head_dim": 16},  # latent, by code of its own
    ],
)
def test_heads_that_it_has_or_that_are_not_its_own_are_taken(config: dict[str, Any], tmp_path: Path) -> None:
    assert faults(tmp_path, **config) == []


def test_a_gated_delta_net_is_taken_in_bfloat16_alone_on_a_cpu(tmp_path: Path) -> None:
    config: dict[str, Any] = {"model_type": "qwen3_next", "linear_key_head_dim": 128}
    (fault,) = faults(tmp_path, dtype="float32", **config)
    assert "engine.dtype: it is float32, and" in fault
    assert "Set engine.dtype to bfloat16" in fault
    assert faults(tmp_path, dtype="float32", on_cpu=False, **config) == []
    assert faults(tmp_path, dtype="bfloat16", **config) == faults(tmp_path, **config) == []
    (fault,) = faults(tmp_path, dtype="float16", **config)
    assert "it is float16" in fault
    assert faults(tmp_path, dtype="auto", torch_dtype="float16", **config) == [fault]
    assert faults(tmp_path, dtype="auto", torch_dtype="float32", **config) == []
    assert faults(tmp_path, dtype="float32") == []


def test_an_architecture_that_vllm_lacks_is_named_with_some_that_it_has(tmp_path: Path) -> None:
    (fault,) = faults(tmp_path, architectures=["Qwen3ForCausals"])
    assert "is a Qwen3ForCausals, and the installed vLLM serves no such model" in fault
    assert f"expected one of its {len(architectures())} architectures, such as Qwen3ForCausalLM" in fault


@pytest.mark.parametrize(
    ("config", "on_cpu"),
    [
        ({"model_type": "gpt_neox", "architectures": ["GPTNeoXForCausalLM"], "head_dim": 64}, True),
        ({"model_type": "gpt_neox", "architectures": ["GPTNeoXForCausalLM"], "head_dim": 64}, False),
        ({"model_type": "deepseek_v3", "kv_lora_rank": 512, "qk_rope_head_dim": 64}, True),
        ({"model_type": "lfm2"}, True),
    ],
)
def test_a_kind_that_vllm_computes_otherwise_than_transformers_is_named(
    config: dict[str, Any], on_cpu: bool, tmp_path: Path
) -> None:
    (fault,) = faults(tmp_path, on_cpu=on_cpu, **config)
    assert f"is of model_type {config['model_type']}, and vLLM's probabilities of its tokens" in fault
    assert "are not those of transformers" in fault


@pytest.mark.parametrize(
    "config",
    [
        {"architectures": None},
        {"architectures": ["LlamaForConditionalGeneration"]},  # vLLM takes it for LlamaForCausalLM
        {"architectures": ["Mine"], "auto_map": {"AutoModelForCausalLM": "mine.Mine"}},
        {"architectures": ["CTRLLMHeadModel", "LlamaForCausalLM"]},
    ],
)
def test_what_vllm_serves_or_may_serve_is_taken(config: dict[str, Any], tmp_path: Path) -> None:
    assert faults(tmp_path, **config) == []


def test_what_vllm_runs_by_the_code_of_transformers_is_taken(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    named = [name for name in ("DiffLlamaForCausalLM", "HeliumForCausalLM") if hasattr(transformers, name)]
    lacking = [name for name in named if name not in architectures()]
    assert lacking
    assert faults(tmp_path, architectures=lacking[:1]) == []


def test_arguments_that_change_what_is_run_leave_it_to_vllm(tmp_path: Path) -> None:
    extra: dict[str, object] = {"hf_overrides": {"head_dim": 64}}
    assert faults(tmp_path, extra=extra, head_dim=16, architectures=["Nobody"]) == []


def test_without_vllm_the_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ModuleNotFoundError) as caught:
        list(engine_faults(tmp_path, on_cpu=True, dtype="auto", extra={}))
    assert caught.value.name == "vllm"


def test_a_config_that_cannot_be_read_has_no_fault_here(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    (tmp_path / "config.json").write_text("{")
    assert list(engine_faults(tmp_path, on_cpu=True, dtype="auto", extra={})) == []
