"""Matches on templates of many model families: what is trained of each player is what the engine showed and sampled."""

import random
from datetime import datetime
from pathlib import Path

import pytest

from env_service.environments.bridges import Bridges
from env_service.environments.interface import Action, ChatMessage, OfferedEnvironment, Round, Task, TurnOf
from env_service.environments.rules import History, Rules
from env_service.environments.tokenization import Tokenization
from env_service.rollouts.completions import RolloutProgress
from env_service.rollouts.conversation import Speaker
from env_service.rollouts.environment_calls import EnvironmentCalls
from env_service.rollouts.match import Match, Table
from env_service.rollouts.outcomes import RolloutMetrics
from env_service.rollouts.speech import Language
from protocol.generation import GenerateRequest, Sampling
from protocol.trajectories import RewardRecord
from services.http.metrics import Metrics
from tests.env_service.chat_models import TEMPLATES, ends_of, model_with
from tests.env_service.random_engine import RandomEngine
from tests.env_service.rollouts.test_token_exactness import TEXTS, check

PLAYERS = ("x", "o", "judge")


class RandomTalk:
    """A game that chooses the next speaker, and its words to him, by chance; it ends at some time."""

    players = PLAYERS

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance

    def reset(self, task: Task, seed: int) -> TurnOf:
        return self._turn()

    def step(self, action: Action) -> Round:
        if self._chance.random() < 0.1:
            return Round(stop="enough", rewards={"x": 1.0, "o": -1.0})
        return Round(self._turn(), rewards={self._chance.choice(PLAYERS): 0.5})

    def _turn(self) -> TurnOf:
        return TurnOf(self._chance.choice(PLAYERS), (ChatMessage("user", self._chance.choice(TEXTS)),))


@pytest.mark.parametrize("history", ["append", "split"])
@pytest.mark.parametrize("template", TEMPLATES)
async def test_every_player_is_exact_to_the_token(template: str, history: History, tmp_path: Path) -> None:
    tokenization = Tokenization(model_with(template, tmp_path))
    chance = random.Random(f"{template}/{history}")
    stops = [tokenization.special_tokens[end] for end in ends_of(template)]
    engine = RandomEngine(chance, tokens=400, stops=stops)
    rules = Rules(max_turns=5, trajectory_tokens=chance.choice([None, 400]), history=history)
    bridges = Bridges(tokenization)
    for _ in range(6):
        engine.turns.clear()
        environment = RandomTalk(chance)
        first, now = environment.reset(Task(), 0), datetime(2026, 1, 2)
        _, ids = tokenization.encode(first.observation, now=now)
        speaker = Speaker(
            offered=OfferedEnvironment(name="talk", tasks=None, start=lambda: None, rules=rules),  # type: ignore[arg-type, return-value]
            language=Language(
                tokenization=tokenization, bridges=bridges, rules=rules, opening=first.opening, opening_ids=ids,
                stop_ids=frozenset(stops), now=now,
            ),
            request=GenerateRequest(request_id="r", prompt_token_ids=tuple(ids), sampling=Sampling(max_tokens=12)),
            sample=engine.sample, calls=EnvironmentCalls(timeout_s=30), progress=RolloutProgress(),
            metrics=RolloutMetrics(Metrics("env-service")),
        )  # fmt: skip
        table = Table(first=first, players=PLAYERS, frozen=frozenset(), policy=speaker, opponent=None, games=1)
        match = Match(0, environment, table)
        await match.hold()

        sides = [side for side in match.trained if side.transcript.turns]
        assert sides
        for side in sides:
            assert side.fault is None
            record = side.transcript.record(
                reward=RewardRecord(reward=0.0, verifier="v"), stop_reason="x", turn_rewards=True
            )
            names = [f"r/{side.index}.{turn}:0" for turn in range(side.transcript.turns)]
            check(record, [engine.turns[name] for name in names])
        assert sum(side.transcript.turns for side in sides) == len(engine.turns), "no turn is anybody else's"
