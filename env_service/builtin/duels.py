"""Games of two players that a small model can learn by playing itself: Nim and tic-tac-toe, a few tokens a turn."""

from collections.abc import Mapping
from functools import reduce
from operator import xor
from random import Random
from typing import ClassVar, Generic, Literal, TypeVar

from pydantic import Field

from env_service.environments.interface import Action, Aggregation, ChatMessage, Role, Round, Task, TurnOf
from env_service.environments.rules import Rules
from services.config.models import ConfigModel

StateT = TypeVar("StateT")

_PLAYERS = ("first", "second")
_HEAPS = "abcd"
_MARKS = "xo"
_LINES = ("012", "345", "678", "036", "147", "258", "048", "246")


class DuelOptions(ConfigModel):
    """Options of every duel."""

    system_prompt: str | None = Field(
        None, description="text of the system message; the game's own instructions if not given, no message if empty"
    )
    illegal: Literal["loses", "again"] = Field(
        "loses", description="what an illegal move does: it loses the game, or the player is asked again"
    )
    win: float = Field(1.0, ge=-100, le=100, description="reward of who wins")
    draw: float = Field(0.5, ge=-100, le=100, description="reward of both in a draw")
    loss: float = Field(0.0, ge=-100, le=100, description="reward of who loses")


class NimDuelOptions(DuelOptions):
    """The heaps at the start."""

    heaps: int = Field(3, ge=1, le=len(_HEAPS), description="number of heaps")
    most: int = Field(5, ge=1, le=9, description="most objects in a heap at the start")


class Duel(Generic[StateT]):
    """A game of two. A player sees the whole state, and says a move."""

    players: ClassVar[tuple[str, ...]] = _PLAYERS
    roles: ClassVar[tuple[Role, ...]] = ("user",)
    metrics: ClassVar[Mapping[str, Aggregation]] = {"success": "last"}
    instructions: ClassVar[str] = ""

    def __init__(self, options: DuelOptions) -> None:
        self._options = options
        self._met: set[str] = set()
        self._mover = 0
        self._state: StateT

    def start(self, chance: Random) -> StateT:
        """The state in which the first player moves."""
        raise NotImplementedError

    def played(self, state: StateT, move: str, mover: int) -> StateT | None:
        """The state after a move of player 0 or 1; None if it is not legal."""
        raise NotImplementedError

    def outcome(self, state: StateT, mover: int) -> Literal["won", "draw"] | None:
        """The outcome if the game is over now that player 0 or 1 has moved; `won` is of who moved."""
        raise NotImplementedError

    def show(self, state: StateT) -> str:
        """The state as both see it."""
        raise NotImplementedError

    def reset(self, task: Task, seed: int) -> TurnOf:
        """The start is the task's; nothing is left to chance after it."""
        self._state, self._mover, self._met = self.start(Random(task.seed)), 0, set()
        return self._turn()

    def step(self, action: Action) -> Round:
        """A move of the player whose turn it is."""
        said = action.value if isinstance(action.value, str) else action.text
        after = self.played(self._state, said.strip().lower(), self._mover)
        if after is None:
            again = self._options.illegal == "again"
            return Round(self._turn(), invalid=True) if again else self._over(winner=1 - self._mover, invalid=True)
        self._state = after
        outcome = self.outcome(after, self._mover)
        if outcome is not None:
            return self._over(winner=self._mover if outcome == "won" else None)
        self._mover = 1 - self._mover
        return Round(self._turn())

    def _turn(self) -> TurnOf:
        player, shown = _PLAYERS[self._mover], self.show(self._state)
        told = self._options.system_prompt
        system = self.instructions if told is None else told
        opening = () if player in self._met or not system else (ChatMessage("system", system),)
        self._met.add(player)
        return TurnOf(player, (*opening, ChatMessage("user", shown)), state=shown)

    def _over(self, *, winner: int | None, invalid: bool = False) -> Round:
        options = self._options
        if winner is None:
            worth = dict.fromkeys(_PLAYERS, options.draw)
        else:
            worth = {_PLAYERS[winner]: options.win, _PLAYERS[1 - winner]: options.loss}
        metrics = {name: {"success": float(winner is not None and name == _PLAYERS[winner])} for name in _PLAYERS}
        stop = "draw" if winner is None else "illegal" if invalid else f"{_PLAYERS[winner]}_won"
        return Round(stop=stop, rewards=worth, metrics=metrics, invalid=invalid)


class NimDuel(Duel[tuple[int, ...]]):
    """Nim of two players; who takes the last object wins. The first player could always win."""

    rules = Rules(max_turns=36)
    instructions = (
        "Two players in turn take objects from heaps (a, b, ...), as many as they like from one of them. Who takes "
        "the last object wins. You see how many objects each heap has, a digit for each. A move is the letter of a "
        "heap and a number: a2 takes two objects from the first heap. Answer with the move alone."
    )

    def __init__(self, options: NimDuelOptions) -> None:
        super().__init__(options)
        self._heaps, self._most = options.heaps, options.most

    def start(self, chance: Random) -> tuple[int, ...]:
        """Heaps with which a perfect first player wins."""
        while True:
            heaps = tuple(chance.randint(0, self._most) for _ in range(self._heaps))
            if reduce(xor, heaps):
                return heaps

    def played(self, state: tuple[int, ...], move: str, mover: int) -> tuple[int, ...] | None:
        """The heaps without what was taken."""
        heap, number = _HEAPS.find(move[:1]) if move else -1, move[1:]
        if len(number) != 1 or number not in "123456789" or not 0 <= heap < len(state) or int(number) > state[heap]:
            return None
        return (*state[:heap], state[heap] - int(number), *state[heap + 1 :])

    def outcome(self, state: tuple[int, ...], mover: int) -> Literal["won", "draw"] | None:
        """The mover has won if nothing is left."""
        return None if any(state) else "won"

    def show(self, state: tuple[int, ...]) -> str:
        """A digit for each heap."""
        return "".join(map(str, state))


class TicTacToe(Duel[str]):
    """Tic-tac-toe of two players, from a free board or one with a mark of each, as the task's seed says."""

    rules = Rules(max_turns=10)
    instructions = (
        "Two players in turn put their mark, x or o, on a free cell of a board of three rows; three in a row, a column "
        "or a diagonal win. You see the nine cells, those that are free as their numbers 0 to 8. Say a number."
    )

    def __init__(self, options: DuelOptions) -> None:
        super().__init__(options)

    def start(self, chance: Random) -> str:
        """A free board, or one with a mark of each."""
        board = list("012345678")
        if chance.random() < 0.9:
            for place, mark in zip(chance.sample(range(9), 2), _MARKS, strict=True):
                board[place] = mark
        return "".join(board)

    def played(self, state: str, move: str, mover: int) -> str | None:
        """The board with the mark on it."""
        return state.replace(move, _MARKS[mover]) if len(move) == 1 and move in state and move.isdecimal() else None

    def outcome(self, state: str, mover: int) -> Literal["won", "draw"] | None:
        """Three of the mover's marks in a line win; a full board is a draw."""
        if any(all(state[int(place)] == _MARKS[mover] for place in line) for line in _LINES):
            return "won"
        return None if any(cell.isdecimal() for cell in state) else "draw"

    def show(self, state: str) -> str:
        """Nine cells in three rows."""
        return "\n".join(state[row : row + 3] for row in (0, 3, 6))
