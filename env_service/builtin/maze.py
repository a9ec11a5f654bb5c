"""Grid mazes: from the upper left corner to the goal in the lower right one, round the holes; every task has a map of
its own.
"""

from dataclasses import dataclass
from random import Random

from pydantic import Field

from env_service.builtin.game_environment import GameEnvironment
from env_service.builtin.games import GameOptions, neighbours, shortest_way
from env_service.environments.rules import Rules

HOLE, FREE, GOAL, PLAYER = "H", ".", "G", "A"
_DIRECTIONS = ("u", "d", "l", "r")


class MazeOptions(GameOptions):
    """How large mazes are, and how many holes they have."""

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

    rules = Rules(max_turns=10)

    def __init__(self, options: MazeOptions) -> None:
        super().__init__(Maze(options), options)
