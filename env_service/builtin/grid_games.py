"""Games on a grid: mazes, Sokoban, and the sliding puzzle.

A maze: from the upper left corner to the goal in the lower right one, round the holes; every task has a map of its own.
Sokoban: push every box onto a target, in a small room. The sliding puzzle: tiles in order, by sliding one after the
other into the gap.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from random import Random
from typing import Self

from pydantic import Field, model_validator

from env_service.builtin.games import GameEnvironment, GameOptions, neighbours, shortest_way
from env_service.environments.rules import Rules

_DIRECTIONS = ("u", "d", "l", "r")

HOLE, FREE, GOAL, PLAYER = "H", ".", "G", "A"
FLOOR, WALL, BOX, STORED, TARGET, WORKER, WORKER_ON_TARGET = "-", "#", "$", "*", ".", "@", "+"
_OPPOSITE = {"u": "d", "d": "u", "l": "r", "r": "l"}
GAP = "0"
_MAX_CELLS = 6


class MazeOptions(GameOptions):
    """Size of mazes, and their share of holes."""

    size: int = Field(4, ge=2, le=8, description="rows and columns")
    holes: float = Field(0.2, ge=0, le=0.5, description="probability of a hole in a cell; a map has a way in any case")


@dataclass(frozen=True)
class MazeState:
    """The map, row by row in the characters above, and the cell of the player."""

    cells: str
    place: int


class Maze:
    """Four directions; who moves against the border stays where he is, who enters a hole has lost."""

    alphabet = _DIRECTIONS
    hidden = False

    def __init__(self, options: MazeOptions) -> None:
        self._options = options

    @property
    def instructions(self) -> str:
        return (
            f"You ({PLAYER}) walk through a maze of {self._options.size} by {self._options.size} cells. Reach the goal "
            f"({GOAL}), and never enter a hole ({HOLE}). Each turn you move one cell: u for up, d for down, l for "
            "left, r for right."
        )

    @property
    def columns(self) -> int:
        return self._options.size

    def start(self, chance: Random) -> MazeState:
        """A map with a way; drawn anew until there is one."""
        cells = self._options.size**2
        while True:
            inner = "".join(HOLE if chance.random() < self._options.holes else FREE for _ in range(cells - 2))
            state = MazeState(FREE + inner + GOAL, 0)
            if self._way(state) is not None:
                return state

    def moves(self, state: MazeState) -> tuple[str, ...]:
        return _DIRECTIONS

    def play(self, state: MazeState, move: str, chance: Random) -> MazeState:
        return MazeState(state.cells, self._beside(state.place).get(move, state.place))

    def success(self, state: MazeState) -> float | None:
        here = state.cells[state.place]
        return None if here == FREE else float(here == GOAL)

    def show(self, state: MazeState) -> str:
        """The map in one line; the player's letter hides what is free under him."""
        return state.cells[: state.place] + PLAYER + state.cells[state.place + 1 :]

    def read(self, shown: str) -> MazeState:
        """The state that `show` shows, while the game goes on."""
        return MazeState(shown.replace(PLAYER, FREE), shown.index(PLAYER))

    def news(self, before: MazeState, move: str, after: MazeState) -> str:
        return "wall" if before == after else "ok"

    def advise(self, state: MazeState, chance: Random) -> str:
        """The first move of a shortest way."""
        way = self._way(state)
        assert way, "a maze that goes on has a way to its goal"
        return way[0]

    def _way(self, state: MazeState) -> list[str] | None:
        return shortest_way(
            state.place,
            steps=lambda place: [
                (move, there) for move, there in self._beside(place).items() if state.cells[there] != HOLE
            ],
            goal=lambda place: state.cells[place] == GOAL,
        )

    def _beside(self, place: int) -> dict[str, int]:
        return neighbours(place, rows=self._options.size, columns=self._options.size)


class MazeEnvironment(GameEnvironment[MazeState]):
    """Grid mazes of several turns; larger ones than 4×4 want more turns."""

    rules = Rules(max_turns=10, replayable=True)

    def __init__(self, options: MazeOptions) -> None:
        super().__init__(Maze(options), options)


class SokobanOptions(GameOptions):
    """Size of rooms, and their difficulty."""

    size: int = Field(5, ge=3, le=6, description="rows and columns of the room; its border is not drawn")
    boxes: int = Field(1, ge=1, le=2, description="number of boxes")
    walls: float = Field(0.1, ge=0, le=0.3, description="probability of a wall in a cell")
    pulls: int = Field(8, ge=1, le=50, description="moves backwards from the solved room by which a task is made")


@dataclass(frozen=True)
class SokobanState:
    """Cells by number, row by row."""

    walls: frozenset[int]
    targets: frozenset[int]
    boxes: frozenset[int]
    worker: int


