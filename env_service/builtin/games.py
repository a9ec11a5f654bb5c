"""Games: their interface, scripted players, the search that some of them use, and how they are played with the policy.

A game is a set of pure functions over an immutable state: the same start, moves and chances give the same game, and a
state can be a key. What the policy sees and says is text of a few tokens.
"""

import copy
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from random import Random
from string import ascii_letters, digits
from typing import Generic, Literal, Protocol, Self, TypeVar
from zlib import crc32

from pydantic import Field, JsonValue

from env_service.environments.interface import Action, Aggregation, ChatMessage, Opening, Role, Step, Task
from protocol.trajectories import Purpose
from services.config.models import ConfigModel

StateT = TypeVar("StateT", bound=Hashable)

_HELD_OUT = 8
"""Of so many starts a single one is for evaluation."""
_DRAWS = 2000
_LETTERS = ascii_letters + digits


class GameOptions(ConfigModel):
    """Options of every game, beside what it has of its own."""

    system_prompt: str | None = Field(
        None, description="text of the system message; the game's own instructions if not given, no message if empty"
    )
    answer_hint: str = Field(
        "Answer with the move alone.", description="put behind the instructions: how an answer is to be written"
    )
    whole_state: bool = Field(True, description="whether each turn shows the whole state, or only what is new")
    layout: Literal["line", "rows"] = Field("line", description="whether a grid is shown in one line, or as a picture")
    moves: Literal["words", "letters"] = Field(
        "words", description="letters: each move is a single letter or digit, which the instructions list"
    )
    invalid_text: str = Field(
        "That is not a legal move.", description="said after an action that is no legal move; empty for nothing"
    )
    turn_cost: float = Field(0.0, ge=0, le=1, description="taken from the reward of each turn")
    held_out: bool = Field(
        True,
        description="whether evaluation starts where no training task does; of no effect where the player is not shown "
        "the start",
    )


class Game(Protocol[StateT]):
    """A game of one player, who may have an opponent that the game plays itself.

    `instructions` explain the game and its moves to a model that reads; `alphabet` has every move that any state may
    have. `hidden` is whether the player is not shown the whole state: tasks of such games are not held out for
    evaluation, since a player who never meets some secrets in training learns not to expect them.
    """

    @property
    def instructions(self) -> str: ...

    @property
    def alphabet(self) -> tuple[str, ...]: ...

    @property
    def hidden(self) -> bool: ...

    @property
    def columns(self) -> int:
        """Width of the grid that `show` gives row by row; 0 if it gives none."""
        ...

    def start(self, chance: Random) -> StateT:
        """A state that is not over, from which the game can be won."""
        ...

    def moves(self, state: StateT) -> tuple[str, ...]:
        """The legal moves; at least one while the game is not over."""
        ...

    def play(self, state: StateT, move: str, chance: Random) -> StateT:
        """The state after a legal move, an opponent's answer included."""
        ...

    def success(self, state: StateT) -> float | None:
        """None while the game goes on; then 1 if it is won, and 0 if it is lost."""
        ...

    def show(self, state: StateT) -> str:
        """All that the player may know, without the turns before."""
        ...

    def news(self, before: StateT, move: str, after: StateT) -> str:
        """Tells what the player did not know before the move."""
        ...

    def advise(self, state: StateT, chance: Random) -> str:
        """The move of a player who knows the game, and no more of the state than is shown."""
        ...


def drawn_for(purpose: Purpose, draw: Callable[[], StateT], *, shown: Callable[[StateT], str]) -> StateT:
    """Draws until a start is for that purpose: what a start shows decides, so that no start is for both.

    Raises ValueError where there are too few different ones.
    """
    for _ in range(_DRAWS):
        start = draw()
        if (crc32(shown(start).encode()) % _HELD_OUT == 0) == (purpose == "evaluate"):
            return start
    raise ValueError("there are too few different starts to keep some for evaluation: set held_out to false")


def noisy_move(game: Game[StateT], state: StateT, chance: Random, *, noise: float) -> str:
    """The scripted player's move, or with probability `noise` any legal one."""
    if chance.random() < noise:
        return chance.choice(game.moves(state))
    return game.advise(state, chance)


def shortest_way(
    start: StateT, *, steps: Callable[[StateT], Iterable[tuple[str, StateT]]], goal: Callable[[StateT], bool]
) -> list[str] | None:
    """The fewest moves from a state to a goal by breadth-first search; None if there is no way.

    `steps` gives each move of a state with what it leads to; of equally short ways the one with the earlier moves wins.
    """
    came: dict[StateT, tuple[str, StateT] | None] = {start: None}
    waiting = deque([start])
    while waiting:
        state = waiting.popleft()
        if goal(state):
            return _way(came, state)
        for move, following in steps(state):
            if following not in came:
                came[following] = move, state
                waiting.append(following)
    return None


def _way(came: dict[StateT, tuple[str, StateT] | None], state: StateT) -> list[str]:
    moves: list[str] = []
    while (last := came[state]) is not None:
        move, state = last
        moves.append(move)
    return moves[::-1]


