"""One run of the system in a world of its own, from its first to its last moment, and a failing one made as short as it
gets.
"""

import hashlib
from collections.abc import Callable
from itertools import islice

from headway.simulation.actors.cluster import LEARNER
from headway.simulation.actors.trainer import TrainerScript
from headway.simulation.checking.invariants import watch
from headway.simulation.checking.scenario import Scenario, schedule, smaller
from headway.simulation.checking.stage import Result, Stage, staged
from headway.simulation.world.clock import Stuck
from headway.simulation.world.http import Directory


def begin(stage: Stage) -> None:
    """Starts every process of the cluster."""
    cluster = stage.cluster
    for index, script in enumerate(stage.rewards):
        cluster.add(cluster.reward_service(index, script))
    cluster.add(cluster.learner())
    for index, engine in enumerate(stage.engines):
        cluster.add(cluster.generator(index, engine))
    for index in range(cluster.settings.env_services):
        cluster.add(cluster.env_service(index))


def is_over(stage: Stage) -> bool:
    """Whether the run has come to an end, good or bad."""
    if stage.violation is not None:
        return True
    learner = stage.cluster.services[LEARNER]
    return stage.done and learner.process is None and learner.last_code == 0


def live(stage: Stage) -> None:
    """Lets time pass until the run is over."""
    try:
        stage.world.run(until=lambda: is_over(stage))
    except Stuck as error:
        stage.broken("time passes", str(error))


def result_of(stage: Stage) -> Result:
    """What the run came to."""
    world = stage.world
    digest = hashlib.blake2b(digest_size=16)
    for event in world.history:
        digest.update(str(event).encode())
    digest.update(f"{world.callbacks} {world.now:.9f}".encode())
    return Result(
        seed=world.seed,
        virtual_s=world.now,
        callbacks=world.callbacks,
        requests=world.part(Directory).requests,
        steps=max((len(history) for history in stage.trained), default=0),
        violation=stage.violation,
        history=tuple(world.history),
        fingerprint=digest.hexdigest(),
    )


def simulate(scenario: Scenario) -> Result:
    """Runs it once."""
    trainer = TrainerScript(step_s=scenario.step_s, body=scenario.weights, unhealthy=scenario.unhealthy)
    with staged(seed=scenario.seed, settings=scenario.settings, rates=scenario.rates, trainer=trainer) as stage:
        stage.network.doubled, stage.network.lost = scenario.doubled, scenario.lost
        begin(stage)
        watch(stage)
        schedule(stage, scenario.faults)
        live(stage)
        return result_of(stage)


def shortened(
    scenario: Scenario, result: Result, *, tries: int = 40, said: Callable[[str], None] = lambda text: None
) -> tuple[Scenario, Result]:
    """The smallest scenario found that breaks the same promise, and what it came to."""
    assert result.violation is not None
    left = tries
    improved = True
    while improved and left > 0:
        improved = False
        for candidate in islice(smaller(scenario), left):
            left -= 1
            found = simulate(candidate)
            if found.violation is not None and found.violation.promise == result.violation.promise:
                scenario, result, improved = candidate, found, True
                said(f"{len(scenario.faults)} faults, {scenario.settings.steps} steps")
                break
    return scenario, result
