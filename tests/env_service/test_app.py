"""The process as it is put together: its readiness while its peers come, and the places of its environments."""

import asyncio
import contextlib
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import generate_latest
from pydantic import ValidationError

from env_service import app
from env_service.config import EnvServiceConfig
from env_service.leases.places import PlaceRule
from env_service.leases.running import RunningLeases
from env_service.rollouts.completions import RolloutProgress
from env_service.rollouts.outcomes import Outcome, RolloutMetrics
from protocol.messages import FailedLease, Lease
from services.http.metrics import Metrics
from services.http.waiting import Waiting
from tests.env_service.peers import lease


async def _for_ever(*_: object, **__: object) -> None:
    await asyncio.Event().wait()


async def _all_ready() -> tuple[str, ...]:
    return ()


async def test_between_one_peer_and_the_next_it_is_never_called_ready() -> None:
    waits = Waiting()
    quiet = SimpleNamespace(retry=SimpleNamespace(reward_timeout_s=1.0, environment_timeout_s=1.0))
    config: Any = SimpleNamespace(needs_rewards=True, learner="tcp://l", retry=quiet.retry)
    link: Any = SimpleNamespace(welcomed=False, wait_for=_for_ever, receive=_for_ever, tick=_for_ever)
    rewards: Any = SimpleNamespace(unready=_all_ready, watch=_for_ever)
    nothing: Any = SimpleNamespace(slow=lambda *_, **__: None)

    conversing = asyncio.create_task(app._converse(config, link, nothing, nothing, waits, rewards, None))
    seen = []
    for _ in range(50):
        seen.append(waits.readiness())
        await asyncio.sleep(0)
    conversing.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await conversing

    assert not any(readiness.ready for readiness in seen)
    assert seen[-1].waiting_for == ("the learner at tcp://l",)


MIX = """
model = "{model}"
[[environments]]
source = "addition"
name = "hours"
[environments.places]
most = 2
weight = 1.0
[[environments]]
source = "addition"
name = "short"
[[environments]]
source = "mix"
name = "all"
parts = [{{ environment = "hours" }}, {{ environment = "short" }}]
"""


def test_limits_and_weights_of_a_mix_reach_the_learner_and_the_places_here(model: Path) -> None:
    config = EnvServiceConfig.model_validate(tomllib.loads(MIX.format(model=model)))
    environments = app.environments_of(config, app.tokenization_of(config), app.hosting_of(config))
    alone, _, mix = app.hello_of(config, environments, port=1).environments
    assert (alone.most_leases, mix.most_leases) == (2, None)
    assert [(part.most_leases, part.weight) for part in mix.parts] == [(2, 1.0), (None, None)]
    assert app.place_rules(config) == {"hours": PlaceRule(most=2, weight=1.0)}
    of_parts = [lease(environment="all", task_index=at) for at in (0, mix.train_tasks - 1, mix.train_tasks)]
    assert [app.environment_of(environments, each) for each in of_parts] == ["hours", "short", "all"]


@pytest.mark.parametrize("levels", [["short", "hours"], ["short", "all"]])
def test_a_level_with_a_limit_is_refused(model: Path, levels: list[str]) -> None:
    table = tomllib.loads(MIX.format(model=model))
    table["environments"].append({"source": "levels", "name": "ladder", "levels": levels})
    with pytest.raises(ValidationError, match=r"hours has places\.most and is of level \w+ of ladder"):
        EnvServiceConfig.model_validate(table)


def test_a_weight_that_shares_nothing_is_refused(model: Path) -> None:
    given = tomllib.loads(MIX.format(model=model))
    del given["environments"][2]
    with pytest.raises(ValueError, match=r"hours has places\.weight and is in no mix"):
        EnvServiceConfig.model_validate(given)


async def test_leases_of_an_environment_with_a_limit_are_counted_and_told() -> None:
    metrics, release = Metrics("env-service"), asyncio.Event()

    async def run(each: Lease, _: RolloutProgress) -> Outcome:
        await release.wait()
        return FailedLease(
            **each.model_dump(include={"incarnation", "lease_id", "attempt", "purpose"}),
            data_fault=False,
            reason="released",
        )

    async def report(_: Outcome) -> None: ...

    async with asyncio.TaskGroup() as tasks:
        running = RunningLeases(
            run=run,
            report=report,
            capacity=8,
            tasks=tasks,
            metrics=RolloutMetrics(metrics),
            rules={"addition": PlaceRule(most=2)},
        )
        for number in range(5):
            await running.start(lease(number))
        await asyncio.sleep(0)
        (told,) = running.limited()
        assert (told.environment, told.running, told.waiting, told.most) == ("addition", 2, 3, 2)
        text = generate_latest(metrics.registry).decode()
        assert 'environment_leases{environment="addition",state="waiting"} 3' in text
        release.set()
    assert running.limited()[0].running == 0