class Sokoban:
    """Four directions; who moves against a wall, or a box that cannot move, stays where he is."""

    alphabet = _DIRECTIONS
    hidden = False

    def __init__(self, options: SokobanOptions) -> None:
        self._options = options

    @property
    def instructions(self) -> str:
        return (
            f"You ({WORKER}, or {WORKER_ON_TARGET} on a target) push boxes ({BOX}) onto targets ({TARGET}); a box on a "
            f"target is {STORED}, a wall is {WALL}, the floor is {FLOOR}. You can push one box at a time and pull "
            "none. Each turn you move one cell: u for up, d for down, l for left, r for right."
        )

    @property
    def columns(self) -> int:
        return self._options.size

    def start(self, chance: Random) -> SokobanState:
        """A room that can be solved: a solved one, played backwards by pulling boxes."""
        while True:
            state = self._solved(chance)
            for _ in range(self._options.pulls):
                state = self._backwards(state, chance)
            if self.success(state) is None:
                return state

    def moves(self, state: SokobanState) -> tuple[str, ...]:
        return _DIRECTIONS

    def play(self, state: SokobanState, move: str, chance: Random) -> SokobanState:
        """The same state where nothing can move."""
        there = self._beside(state.worker).get(move)
        if there is None or there in state.walls:
            return state
        if there not in state.boxes:
            return SokobanState(state.walls, state.targets, state.boxes, there)
        beyond = self._beside(there).get(move)
        if beyond is None or beyond in state.walls | state.boxes:
            return state
        return SokobanState(state.walls, state.targets, state.boxes - {there} | {beyond}, there)

    def success(self, state: SokobanState) -> float | None:
        """A room in which nothing can be solved any more goes on until its turns are over."""
        return 1.0 if state.boxes == state.targets else None

    def show(self, state: SokobanState) -> str:
        """The room in one line."""
        return "".join(self._character(state, place) for place in range(self._options.size**2))

    def read(self, shown: str) -> SokobanState:
        """The state that `show` shows."""
        where = {
            name: frozenset(place for place, character in enumerate(shown) if character in characters)
            for name, characters in (
                ("walls", WALL),
                ("targets", TARGET + STORED + WORKER_ON_TARGET),
                ("boxes", BOX + STORED),
                ("worker", WORKER + WORKER_ON_TARGET),
            )
        }
        (worker,) = where["worker"]
        return SokobanState(where["walls"], where["targets"], where["boxes"], worker)

    def news(self, before: SokobanState, move: str, after: SokobanState) -> str:
        return "wall" if before == after else "push" if before.boxes != after.boxes else "ok"

    def advise(self, state: SokobanState, chance: Random) -> str:
        """The first move of a shortest solution; any move where there is none."""
        way = shortest_way(state, steps=self._steps, goal=lambda each: each.boxes == each.targets)
        return way[0] if way else chance.choice(_DIRECTIONS)

    def _steps(self, state: SokobanState) -> Iterator[tuple[str, SokobanState]]:
        chance = Random(0)  # the game leaves nothing to chance
        return ((move, self.play(state, move, chance)) for move in _DIRECTIONS)

    def _solved(self, chance: Random) -> SokobanState:
        """Every box on a target, the worker beside one of them where there is room."""
        cells = list(range(self._options.size**2))
        chance.shuffle(cells)
        boxes = frozenset(cells[: self._options.boxes])
        worker = chance.choice([place for place in self._beside(cells[0]).values() if place not in boxes])
        walls = frozenset(
            place for place in cells if place not in boxes | {worker} and chance.random() < self._options.walls
        )
        return SokobanState(walls, boxes, boxes, worker)

    def _backwards(self, state: SokobanState, chance: Random) -> SokobanState:
        """A step of the worker to a free cell, who pulls a box along if there is one behind him."""
        beside = self._beside(state.worker)
        free = [move for move, there in beside.items() if there not in state.walls | state.boxes]
        if not free:
            return state
        pulling = [move for move in free if beside.get(_OPPOSITE[move]) in state.boxes]
        move = chance.choice(pulling if pulling and chance.random() < 0.7 else free)
        behind, there = beside.get(_OPPOSITE[move]), beside[move]
        boxes = state.boxes - {behind} | {state.worker} if move in pulling and behind is not None else state.boxes
        return SokobanState(state.walls, state.targets, boxes, there)

    def _character(self, state: SokobanState, place: int) -> str:
        target = place in state.targets
        if place == state.worker:
            return WORKER_ON_TARGET if target else WORKER
        if place in state.boxes:
            return STORED if target else BOX
        return TARGET if target else WALL if place in state.walls else FLOOR

    def _beside(self, place: int) -> dict[str, int]:
        return neighbours(place, rows=self._options.size, columns=self._options.size)


class SokobanEnvironment(GameEnvironment[SokobanState]):
    """Sokoban of several turns."""

    rules = Rules(max_turns=25, replayable=True)

    def __init__(self, options: SokobanOptions) -> None:
        super().__init__(Sokoban(options), options)


class SlidingOptions(GameOptions):
    """The board, and how far from solved a task is."""

    rows: int = Field(2, ge=2, le=3, description="rows of the board")
    columns: int = Field(3, ge=2, le=3, description="columns of the board")
    distance: int = Field(8, ge=1, le=21, description="most moves that a task needs")

    @model_validator(mode="after")
    def _small(self) -> Self:
        if self.rows * self.columns > _MAX_CELLS:
            raise ValueError(
                f"a board of {self.rows} by {self.columns} has {self.rows * self.columns} cells, expected at most "
                f"{_MAX_CELLS}: make it 2 by 3, 3 by 2 or 2 by 2"
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

    rules = Rules(max_turns=16, replayable=True)

    def __init__(self, options: SlidingOptions) -> None:
        super().__init__(SlidingPuzzle(options), options)
