"""What a game is, its scripted players, and the search that some of them use.

A game is a set of pure functions over an immutable state: the same start, moves and chances give the same game, and a
state can be a key. What the policy sees and says is text of a few tokens.
"""

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from random import Random
from typing import Literal, Protocol, TypeVar
from zlib import crc32

from pydantic import Field

from protocol.trajectories import Purpose
from services.config.models import ConfigModel

StateT = TypeVar("StateT", bound=Hashable)

_HELD_OUT = 8
"""One start of so many is for evaluation."""
_DRAWS = 2000


class GameOptions(ConfigModel):
    """What every game lets one set, beside what it has of its own."""

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
        """How wide the grid is that `show` gives row by row; 0 if it gives none."""
        ...

    def start(self, chance: Random) -> StateT:
        """A state that is not over, from which the game can be won."""
        ...

    def moves(self, state: StateT) -> tuple[str, ...]:
        """The legal moves; at least one while the game is not over."""
        ...

    def play(self, state: StateT, move: str, chance: Random) -> StateT:
        """What a legal move leads to, an opponent's answer included."""
        ...

    def success(self, state: StateT) -> float | None:
        """None while the game goes on; then 1 if it is won, and 0 if it is lost."""
        ...

    def show(self, state: StateT) -> str:
        """All that the player may know, without the turns before."""
        ...

    def news(self, before: StateT, move: str, after: StateT) -> str:
        """What the player did not know before the move."""
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
