"""Random steps for property tests, and the same step with its trajectories in another order."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class DrawnToken:
    """`number` tells tokens apart wherever they end up."""

    number: int
    reward: float
    value: float
    token_id: int


@dataclass(frozen=True)
class DrawnTurn:
    state: int
    tokens: tuple[DrawnToken, ...]


@dataclass(frozen=True)
class DrawnTrajectory:
    reward: float
    group: int
    components: tuple[float, float]
    turns: tuple[DrawnTurn, ...]

    @property
    def tokens(self) -> list[DrawnToken]:
        return [token for turn in self.turns for token in turn.tokens]


@dataclass(frozen=True)
class DrawnStep:
    """S trajectories of T turns and M tokens in all. `numbers` [M] are those of the tokens."""

    rewards: Tensor  # [S]
    groups: Tensor  # [S]
    components: Tensor  # [S, 2]
    lengths: Tensor  # [S]
    sequences: Tensor  # [M]
    turns: Tensor  # [M]
    turn_states: Tensor  # [T]
    token_rewards: Tensor  # [M]
    values: Tensor  # [M]
    token_ids: Tensor  # [M]
    numbers: Tensor  # [M]


def step_of(trajectories: Sequence[DrawnTrajectory]) -> DrawnStep:
    """The trajectories end to end, in the order given."""
    turns = [(index, turn) for index, trajectory in enumerate(trajectories) for turn in trajectory.turns]
    tokens = [(sequence, number, token) for number, (sequence, turn) in enumerate(turns) for token in turn.tokens]
    return DrawnStep(
        rewards=floats([trajectory.reward for trajectory in trajectories]),
        groups=integers([trajectory.group for trajectory in trajectories]),
        components=floats([value for t in trajectories for value in t.components]).reshape(-1, 2),
        lengths=integers([len(trajectory.tokens) for trajectory in trajectories]),
        sequences=integers([sequence for sequence, _, _ in tokens]),
        turns=integers([turn for _, turn, _ in tokens]),
        turn_states=integers([turn.state for _, turn in turns]),
        token_rewards=floats([token.reward for _, _, token in tokens]),
        values=floats([token.value for _, _, token in tokens]),
        token_ids=integers([token.token_id for _, _, token in tokens]),
        numbers=integers([token.number for _, _, token in tokens]),
    )


def random_trajectories(chance: random.Random) -> list[DrawnTrajectory]:
    """Groups of one to five trajectories; rewards that are often equal; turns that now and then have no token."""
    trajectories: list[DrawnTrajectory] = []
    number = 0
    for group in range(chance.randint(1, 4)):
        for _ in range(chance.randint(1, 5)):
            turns = []
            for _ in range(chance.randint(1, 4)):
                length = chance.choice([0, 1, 1, 2, 5])
                tokens = tuple(
                    DrawnToken(number + at, chance.gauss(0, 0.1), chance.gauss(0, 1), chance.randint(0, 2))
                    for at in range(length)
                )
                number += length
                turns.append(DrawnTurn(state=chance.randint(0, 2), tokens=tokens))
            components = (chance.choice([0.0, 0.1, 1.0]), chance.choice([0.3, 0.5, chance.random()]))
            trajectories.append(
                DrawnTrajectory(chance.choice([0.1, 0.7, -0.3, 1.0]), 7 * group, components, tuple(turns))
            )
    return trajectories


def floats(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def integers(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)
