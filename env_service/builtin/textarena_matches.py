"""TextArena's games of several players: each player is a conversation of its own, as the game talks to it."""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from pydantic import Field

from env_service.builtin.textarena_games import Chance, TextArenaOptions, move_of, opened_game, quiet, registered
from env_service.environments.interface import Action, Aggregation, ChatMessage, Role, Round, Task, TurnOf
from env_service.environments.rules import Rules


class TextArenaMatchOptions(TextArenaOptions):
    """Which game, and for how many."""

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
        self._chance = Chance()
        self._env: Any = None
        _check(options.model_dump_json())

    def reset(self, task: Task, seed: int) -> TurnOf:
        """The game of the task's seed; what it leaves to chance later comes from the same seed."""
        self._chance.seed(task.seed)
        with self._chance.in_place(), quiet():
            self._env = opened_game(self._options, task.seed, players=len(self.players))
            return self._turn()

    def step(self, action: Action) -> Round:
        """A player's first invalid move in a row is answered by what is wrong with it; the second loses the game."""
        said = move_of(action, brackets=self._options.brackets)
        with self._chance.in_place(), quiet():
            done, _ = self._env.step(action=said)
            if done:
                return self._ended()
            return Round(self._turn(), invalid=self._env.state.error_count > 0)

    def _turn(self) -> TurnOf:
        """Whose turn it is, with what the game and the others said since that player was told last."""
        number, messages = self._env.get_observation()
        told = [text for source, text, _ in messages if source != number and isinstance(text, str)]
        text = "\n".join(told).strip() or "Your move."
        return TurnOf(self.players[number], (ChatMessage("user", text),))

    def _ended(self) -> Round:
        given, info = self._env.close()
        rewards = {name: float((given or {}).get(number, 0.0)) for number, name in enumerate(self.players)}
        facts = [info.get(number, {}) if info else {} for number in range(len(self.players))]
        invalid = any(bool(fact.get("invalid_move")) for fact in facts)
        best = max(rewards.values())
        winners = [name for name, reward in rewards.items() if reward == best]
        draw = len(winners) == len(rewards)
        metrics = {name: {"success": float(not draw and name in winners)} for name in self.players}
        stop = "invalid_move" if invalid else "draw" if draw else f"{winners[0]}_won"
        return Round(stop=stop, rewards=rewards, metrics=metrics, invalid=invalid)


@lru_cache(maxsize=64)
def _check(options: str) -> None:
    """Raises ValueError if the game of these options, in JSON, does not open here for so many players."""
    given = TextArenaMatchOptions.model_validate_json(options)
    registered(given)
    try:
        with Chance().in_place(), quiet():
            opened_game(given, 0, players=given.players).get_observation()
    except Exception as error:  # whatever one of a hundred games raises that cannot run here
        told = f"TextArena's {given.id} cannot be played by {given.players} here: {type(error).__name__}: {error}"
        raise ValueError(told) from error
