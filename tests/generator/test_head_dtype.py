"""An engine in bfloat16 whose logits are not rounded to 8 bits, before and after an update."""

import warnings
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.architectures import ModelPair
from generator.engine.options import EngineOptions, prepare_environment
from tests.learner.training.tiny_models import write_tiny_model

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="module")]

PROMPT = (3, 5, 9, 4)
# Logits between 16 and 64 have steps of an eighth or a fourth in bfloat16.
STEP = 1 / 8
TOKENS = range(2, 22)


@pytest.fixture
def sharp(tmp_path: Path) -> Path:
    """A model whose logits are tens, as a trained one's may be."""
    folder = write_tiny_model("qwen3", tmp_path / "model", head_dim=32)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(60)
    model.save_pretrained(folder)
    return folder


async def test_logits_are_not_rounded_before_and_after_an_update(sharp: Path, tmp_path: Path) -> None:
    options = EngineOptions(
        model=str(sharp), dtype="bfloat16", head_dtype="float32", max_model_len=64, max_num_seqs=8, kv_cache_gb=0.25,
        tokenizer=False,
    )  # fmt: skip
    prepare_environment(options)
    # vLLM warns at import of things that are not ours to change.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from generator.engine.engine import Engine

    engine = await Engine.start(options=options)

    async def logits(label: str) -> torch.Tensor:
        """Of the last place, up to a constant."""
        found = [await engine.score(request_id=f"{label}-{token}", token_ids=(*PROMPT, token)) for token in TOKENS]
        return torch.tensor([scores.logprobs[-1] for scores in found], dtype=torch.float64)

    def share_of_steps(found: torch.Tensor) -> float:
        """Share of differences that are a whole number of steps: all of rounded ones, some by chance of others."""
        steps = (found[1:] - found[0]) / STEP
        return float(((steps - steps.round()).abs() < 0.01).double().mean())

    try:
        first = await logits("first")
        assert float(first.std()) > 5
        assert share_of_steps(first) < 0.3
        models = ModelPair(sharp)
        models.change()
        await models.publish(engine, tmp_path, version="1.1")
        second = await logits("second")
        assert float((second - first).abs().max()) > 1
        assert share_of_steps(second) < 0.3
    finally:
        await engine.shutdown()
