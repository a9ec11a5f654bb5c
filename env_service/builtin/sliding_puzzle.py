"""The sliding puzzle, 2×3 unless set otherwise: tiles in order, by sliding one after the other into the gap."""

from collections import deque
from functools import lru_cache
from random import Random
from typing import Self

from pydantic import Field, model_validator

from env_service.builtin.game_environment import GameEnvironment
from env_service.builtin.games import GameOptions, neighbours
from env_service.environments.rules import Rules

GAP = "0"
_MOST_CELLS = 6


class SlidingOptions(GameOptions):
    """The board, and how far from solved a task is."""

    rows: int = Field(2, ge=2, le=3, description="rows of the board")
    columns: int = Field(3, ge=2, le=3, description="columns of the board")
    distance: int = Field(8, ge=1, le=21, description="most moves that a task needs")

    @model_validator(mode="after")
    def _small(self) -> Self:
        if self.rows * self.columns > _MOST_CELLS:
            raise ValueError(
                f"a board of {self.rows} by {self.columns} has {self.rows * self.columns} cells, expected at most "
                f"{_MOST_CELLS}: make it 2 by 3, 3 by 2 or 2 by 2"
            )
        return self


class SlidingPuzzle:
    """A state is the board row by row, a digit a tile and 0 the gap; a move is the digit of the tile that slides."""

    hidden = False

    def __init__(self, options: SlidingOptions) -> None:
        self._options = options
        self._solved = "".join(str(tile) for tile in range(1, options.rows * options.columns)) + GAP
        self._distances = _distances(self._solved, options.rows, options.columns)
        self._starts = [board for board, distance in self._distances.items() if 0 < distance <= options.distance]

    @property
    def instructions(self) -> str:
        return (
            f"A board of {self._options.rows} rows and {self._options.columns} columns holds tiles and a gap ({GAP}), "
            f"given row by row. Bring it into the order {self._solved}. Each turn you name the digit of a tile beside "
            "the gap, which then slides into it."
        )

    @property
    def alphabet(self) -> tuple[str, ...]:
        return tuple(self._solved[:-1])

    @property
    def columns(self) -> int:
        return self._options.columns

    def start(self, chance: Random) -> str:
        return chance.choice(self._starts)

    def moves(self, state: str) -> tuple[str, ...]:
        return tuple(sorted(state[place] for place in self._beside(state.index(GAP))))

    def play(self, state: str, move: str, chance: Random) -> str:
        return _slide(state, move)

    def success(self, state: str) -> float | None:
        return 1.0 if state == self._solved else None

    def show(self, state: str) -> str:
        return state

    def read(self, shown: str) -> str:
        """The state that `show` shows."""
        return shown

    def news(self, before: str, move: str, after: str) -> str:
        return "ok"

    def advise(self, state: str, chance: Random) -> str:
        """A move that brings the board nearer, from a table of all boards."""
        return min(self.moves(state), key=lambda move: self._distances[_slide(state, move)])

    def distance(self, state: str) -> int:
        """The fewest moves to the solved board. Raises KeyError for a board that no moves solve."""
        return self._distances[state]

    def _beside(self, place: int) -> list[int]:
        return list(neighbours(place, rows=self._options.rows, columns=self._options.columns).values())


def _slide(board: str, tile: str) -> str:
    return board.translate(str.maketrans(tile + GAP, GAP + tile))


@lru_cache(maxsize=4)
def _distances(solved: str, rows: int, columns: int) -> dict[str, int]:
    """The fewest moves from every board that can be solved: 360 of them for six cells."""
    found, waiting = {solved: 0}, deque([solved])
    while waiting:
        board = waiting.popleft()
        for place in neighbours(board.index(GAP), rows=rows, columns=columns).values():
            following = _slide(board, board[place])
            if following not in found:
                found[following] = found[board] + 1
                waiting.append(following)
    return found


class SlidingPuzzleEnvironment(GameEnvironment[str]):
    """The sliding puzzle of several turns."""

    rules = Rules(max_turns=16)

    def __init__(self, options: SlidingOptions) -> None:
        super().__init__(SlidingPuzzle(options), options)
