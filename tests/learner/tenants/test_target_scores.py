"""Scores of given tokens by the real trainer: the base model's, and those of a checkpoint's adapter."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from learner.tenants.checkpoints import CheckpointFacts, TenantCheckpoints
from learner.tenants.sampling import SampleFailed
from learner.tenants.target_scores import TargetScores
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
    scores = await TargetScores(trainer, between_turns=at_once)(
        TargetWeights(BASE_TARGET), SampleRequest(prompt=PROMPT, targets=TARGETS)
    )
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
    scores = await TargetScores(trainer, between_turns=at_once)(
        target_of(facts, checkpoints), SampleRequest(prompt=PROMPT, targets=TARGETS)
    )
    np.testing.assert_allclose(scores, expected(trainer, "trained"), atol=1e-5)
    assert np.abs(scores - before).max() > 0.1
    assert not [name for name in trainer._adapters if name.startswith("scores")]


async def test_what_cannot_be_scored_names_the_clients_field(trainer: Any, tmp_path: Path) -> None:
    scorer = TargetScores(trainer, between_turns=at_once)
    base = TargetWeights(BASE_TARGET)
    with pytest.raises(TinkerWireError, match=r"^target_prompt_logprobs: .*target_tokens"):
        await scorer(base, SampleRequest(prompt=PROMPT, targets=np.full((4, 1), 10**6)))
    gone = TargetWeights("tinker://trained/sampler_weights/b", 1, tmp_path / "nothing", 1)
    with pytest.raises(SampleFailed, match="the weights of tinker://trained/sampler_weights/b cannot be read"):
        await scorer(gone, SampleRequest(prompt=PROMPT, targets=TARGETS))
    assert not [name for name in trainer._adapters if name.startswith("scores")]
