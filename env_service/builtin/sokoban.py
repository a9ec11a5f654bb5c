"""Sokoban in a small room: push every box onto a goal. Boxes can be pushed, one at a time, and never pulled."""

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from pydantic import Field

from env_service.builtin.game_environment import GameEnvironment
from env_service.builtin.games import GameOptions, neighbours, shortest_way
from env_service.environments.rules import Rules

FLOOR, WALL, BOX, STORED, TARGET, WORKER, WORKER_ON_TARGET = "-", "#", "$", "*", ".", "@", "+"
_DIRECTIONS = ("u", "d", "l", "r")
_OPPOSITE = {"u": "d", "d": "u", "l": "r", "r": "l"}


class SokobanOptions(GameOptions):
    """How large rooms are, and how hard."""

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

    rules = Rules(max_turns=25)

    def __init__(self, options: SokobanOptions) -> None:
        super().__init__(Sokoban(options), options)
