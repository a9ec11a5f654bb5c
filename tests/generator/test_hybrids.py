"""An engine of a model with layers that have a recurrent state: it starts on a CPU, and serves what it is sent."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.generator.conftest import VOCABULARY, Policy, Rig, start_rig
from tests.generator.engine.test_engine import TOLERANCE, gaps

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="module")]


class PolicyOfStates(Policy):
    """A tiny Granite 4 hybrid in float32, a layer of Mamba 2 below one of attention."""

    def __init__(self, *, folder: Path) -> None:
        import torch
        from transformers import GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM

        torch.set_num_threads(1)
        torch.manual_seed(0)
        self.folder = folder
        self._tied = False
        config = GraniteMoeHybridConfig(
            vocab_size=len(VOCABULARY),
            hidden_size=128,
            intermediate_size=128,
            shared_intermediate_size=128,
            num_hidden_layers=2,
            layer_types=["mamba", "attention"],
            num_local_experts=0,
            num_attention_heads=4,
            num_key_value_heads=2,
            mamba_n_heads=8,
            mamba_d_head=32,
            mamba_d_state=16,
            mamba_n_groups=1,
            mamba_chunk_size=8,
            max_position_embeddings=1024,
            initializer_range=0.08,
            tie_word_embeddings=False,
            pad_token_id=None,
            bos_token_id=None,
            eos_token_id=None,
        )
        self._model = GraniteMoeHybridForCausalLM(config)
        self._model.save_pretrained(folder)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    folder = tmp_path_factory.mktemp("hybrid")
    rig = await start_rig(folder=folder, tied=False, policy=PolicyOfStates(folder=folder))
    yield rig
    await rig.engine.shutdown()


async def test_logprobs_agree_with_transformers_after_each_update_of_recurrent_layers(rig: Rig) -> None:
    assert await gaps(rig) < TOLERANCE
    for seed in (1, 2):
        rig.policy.change(seed=seed)
        assert await gaps(rig) > 0.01
        await rig.publish()
        assert await gaps(rig) < TOLERANCE
