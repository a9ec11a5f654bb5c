"""Guessed tokens, which `engine.extra` refuses: what the CPU engine of vLLM makes of them, to learn when that ends."""

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import pytest_asyncio

from tests.generator.conftest import PROMPT, CompletionSoFar, Rig, sample, start_rig
from tests.generator.engine.test_engine import TOLERANCE, covers

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="module")]

GUESSES = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 2}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def guessing(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    folder = tmp_path_factory.mktemp("guessing")
    extra = {"speculative_config": GUESSES}
    rig = await start_rig(folder=folder, tied=True, change=lambda given: replace(given, extra=extra))
    yield rig
    await rig.engine.shutdown()


def wrong(rig: Rig, completion: CompletionSoFar) -> int:
    """Number of tokens that have another logprob than the policy gives them."""
    expected = rig.policy.logprobs(PROMPT + completion.token_ids)[len(PROMPT) - 1 :]
    pairs = zip(expected, completion.behavior_logprobs, strict=True)
    return sum(abs(theirs - ours) > TOLERANCE for theirs, ours in pairs)


async def test_guessed_tokens_have_logprobs_that_are_not_theirs(guessing: Rig) -> None:
    version = await guessing.publish()
    completions = await sample(guessing, n=4, max_tokens=120)
    assert all(covers(each) for each in completions)
    assert {span.version for each in completions for span in each.spans} == {version}
    assert sum(wrong(guessing, each) for each in completions) > 20, "it may be allowed: look at min_p, too"
