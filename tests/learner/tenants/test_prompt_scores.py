"""Scores of a prompt by the real trainer: the base model's, and those of a checkpoint's adapter."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from learner.tenants.checkpoints import CheckpointFacts, TenantCheckpoints
from learner.tenants.prompt_scores import PromptScores
from learner.tenants.sampling import SampleFailed
from learner.tenants.turns import BASE_TARGET, TargetWeights, target_of
from learner.training.client_operations import AdamStep, AdapterShape, ClientDatum, ForwardBackward
from protocol.tinker.sampling import SampleRequest
from protocol.tinker.tensors import TinkerWireError
from tests.learner.tenants.tiny import tiny_service_parts

PROMPT = (5, 6, 7, 8, 9)
TARGETS = np.array([[6, 1], [7, -1], [-1, 2], [9, 3]], np.int64)


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tiny_service_parts(tmp_path_factory.mktemp("models"), "tiny")[0]


async def at_once(work: Callable[[], Any]) -> Any:
    return work()


def expected(trainer: Any, model_id: str) -> Any:
    datum = ClientDatum(np.array(PROMPT[:-1]), {"target_tokens": np.where(TARGETS < 0, 0, TARGETS)})
    (result,) = trainer.run_round([ForwardBackward(model_id, (datum,), "cross_entropy", forward_only=True)])
    return np.where(TARGETS < 0, 0, result.outputs[0].arrays["logprobs"])


async def test_the_base_models_scores_are_those_of_an_adapter_that_adds_nothing(trainer: Any) -> None:
    trainer.create("new", AdapterShape(rank=2, seed=1))
    extras = await PromptScores(trainer, between_turns=at_once)(
        TargetWeights(BASE_TARGET), SampleRequest(prompt=PROMPT, targets=TARGETS)
    )
    scores = extras.targets
    assert scores is not None
    assert extras.alternatives is None
    assert scores.dtype == np.float32
    np.testing.assert_allclose(scores, expected(trainer, "new"), atol=1e-5)


async def test_a_checkpoints_scores_are_those_of_the_model_that_saved_it(trainer: Any, tmp_path: Path) -> None:
    shape = AdapterShape(rank=4, seed=1)
    trainer.create("trained", shape)
    before = expected(trainer, "trained")
    datum = ClientDatum(np.array(PROMPT[:-1]), {"target_tokens": np.array(PROMPT[1:])})
    for _ in range(2):
        trainer.run_round([ForwardBackward("trained", (datum,), "cross_entropy")])
        trainer.step(AdamStep("trained", learning_rate=1e-1))
    facts = CheckpointFacts(
        path="tinker://trained/sampler_weights/a", run_id="trained", name="a", kind="sampler", owner="a",
        base_model="tiny", shape=shape, seq_id=5, version=2, created_at=0.0,
    )  # fmt: skip
    checkpoints = TenantCheckpoints(tmp_path)
    adapter, config = trainer.peft("trained")
    checkpoints.save(facts, adapter=adapter, config=config, state=None)
    extras = await PromptScores(trainer, between_turns=at_once)(
        target_of(facts, checkpoints), SampleRequest(prompt=PROMPT, targets=TARGETS)
    )
    scores = extras.targets
    assert scores is not None
    np.testing.assert_allclose(scores, expected(trainer, "trained"), atol=1e-5)
    assert np.abs(scores - before).max() > 0.1
    assert not [name for name in trainer._adapters if name.startswith("scores")]


async def drawn(trainer: Any, count: int, **more: Any) -> Any:
    scorer = PromptScores(trainer, between_turns=at_once)
    extras = await scorer(TargetWeights(BASE_TARGET), SampleRequest(prompt=PROMPT, alternatives=count, **more))
    assert extras.targets is None
    assert extras.alternatives is not None
    return extras.alternatives


async def test_tokens_are_drawn_at_the_temperature_and_have_the_models_own_logprobs(trainer: Any) -> None:
    trainer.create("whole", AdapterShape(rank=2, seed=1))
    vocabulary = trainer.base.vocabulary_size
    tokens, count = np.array(PROMPT[:-1]), 4000
    whole = []
    for first in range(0, vocabulary, 256):
        some = np.tile(np.arange(first, min(first + 256, vocabulary)), (len(tokens), 1))
        operation = ForwardBackward("whole", (ClientDatum(tokens, {"target_tokens": some}),), "cross_entropy", {}, True)
        whole.append(trainer.run_round([operation])[0].outputs[0].arrays["logprobs"])
    logprobs = np.concatenate(whole, axis=1)
    for temperature in (1.0, 0.5):
        ids, found = await drawn(trainer, count, seed=7, temperature=temperature)
        assert (ids.dtype, ids.shape, found.dtype, found.shape) == (np.int64, (4, count), np.float32, (4, count))
        np.testing.assert_allclose(found, np.take_along_axis(logprobs, ids, axis=1), atol=1e-5)
        warm = np.exp(logprobs / temperature)
        share = warm / warm.sum(axis=1, keepdims=True)
        for row in range(4):
            counts = np.bincount(ids[row], minlength=vocabulary)
            spread = np.sqrt(count * share[row] * (1 - share[row]))
            assert np.abs(counts - count * share[row]).max() < 6 * spread.max()
    greedy, _ = await drawn(trainer, 2, temperature=0.0)
    assert greedy.tolist() == [[best, best] for best in logprobs.argmax(axis=1)]


async def test_a_seed_draws_the_same_tokens_again(trainer: Any) -> None:
    first, again, other = [(await drawn(trainer, 50, seed=seed))[0].tolist() for seed in (-3, -3, 4)]
    assert first == again != other


async def test_one_prompt_at_a_time_waits_for_the_trainer(trainer: Any) -> None:
    waiting, most, released = 0, 0, asyncio.Event()

    async def after_a_turn(work: Callable[[], Any]) -> Any:
        nonlocal waiting, most
        waiting += 1
        most = max(most, waiting)
        await released.wait()
        waiting -= 1
        return work()

    scorer = PromptScores(trainer, between_turns=after_a_turn)
    request = SampleRequest(prompt=PROMPT, targets=TARGETS)
    asked = [asyncio.create_task(scorer(TargetWeights(BASE_TARGET), request)) for _ in range(3)]
    await asyncio.sleep(0.1)
    released.set()
    assert len(await asyncio.gather(*asked)) == 3
    assert most == 1


async def test_what_cannot_be_scored_names_the_clients_field(trainer: Any, tmp_path: Path) -> None:
    scorer = PromptScores(trainer, between_turns=at_once)
    base = TargetWeights(BASE_TARGET)
    with pytest.raises(TinkerWireError, match=r"^target_prompt_logprobs: .*target_tokens"):
        await scorer(base, SampleRequest(prompt=PROMPT, targets=np.full((4, 1), 10**6)))
    with pytest.raises(TinkerWireError, match=r"^prompt_alt_tokens_k: "):
        await scorer(base, SampleRequest(prompt=(10**6, 1), alternatives=1))
    gone = TargetWeights("tinker://trained/sampler_weights/b", 1, tmp_path / "nothing", 1)
    with pytest.raises(SampleFailed, match="the weights of tinker://trained/sampler_weights/b cannot be read"):
        await scorer(gone, SampleRequest(prompt=PROMPT, targets=TARGETS))
    assert not [name for name in trainer._adapters if name.startswith("scores")]