def neighbours(place: int, *, rows: int, columns: int) -> dict[str, int]:
    """The cells beside one of a grid that is numbered row by row, by direction: u, d, l, r; none outside the grid."""
    row, column = divmod(place, columns)
    found = {
        "u": (row > 0, place - columns),
        "d": (row < rows - 1, place + columns),
        "l": (column > 0, place - 1),
        "r": (column < columns - 1, place + 1),
    }
    return {direction: there for direction, (inside, there) in found.items() if inside}


def in_rows(cells: Sequence[str], columns: int) -> str:
    """Cells as lines of a picture."""
    return "\n".join("".join(cells[first : first + columns]) for first in range(0, len(cells), columns))


class GameEnvironment(Generic[StateT]):
    """A conversation about a game. A won game is a reward of 1; a lost one, or one that is cut off, of 0.

    The start comes from the task alone. What the game leaves to chance later comes from the seed and the number of
    the turn, so that members of a group that did the same see the same.
    """

    roles: tuple[Role, ...] = ("user",)
    metrics: Mapping[str, Aggregation] = {"success": "last", "moves": "sum"}

    def __init__(self, game: Game[StateT], options: GameOptions) -> None:
        self._game = game
        self._options = options
        self._words = _spoken(game, options)
        self._seed = 0
        self._turn = 0
        self._state: StateT

    def reset(self, task: Task, seed: int) -> Opening:
        """Instructions as a system message, and the start. Raises ValueError if a held-out one cannot be found."""
        self._state, self._seed, self._turn = self._start(task), seed, 0
        system = self._instructions()
        opening = (ChatMessage("system", system),) if system else ()
        return Opening((*opening, *self._message(self._shown())), state=self._key())

    def step(self, action: Action) -> Step:
        """An action that is no legal move changes nothing, and is counted as invalid."""
        self._turn += 1
        cost = -self._options.turn_cost
        move = self._read(action)
        if move is None:
            told = [self._options.invalid_text, self._shown() if self._options.whole_state else ""]
            text = "\n".join(filter(None, told)) or "?"
            return Step(self._message(text), reward=cost, state=self._key(), invalid=True, metrics={"success": 0.0})
        before, self._state = self._state, self._game.play(self._state, move, self._chance())
        success = self._game.success(self._state)
        metrics = {"success": success or 0.0, "moves": 1.0}
        if success is not None:
            return Step(stop="won" if success else "lost", reward=success + cost, state=self._key(), metrics=metrics)
        text = self._shown() if self._options.whole_state else self._game.news(before, move, self._state)
        return Step(self._message(text), reward=cost, state=self._key(), metrics=metrics)

    def fork(self) -> Self:
        """Another game that stands where this one does; states are not changed by moves, but made anew."""
        return copy.copy(self)

    def scripted(self, chance: Random, *, noise: float = 0.0) -> str:
        """The move of the game's own player; with probability `noise` any legal move instead."""
        return self._words[noisy_move(self._game, self._state, chance, noise=noise)]

    def _start(self, task: Task) -> StateT:
        chance = Random(task.seed)
        if self._game.hidden or not self._options.held_out:
            return self._game.start(chance)
        return drawn_for(task.purpose, lambda: self._game.start(chance), shown=self._game.show)

    def _chance(self) -> Random:
        return Random(f"{self._seed}/{self._turn}")

    def _instructions(self) -> str:
        if self._options.system_prompt is not None:
            return self._options.system_prompt
        told = [self._game.instructions, self._options.answer_hint]
        if self._options.moves == "letters":
            letters = ", ".join(f"{letter} for {move}" for move, letter in self._words.items())
            told.insert(1, f"Each move has a letter: {letters}. Say the letter.")
        return " ".join(filter(None, told))

    def _read(self, action: Action) -> str | None:
        """The legal move that an action names, if it names one."""
        said = _named(action).strip().lower() if self._options.moves == "words" else _named(action).strip()
        legal = self._game.moves(self._state)
        return next((move for move in legal if self._words[move] == said), None)

    def _shown(self) -> str:
        shown = self._game.show(self._state)
        return in_rows(shown, self._game.columns) if self._options.layout == "rows" and self._game.columns else shown

    def _key(self) -> str:
        return self._game.show(self._state)

    def _message(self, text: str) -> tuple[ChatMessage, ...]:
        return (ChatMessage("user", text),)


def _named(action: Action) -> str:
    """The move that an action names: its text, the field `move` of its JSON object, or the argument `move` of its
    call.
    """
    value: JsonValue = action.calls[0].arguments.get("move") if action.calls else action.value
    if isinstance(value, dict):
        value = value.get("move")
    return "" if value is None or isinstance(value, dict | list) else str(value)


def _spoken(game: Game[StateT], options: GameOptions) -> dict[str, str]:
    """The word for each move. Raises ValueError where there are more moves than letters."""
    alphabet = game.alphabet
    if options.moves == "words":
        return {move: move for move in alphabet}
    if len(alphabet) > len(_LETTERS):
        raise ValueError(
            f"the game has {len(alphabet)} moves, expected at most {len(_LETTERS)} for moves = 'letters': make the "
            "game smaller, or set moves to 'words'"
        )
    return dict(zip(alphabet, _LETTERS, strict=False))
