"""vLLM's complaints about its arguments, in the keys of run.toml."""

import pytest

from generator.config import EngineConfig
from generator.engine.installed import vllm_arguments
from generator.engine.options import EngineOptions, extra_fault, in_settings

OPTIONS = EngineOptions(model="models/mine", max_model_len=4096, dtype="bfloat16", tensor_parallel_size=3)


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        (
            "1 validation error for ModelConfig Value error, User-specified max_model_len (4096) is greater than the "
            "derived max_model_len (max_position_embeddings=128 or model_max_length=None in model's config.json).",
            "[generator] engine.max_model_len is 4096, more than the model has positions for",
        ),
        (
            "Total number of attention heads (4) must be divisible by tensor parallel size (3).",
            "[generator] engine.tensor_parallel_size is 3",
        ),
        (
            "To serve at least one request with the models's max seq len (4096), (2.0 GiB KV cache is needed, which is "
            "larger than the available KV cache memory (1.0 GiB).",
            "raise engine.kv_cache_gb (on a CPU) or engine.gpu_memory_fraction, or lower engine.max_model_len",
        ),
        (
            "Model architectures ['MyModel'] are not supported for now.",
            "[generator] model models/mine is of an architecture that vLLM does not know",
        ),
        (
            "Value error, Model architectures ['MyModel'] failed to be inspected. Please check the logs for details.",
            "[generator] model models/mine is of an architecture whose code in vLLM cannot be imported here",
        ),
        ("Bfloat16 is only supported on GPUs with compute capability of at least 8.0.", "engine.dtype is bfloat16"),
    ],
)
def test_an_error_about_a_setting_names_its_key_and_keeps_vllms_words(said: str, meant: str) -> None:
    told = in_settings(ValueError(said), OPTIONS)
    assert told is not None
    assert meant in told
    assert said[:60] in told


def test_an_error_about_no_setting_stays_what_it_is() -> None:
    assert in_settings(RuntimeError("Engine core initialization failed"), OPTIONS) is None


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"quantizatoin": "fp8"}, "vLLM has no argument quantizatoin; did you mean quantization?"),
        ({"zzzz": 1}, "vLLM has no argument zzzz: expected a field of vLLM's AsyncEngineArgs"),
        ({"max_model_len": 8}, "max_model_len is a setting: set engine.max_model_len"),
        ({"logprobs_mode": "raw_logprobs"}, "logprobs_mode is set by Headway"),
        ({"enable_chunked_prefill": True}, "enable_chunked_prefill is set by Headway"),
        ({"data_parallel_size": 2}, "start another generator for each replica"),
        ({"speculative_config": {"method": "ngram"}}, "gives logprobs that are not its tokens'"),
    ],
)
def test_an_argument_for_vllm_that_cannot_be_given_is_named_before_anything_is_started(
    extra: dict[str, object], said: str
) -> None:
    if not vllm_arguments() and "vLLM has" in said:
        pytest.skip("vLLM is not installed")
    assert said in str(extra_fault(extra))
    with pytest.raises(ValueError, match=r"engine\.extra"):
        EngineConfig.model_validate({"extra": extra})


def test_an_argument_that_vllm_has_and_that_is_no_setting_is_taken() -> None:
    extra = {"quantization": "fp8", "enable_expert_parallel": True, "block_size": 16}
    assert EngineConfig.model_validate({"extra": extra}).extra == extra
