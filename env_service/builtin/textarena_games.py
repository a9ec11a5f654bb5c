"""TextArena's games: for one player, and matches of several, of whom each is a conversation of its own.

They draw from the process's own random numbers. Each conversation keeps a state of them for itself, which is put in
place for the time of a call. Calls are made one at a time; a draw of another thread in the middle of one would still
be taken from its numbers.
"""

import io
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from functools import lru_cache
from typing import Any

import numpy as np
from pydantic import Field

from env_service.environments.interface import (
    Action,
    Aggregation,
    ChatMessage,
    EnvironmentFailed,
    Opening,
    Role,
    Round,
    Step,
    Task,
    TurnOf,
)
from env_service.environments.rules import Rules
from services.config.models import ConfigModel

try:
    with redirect_stderr(io.StringIO()):  # it says which corpora of words it does not find
        import textarena
        from textarena.core import ObservationType
        from textarena.envs.registration import ENV_REGISTRY
    from textarena.state import SinglePlayerState
except ImportError as error:
    raise ImportError("textarena is not installed: pip install 'headway[textarena]'") from error

_RAW = "-raw"
_OWN_WORDS = frozenset({ObservationType.PLAYER_ACTION})


class TextArenaOptions(ConfigModel):
    """The game, and how its moves are written."""

    id: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$", description="a game, such as TowerOfHanoi-v0")
    settings: dict[str, int | float | bool | str] = Field(
        default_factory=dict, description="what the game's constructor takes, beside what the id sets"
    )
    brackets: bool = Field(True, description="put square brackets around a move that has none")


def _move_of(action: Action, *, brackets: bool) -> str:
    """The move as the game is told it; with `brackets`, in the square brackets that a move without any lacks."""
    said = action.value if isinstance(action.value, str) else action.text
    return f"[{said.strip()}]" if brackets and "[" not in said else said


class TextArenaEnvironment:
    """A game of TextArena for one player, whose reward at the end counts. Its prompt is the first user message."""

    rules = Rules(max_turns=50)
    roles: tuple[Role, ...] = ("user",)
    metrics: Mapping[str, Aggregation] = {"success": "last", "moves": "sum"}

    def __init__(self, options: TextArenaOptions) -> None:
        """Raises ValueError for a game that does not exist, does not run here, or is not for one player."""
        self._options = options
        self._chance = _Chance()
        self._env: Any = None
        _check(options.model_dump_json())

    def reset(self, task: Task, seed: int) -> Opening:
        """The game of the task's seed; what it leaves to chance later comes from the same seed."""
        self._chance.seed(task.seed)
        with self._chance.in_place(), _quiet():
            self._env = _opened_game(self._options, task.seed)
        return Opening((ChatMessage("user", self._news()),))

    def step(self, action: Action) -> Step:
        """The first invalid move in a row is answered by what is wrong with it; the second loses the game."""
        said = _move_of(action, brackets=self._options.brackets)
        with self._chance.in_place(), _quiet():
            done, _ = self._env.step(action=said)
        if done:
            return self._ended()
        invalid = self._env.state.error_count > 0
        text = self._news() or "Your move."
        return Step(
            (ChatMessage("user", text),), invalid=invalid, metrics={"success": 0.0, "moves": float(not invalid)}
        )

    def _ended(self) -> Step:
        rewards, info = self._env.close()
        reward, facts = _reward_of(0, rewards), info.get(0, {})
        invalid = bool(facts.get("invalid_move"))
        metrics = {"success": float(reward >= 1), "moves": float(not invalid)}
        stop = "invalid_move" if invalid else "won" if reward >= 1 else "lost"
        return Step(stop=stop, reward=reward, invalid=invalid, metrics=metrics)

    def _news(self) -> str:
        """The game's words since the last time; the player's own words are left out."""
        _, messages = self._env.get_observation()
        # Some games swap the arguments of a note of the player's move: its text is then a number.
        told = [text for _, text, kind in messages if kind not in _OWN_WORDS and isinstance(text, str)]
        return "\n".join(told).strip()


class TextArenaMatchOptions(TextArenaOptions):
    """The game, and its number of players."""

    players: int = Field(2, ge=2, le=16, description="how many play; a game may take only some numbers")


