"""Slices of a mixture of experts whose workers share one head of keys, by the names that transformers gives."""

import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
import torch

from protocol.fleet import TensorBox
from tests.generator.conftest import Policy, Rig, start_rig
from tests.generator.sliced_updates import WORKERS, updated_in_slices

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="module")]

PREFIX = "model.layers.1"


class PolicyOfFusedExperts(Policy):
    """A tiny Qwen3-MoE in float32, of 128 words."""

    def __init__(self, *, folder: Path) -> None:
        from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

        torch.set_num_threads(1)
        torch.manual_seed(0)
        self.folder = folder
        self._tied = False
        config = Qwen3MoeConfig(
            vocab_size=128, hidden_size=128, intermediate_size=128, moe_intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=1, head_dim=32, num_experts=4, num_experts_per_tok=2,
            norm_topk_prob=True, max_position_embeddings=1024, initializer_range=0.08, tie_word_embeddings=False,
            bos_token_id=None, eos_token_id=None,
        )  # fmt: skip
        self._model = Qwen3MoeForCausalLM(config)
        self._model.save_pretrained(folder)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    """Cut in two."""
    folder = tmp_path_factory.mktemp("experts")
    rig = await start_rig(
        folder=folder, tied=False, policy=PolicyOfFusedExperts(folder=folder),
        change=lambda options: dataclasses.replace(options, tensor_parallel_size=WORKERS),
    )  # fmt: skip
    yield rig
    await rig.engine.shutdown()


async def test_each_worker_is_sent_its_part_of_heads_words_and_experts_and_loads_it_as_of_whole_tensors(
    rig: Rig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    member = await updated_in_slices(rig, tmp_path, caplog)
    assert member.slices is not None
    first, second = (worker.boxes for worker in member.slices.workers)
    for name, value in rig.policy.tensors().items():
        if "norm" in name or "mlp.gate.weight" in name or "k_proj" in name or "v_proj" in name:
            assert name not in first.keys() | second.keys(), "read whole by both"
        else:
            halves = [sum(torch.Size(box.shape).numel() for box in boxes[name]) for boxes in (first, second)]
            assert halves == [value.numel() // 2] * 2, name
    assert second["lm_head.weight"] == (TensorBox(start=(64, 0), shape=(64, 128)),)
    assert second[f"{PREFIX}.self_attn.o_proj.weight"] == (TensorBox(start=(0, 64), shape=(128, 64)),)
    assert second[f"{PREFIX}.mlp.experts.gate_up_proj"] == (
        TensorBox(start=(0, 32, 0), shape=(4, 32, 128)),
        TensorBox(start=(0, 96, 0), shape=(4, 32, 128)),
    )
