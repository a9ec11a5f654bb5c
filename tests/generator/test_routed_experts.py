"""The engine tells the experts that each token was sent to: those that transformers' routers choose, in float32."""

from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch

from protocol.generation import Sampling
from tests.generator.conftest import VOCABULARY, Rig, start_rig
from tests.generator.test_experts import PolicyOfExperts

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="module")]

LONG = tuple(int(each) for each in np.random.default_rng(0).integers(3, len(VOCABULARY), 300))
"""More than two blocks of a CPU's cache."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    folder = tmp_path_factory.mktemp("experts")
    rig = await start_rig(folder=folder, tied=False, policy=PolicyOfExperts(folder=folder, width=64))
    yield rig
    await rig.engine.shutdown()


def chosen_by_transformers(rig: Rig, token_ids: tuple[int, ...]) -> Any:
    """[T, 2, 2]: of each token and layer the experts, by rising number."""
    found: list[Any] = []
    model = rig.policy._model
    hooks = [
        layer.mlp.experts.register_forward_pre_hook(lambda _, given: found.append(given[1].sort(-1).values.numpy()))
        for layer in model.model.layers
    ]
    with torch.no_grad():
        model(torch.tensor([token_ids]))
    for hook in hooks:
        hook.remove()
    return np.stack(found, 1)


async def sampled(
    rig: Rig, *, prompt: tuple[int, ...], n: int, asked: bool = True
) -> list[tuple[tuple[int, ...], Any]]:
    """Of each completion its tokens, and the rows that its parts told, which follow one another."""
    tokens: list[tuple[int, ...]] = [()] * n
    rows: list[list[Any]] = [[] for _ in range(n)]
    async for parts in rig.engine.generate(
        request_id=rig.next_request(), prompt_token_ids=prompt, n=n,
        sampling=Sampling(max_tokens=40), routed_experts=asked,
    ):  # fmt: skip
        for part in parts:
            tokens[part.index] += part.token_ids
            if part.routed_experts is not None:
                ((start, told),) = part.routed_experts.pieces()
                assert start == sum(map(len, rows[part.index]))
                rows[part.index].append(told)
                assert start + len(told) == len(prompt) + len(tokens[part.index]) - 1
    return [(one, np.concatenate(told) if told else None) for one, told in zip(tokens, rows, strict=True)]


async def test_each_token_but_the_last_has_the_experts_of_transformers(rig: Rig) -> None:
    for prompt in (LONG[:5], LONG, LONG):  # the third one finds two blocks in the cache
        for completion, rows in await sampled(rig, prompt=prompt, n=3):
            assert rows.shape == (len(prompt) + len(completion) - 1, 2, 2)
            assert rows.dtype == np.uint8
            assert (rows == chosen_by_transformers(rig, (*prompt, *completion))[:-1]).all()
    counters = rig.engine.counters()
    assert counters.cached_tokens_total >= 256


async def test_after_an_update_they_are_those_of_the_new_weights(rig: Rig) -> None:
    ((_, former),) = await sampled(rig, prompt=LONG, n=1)
    rig.policy.change(seed=3)
    await rig.publish()
    ((after, rows),) = await sampled(rig, prompt=LONG, n=1)
    assert (rows == chosen_by_transformers(rig, (*LONG, *after))[:-1]).all()
    assert (rows[:300] != former[:300]).any()


async def test_nobody_who_does_not_ask_is_told(rig: Rig) -> None:
    assert [rows for _, rows in await sampled(rig, prompt=LONG, n=2, asked=False)] == [None, None]
