"""Gymnasium's toy-text games: FrozenLake, CliffWalking, Taxi and Blackjack, their states written in a few characters.

States are written from what they hold, not from `render`, which marks by colour alone where the player is.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field

from env_service.builtin.games import in_rows
from env_service.environments.interface import Action, Aggregation, ChatMessage, Opening, Role, Step, Task
from env_service.environments.rules import Rules
from services.config.models import ConfigModel

try:
    import gymnasium
    from gymnasium.envs.toy_text.frozen_lake import generate_random_map
    from gymnasium.utils import seeding
except ImportError as error:
    raise ImportError("gymnasium is not installed: pip install 'headway[gym]'") from error


class GymnasiumOptions(ConfigModel):
    """The game, and how it is told."""

    id: Literal["FrozenLake-v1", "CliffWalking-v1", "Taxi-v4", "Blackjack-v1"] = Field(description="the game")
    size: int = Field(4, ge=2, le=8, description="rows and columns of FrozenLake's map, which each task has anew")
    slippery: bool = Field(False, description="whether FrozenLake and CliffWalking move aside by chance")
    reward: Literal["success", "own"] = Field(
        "success", description="success: 1 for reaching the goal or winning; own: the game's own reward of each turn"
    )
    system_prompt: str | None = Field(
        None, description="text of the system message; the game's own instructions if not given, no message if empty"
    )


@dataclass(frozen=True)
class _Toy:
    """An adapter to a game: a letter for each of its actions, and how a state is written.

    `show` gets Gymnasium's environment, unwrapped, and an observation.
    """

    letters: str
    instructions: str
    show: Callable[[Any, Any], str]


def _frozen_lake(env: Any, observation: Any) -> str:
    cells = [letter.decode() for letter in env.desc.ravel()]
    cells[int(observation)] = "A"
    return in_rows(cells, env.ncol)


def _cliff(env: Any, observation: Any) -> str:
    rows, columns = env.shape
    cells = ["."] * (columns * (rows - 1)) + ["."] + ["C"] * (columns - 2) + ["G"]
    cells[int(observation)] = "A"
    return in_rows(cells, columns)


def _taxi(env: Any, observation: Any) -> str:
    row, column, passenger, destination = env.decode(int(observation))
    return f"taxi {row} {column} passenger {'RGYBT'[passenger]} to {'RGYB'[destination]}"


def _blackjack(env: Any, observation: Any) -> str:
    total, dealer, ace = observation
    return f"{int(total)} {int(dealer)} {'ace' if ace else 'no'}"


_TOYS: Mapping[str, _Toy] = {
    "FrozenLake-v1": _Toy(
        "ldru",
        "Walk (A) over the frozen lake (F) to the goal (G), and never into a hole (H). Each turn answer with one "
        "letter: l for left, d for down, r for right, u for up.",
        _frozen_lake,
    ),
    "CliffWalking-v1": _Toy(
        "urdl",
        "Walk (A) to the goal (G). Who steps off the cliff (C) is back at the start. Each turn answer with one letter: "
        "u for up, r for right, d for down, l for left.",
        _cliff,
    ),
    "Taxi-v4": _Toy(
        "snewpo",
        "A taxi drives in a grid of five rows and columns, counted from 0. R is at 0 0, G at 0 4, Y at 4 0, B at 4 3; "
        "T is the taxi itself. There are walls between columns 1 and 2 in rows 0 and 1, and between columns 0 and 1, "
        "and 2 and 3, in rows 3 and 4. Fetch the passenger and bring him to his destination. Each turn answer with one "
        "letter: s for south (down), n for north, e for east, w for west, p to pick up, o to let out.",
        _taxi,
    ),
    "Blackjack-v1": _Toy(
        "sh",
        "Blackjack: you see the sum of your cards, the dealer's open card, and whether you have an ace that counts 11. "
        "Answer with one letter: h for another card, s to stop.",
        _blackjack,
    ),
}


class GymnasiumEnvironment:
    """A toy-text game of Gymnasium. A task's start comes from the task, later chances from the seed of the group."""

    rules = Rules(max_turns=50)
    roles: tuple[Role, ...] = ("user",)
    metrics: Mapping[str, Aggregation] = {"success": "last", "own_reward": "sum"}

    def __init__(self, options: GymnasiumOptions) -> None:
        self._options = options
        self._toy = _TOYS[options.id]
        self._env: Any = None
        self._shown = ""
        self._mask: Any = None

    def reset(self, task: Task, seed: int) -> Opening:
        """A map of its own for each FrozenLake; of the others, a start that Gymnasium draws."""
        self._env = gymnasium.make(self._options.id, **self._settings(task.seed))
        observation, info = self._env.reset(seed=task.seed % (1 << 31))
        self._env.unwrapped.np_random, _ = seeding.np_random(seed % (1 << 31))
        self._see(observation, info)
        told = self._options.system_prompt
        system = self._toy.instructions if told is None else told
        opening = (ChatMessage("system", system),) if system else ()
        return Opening((*opening, *self._message()), state=self._shown)

    def step(self, action: Action) -> Step:
        """An action that Gymnasium masks, since it would change nothing, is taken and counted as invalid."""
        said = action.value.strip().lower() if isinstance(action.value, str) else ""
        if len(said) != 1 or said not in self._toy.letters:
            return Step(self._message(), invalid=True, state=self._shown, metrics={"success": 0.0})
        index = self._toy.letters.index(said)
        masked = self._mask is not None and not self._mask[index]
        observation, reward, terminated, truncated, info = self._env.step(index)
        self._see(observation, info)
        return self._told(float(reward), terminated=terminated, truncated=truncated, masked=masked)

    def close(self) -> None:
        """Ends Gymnasium's environment."""
        if self._env is not None:
            self._env.close()

    def _told(self, own: float, *, terminated: bool, truncated: bool, masked: bool) -> Step:
        # Every game but CliffWalking pays for its goal alone; that one ends nowhere else.
        success = float(terminated and (own > 0 or self._options.id == "CliffWalking-v1"))
        ends = terminated or truncated
        return Step(
            () if ends else self._message(),
            stop=("won" if success else "truncated" if truncated else "lost") if ends else "",
            reward=own if self._options.reward == "own" else success,
            state=self._shown,
            invalid=masked,
            metrics={"success": success, "own_reward": own},
        )

    def _settings(self, seed: int) -> dict[str, Any]:
        if self._options.id == "FrozenLake-v1":
            lake = generate_random_map(size=self._options.size, seed=seed % (1 << 31))
            return {"desc": lake, "is_slippery": self._options.slippery}
        return {"is_slippery": self._options.slippery} if self._options.id == "CliffWalking-v1" else {}

    def _see(self, observation: Any, info: Mapping[str, Any]) -> None:
        self._shown = self._toy.show(self._env.unwrapped, observation)
        self._mask = info.get("action_mask")

    def _message(self) -> tuple[ChatMessage, ...]:
        return (ChatMessage("user", self._shown),)
