"""A scenario from its first to its last moment, and a failing one made as short as it gets."""

from collections.abc import Callable
from itertools import islice

from headway.simulation import run
from headway.simulation.faults import schedule
from headway.simulation.invariants import watch
from headway.simulation.run import Result
from headway.simulation.scenario import Scenario, smaller
from headway.simulation.trainer import TrainerScript


def simulate(scenario: Scenario) -> Result:
    """Runs it once."""
    trainer = TrainerScript(step_s=scenario.step_s, body=scenario.weights, unhealthy=scenario.unhealthy)
    with run.staged(seed=scenario.seed, settings=scenario.settings, rates=scenario.rates, trainer=trainer) as stage:
        stage.network.doubled = scenario.doubled
        run.begin(stage)
        watch(stage)
        schedule(stage, scenario.faults)
        run.live(stage)
        return run.result_of(stage)


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