class TextArenaMatch:
    """A game of TextArena for several players, of which each has the reward that the game gives it at the end.

    Players are `player_0`, `player_1` and so on; player_0 begins where the game does not say otherwise.
    """

    rules = Rules(max_turns=50)
    roles: tuple[Role, ...] = ("user",)
    metrics: Mapping[str, Aggregation] = {"success": "last"}

    def __init__(self, options: TextArenaMatchOptions) -> None:
        """Raises ValueError for a game that does not exist, does not run here, or is not for so many players."""
        self.players = tuple(f"player_{number}" for number in range(options.players))
        self._options = options
        self._chance = _Chance()
        self._env: Any = None
        _check_match(options.model_dump_json())

    def reset(self, task: Task, seed: int) -> TurnOf:
        """The game of the task's seed; what it leaves to chance later comes from the same seed."""
        self._chance.seed(task.seed)
        with self._chance.in_place(), _quiet():
            self._env = _opened_game(self._options, task.seed, players=len(self.players))
            return self._turn()

    def step(self, action: Action) -> Round:
        """A player's first invalid move in a row is answered by what is wrong with it; the second loses the game."""
        said = _move_of(action, brackets=self._options.brackets)
        with self._chance.in_place(), _quiet():
            done, _ = self._env.step(action=said)
            if done:
                return self._ended()
            return Round(self._turn(), invalid=self._env.state.error_count > 0)

    def _turn(self) -> TurnOf:
        """The player to move, with all that the game and the others said since that player was told last."""
        number, messages = self._env.get_observation()
        told = [text for source, text, _ in messages if source != number and isinstance(text, str)]
        text = "\n".join(told).strip() or "Your move."
        return TurnOf(self.players[number], (ChatMessage("user", text),))

    def _ended(self) -> Round:
        given, info = self._env.close()
        rewards = {name: _reward_of(number, given) for number, name in enumerate(self.players)}
        facts = [info.get(number, {}) if info else {} for number in range(len(self.players))]
        invalid = any(bool(fact.get("invalid_move")) for fact in facts)
        best = max(rewards.values())
        winners = [name for name, reward in rewards.items() if reward == best]
        draw = len(winners) == len(rewards)
        metrics = {name: {"success": float(not draw and name in winners)} for name in self.players}
        stop = "invalid_move" if invalid else "draw" if draw else f"{winners[0]}_won"
        return Round(stop=stop, rewards=rewards, metrics=metrics, invalid=invalid)


def _reward_of(number: int, rewards: Mapping[int, float] | None) -> float:
    """The reward that the game gives a player at its end. Raises EnvironmentFailed if it gives none."""
    reward = (rewards or {}).get(number)
    if reward is None:
        raise EnvironmentFailed("nonsense", f"TextArena's game ended without a reward for player {number}")
    return float(reward)


class _Chance:
    """The random numbers of one conversation, of `random` and of numpy."""

    def __init__(self) -> None:
        self.seed(0)

    def seed(self, seed: int) -> None:
        self._random: Any = random.Random(seed).getstate()
        self._numpy: Any = np.random.RandomState(seed % (1 << 32)).get_state()

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Puts them in the place of the process's own."""
        others = random.getstate(), np.random.get_state()
        random.setstate(self._random)
        np.random.set_state(self._numpy)
        try:
            yield
        finally:
            self._random, self._numpy = random.getstate(), np.random.get_state()
            random.setstate(others[0])
            np.random.set_state(others[1])


@contextmanager
def _quiet() -> Iterator[None]:
    """Some games print what they are doing."""
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        yield


def _opened_game(options: TextArenaOptions, seed: int, *, players: int = 1) -> Any:
    """A game without wrappers, which gives each message once."""
    env = textarena.make(options.id + _RAW, **options.settings)
    env.reset(num_players=players, seed=seed % (1 << 31))
    return env


def _check_registered(options: TextArenaOptions) -> None:
    """Raises ValueError for a game that does not exist."""
    if options.id + _RAW not in ENV_REGISTRY:
        known = ", ".join(sorted({name.split("-v")[0] for name in ENV_REGISTRY}))
        raise ValueError(f"TextArena has no game {options.id!r}; expected such as Sudoku-v0, of one of {known}")


@lru_cache(maxsize=64)
def _check(options: str) -> None:
    """Raises ValueError if the game of these options, in JSON, does not open here for one player."""
    given = TextArenaOptions.model_validate_json(options)
    _check_registered(given)
    try:
        with _Chance().in_place(), _quiet():
            env = _opened_game(given, 0)
    except Exception as error:  # whatever one of a hundred games raises that cannot run here
        told = f"TextArena's {given.id} cannot be played by one player here: {type(error).__name__}: {error}"
        raise ValueError(told) from error
    if not isinstance(env.state, SinglePlayerState):
        raise ValueError(f"TextArena's {given.id} is not for one player: see textarena_match")


@lru_cache(maxsize=64)
def _check_match(options: str) -> None:
    """Raises ValueError if the game of these options, in JSON, does not open here for so many players."""
    given = TextArenaMatchOptions.model_validate_json(options)
    _check_registered(given)
    try:
        with _Chance().in_place(), _quiet():
            _opened_game(given, 0, players=given.players).get_observation()
    except Exception as error:  # whatever one of a hundred games raises that cannot run here
        told = f"TextArena's {given.id} cannot be played by {given.players} here: {type(error).__name__}: {error}"
        raise ValueError(told) from error
