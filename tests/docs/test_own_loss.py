"""The loss in docs/own-loss.md learns: a policy of three actions comes to prefer the best one."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import torch

from learner.algorithms.preset import LossTokens, Preset, ScoredBatch

PAGE = (Path(__file__).parents[2] / "docs" / "own-loss.md").read_text(encoding="utf-8")
REWARDS = torch.tensor([0.0, 0.5, 1.0], dtype=torch.float64)
TRAJECTORIES = 32
NONE = torch.zeros(0, dtype=torch.int64)


def test_the_best_of_three_actions_becomes_the_likely_one() -> None:
    preset = _of_the_page("tethered", tether=0.05)
    logits = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([logits], lr=1.0)
    chance = torch.Generator().manual_seed(0)
    for _ in range(60):
        behavior = logits.detach().log_softmax(0)
        actions = torch.multinomial(behavior.exp(), TRAJECTORIES, replacement=True, generator=chance)
        _update(preset, logits, optimizer, actions, behavior[actions])

    likely = logits.detach().softmax(0)
    assert likely.argmax() == 2
    assert likely[2] > 0.9


def _update(
    preset: Preset, logits: torch.Tensor, optimizer: torch.optim.SGD, actions: torch.Tensor, behavior: torch.Tensor
) -> None:
    numbers = torch.arange(TRAJECTORIES)
    scored = ScoredBatch(
        rewards=REWARDS[actions],
        groups=numbers // 8,
        truncated=torch.zeros(TRAJECTORIES, dtype=torch.bool),
        components=torch.zeros(TRAJECTORIES, 0, dtype=torch.float64),
        sequences=numbers,
        token_ids=actions,
        turns=numbers,
        turn_states=numbers,
        lags=torch.zeros_like(numbers),
        behavior_logprobs=behavior,
    )
    assert preset.advantages is not None
    policy = logits.log_softmax(0)[actions]
    weights = torch.from_numpy(preset.weights(np.ones(TRAJECTORIES, dtype=np.int64)))
    loss = preset.loss(
        LossTokens(
            policy_logprobs=policy,
            proximal_logprobs=behavior,
            behavior_logprobs=behavior,
            advantages=preset.advantages(scored).advantages,
            lags=torch.zeros_like(numbers),
            weights=weights,
            sequences=numbers,
            sequence_weights=weights,
            labels=torch.zeros(TRAJECTORIES, dtype=torch.bool),
            pairs=NONE.reshape(0, 2),
            margins=NONE.double(),
        )
    )
    optimizer.zero_grad()
    loss.total.backward()  # type: ignore[no-untyped-call] # torch's own has no types
    optimizer.step()
    assert set(loss.means) == {"gap"}


def _of_the_page(name: str, **options: float) -> Preset:
    (code,) = [one for one in re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE) if name in one]
    made: dict[str, Any] = {}
    exec(compile(code, "mine.py", "exec"), made)
    preset = made[name](**options)
    assert isinstance(preset, Preset)
    return preset
