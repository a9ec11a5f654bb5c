"""A scenario of clients of the Tinker API, drawn from its seed: who they are, what they do, what befalls the rest."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from simulation.actors.cluster import LEARNER
from simulation.actors.tenant_client import TenantHabits
from simulation.actors.tenant_trainer import TenantScript
from simulation.checking.scenario import ScheduledFault

_KINDS = ("kill", "kill", "kill", "terminate", "stop", "power loss", "power loss", "cut off", "slow link")
_DISK_KINDS = ("disk full", "disk fails")
_OF_OTHERS = ("kill", "kill", "stop", "cut off")
_SELDOM = 0.25
_AIM_S = 0.3
"""Within so many seconds of a sync."""
_LASTING = ("stop", "cut off", "slow link", *_DISK_KINDS)


@dataclass(frozen=True)
class TenantScenario:
    """Everything that a run of tenants depends on, beside the product itself. Times in seconds."""

    seed: int
    clients: tuple[TenantHabits, ...] = (TenantHabits(), TenantHabits())
    generators: int = 1
    snapshot_every: int = 4
    max_resident: int = 4
    learner: TenantScript = field(default_factory=TenantScript)
    thread_s: float = 0.003
    sync_s: float = 0.005
    name_s: float = 0.002
    token_s: float = 0.05
    lost: float = 0.0
    faults: tuple[ScheduledFault, ...] = ()
    profile: str = "tenants"

    @property
    def settings(self) -> str:
        """The scenario in words, but for its faults."""
        return str(replace(self, faults=()))

    @property
    def size(self) -> str:
        """Its length, in words."""
        return f"{sum(each.moves for each in self.clients)} moves of {len(self.clients)} clients"


def tenant_scenario_of(seed: int) -> TenantScenario:
    """The run of a seed."""
    dice = random.Random(f"tenants of {seed}")
    has_disk_faults = dice.random() < 0.2
    clients = tuple(_habits(dice, loads=not has_disk_faults) for _ in range(dice.choice((1, 2, 2, 3))))
    if not has_disk_faults:
        more = random.Random(f"later loads of {seed}")
        clients = tuple(replace(each, rewrites=more.choice((0.0, 0.0, 0.6))) for each in clients)
    scenario = TenantScenario(
        seed=seed,
        clients=clients,
        generators=dice.choice((1, 2)),
        snapshot_every=dice.choice((1, 2, 4, 8, 64)),
        max_resident=dice.choice((1, 2, 16)),
        learner=TenantScript(
            pass_s=dice.choice((0.01, 0.1, 0.5)),
            other_s=dice.choice((0.002, 0.05)),
            segment_bytes=dice.choice((1, 1500, 6000, 1 << 20)),
        ),
        thread_s=dice.choice((0.001, 0.01, 0.05)),
        sync_s=dice.choice((0.002, 0.02, 0.1)),
        name_s=dice.choice((0.001, 0.02)),
        token_s=dice.choice((0.02, 0.2)),
        lost=dice.choice((0.0, 0.0, 0.05)),
    )
    lasts_s = 2.0 + max(each.moves * (0.6 + each.think_s + 4 * scenario.learner.pass_s) for each in clients)
    faults = [_fault(dice, scenario, lasts_s) for _ in range(dice.choice((0, 2, 4, 6, 10, 14)))]
    if has_disk_faults:
        kind, lasts = dice.choice(_DISK_KINDS), dice.choice((0.5, 3.0, 20.0))
        faults.append(ScheduledFault(_moment(dice, lasts_s), kind, "", lasts))
    deaf = random.Random(f"a client that hears nothing of {seed}")
    if deaf.random() < _SELDOM:
        polling = [name for name, each in zip(_names(scenario), clients, strict=True) if each.polls]
        client = deaf.choice(polling or _names(scenario))
        faults += _while_cut_off(deaf, _moment(deaf, lasts_s), client=client)
    return replace(scenario, faults=tuple(sorted(faults, key=lambda fault: fault.at)))


def _while_cut_off(dice: random.Random, at: float, *, client: str) -> list[ScheduledFault]:
    """Two lives of the learner go by of which a client hears nothing."""
    between_s = dice.choice((6.0, 25.0))
    return [
        ScheduledFault(round(at - 0.2, 3), "cut off", client, 2 * between_s + 5.0),
        ScheduledFault(at, "kill", LEARNER),
        ScheduledFault(round(at + between_s, 3), "kill", LEARNER),
        ScheduledFault(round(at + 2 * between_s, 3), "kill", LEARNER),
    ]


def _habits(dice: random.Random, *, loads: bool) -> TenantHabits:
    return TenantHabits(
        moves=dice.randint(4, 20),
        models=dice.choice((1, 1, 2, 3)),
        think_s=dice.choice((0.0, 0.3, 2.0)),
        impatience=dice.choice((0.0, 0.05, 0.3)),
        depth=dice.choice((0, 3, 8)),
        polls=dice.random() < 0.6,
        odd=dice.choice((0.0, 0.1, 0.3)),
        nosy=dice.choice((0.0, 0.2)),
        samples=dice.choice((0.1, 0.4)),
        loads=loads,
    )


def _fault(dice: random.Random, scenario: TenantScenario, within_s: float) -> ScheduledFault:
    """Of the learner mostly; half of its ends come while its disk syncs."""
    at, lasts_s = _moment(dice, within_s), dice.choice((0.5, 5.0, 30.0)) * (0.5 + dice.random())
    if dice.random() < 0.3:
        names = (*(f"gen-{index}" for index in range(scenario.generators)), *_names(scenario))
        kind, target = dice.choice(_OF_OTHERS), dice.choice(names)
    else:
        kind, target = dice.choice(_KINDS), LEARNER
    lasts_s = round(lasts_s, 3) if kind in _LASTING else 0.0
    amount = 0.0
    if kind in ("kill", "terminate") and target == LEARNER and dice.random() < 0.5:
        amount = _AIM_S * dice.random()
    elif kind == "slow link":
        amount = dice.choice((20.0, 200.0))
    return ScheduledFault(at, kind, target, lasts_s, amount)


def _names(scenario: TenantScenario) -> tuple[str, ...]:
    return tuple(f"client-{index}" for index in range(len(scenario.clients)))


def _moment(dice: random.Random, within_s: float) -> float:
    return round(1.5 + dice.random() * within_s, 3)


def smaller_tenants(scenario: TenantScenario) -> Iterator[TenantScenario]:
    """The same with less of something: fewer faults, fewer clients, fewer moves."""
    faults, clients = scenario.faults, scenario.clients
    for index in range(len(faults)):
        yield replace(scenario, faults=faults[:index] + faults[index + 1 :])
    if len(clients) > 1 and not any(fault.target.startswith("client") for fault in faults):
        for index in range(len(clients)):
            yield replace(scenario, clients=clients[:index] + clients[index + 1 :])
    for index, habits in enumerate(clients):
        plain: dict[str, Any] = dict.fromkeys(("odd", "nosy", "impatience", "samples", "rewrites"), 0.0)
        for name, value in {**plain, "models": 1}.items():
            if getattr(habits, name) != value:
                fewer = replace(habits, **{name: value})
                yield replace(scenario, clients=(*clients[:index], fewer, *clients[index + 1 :]))
        if habits.moves > 1:
            yield replace(
                scenario, clients=(*clients[:index], replace(habits, moves=habits.moves - 1), *clients[index + 1 :])
            )
    if scenario.lost:
        yield replace(scenario, lost=0.0)
