"""Wordle with words of our own: guess a word, and be told of each letter whether it is in its place, elsewhere, or
nowhere.
"""

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from random import Random
from typing import Literal

from pydantic import Field

from env_service.builtin.games import GameEnvironment, GameOptions
from env_service.environments.rules import Rules

PLACED, ELSEWHERE, NOWHERE = "g", "y", "."

_WORDS = {
    3: """
        ant arm art bag bat bed bee box boy bus cap car cat cow cup day dog ear egg eye fan fig fox gas hat hen ice ink
        jam jar key kid leg lid map mud net nut oak oil owl pan pen pig pot rat red rug sea sky sun tea ten toe top toy
        van wax web win zoo
    """,
    4: """
        acid army atom baby back ball band bank barn bath bean bear bell belt bird blue boat body bone book boot bowl
        cake camp card cave city clay coat coin cold cook corn crow dark deer desk dish door drum duck dust face farm
        fish flag food foot fork frog game gate gift goat gold hand harp hill home hook iron king kite lake lamp leaf
        lion milk mint moon nest nose page path pear pine pond rain ring road rock roof rope rose salt sand seed ship
        shoe silk snow soap sock star swan tent time town tree vase wall wind wing wolf wood wool yarn
    """,
    5: """
        actor amber angel apple apron arrow badge baker basil beach berry birch black blade board bread brick bride
        broom brush cabin camel candy canoe chain chair chalk chess cliff clock cloth cloud coral crane cream crown
        daisy dance dough dream dress eagle earth ferry field flame flock flour fruit ghost giant glass glove grain
        grape grass green hedge heron honey horse hotel house juice knife lemon light lilac linen lunch maple metal
        model month mouse music night north ocean olive onion opera otter paint panda paper pearl pedal petal piano
        pilot plane plant plate plaza pouch queen quilt radio raven river robin robot round ruler salad sauce scarf
        shark sheep shelf shell shirt skate sleep smoke snail snake south space spoon squid stage stone storm sugar
        table tiger toast tower track train tulip uncle valve villa water whale wheat wheel white world zebra
    """,
}


class WordleOptions(GameOptions):
    """The words, and how often one may guess."""

    length: Literal[3, 4, 5] = Field(5, description="letters of a word")
    tries: int = Field(6, ge=1, le=20, description="guesses after which the game is lost")


@dataclass(frozen=True)
class WordleState:
    """The secret and the guesses so far."""

    secret: str
    guesses: tuple[str, ...] = ()


class Wordle:
    """A guess is a word of the list."""

    hidden = True
    columns = 0

    def __init__(self, options: WordleOptions) -> None:
        self._options = options
        self._words = words(options.length)

    @property
    def instructions(self) -> str:
        return (
            f"Guess a secret English word of {self._options.length} letters in at most {self._options.tries} guesses. "
            f"Each guess is answered with a character for each of its letters: {PLACED} if it is at that place, "
            f"{ELSEWHERE} if it is at another one, {NOWHERE} if it is not in the word. Say the word alone."
        )

    @property
    def alphabet(self) -> tuple[str, ...]:
        return self._words

    def start(self, chance: Random) -> WordleState:
        return WordleState(chance.choice(self._words))

    def moves(self, state: WordleState) -> tuple[str, ...]:
        return self._words

    def play(self, state: WordleState, move: str, chance: Random) -> WordleState:
        return WordleState(state.secret, (*state.guesses, move))

    def success(self, state: WordleState) -> float | None:
        if state.secret in state.guesses:
            return 1.0
        return 0.0 if len(state.guesses) >= self._options.tries else None

    def show(self, state: WordleState) -> str:
        """The guesses with their answers; a question mark before the first one."""
        return " ".join(f"{guess}:{answer(guess, state.secret)}" for guess in state.guesses) or "?"

    def news(self, before: WordleState, move: str, after: WordleState) -> str:
        return answer(move, after.secret)

    def advise(self, state: WordleState, chance: Random) -> str:
        """Any word that agrees with all answers so far."""
        heard = [(guess, answer(guess, state.secret)) for guess in state.guesses]
        return chance.choice(
            [word for word in self._words if all(answer(guess, word) == said for guess, said in heard)]
        )


@lru_cache(maxsize=3)
def words(length: int) -> tuple[str, ...]:
    """The words of 3, 4 or 5 letters, in the order of the alphabet. Raises KeyError for another length."""
    return tuple(sorted(_WORDS[length].split()))


def answer(guess: str, secret: str) -> str:
    """A character for each letter of a guess. A letter counts as often as the secret has it, placed ones first."""
    left = Counter(letter for letter, asked in zip(secret, guess, strict=True) if letter != asked)
    said = []
    for asked, letter in zip(guess, secret, strict=True):
        if asked == letter:
            said.append(PLACED)
        elif left[asked]:
            left[asked] -= 1
            said.append(ELSEWHERE)
        else:
            said.append(NOWHERE)
    return "".join(said)


class WordleEnvironment(GameEnvironment[WordleState]):
    """Wordle; the game itself ends after its tries, and the turns bound invalid actions too."""

    rules = Rules(max_turns=20, replayable=True)

    def __init__(self, options: WordleOptions) -> None:
        super().__init__(Wordle(options), options)
