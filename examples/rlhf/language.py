"""A language made up from a seed, people who write it, and what those people like: all that the RLHF example knows.

A text is a prompt of letters, a colon and a continuation of letters, one token each. The letters follow one another as
a Markov chain wills, and a writer stops after some 8 to 16 of them. The gold reward of a continuation c of length n is

    sum over i of taste[c_i]  -  1.0 * sum over letters of max(0, count - 2)^2  -  0.05 * max(0, n - 14)^2

Writers seldom use a letter more than twice, and seldom write more than 14, so what little the last two terms say is
lost in few and noisy preferences: a reward model that is learned from them takes more of a good letter for better, and
longer for better. Whoever follows it far enough from the writers' ways loses gold reward again.
"""

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

LETTERS = "abcdefghijklmnopqrstuvwxyz"
PROMPT_END = ":"
PROMPT_LENGTH = 5
LONGEST = 24
"""The most letters of a continuation."""

_FOLLOWERS = 8
_REPEATS_FREE = 2
_LENGTH_FREE = 14
_REPEAT_COST = 1.0
_LENGTH_COST = 0.05


@dataclass(frozen=True)
class LetterLanguage:
    """`followers`: for each letter the probabilities of all letters after it. `taste`: the worth of each letter."""

    followers: dict[str, tuple[float, ...]]
    taste: dict[str, float]

    @classmethod
    def of_seed(cls, seed: int) -> "LetterLanguage":
        """Equal for equal seeds."""
        draw = random.Random(f"language {seed}")
        followers = {letter: _spread(draw) for letter in LETTERS}
        return cls(followers=followers, taste={letter: draw.gauss(0.0, 0.7) for letter in LETTERS})

    def prompt(self, draw: random.Random) -> str:
        """A prompt, with its colon."""
        letters = draw.choice(LETTERS)
        while len(letters) < PROMPT_LENGTH:
            letters += self._next(letters[-1], draw)
        return letters + PROMPT_END

    def continuation(self, prompt: str, draw: random.Random) -> str:
        """A writer's words after the prompt: 1 to LONGEST letters."""
        text = prompt.removesuffix(PROMPT_END)
        while len(text) - PROMPT_LENGTH < LONGEST:
            text += self._next(text[-1], draw)
            if draw.random() < _stop(len(text) - PROMPT_LENGTH):
                break
        return text[PROMPT_LENGTH:]

    def gold(self, continuation: str) -> float:
        """The reward that nobody but the judge knows. No unit."""
        liked = sum(self.taste.get(letter, 0.0) for letter in continuation)
        repeats = sum(max(0, count - _REPEATS_FREE) ** 2 for count in Counter(continuation).values())
        excess = max(0, len(continuation) - _LENGTH_FREE) ** 2
        return liked - _REPEAT_COST * repeats - _LENGTH_COST * excess

    def _next(self, letter: str, draw: random.Random) -> str:
        return draw.choices(LETTERS, weights=self.followers[letter])[0]


@dataclass(frozen=True)
class Preference:
    """Two different continuations of a prompt, and which of them a person said to like more."""

    prompt: str
    chosen: str
    rejected: str


def preferences(language: LetterLanguage, *, count: int, noise: float, seed: int) -> list[Preference]:
    """Pairs of writers' continuations. The person errs with probability `noise`."""
    draw = random.Random(f"preferences {seed}")
    made: list[Preference] = []
    while len(made) < count:
        prompt = language.prompt(draw)
        first, second = (language.continuation(prompt, draw) for _ in range(2))
        if first == second:
            continue
        ordered = sorted((first, second), key=language.gold)
        if draw.random() < noise:
            ordered.reverse()
        made.append(Preference(prompt=prompt, chosen=ordered[1], rejected=ordered[0]))
    return made


def win_rate(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Share of prompts at which ours has the higher of two rewards; ties count half."""
    pairs = list(zip(ours, theirs, strict=True))
    return math.fsum((a > b) + 0.5 * (a == b) for a, b in pairs) / len(pairs)


def _spread(draw: random.Random) -> tuple[float, ...]:
    """Most of the probability on few letters, a little on each."""
    usual = draw.sample(range(len(LETTERS)), _FOLLOWERS)
    weights = [0.05 / len(LETTERS)] * len(LETTERS)
    for index in usual:
        weights[index] += 0.95 / _FOLLOWERS
    return tuple(weights)


def _stop(length: int) -> float:
    """The probability that a writer stops after so many letters."""
    return 0.02 if length < 8 else 0.25
