"""An engine of a mixture of experts: a CPU packs their weights, after an update as after the start."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio
import torch
from safetensors.torch import load_file

from tests.generator.conftest import VOCABULARY, Policy, Rig, start_rig
from tests.generator.engine.test_engine import TOLERANCE, gaps

if TYPE_CHECKING:
    from torch import Tensor

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="module")]


class PolicyOfExperts(Policy):
    """A tiny Qwen3-MoE in float32."""

    def __init__(self, *, folder: Path, width: int) -> None:
        from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

        torch.set_num_threads(1)
        torch.manual_seed(0)
        self.folder = folder
        self._tied = False
        config = Qwen3MoeConfig(
            vocab_size=len(VOCABULARY),
            hidden_size=128,
            intermediate_size=128,
            moe_intermediate_size=width,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            head_dim=32,
            num_experts=4,
            num_experts_per_tok=2,
            norm_topk_prob=True,
            max_position_embeddings=1024,
            initializer_range=0.08,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=None,
        )
        self._model = Qwen3MoeForCausalLM(config)
        self._model.save_pretrained(folder)

    def tensors(self) -> "dict[str, Tensor]":
        """The tensors that are sent: checkpoint names, an expert's weights each under its own."""
        sent = self.folder / "sent"
        self._model.save_pretrained(sent)
        return dict(load_file(sent / "model.safetensors"))


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=[64, 48])
async def rig(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    """With experts of a width that vLLM's kernel takes as it is, and of one that is padded."""
    folder = tmp_path_factory.mktemp("experts")
    rig = await start_rig(folder=folder, tied=False, policy=PolicyOfExperts(folder=folder, width=request.param))
    yield rig
    await rig.engine.shutdown()


async def test_logprobs_agree_with_transformers_after_each_update_of_experts(rig: Rig) -> None:
    assert await gaps(rig) < TOLERANCE
    for seed in (1, 2):
        rig.policy.change(seed=seed)
        assert await gaps(rig) > 0.01
        await rig.publish()
        assert await gaps(rig) < TOLERANCE
