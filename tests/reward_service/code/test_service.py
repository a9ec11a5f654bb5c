"""Code among the other verifiers of the service."""

import pytest

from protocol.rewards import ScoreItem, ScoreRequest
from reward_service.config import RewardServiceConfig
from reward_service.included import build_registry
from reward_service.requests.scoring import Scorer
from reward_service.sandbox.pool import open_sandboxes
from reward_service.verifier.lanes import make_metrics
from services.http.metrics import Metrics

CODE = "```python\ndef add(a, b):\n    return a + b\n```"


def items() -> tuple[ScoreItem, ...]:
    tests = {"kind": "assert", "cases": [{"code": "assert add(1, 2) == 3"}, {"code": "assert add(1, 2) == 4"}]}
    broken = {"kind": "assert", "cases": [{"code": "assert"}]}
    code = {"verifier": "code", "completion": CODE}
    return (
        ScoreItem.model_validate({"id": "half", **code, "arguments": {"tests": tests}}),
        ScoreItem.model_validate({"id": "all", **code, "arguments": {"tests": tests, "reward": "all"}}),
        ScoreItem.model_validate({"id": "broken", **code, "arguments": {"tests": broken}}),
        ScoreItem(id="text", verifier="exact_match", completion="4", arguments={"answer": "4"}),
    )


@pytest.mark.parametrize("places", [2, 4])
async def test_a_batch_is_scored_with_the_places_that_there_are(places: int) -> None:
    config = RewardServiceConfig.model_validate({"sandbox": "unsafe", "execution": {"concurrency": places}})
    async with (
        open_sandboxes(kind=config.sandbox, config=config.execution) as sandboxes,
        Scorer(
            registry=build_registry(config),
            config=config,
            metrics=make_metrics(Metrics("reward-service")),
            service_id="rewards-0",
            sandbox=None if sandboxes is None else sandboxes.programs,
        ) as scorer,
    ):
        response = await scorer.score(ScoreRequest(items=items() * 3, deadline_s=120))
    assert [result.reward for result in response.results] == [0.5, 0.0, None, 1.0] * 3
    assert {result.error.kind for result in response.results if result.error} == {"data"}


async def test_without_a_sandbox_the_items_are_told_so() -> None:
    config = RewardServiceConfig.model_validate({"sandbox": "off"})
    async with Scorer(
        registry=build_registry(config),
        config=config,
        metrics=make_metrics(Metrics("reward-service")),
        service_id="rewards-0",
    ) as scorer:
        response = await scorer.score(ScoreRequest(items=items()[:1]))
    (result,) = response.results
    assert result.error is not None
    assert result.error.kind == "user"
