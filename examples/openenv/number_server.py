"""An OpenEnv server: guess a number from 0 to `HIGHEST`. It runs in the virtual environment of OpenEnv, not in ours:

uv venv openenv && uv pip install --python openenv/bin/python openenv==0.8.0
openenv/bin/python examples/openenv/number_server.py --port 8000
"""

import argparse
import random
from typing import Any

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

HIGHEST = 31
TRIES = 6


class GuessAction(Action):
    """A number."""

    guess: int


class GuessObservation(Observation):
    """Hint on the number: higher or lower."""

    hint: str = ""


class NumberEnvironment(Environment[GuessAction, GuessObservation, State]):
    """The number is drawn by the seed of the reset."""

    SUPPORTS_CONCURRENT_SESSIONS = True  # without it there is one session at a time

    def __init__(self) -> None:
        super().__init__()
        self._state = State()
        self._number = 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> GuessObservation:
        self._number = random.Random(seed).randint(0, HIGHEST)
        self._state = State(episode_id=episode_id, step_count=0)
        return GuessObservation(hint="start")

    def step(self, action: GuessAction, timeout_s: float | None = None, **_: Any) -> GuessObservation:
        self._state.step_count += 1
        if action.guess < 0:
            raise RuntimeError("no such number")
        found = action.guess == self._number
        hint = "found" if found else "too low" if action.guess < self._number else "too high"
        over = found or self._state.step_count >= TRIES
        return GuessObservation(hint=hint, done=over, reward=1.0 if found else 0.0)

    @property
    def state(self) -> State:
        return self._state


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--sessions", type=int, default=64)
    given = parser.parse_args()
    app = create_fastapi_app(NumberEnvironment, GuessAction, GuessObservation, max_concurrent_envs=given.sessions)
    uvicorn.run(app, host=given.host, port=given.port, log_level="warning")


if __name__ == "__main__":
    main()
