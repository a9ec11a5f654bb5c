"""Engines of models with windows, softcaps, sinks and experts: they sample with the probabilities that the learner
trains with, and with those of new weights after an update.
"""

from pathlib import Path

import pytest

from benchmarks.architectures import BOUND, compared

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="module")]


@pytest.mark.parametrize(
    "name",
    [
        "gemma2",  # windows and softcaps
        "cohere2",  # windows that vLLM makes wider by a token
        "gpt-oss",  # sinks, and weights that vLLM's code of the model writes itself
        "glm4 moe",  # experts, and routers' biases
    ],
)
async def test_what_is_sampled_is_what_is_trained_before_and_after_an_update(name: str, tmp_path: Path) -> None:
    gaps = await compared(name, tmp_path)
    print(name, gaps)
    assert gaps.verdict == "right", f"gaps of more than {BOUND:g}: {gaps}"
