"""Facts read from vLLM's source, compared with vLLM's own when it is imported."""

import pytest

from generator.engine import installed


@pytest.mark.filterwarnings("ignore")
def test_what_is_read_of_the_source_is_what_vllm_says() -> None:
    pytest.importorskip("vllm")
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.model_executor.models.registry import ModelRegistry
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
    from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend

    assert installed.vllm_arguments() == frozenset(AsyncEngineArgs.__dataclass_fields__)
    assert installed.architectures() == frozenset(ModelRegistry.get_supported_archs())
    assert installed.cpu_head_sizes() == frozenset(CPUAttentionBackend.get_supported_head_sizes())
    assert installed.cpu_head_sizes(latent=True) == frozenset(CPUMLABackend.get_supported_head_sizes())
    assert {"deepseek_v3", "kimi_k2"} <= installed.latent_kinds()


def test_without_vllm_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    for read in (installed.architectures, installed.cpu_head_sizes, installed.latent_kinds, installed.vllm_arguments):
        assert read.__wrapped__() == frozenset()
