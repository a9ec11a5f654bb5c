"""A completion that is cut off and goes on from its prefix is a sample of the policy like any other."""

from contextlib import aclosing

import pytest

from env_service.rollouts.completions import Completion, CompletionPiece, RolloutProgress, rest_of
from protocol.generation import GenerateRequest, Sampling
from tests.generator.conftest import PROMPT, Rig

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="session")]

TOLERANCE = 1e-3
SAMPLING = Sampling(max_tokens=100)
REQUEST = GenerateRequest(request_id="r", prompt_token_ids=PROMPT, n=4, sampling=SAMPLING)


async def ask(rig: Rig, piece: CompletionPiece, *, name: str, most_parts: int = 1000) -> None:
    """The request for a piece, broken off after some parts."""
    asked = piece.begin(REQUEST)
    parts = rig.engine.generate(
        request_id=rig.next_request(),
        prompt_token_ids=asked.prompt_token_ids,
        n=asked.n,
        sampling=asked.sampling,
    )
    async with aclosing(parts):
        async for together in parts:
            for part in together:
                piece.take(part, generator_id=name)
                most_parts -= 1
                if most_parts == 0:
                    return


def gap(rig: Rig, completion: Completion, *, version: str) -> float:
    """Of the logprobs under a version, to those of the whole sequence under the policy as it is now."""
    scored = rig.policy.logprobs((*PROMPT, *completion.token_ids))[len(PROMPT) - 1 :]
    (span,) = [span for span in completion.version_spans if span.version == version]
    ours = completion.behavior_logprobs[span.start : span.end]
    return max(abs(a - b) for a, b in zip(scored[span.start : span.end], ours, strict=True))


async def test_it_agrees_with_a_score_of_the_whole_sequence_also_under_newer_weights(rig: Rig) -> None:
    older = await rig.publish()
    completions = RolloutProgress().completions(REQUEST.n)
    whole = CompletionPiece(tuple(completions))
    await ask(rig, whole, name="g0", most_parts=6)
    snapshot = rig.policy.snapshot()
    rig.policy.change(seed=11)
    newer = await rig.publish()

    rest = rest_of(whole, SAMPLING)
    prefixes = [len(completion.token_ids) for completion in completions]
    for piece in rest:
        await ask(rig, piece, name="g1")
    assert not rest_of(whole, SAMPLING)

    assert any(prefixes)
    for completion, prefix in zip(completions, prefixes, strict=True):
        assert len(completion.token_ids) == SAMPLING.max_tokens
        assert completion.finish_reason == "length"
        assert [span.end for span in completion.version_spans] == ([prefix, 100] if prefix else [100])
        assert gap(rig, completion, version=newer) < TOLERANCE
    rig.policy.restore(snapshot)
    cut_off = [c for c, prefix in zip(completions, prefixes, strict=True) if prefix]
    assert max(gap(rig, completion, version=older) for completion in cut_off) < TOLERANCE
    assert min(gap(rig, completion, version=newer) for completion in cut_off) > 10 * TOLERANCE
    await rig.publish()
