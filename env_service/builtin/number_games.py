"""Two games with numbers: Nim with three heaps, and guessing a number that is too low or too high."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import xor
from random import Random
from typing import Literal

from pydantic import Field

from env_service.builtin.games import GameEnvironment, GameOptions
from env_service.environments.rules import Rules

_HEAP_NAMES = "abcd"


class NimOptions(GameOptions):
    """The heaps, and who plays against the policy."""

    heaps: int = Field(3, ge=1, le=len(_HEAP_NAMES), description="number of heaps")
    most: int = Field(5, ge=1, le=9, description="most objects in a heap at the start")
    opponent: Literal["random", "optimal"] = Field("random", description="how the other player moves")


@dataclass(frozen=True)
class NimState:
    """Objects in each heap when the policy is to move; `lost` if the opponent took the last one."""

    heaps: tuple[int, ...]
    lost: bool = False


class Nim:
    """Nim: taking the last object wins. A move is the letter of a heap and how many are taken from it, such as b3.

    The policy begins, from heaps with which a perfect player wins. An optimal opponent that must lose takes one object.
    """

    hidden = False
    columns = 0

    def __init__(self, options: NimOptions) -> None:
        self._options = options

    @property
    def instructions(self) -> str:
        names = ", ".join(_HEAP_NAMES[: self._options.heaps])
        return (
            f"Two players in turn take objects from heaps ({names}), as many as they like from one of them. Who takes "
            "the last object wins. You see how many objects each heap has, a digit for each. A move is the letter of a "
            f"heap and a number: {_HEAP_NAMES[0]}2 takes two objects from the first heap."
        )

    @property
    def alphabet(self) -> tuple[str, ...]:
        return _takings((self._options.most,) * self._options.heaps)

    def start(self, chance: Random) -> NimState:
        while True:
            heaps = tuple(chance.randint(0, self._options.most) for _ in range(self._options.heaps))
            if reduce(xor, heaps):
                return NimState(heaps)

    def moves(self, state: NimState) -> tuple[str, ...]:
        return _takings(state.heaps)

    def play(self, state: NimState, move: str, chance: Random) -> NimState:
        left = _take(state.heaps, move)
        if not any(left):
            return NimState(left)
        answer = chance.choice(_takings(left)) if self._options.opponent == "random" else _best(left)
        left = _take(left, answer)
        return NimState(left, lost=not any(left))

    def success(self, state: NimState) -> float | None:
        return None if any(state.heaps) else float(not state.lost)

    def show(self, state: NimState) -> str:
        """A digit for each heap."""
        return "".join(map(str, state.heaps))

    def read(self, shown: str) -> NimState:
        """The state that `show` shows, while the game goes on."""
        return NimState(tuple(map(int, shown)))

    def news(self, before: NimState, move: str, after: NimState) -> str:
        """The opponent's move, written as the policy's own."""
        answers = zip(_HEAP_NAMES, _take(before.heaps, move), after.heaps, strict=False)
        return "".join(f"{name}{was - now}" for name, was, now in answers if was != now)

    def advise(self, state: NimState, chance: Random) -> str:
        """The move that leaves heaps whose binary digits cancel out."""
        return _best(state.heaps)


def _takings(heaps: Sequence[int]) -> tuple[str, ...]:
    return tuple(f"{_HEAP_NAMES[index]}{count}" for index, heap in enumerate(heaps) for count in range(1, heap + 1))


def _take(heaps: Sequence[int], move: str) -> tuple[int, ...]:
    taken, count = _HEAP_NAMES.index(move[0]), int(move[1:])
    return tuple(heap - count if index == taken else heap for index, heap in enumerate(heaps))


def _best(heaps: Sequence[int]) -> str:
    """The move to heaps whose exclusive or is 0, which are lost for whoever moves next (Bouton 1901)."""
    total = reduce(xor, heaps)
    for index, heap in enumerate(heaps):
        if heap ^ total < heap:
            return f"{_HEAP_NAMES[index]}{heap - (heap ^ total)}"
    return _takings(heaps)[0]


class GuessingOptions(GameOptions):
    """The numbers, and how often one may guess."""

    numbers: int = Field(32, ge=2, le=1000, description="the secret is from 0 to one less")
    tries: int = Field(5, ge=1, le=20, description="guesses after which the game is lost")


@dataclass(frozen=True)
class GuessingState:
    """The secret and the guesses so far."""

    secret: int
    guesses: tuple[int, ...] = ()


class Guessing:
    """A secret number; each guess is answered by whether it is too low or too high."""

    hidden = True
    columns = 0

    def __init__(self, options: GuessingOptions) -> None:
        self._options = options

    @property
    def instructions(self) -> str:
        return (
            f"Guess a secret number from 0 to {self._options.numbers - 1} in at most {self._options.tries} guesses. "
            "Each guess is answered with low if it is below the secret, and high if it is above. Say the number alone."
        )

    @property
    def alphabet(self) -> tuple[str, ...]:
        return tuple(map(str, range(self._options.numbers)))

    def start(self, chance: Random) -> GuessingState:
        return GuessingState(chance.randrange(self._options.numbers))

    def moves(self, state: GuessingState) -> tuple[str, ...]:
        return self.alphabet

    def play(self, state: GuessingState, move: str, chance: Random) -> GuessingState:
        return GuessingState(state.secret, (*state.guesses, int(move)))

    def success(self, state: GuessingState) -> float | None:
        if state.secret in state.guesses:
            return 1.0
        return 0.0 if len(state.guesses) >= self._options.tries else None

    def show(self, state: GuessingState) -> str:
        """The guesses with their answers; a question mark before the first one."""
        return " ".join(f"{guess}{_answer(guess, state.secret)}" for guess in state.guesses) or "?"

    def news(self, before: GuessingState, move: str, after: GuessingState) -> str:
        return _answer(int(move), after.secret)

    def advise(self, state: GuessingState, chance: Random) -> str:
        """The middle of what is still possible."""
        low = max((guess + 1 for guess in state.guesses if guess < state.secret), default=0)
        high = min((guess - 1 for guess in state.guesses if guess > state.secret), default=self._options.numbers - 1)
        return str((low + high) // 2)


def _answer(guess: int, secret: int) -> str:
    return "right" if guess == secret else "low" if guess < secret else "high"


class NimEnvironment(GameEnvironment[NimState]):
    """Nim against a scripted opponent."""

    rules = Rules(max_turns=36, replayable=True)

    def __init__(self, options: NimOptions) -> None:
        super().__init__(Nim(options), options)


class GuessingEnvironment(GameEnvironment[GuessingState]):
    """Guessing a number; the game itself ends after its tries, and the turns bound invalid actions too."""

    rules = Rules(max_turns=20, replayable=True)

    def __init__(self, options: GuessingOptions) -> None:
        super().__init__(Guessing(options), options)
